"""Times `paged_attention` over implementations, shapes and cache formats. Correctness comes first: a wrong kernel gets no time.

Needs jax and numpy only; torch, where it has a GPU, gives the time of its own bfloat16 attention beside it.
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.close_page import close_page
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.specs import PagedAttentionSpec
from pallas_kernels.pallas_utils import INVALID, cdiv

DISTINCT_PAGES = 64  # pages that are quantised; the pool holds copies of them, each in memory of its own
MAX_ERROR = 2e-2  # relative L2 error of a row, against the reference in float32
NAN_WORD = 0xFFFFFFFF

_close = jax.jit(close_page, static_argnames="kv_format")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, and the 10th and 90th percentile of the repeats."""

    median: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `paged_attention`, in its order."""

    q: jax.Array
    pages: jax.Array
    open_k: jax.Array
    open_v: jax.Array
    block_table: jax.Array
    kv_lens: jax.Array
    sinks: dict[str, jax.Array]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.q, self.pages, self.open_k, self.open_v, self.block_table, self.kv_lens


def make_inputs(spec: PagedAttentionSpec, fmt: KVFormat, seed: int = 0) -> Inputs:
    """A pool of shuffled pages of normal keys (every 16th channel 8 times as large) and values; what no row owns is NaN."""
    key = jax.random.key(seed)
    channel = jnp.where(jnp.arange(spec.head_dim) % 16 == 15, 8.0, 1.0)
    if fmt.outlier_channels:
        channel = jnp.sort(channel)  # the cache's permutation puts the promoted channels last

    def tokens(i: int, count: int, length: int, scale) -> jax.Array:
        shape = (count, spec.num_kv_heads, length, spec.head_dim)
        return (jax.random.normal(jax.random.fold_in(key, i), shape) * scale).astype(jnp.bfloat16)

    some = _close(
        tokens(0, DISTINCT_PAGES, fmt.page_size, channel), tokens(1, DISTINCT_PAGES, fmt.page_size, 1.0), kv_format=fmt)
    closed = [(n - 1) // fmt.page_size for n in spec.kv_lens]
    columns, rng = max(1, cdiv(spec.kv_len, fmt.page_size)), np.random.default_rng(seed)
    ids = rng.permutation(sum(closed) + 1).astype(np.int32)  # one page that no row owns
    table, first = np.full((spec.batch, columns), INVALID, np.int32), 0
    for row, count in enumerate(closed):
        table[row, :count] = ids[first:first + count]
        first += count
    source = jax.random.randint(key, (len(ids),), 0, DISTINCT_PAGES)
    pages = jax.jit(lambda some, source: some[source].at[ids[-1]].set(NAN_WORD))(some, source)
    lens = jnp.asarray(spec.kv_lens, jnp.int32)
    owned = jnp.arange(fmt.page_size) < (lens - jnp.asarray(closed) * fmt.page_size)[:, None]
    open_k, open_v = (
        jnp.where(owned[:, None, :, None], tokens(i, spec.batch, fmt.page_size, scale), jnp.nan)
        for i, scale in ((2, channel), (3, 1.0)))
    sinks = {name: tokens(i, spec.batch, fmt.sink_tokens, 1.0) for i, name in ((4, "sink_k"), (5, "sink_v"))}
    q = jax.random.normal(jax.random.fold_in(key, 6), (spec.batch, spec.q_len, spec.num_heads, spec.head_dim)) / channel
    return Inputs(q.astype(jnp.bfloat16), pages, open_k, open_v, jnp.asarray(table), lens, sinks if fmt.sink_tokens else {})


def attention(spec: PagedAttentionSpec, fmt: KVFormat, implementation: str) -> Callable[..., jax.Array]:
    """The call that is checked and timed: f(*Inputs.arrays, **Inputs.sinks)."""
    def call(*arrays, **sinks):
        return paged_attention(
            *arrays, kv_format=fmt, sm_scale=spec.head_dim**-0.5, implementation=implementation, **sinks)
    return call


def row_errors(spec: PagedAttentionSpec, fmt: KVFormat, implementation: str, seed: int = 0) -> np.ndarray:
    """Relative L2 errors against the reference in float32, on a few short rows of the same heads, channels and format.

    Raises:
      NotImplementedError: the implementation does not serve this call.
    """
    small = dataclasses.replace(spec, batch=4, kv_len=3 * fmt.page_size + fmt.page_size // 2 + spec.q_len, ragged=True)
    if spec.q_len > 1:  # queries must lie in the open page
        small = dataclasses.replace(small, ragged=False)
    inputs = make_inputs(small, fmt, seed)
    got = jax.jit(attention(small, fmt, implementation))(*inputs.arrays, **inputs.sinks)
    want = jax.jit(attention(small, fmt, "reference"))(inputs.q.astype(jnp.float32), *inputs.arrays[1:], **inputs.sinks)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.array([np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want)])


def seconds_per_call(call, q: jax.Array, *rest, calls: int, repeats: int, **options) -> Timing:
    """Times `calls` calls in one jitted loop. A barrier makes each call's q wait for the output of the call before.

    The loop's length is static: then the device runs it without asking the host.
    """
    @jax.jit
    def loop(q, *rest, **options):
        def again(_, carry):
            q, out = lax.optimization_barrier(carry)
            return q, call(q, *rest, **options)

        return lax.fori_loop(0, calls, again, (q, jnp.zeros_like(q)))[1]

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(q, *rest, **options))
        return (time.perf_counter() - start) / calls

    run()
    times = sorted(run() for _ in range(repeats))
    return Timing(statistics.median(times), *(float(np.quantile(times, p)) for p in (0.1, 0.9)))


def moved_bytes(spec: PagedAttentionSpec, fmt: KVFormat) -> int:
    """Bytes that a call must move: closed pages, the filled part of open pages, sinks, the block table, queries and output."""
    layout, heads = fmt.page_layout(spec.head_dim), spec.num_kv_heads
    total = 2 * spec.batch * spec.q_len * spec.num_heads * spec.head_dim * 2
    for length in spec.kv_lens:
        closed = (length - 1) // fmt.page_size
        unquantised = length - closed * fmt.page_size + fmt.sink_tokens
        total += closed * (heads * layout.page_bytes + 4) + unquantised * heads * spec.head_dim * 2 * 2
    return total


def read_bandwidth(num_bytes: int, repeats: int = 5) -> float:
    """Bytes a second of a reduction over `num_bytes` of float32."""
    x = jax.random.normal(jax.random.key(0), (num_bytes // 4,))
    loop = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, s: jnp.sum(x + s * 1e-30), jnp.float32(0)))
    jax.block_until_ready(loop(x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(loop(x))
        times.append((time.perf_counter() - start) / 10)
    return x.nbytes / statistics.median(times)


def torch_seconds(spec: PagedAttentionSpec, repeats: int) -> float:
    """Median seconds of torch's flash attention in bfloat16 over the longest row's length, the group as query rows.

    Raises:
      NotImplementedError: no torch with a GPU here, with the reason.
    """
    try:
        import torch
    except ImportError as e:
        raise NotImplementedError(f"torch cannot be imported ({e})") from None
    if not torch.cuda.is_available():
        raise NotImplementedError("torch sees no GPU")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = spec.num_heads // spec.num_kv_heads
    k, v = (torch.randn(spec.batch, spec.num_kv_heads, spec.kv_len, spec.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in "kv")
    q = torch.randn(spec.batch, spec.num_kv_heads, group * spec.q_len, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        graph, times = torch.cuda.CUDAGraph(), []
        for _ in range(3):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
        with torch.cuda.graph(graph):
            for _ in range(10):
                torch.nn.functional.scaled_dot_product_attention(q, k, v)
        for _ in range(repeats + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 10 / 1e3)
    del q, k, v, graph
    torch.cuda.empty_cache()
    return statistics.median(times[1:])
