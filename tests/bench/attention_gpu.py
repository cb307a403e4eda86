"""Correctness and time of the Hopper attention kernel over tunings, in one go: PYTHONPATH=. python tests/bench/attention_gpu.py"""
import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import KVFormat, close_page
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import Tuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.paged_attention_cases import make_cache

NONE = {name: None for name in ("sink_k", "sink_v", "sliding_window", "logit_softcap", "attention_sinks")}
CASES = [
    (dict(k_bits=k, v_bits=v), {}) for k in (2, 3, 4, 8, 16) for v in (2, 3, 4, 8, 16)
] + [
    (dict(k_bits=2, v_bits=2, outlier_channels=16, outlier_bits=b), dict(head_dim=d)) for b in (4, 8, 16) for d in (64, 128, 256)
] + [
    (dict(k_bits=3, v_bits=2, outlier_channels=32, outlier_bits=8), {}),
    (dict(k_bits=3, v_bits=3, outlier_channels=16, outlier_bits=4, sink_tokens=4), dict(num_queries=2, sliding_window=200)),
    (dict(k_bits=2, v_bits=2, sink_tokens=70), dict(num_queries=4, group=5, logit_softcap=5.0,
                                                    attention_sinks=np.linspace(-3, 4, 10).astype(np.float32))),
    (dict(k_bits=4, v_bits=2), dict(group=16)), (dict(k_bits=4, v_bits=2), dict(group=1, k_size=2.0, v_size=2 / 7)),
    (dict(k_bits=4, v_bits=4), dict(head_dim=256)), (dict(k_bits=2, v_bits=3), dict(head_dim=256)),
    (dict(k_bits=4, v_bits=4), dict(head_dim=64, group=9)), (dict(k_bits=16, v_bits=16), dict(head_dim=64, sliding_window=1)),
]


def check(every: int) -> None:
    worst = 0.0
    for fmt, options in CASES[::every]:
        fmt = KVFormat(layout="mma_sm90", **fmt)
        options = {"head_dim": 128, "num_queries": 1, "group": 8, **options}
        try:
            cache = make_cache(fmt, [1, 127, 128, 129, 383, 3 * 128, 5000], q_dtype="bfloat16", **options)
            f = jax.jit(lambda *a: mosaic_gpu.paged_attention(*a, **{**NONE, **cache.options}))
            out = np.asarray(f(*map(jnp.asarray, cache.arrays()))).astype(float)
        except NotImplementedError as e:
            print("refused", fmt.name, options, e)
            continue
        want = oracle.attention(*cache.arrays(), **cache.options)
        error = [np.linalg.norm(o - w) / max(np.linalg.norm(w), 1e-30) for o, w in zip(out, want) if w.any()]
        worst = max(worst, *error)
        print("ok " if max(error) < 2e-2 else "BAD", fmt.name, {k: v for k, v in options.items() if k != "attention_sinks"},
              " ".join(f"{e:.4f}" for e in error), flush=True)
    print("worst", worst)


def inputs(fmt: KVFormat, batch: int, kv_len: int, num_kv_heads=4, group=8, head_dim=128):
    key = jax.random.key(0)
    columns = -(-kv_len // 128)
    pool = batch * columns
    shape = (64, num_kv_heads, 128, head_dim)
    k, v = (jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16) for i in range(2))
    some = jax.jit(lambda k, v: close_page(k, v, kv_format=fmt))(k, v)
    pages = jax.jit(lambda s, i: s[i])(some, jax.random.randint(key, (pool,), 0, 64))
    table = jax.random.permutation(key, pool).reshape(batch, columns).astype(jnp.int32)
    open_k, open_v = (jax.random.normal(jax.random.fold_in(key, i), (batch, num_kv_heads, 128, head_dim), jnp.bfloat16) for i in (3, 4))
    q = jax.random.normal(key, (batch, 1, num_kv_heads * group, head_dim), jnp.bfloat16)
    return q, pages, open_k, open_v, table, jnp.full((batch,), kv_len, jnp.int32), jnp.ones((batch,), jnp.int32)


def seconds_a_call(step, q, *rest, repeats=5) -> float:
    """Median over repeats of (time of 120 calls - time of 40 calls) / 80, each call's q depending on the last output."""
    def eight(_, q):
        for _ in range(8):
            q = (q + 1e-3 * step(q, *rest)).astype(q.dtype)
        return q

    @jax.jit
    def loop(n, q, *rest):
        return lax.fori_loop(0, n, eight, q)

    def run(n):
        start = time.perf_counter()
        jax.block_until_ready(loop(n, q, *rest))
        return time.perf_counter() - start

    run(3)
    return statistics.median((run(15) - run(5)) / 80 for _ in range(repeats))


def measure(pairs, shapes, tunings) -> None:
    for bits in pairs:
        fmt = KVFormat(layout="mma_sm90", **bits)
        for batch, kv_len in shapes:
            args = inputs(fmt, batch, kv_len)
            moved = (args[5][0] - 1) // 128 * batch * fmt.page_layout(128).page_bytes * 4
            for tuning in tunings or [None]:
                try:
                    step = lambda q, *rest: mosaic_gpu.paged_attention(q, *rest, **NONE, kv_format=fmt, sm_scale=128**-0.5, tuning=tuning)
                    t = seconds_a_call(step, *args)
                    print(f"{fmt.name:12} B={batch} {kv_len} {tuning} {t * 1e6:.1f} us {moved / t / 1e12:.2f} TB/s", flush=True)
                except Exception as e:
                    print(f"{fmt.name:12} B={batch} {kv_len} {tuning} FAILED {str(e)[:200]}", flush=True)


def bandwidth() -> None:
    x = jnp.ones((1 << 28,), jnp.float32)
    f = jax.jit(lambda n, x: lax.fori_loop(0, n, lambda _, s: s + jnp.sum(x + s * 1e-30), jnp.float32(0)))
    def run(n):
        start = time.perf_counter(); jax.block_until_ready(f(n, x)); return time.perf_counter() - start
    run(2)
    t = statistics.median((run(22) - run(2)) / 20 for _ in range(5))
    print(f"read bandwidth {x.nbytes / t / 1e12:.2f} TB/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check_every", type=int, default=1, help="check only every n-th case; 0 for none")
    parser.add_argument("--plan", default="first")
    a = parser.parse_args()
    if a.check_every:
        check(a.check_every)
    bandwidth()
    b = lambda k, v, **o: dict(k_bits=k, v_bits=v, **o)
    if a.plan == "fourth":
        measure([b(2, 2)], [(16, 32768), (64, 32768)], [Tuning(1, 4, 132)])
        measure([b(4, 4)], [(16, 32768)], [Tuning(1, 3, 132), Tuning(2, 4, 132)])
        measure([b(3, 3)], [(16, 32768)], [Tuning(1, 4, 132), Tuning(1, 3, 132)])
        measure([b(2, 2), b(4, 4)], [(1, 131072)], None)
        measure([b(2, 2, outlier_channels=16, outlier_bits=4), b(2, 2, outlier_channels=16, outlier_bits=8), b(16, 16)], [(16, 32768)], None)
        measure([b(16, 16)], [(16, 32768)], [Tuning(4, 1, 132), Tuning(4, 1, 264)])
        measure([b(8, 8)], [(16, 32768)], [Tuning(2, 3, 132), Tuning(4, 4, 132)])
    if a.plan == "first":
        measure([b(2, 2)], [(16, 32768)], [Tuning(1, w, n * 132) for w, n in ((4, 1), (3, 1), (2, 1), (2, 2), (1, 1), (1, 2), (1, 3), (1, 4))])
        measure([b(4, 4)], [(16, 32768)], [Tuning(p, w, n * 132) for p, w, n in ((1, 3, 1), (1, 2, 1), (1, 1, 3), (2, 4, 1), (2, 3, 1), (2, 2, 2), (1, 1, 2))])
        measure([b(3, 3), b(8, 8), b(16, 16)], [(16, 32768)], None)
        measure([b(2, 2)], [(64, 32768), (1, 131072)], None)
