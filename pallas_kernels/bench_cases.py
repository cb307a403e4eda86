"""Cases for `bench`: named shapes filled with random numbers, the bytes they must move, and checks against float64.

Keys and queries are normal, with outlier channels; nothing is zero. Everything that a row does not own is NaN: pages of the pool
that nobody owns, the open page beyond the row's length. Page ids are a random permutation.
"""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import Case, add_tiny
from pallas_kernels.bench_grouped_matmul import grouped_matmul_case
from pallas_kernels.close_page import close_page, open_page
from pallas_kernels.close_page.specs import ClosePageSpec
from pallas_kernels.kv_format import QUANT_BITS, KVFormat
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.specs import PagedAttentionSpec
from pallas_kernels.pallas_utils import INVALID, cdiv

STOCK_PAGES = 256  # distinct random pages; larger pools are copies of them, each copy in memory of its own
UNOWNED_PAGES = 8
NAN_WORD = np.uint32(0xFFFFFFFF)  # NaN as scale, as bfloat16 and as float32
OUTLIER_SIZE = 30.0
LOGIT_STD = 2.0  # a softmax that is neither flat nor one token
CHECKED_PAGES = 16  # of `close_page`


def case(op: str, spec, kv_format: KVFormat | None, *, working_set_bytes: int = 0) -> Case:
    """The case of one named shape of `op` in one format; None for `grouped_matmul`, whose shapes say what the weights are.

    Args:
      working_set_bytes: the calls of a loop take turns over pools that together take at least this, so that pages come from
        memory and not from a cache. `close_page` does not take turns: choose a large shape.
    """
    if op == "grouped_matmul":
        return grouped_matmul_case(spec, working_set_bytes)
    if kv_format is None:
        raise ValueError(f"{op=}: needs a cache format")
    if op == "paged_attention":
        return attention_case(spec, kv_format, working_set_bytes)
    if op == "close_page":
        return close_page_case(spec, kv_format)
    raise ValueError(f"{op=}: accepted are paged_attention, close_page, grouped_matmul")


def attention_bytes(spec: PagedAttentionSpec, kv_format: KVFormat) -> int:
    """Bytes one call must move: planes of the closed pages, filled parts of open pages, sinks, q, output, used table entries.

    Padding of pages, and pages that rows could share, are not counted.
    """
    lens, z = spec.kv_lens().astype(np.int64), kv_format.page_size
    closed = kv_format.closed_pages(lens)
    sinks = np.minimum(lens, kv_format.sink_tokens)
    open_tokens = lens - np.maximum(closed * z, sinks)
    token_bytes = 2 * spec.head_dim * jnp.dtype(kv_format.open_dtype).itemsize  # key and value of one KV head
    page_bytes = 4 * kv_format.page_layout(spec.head_dim).used_words
    kv_bytes = spec.num_kv_heads * int(np.sum(closed * page_bytes + (open_tokens + sinks) * token_bytes))
    q_bytes = spec.batch * spec.q_len * spec.num_heads * spec.head_dim * 2
    return kv_bytes + 2 * q_bytes + 4 * int(closed.sum()) + 4 * spec.batch


def attention_case(spec: PagedAttentionSpec, kv_format: KVFormat, working_set_bytes: int) -> Case:
    """Decode attention over full-size pools."""
    bytes_moved = attention_bytes(spec, kv_format)
    turns = max(1, cdiv(working_set_bytes, bytes_moved))
    cache = attention_inputs(spec, kv_format, spec.kv_lens(), turns=turns)

    def call(implementation, i, x, tables, *operands):
        table = tables[i % turns] if turns > 1 else tables[0]
        return _attend(implementation, cache, x, table, *operands)

    def check(implementation) -> float:
        small = dataclasses.replace(spec, batch=1, kv_len=1, ragged=False)  # shared by all shapes of these heads
        return max(_small_attention_error(implementation, small, kv_format),
                   _attention_error(implementation, cache, every_head=False))

    return Case("paged_attention", call, cache.q, (cache.tables, *cache.operands), add_tiny, bytes_moved, check)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Arguments of `paged_attention`, and what its pages hold.

    Attributes:
      q: bfloat16 [B, T, N, H].
      tables: int32 [turns, B, J]; no two rows or turns share a page.
      operands: pages, open_k, open_v, kv_lens, q_lens and, with sinks, sink_k, sink_v.
      kept_k, kept_v: float32 [STOCK_PAGES, K, Z, H], on the host: what closed pages hold.
      kept_index: int [P]: which of these a page of the pool is a copy of.
    """

    kv_format: KVFormat
    q: jax.Array
    tables: jax.Array
    operands: tuple[jax.Array, ...]
    kept_k: np.ndarray
    kept_v: np.ndarray
    kept_index: np.ndarray


def small_attention_inputs(spec: PagedAttentionSpec, kv_format: KVFormat) -> AttentionInputs:
    """The heads of `spec` over lengths around page boundaries, one row not in use, one of many pages."""
    z = kv_format.page_size
    lens = np.array([5 * z + 3, 1, z - 1, z, z + 1, 0, 17 * z + z // 2, 2 * z], np.int32)
    return attention_inputs(spec, kv_format, lens, turns=1)


def attention_inputs(spec: PagedAttentionSpec, kv_format: KVFormat, kv_lens: np.ndarray, *, turns: int) -> AttentionInputs:
    """Random inputs for rows of `kv_lens` tokens, int32 [B]; see the head of this file."""
    rng = np.random.default_rng(1)
    z, heads = kv_format.page_size, (spec.num_kv_heads, spec.head_dim)
    batch, closed = len(kv_lens), kv_format.closed_pages(kv_lens)
    owned = turns * int(closed.sum())
    words, kept_k, kept_v = _stock(kv_format, *heads, STOCK_PAGES)
    ids = rng.permutation(owned + UNOWNED_PAGES)
    kept_index = np.full(len(ids), len(kept_k))  # the NaN page
    kept_index[ids[:owned]] = rng.integers(len(kept_k), size=owned) if owned > len(kept_k) else np.arange(owned)
    columns = cdiv(int(kv_lens.max()), z)
    tables = np.full((turns, batch, columns), INVALID, np.int32)
    tables[:, np.arange(columns) < closed[:, None]] = ids[:owned].reshape(turns, -1)
    pages = jax.jit(functools.partial(jnp.take, axis=0, mode="clip"))(words, kept_index.astype(np.int32))

    sizes, dtype = _channel_sizes(kv_format, spec.head_dim), jnp.dtype(kv_format.open_dtype)
    open_k, open_v = _random_tokens(rng, (batch, heads[0], kv_format.open_tokens, heads[1]), kv_format)
    for row, (first, length) in enumerate(zip(closed * z, kv_lens)):
        unused = np.setdiff1d(np.arange(kv_format.open_tokens), np.arange(first, length) % kv_format.open_tokens)
        open_k[row, :, unused] = open_v[row, :, unused] = np.nan
    sinks = _random_tokens(rng, (batch, heads[0], kv_format.sink_tokens, heads[1]), kv_format)
    q = LOGIT_STD * rng.standard_normal((batch, spec.q_len, spec.num_heads, spec.head_dim), np.float32) / sizes
    q_lens = np.where(kv_lens > 0, np.minimum(spec.q_len, (kv_lens - 1) % z + 1), 0).astype(np.int32)
    operands = [pages, jnp.asarray(open_k, dtype), jnp.asarray(open_v, dtype), jnp.asarray(kv_lens), jnp.asarray(q_lens)]
    if kv_format.sink_tokens:
        operands += [jnp.asarray(x, dtype) for x in sinks]
    return AttentionInputs(
        kv_format, jnp.asarray(q, jnp.bfloat16), jnp.asarray(tables), tuple(operands), kept_k, kept_v, kept_index)


@functools.lru_cache(maxsize=4)
def _stock(kv_format: KVFormat, num_kv_heads: int, head_dim: int, count: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """(uint32 [count + 1, K, words]: closed random pages and one of NaN; their keys and values, float32 [count, K, Z, H])."""
    k, v = _random_tokens(np.random.default_rng(0), (count, num_kv_heads, kv_format.page_size, head_dim), kv_format)
    close = jax.jit(functools.partial(close_page, kv_format=kv_format, implementation="reference"))
    words = close(jnp.asarray(k, kv_format.open_dtype), jnp.asarray(v, kv_format.open_dtype))
    kept_k, kept_v = jax.jit(functools.partial(open_page, kv_format=kv_format, head_dim=head_dim))(words)
    return (jnp.pad(words, [(0, 1), (0, 0), (0, 0)], constant_values=NAN_WORD), np.asarray(kept_k),
            np.asarray(kept_v))


def _channel_sizes(kv_format: KVFormat, head_dim: int) -> np.ndarray:
    """float32 [H]: 1, and OUTLIER_SIZE for the promoted channels, or for the last one if the format promotes none."""
    sizes = np.ones(head_dim, np.float32)
    sizes[-max(kv_format.outlier_channels, 1):] = OUTLIER_SIZE
    return sizes


def _random_tokens(rng: np.random.Generator, shape: tuple[int, ...], kv_format: KVFormat) -> tuple[np.ndarray, np.ndarray]:
    """Keys, whose outlier channels are large and off zero, and values: float32 `shape`, channels last."""
    sizes = _channel_sizes(kv_format, shape[-1])
    keys = sizes * (rng.standard_normal(shape, np.float32) + np.float32(0.5) * (sizes > 1))
    return keys, rng.standard_normal(shape, np.float32)


def _attend(implementation: str, cache: AttentionInputs, q, table, pages, open_k, open_v, kv_lens, q_lens, *sinks) -> jax.Array:
    sink_k, sink_v = sinks or (None, None)
    return paged_attention(
        q, pages, open_k, open_v, table, kv_lens, q_lens, kv_format=cache.kv_format, sink_k=sink_k, sink_v=sink_v,
        sm_scale=q.shape[-1] ** -0.5, implementation=implementation)


@functools.cache
def _small_attention_error(implementation: str, spec: PagedAttentionSpec, kv_format: KVFormat) -> float:
    return _attention_error(implementation, small_attention_inputs(spec, kv_format), every_head=True)


def _attention_error(implementation: str, cache: AttentionInputs, *, every_head: bool) -> float:
    """Worst relative L2 error of a row: of every row, or of the first and last query head of the longest and the shortest row."""
    out = jax.jit(functools.partial(_attend, implementation, cache))(cache.q, cache.tables[0], *cache.operands)
    out = np.asarray(out).astype(np.float64)
    lens, q_lens, num_heads = np.asarray(cache.operands[3]), np.asarray(cache.operands[4]), cache.q.shape[2]
    unused = np.arange(out.shape[1]) >= q_lens[:, None]
    if not np.isfinite(out).all() or out[unused].any():
        return math.inf
    rows = np.flatnonzero(lens) if every_head else np.unique([lens.argmax(), lens.argmin()])
    heads = list(range(num_heads)) if every_head else [0, num_heads - 1]
    # NumPy puts the axis of `heads` first: [heads, queries, H].
    return max(_relative_l2(out[b, :q_lens[b], heads], attention_row(cache, int(b), heads)) for b in rows)


def attention_row(cache: AttentionInputs, row: int, heads: list[int]) -> np.ndarray:
    """Float64 attention of one row of the first turn over what its pages hold: [len(heads), queries, H]."""
    f = cache.kv_format
    _, open_k, open_v, kv_lens, q_lens, *sinks = cache.operands
    length, queries = int(kv_lens[row]), int(q_lens[row])
    closed = f.closed_pages(length)
    pages = cache.kept_index[np.asarray(cache.tables[0, row, :closed])]
    group = cache.q.shape[2] // open_k.shape[1]
    seen = np.arange(length) <= np.arange(length - queries, length)[:, None]

    @functools.cache
    def tokens(kv_head: int) -> list[np.ndarray]:
        both = []
        for part, (kept, opened) in enumerate(((cache.kept_k, open_k), (cache.kept_v, open_v))):
            newest = np.asarray(opened[row, kv_head])[np.arange(closed * f.page_size, length) % f.open_tokens].astype(np.float64)
            x = np.concatenate([kept[pages, kv_head].reshape(-1, kept.shape[-1]), newest])
            if sinks:
                count = min(length, f.sink_tokens)
                x[:count] = np.asarray(sinks[part][row, kv_head, :count]).astype(np.float64)
            both.append(x)
        return both

    out = []
    for head in heads:
        k, v = tokens(head // group)
        q = np.asarray(cache.q[row, :queries, head]).astype(np.float64)
        logits = np.where(seen, q @ k.T * k.shape[1] ** -0.5, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out.append(weights @ v / weights.sum(axis=1, keepdims=True))
    return np.stack(out)


def _relative_l2(actual: np.ndarray, desired: np.ndarray) -> float:
    return float(np.linalg.norm(actual - desired) / np.linalg.norm(desired))


def close_page_bytes(spec: ClosePageSpec, kv_format: KVFormat) -> int:
    """Bytes one call must move: keys and values read, planes of the closed pages written."""
    read = 2 * kv_format.page_size * spec.head_dim * jnp.dtype(kv_format.open_dtype).itemsize
    return spec.batch * spec.num_kv_heads * (read + 4 * kv_format.page_layout(spec.head_dim).used_words)


def close_page_case(spec: ClosePageSpec, kv_format: KVFormat) -> Case:
    """A batch of pages closed at once. Calls depend on each other through `num_sinks`."""
    shape = (min(STOCK_PAGES, spec.batch), spec.num_kv_heads, kv_format.page_size, spec.head_dim)
    index = np.arange(spec.batch) % shape[0]
    open_k, open_v = (
        jnp.take(jnp.asarray(x, kv_format.open_dtype), index, axis=0)
        for x in _random_tokens(np.random.default_rng(0), shape, kv_format))
    num_sinks = jnp.zeros(spec.batch, jnp.int32)

    def call(implementation, i, x, open_k, open_v):
        return close_page(open_k, open_v, kv_format=kv_format, num_sinks=x, implementation=implementation)

    def feed(x, out):  # NaN beside NaN: never so
        return x + (out[:, 0, -1] == NAN_WORD).astype(jnp.int32)

    def check(implementation) -> float:
        words = jax.jit(functools.partial(call, implementation, 0))(num_sinks, open_k, open_v)
        some = np.unique(np.linspace(0, spec.batch - 1, CHECKED_PAGES).astype(int))
        return _close_page_error(words[some], open_k[some], open_v[some], kv_format)

    return Case("close_page", call, num_sinks, (open_k, open_v), feed, close_page_bytes(spec, kv_format), check)


def _close_page_error(words, open_k, open_v, kv_format: KVFormat) -> float:
    """Worst relative L2 error of what a page holds against the reference's; inf if a code is off by more than its rounding."""
    read = jax.jit(functools.partial(open_page, kv_format=kv_format, head_dim=open_k.shape[-1]))
    right = jax.jit(functools.partial(close_page, kv_format=kv_format, implementation="reference"))(open_k, open_v)
    held, expected = ([np.asarray(x, np.float64) for x in read(w)] for w in (words, right))
    k, v = (np.asarray(x).astype(np.float64) for x in (open_k, open_v))
    base = kv_format.page_layout(open_k.shape[-1]).base_channels
    groups = [(k[..., :base], held[0][..., :base], kv_format.k_bits, -2, kv_format.k_range),
              (k[..., base:], held[0][..., base:], kv_format.outlier_bits, -2, kv_format.k_range),
              (v, held[1], kv_format.v_bits, -1, kv_format.v_range)]
    for x, y, bits, axis, rule in groups:
        if x.size and rule == "minmax" and not _is_rounded(x, y, bits, axis):
            return math.inf
    return max(_relative_l2(h[i], e[i]) for h, e in zip(held, expected) for i in range(len(k)))


def _is_rounded(x: np.ndarray, held: np.ndarray, bits: int, axis: int) -> bool:
    """Is every element within half a step of its group's range (the scale is widened by up to 2**-7)?"""
    if bits not in QUANT_BITS:
        return bool(np.all(np.abs(held - x) <= 2**-8 * np.abs(x)))
    step = np.ptp(x, axis=axis, keepdims=True) / (2**bits - 1)
    return bool(np.all(np.abs(held - x) <= (0.5 + 2**-8 + 1e-3) * step + 1e-6 * np.abs(x)))
