"""`paged_attention`: queries of the newest page against sinks, low-bit closed pages and the open pages, one softmax."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.paged_attention import reference

dispatch.register_mosaic("paged_attention")
dispatch.register("paged_attention", "reference", reference.paged_attention)

FLOATS = ("bfloat16", "float16", "float32")


def paged_attention(
    q: jax.Array, pages: jax.Array, open_k: jax.Array, open_v: jax.Array, block_table: jax.Array, kv_lens: jax.Array,
    q_lens: jax.Array | None = None, *, kv_format: KVFormat, sink_k: jax.Array | None = None,
    sink_v: jax.Array | None = None, attention_sinks: jax.Array | None = None, sm_scale: float,
    sliding_window: int | None = None, logit_softcap: float | None = None, implementation: str | None = None,
) -> jax.Array:
    """Attention of the newest tokens of each sequence over its whole paged cache.

    The query at position t sees the tokens s <= t: those below `sink_tokens` in the sinks, those of its own page t // Z, and of
    the `open_pages` - 1 before it, in the open pages, all others in closed pages. A row's result does not depend, bit for bit,
    on what the other rows hold; words of pages that a row does not own, and tokens beyond its length, never reach it, NaN or not.

    Args:
      q: [B, T, N, H]; query i of row b stands at position kv_lens[b] - q_lens[b] + i. All valid queries of a row lie in its
        newest page, (kv_lens[b] - 1) // Z. Query head n reads KV head n // (N // K).
      pages: uint32 [P, K, words], the pool of closed pages (`close_page`).
      open_k, open_v: [B, K, Zo, H], float, Zo = kv_format.open_tokens; the open pages of each row, the queries' own tokens
        included. The token at position s lies at s % Zo.
      block_table: int32 [B, J]; entry j is the page id that holds the tokens j * Z ... of the row. Read for closed pages only.
      kv_lens: int32 [B], tokens of the row, its queries included, at most J * Z; 0 for a row that is not in use.
      q_lens: int32 [B], valid queries; None for T.
      kv_format: storage format of the pages. Channels of q, open pages and sinks stand in the stored order and rotation.
      sink_k, sink_v: [B, K, S, H], float, S = kv_format.sink_tokens: the first tokens; given exactly when S > 0.
      attention_sinks: float32 [N], learned logits that join the softmax denominator only.
      sm_scale: multiplies q·k.
      sliding_window: tokens a query sees, itself included: s is visible iff t - s < sliding_window, in sinks too.
      logit_softcap: logits become cap * tanh(logit / cap), before masks.
      implementation: None for the first of the platform's order that can serve the call, or a registered name.

    Returns:
      [B, T, N, H] in the dtype of q. 0 for queries i >= q_lens[b] and rows with kv_lens[b] == 0.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      NotImplementedError: no implementation can serve the call.
    """
    _check_queries(q, open_k, open_v, kv_format)
    _check_pages(q, pages, open_k, block_table, kv_lens, q_lens, kv_format)
    _check_options(q, open_k, sink_k, sink_v, attention_sinks, sliding_window, logit_softcap, kv_format)
    if q_lens is None:
        q_lens = jnp.full(kv_lens.shape, q.shape[1], jnp.int32)
    return dispatch.call(
        "paged_attention", implementation, q, pages, open_k, open_v, block_table, kv_lens, q_lens, kv_format=kv_format,
        sink_k=sink_k, sink_v=sink_v, attention_sinks=attention_sinks, sm_scale=sm_scale, sliding_window=sliding_window,
        logit_softcap=logit_softcap)


def _check_queries(q, open_k, open_v, kv_format: KVFormat) -> None:
    if q.ndim != 4 or open_k.ndim != 4 or open_k.shape != open_v.shape:
        raise ValueError(f"{q.shape=}, {open_k.shape=}, {open_v.shape=}: must be [B, T, N, H], [B, K, Zo, H], [B, K, Zo, H]")
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = open_k.shape[1]
    if open_k.shape != (batch, num_kv_heads, kv_format.open_tokens, head_dim):
        raise ValueError(f"{open_k.shape=}: must be [B, K, Zo, H] with B={batch}, Zo={kv_format.open_tokens} tokens of open pages, "
                         f"H={head_dim} of {q.shape=}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{q.shape=}, {open_k.shape=}: N={num_heads} must be a multiple of K={num_kv_heads}")
    for name, x in (("q", q), ("open_k", open_k), ("open_v", open_v)):
        if x.dtype.name not in FLOATS:
            raise ValueError(f"{name}.dtype={x.dtype}: accepted are {', '.join(FLOATS)}")


def _check_pages(q, pages, open_k, block_table, kv_lens, q_lens, kv_format: KVFormat) -> None:
    batch, num_kv_heads, head_dim = q.shape[0], open_k.shape[1], q.shape[3]
    words = kv_format.page_layout(head_dim).words
    if pages.dtype != jnp.uint32 or pages.ndim != 3 or pages.shape[0] < 1 or pages.shape[1:] != (num_kv_heads, words):
        raise ValueError(
            f"{pages.shape=}, {pages.dtype=}: must be uint32 [P, {num_kv_heads}, {words}] for {kv_format.name}, H={head_dim}")
    if block_table.ndim != 2 or block_table.shape[0] != batch or block_table.shape[1] < 1:
        raise ValueError(f"{block_table.shape=}: must be [{batch}, J], J at least 1")
    for name, x in (("kv_lens", kv_lens), ("q_lens", q_lens)):
        if x is not None and x.shape != (batch,):
            raise ValueError(f"{name}.shape={x.shape}: must be ({batch},)")
    for name, x in (("block_table", block_table), ("kv_lens", kv_lens), ("q_lens", q_lens)):
        if x is not None and x.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={x.dtype}: must be int32")


def _check_options(
    q, open_k, sink_k, sink_v, attention_sinks, sliding_window, logit_softcap, kv_format: KVFormat,
) -> None:
    batch, num_kv_heads, _, head_dim = open_k.shape
    sinks = (batch, num_kv_heads, kv_format.sink_tokens, head_dim)
    for name, x in (("sink_k", sink_k), ("sink_v", sink_v)):
        if (x is not None) != (kv_format.sink_tokens > 0):
            raise ValueError(f"{name} is {'missing' if x is None else 'given'}, but kv_format.{kv_format.sink_tokens=}")
        if x is not None and x.shape != sinks:
            raise ValueError(f"{name}.shape={x.shape}: must be {sinks}")
    if attention_sinks is not None and attention_sinks.shape != (q.shape[2],):
        raise ValueError(f"{attention_sinks.shape=}: must be ({q.shape[2]},), one logit a query head")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{sliding_window=}: must be at least 1 token, or None")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"{logit_softcap=}: must be positive, or None")
