"""Plain JAX `paged_attention`: the specification, and what CPU users run.

One online softmax in float32 over segments: the open pages and the sinks first (so that every valid query has seen at least
itself and the running maximum is finite), then blocks of `PAGES_PER_BLOCK` closed pages in a loop whose trip count follows the
longest sequence. Blocks start at multiples of PAGES_PER_BLOCK pages for every row, and a block of which a row sees nothing
leaves its accumulators as they are, so what other rows hold never changes a row's result.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.close_page.reference import open_page
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.pallas_utils import MASK_VALUE

PAGES_PER_BLOCK = 4


class _Softmax(NamedTuple):
    """Online softmax: running maximum and denominator [B, K, M], weighted values [B, K, M, H]; M = G * T query rows."""

    m: jax.Array
    l: jax.Array
    acc: jax.Array


def paged_attention(
    q, pages, open_k, open_v, block_table, kv_lens, q_lens, *, kv_format: KVFormat, sink_k, sink_v, attention_sinks,
    sm_scale: float, sliding_window: int | None, logit_softcap: float | None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size, open_tokens = open_k.shape[1], kv_format.page_size, kv_format.open_tokens
    group = num_heads // num_kv_heads
    # [B, K, G * T, H]; scale first, in float32.
    rows = (q.astype(jnp.float32) * sm_scale).reshape(batch, num_queries, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, group * num_queries, head_dim)
    first = kv_lens - q_lens
    query_pos = jnp.tile(first[:, None] + jnp.arange(num_queries, dtype=jnp.int32), (1, group))  # [B, M]
    closed = kv_format.closed_pages(kv_lens)  # [B]

    def attend(state, k, v, positions, present):
        """positions int32 [B, S]; present bool [B, S]: this segment holds that token."""
        distance = query_pos[:, :, None] - positions[:, None, :]
        seen = present[:, None, :] & (distance >= 0)
        if sliding_window is not None:
            seen &= distance < sliding_window
        return _update(state, rows, k, v, seen[:, None], present, logit_softcap)

    state = _Softmax(
        m=jnp.full(rows.shape[:3], MASK_VALUE, jnp.float32), l=jnp.zeros(rows.shape[:3], jnp.float32),
        acc=jnp.zeros(rows.shape, jnp.float32))
    # Token s lies at s % open_tokens: what a place holds is the last such s that does not lie beyond the row's newest page.
    last = jnp.maximum(kv_lens[:, None] - 1, 0) // page_size * page_size + page_size - 1
    positions = last - (last - jnp.arange(open_tokens, dtype=jnp.int32)) % open_tokens
    present = (positions < kv_lens[:, None]) & (positions >= kv_format.sink_tokens)
    state = attend(state, open_k, open_v, positions, present)
    if kv_format.sink_tokens:
        positions = jnp.broadcast_to(jnp.arange(kv_format.sink_tokens, dtype=jnp.int32), (batch, kv_format.sink_tokens))
        state = attend(state, sink_k, sink_v, positions, positions < kv_lens[:, None])

    def block(i, state):
        k, v = _read_block(pages, block_table, closed, i, kv_format, head_dim)
        positions = i * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)
        present = (positions < (closed * page_size)[:, None]) & (positions >= kv_format.sink_tokens)
        return attend(state, k, v, jnp.broadcast_to(positions, present.shape), present)

    num_blocks = (jnp.max(closed) + PAGES_PER_BLOCK - 1) // PAGES_PER_BLOCK
    first_block = jnp.int32(0)
    if sliding_window is not None:
        lowest = jnp.min(jnp.where(kv_lens > 0, first, jnp.iinfo(jnp.int32).max)) - sliding_window + 1
        first_block = jnp.maximum(lowest, 0) // (page_size * PAGES_PER_BLOCK)
    state = lax.fori_loop(first_block, num_blocks, block, state)
    if attention_sinks is not None:
        logits = jnp.repeat(attention_sinks.astype(jnp.float32).reshape(num_kv_heads, group), num_queries, axis=1)
        state = _add_sink_logits(state, logits)
    out = state.acc / state.l[..., None]
    out = out.reshape(batch, num_kv_heads, group, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    valid = (jnp.arange(num_queries, dtype=jnp.int32) < q_lens[:, None]) & (kv_lens > 0)[:, None]
    out = jnp.where(valid[:, :, None, None, None], out, 0.0)
    return out.reshape(q.shape).astype(q.dtype)


def _update(state: _Softmax, q, k, v, seen, present, softcap: float | None) -> _Softmax:
    """Adds a segment of S tokens. q [B, K, M, H]; k, v [B, K, S, H]; seen bool [B, 1, M, S]; present bool [B, S]."""
    scores = jnp.einsum("bkmh,bksh->bkms", q, k.astype(jnp.float32))
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, MASK_VALUE)
    m = jnp.maximum(state.m, jnp.max(scores, axis=-1))
    p = jnp.where(seen, jnp.exp(scores - m[..., None]), 0.0)
    # 0 * NaN is NaN: values that are not there must be taken out as well.
    v = jnp.where(present[:, None, :, None], v.astype(jnp.float32), 0.0)
    alpha = jnp.exp(state.m - m)
    return _Softmax(
        m=m, l=alpha * state.l + jnp.sum(p, axis=-1),
        acc=alpha[..., None] * state.acc + jnp.einsum("bkms,bksh->bkmh", p, v))


def _read_block(pages, block_table, closed, i, kv_format: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of block i of every row, float32 [B, K, PAGES_PER_BLOCK * Z, H]. Pages not owned read page 0."""
    batch, num_kv_heads = block_table.shape[0], pages.shape[1]
    index = i * PAGES_PER_BLOCK + jnp.arange(PAGES_PER_BLOCK, dtype=jnp.int32)
    ids = jnp.take(block_table, index, axis=1, mode="clip")
    ids = jnp.where(index < closed[:, None], ids, 0)
    # Heads first while the data are still packed. The barrier keeps XLA from fusing the gather into the unpacking, which then
    # computes addresses element by element (20 times slower on CPU).
    words = lax.optimization_barrier(jnp.take(pages, ids, axis=0, mode="clip").swapaxes(1, 2))
    k, v = open_page(words, kv_format=kv_format, head_dim=head_dim)  # [B, K, PAGES_PER_BLOCK, Z, H]
    shape = (batch, num_kv_heads, PAGES_PER_BLOCK * kv_format.page_size, head_dim)
    return k.reshape(shape), v.reshape(shape)


def _add_sink_logits(state: _Softmax, logits: jax.Array) -> _Softmax:
    """Learned sinks: a logit per query head that takes weight and gives no value. logits float32 [K, M]."""
    m = jnp.maximum(state.m, logits)
    alpha = jnp.exp(state.m - m)
    return _Softmax(m=m, l=alpha * state.l + jnp.exp(logits - m), acc=alpha[..., None] * state.acc)
