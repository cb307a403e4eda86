"""The Hopper attention kernel on a GPU: correctness over many formats, then its time over tunings, in one go.

  PYTHONPATH=. python tests/bench/tune_attention.py --formats k2v2 k4v4 --tunings 1,4 2,4 --spec qwen3_30b_32k
  ncu --set full -k regex:paged python tests/bench/tune_attention.py --check_every 0 --formats k2v2 --calls 1

A tuning is warps_per_page,warpgroups. Timed with several calls an iteration of the loop: the loop itself takes about 10 us.
"""
from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import parse_format
from pallas_kernels import KVFormat, bench, bench_cases, dispatch
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import Tuning
from pallas_kernels.paged_attention.specs import SPECS
from tests.pallas_kernels import oracle
from tests.pallas_kernels.paged_attention_cases import make_cache

NONE = dict.fromkeys(("sink_k", "sink_v", "sliding_window", "logit_softcap", "attention_sinks"))
LENGTHS = [1, 127, 128, 129, 383, 384, 5000]
SINKS = np.linspace(-3, 4, 10).astype(np.float32)
CASES: list[tuple[dict, dict]] = [
    *(({"k_bits": k, "v_bits": v}, {}) for k in (2, 3, 4, 8, 16) for v in (2, 3, 4, 8, 16)),
    *(({"k_bits": 2, "v_bits": 2, "outlier_channels": 16, "outlier_bits": b}, {"head_dim": d})
      for b in (4, 8, 16) for d in (64, 128, 256)),
    ({"k_bits": 3, "v_bits": 2, "outlier_channels": 32, "outlier_bits": 8}, {}),
    ({"k_bits": 3, "v_bits": 3, "outlier_channels": 16, "outlier_bits": 4, "sink_tokens": 4},
     {"num_queries": 2, "sliding_window": 200}),
    ({"k_bits": 2, "v_bits": 2, "sink_tokens": 70},
     {"num_queries": 4, "group": 5, "logit_softcap": 5.0, "attention_sinks": SINKS}),
    ({"k_bits": 4, "v_bits": 2}, {"group": 16}), ({"k_bits": 4, "v_bits": 2}, {"group": 1, "k_size": 2.0, "v_size": 2 / 7}),
    ({"k_bits": 4, "v_bits": 4}, {"head_dim": 256}), ({"k_bits": 2, "v_bits": 3}, {"head_dim": 256}),
    ({"k_bits": 4, "v_bits": 4}, {"head_dim": 64, "group": 9}),
    ({"k_bits": 16, "v_bits": 16}, {"head_dim": 64, "sliding_window": 1}),
]


def check(every: int) -> None:
    """Prints the relative L2 error of every row against the float64 oracle."""
    for fields, options in CASES[::every]:
        fmt = KVFormat(layout="mma_sm90", **fields)
        cache = make_cache(fmt, LENGTHS, q_dtype="bfloat16", **{"head_dim": 128, "num_queries": 1, "group": 8, **options})
        out = jax.jit(functools.partial(mosaic_gpu.paged_attention, **{**NONE, **cache.options}))(*map(jnp.asarray, cache.arrays()))
        want = oracle.attention(*cache.arrays(), **cache.options)
        rows = [(o.astype(np.float64), w) for o, w in zip(np.asarray(out), want) if w.any()]
        errors = [np.linalg.norm(o - w) / np.linalg.norm(w) for o, w in rows]
        verdict = "ok " if max(errors) <= bench.TOLERANCE else "BAD"
        print(verdict, fmt.name, options, " ".join(f"{e:.4f}" for e in errors), flush=True)


def measure(spec_name: str, fmt: KVFormat, tuning: Tuning | None, calls: int, repeats: int) -> None:
    spec = SPECS[spec_name]
    cache = bench_cases.attention_inputs(spec, fmt, spec.kv_lens(), turns=1)
    attend = jax.jit(functools.partial(  # lowered once, not for every call
        mosaic_gpu.paged_attention, kv_format=fmt, sm_scale=spec.head_dim**-0.5, tuning=tuning,
        **{name: NONE[name] for name in ("sliding_window", "logit_softcap", "attention_sinks")}))

    def several(i, q, table, pages, open_k, open_v, kv_lens, q_lens, *sinks):
        sink_k, sink_v = sinks or (None, None)
        for _ in range(calls):
            out = attend(q, pages, open_k, open_v, table, kv_lens, q_lens, sink_k=sink_k, sink_v=sink_v)
            q = bench.add_tiny(q, out)  # or the calls would be one and the same
        return out

    run = bench.loop(several, cache.q, (cache.tables[0], *cache.operands), bench.add_tiny)
    moved = bench_cases.attention_bytes(spec, fmt)
    summary = bench.sample(run, repeats=repeats, min_s=0.01).summary(moved * calls)
    print(f"{spec_name} {fmt.name} {tuning} {(summary['us_p50'] or 0) / calls:.1f} us {summary['gb_per_s']} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check_every", type=int, default=1, help="check every n-th case only; 0 for none")
    parser.add_argument("--formats", nargs="*", default=["k2v2"])
    parser.add_argument("--tunings", nargs="*", default=[], help="warps_per_page,warpgroups; none for the default")
    parser.add_argument("--spec", nargs="*", default=["qwen3_30b_32k"])
    parser.add_argument("--calls", type=int, default=8, help="calls an iteration of the timed loop")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.check_every:
        check(args.check_every)
    tunings = [Tuning(*map(int, text.split(",")), 132) for text in args.tunings] or [None]
    for spec in args.spec:
        for text in args.formats:
            for tuning in tunings:
                fmt = dispatch.with_layout(parse_format(text), "mma_sm90", SPECS[spec].head_dim)
                measure(spec, fmt, tuning, args.calls, args.repeats)


if __name__ == "__main__":
    main()
