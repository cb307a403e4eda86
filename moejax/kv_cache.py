"""The paged KV cache of one layer: append to the newest open page, attend, close pages that are due.

The last `open_pages` pages of a sequence, one by default, are open: unquantised, in a ring that each slot has. The pages before
them are closed: quantised, in the pool that all sequences share. If the format asks for them, the first tokens are kept once
more as unquantised sinks. The oldest open page closes *after* the attention of the token that fills the newest, so what a query
sees depends on its position alone: not on how the prompt was cut into pieces, nor on whether the token came from the prompt or
was generated.

Keys and queries are rotated and permuted, values rotated, on their way in; the attention output is rotated back. Their products
stay what they are, so nothing below this module knows of it. Layers may have different formats; their page size is the same.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax.attention import Heads
from pallas_kernels.append_heads import OpenPages, append_heads
from pallas_kernels.append_heads.reference import write
from pallas_kernels.close_page import close_page
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.paged_attention import paged_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyTransform:
    """How one layer's keys, and queries with them, are turned into the channels of the cache; measured by `moejax.calibration`.

    Attributes:
      k_matrix, q_matrix: float32 [K, H, H], of the rotation "calibrated": stored keys are k @ k_matrix, queries q @ q_matrix, and
        q_matrix is the inverse transpose of k_matrix, so that products stay what they are. None for other rotations.
      k_perm: int32 [K, H], a permutation a KV head: stored channel h is channel k_perm[., h] of the rotated key; the last
        `outlier_channels` are the promoted ones. None keeps the order.
    """

    k_perm: jax.Array | None = None
    k_matrix: jax.Array | None = None
    q_matrix: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer, for all slots.

    Attributes:
      pages: uint32 [P, K, words], closed pages; which sequence owns which is the page table's business.
      open_k, open_v: [B, K, Zo, H] bfloat16 (float32 when the cache is exact), Zo = `KVFormat.open_tokens`: the open pages of
        each slot. Token s lies at s % Zo; places that no token of the open pages has are garbage.
      sink_k, sink_v: [B, K, S, H] as the open pages, the first S tokens of each slot; None when the format has no sinks.
      transform: order of the key channels.
    """

    pages: jax.Array
    open_k: jax.Array
    open_v: jax.Array
    sink_k: jax.Array | None
    sink_v: jax.Array | None
    transform: KeyTransform


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the tokens of one call go: the same for every layer.

    Attributes:
      block_table: int32 [B, J] page ids, INVALID (-1) where there is none.
      kv_lens: int32 [B], tokens in each sequence before this call.
      q_lens: int32 [B], new tokens of each row, 0 for a row that sits out. They fit into its newest page.
    """

    block_table: jax.Array
    kv_lens: jax.Array
    q_lens: jax.Array


def init_layer(
    kv_format: KVFormat, *, num_kv_heads: int, head_dim: int, num_pages: int, max_batch: int,
    transform: KeyTransform | None = None,
) -> LayerKV:
    """An empty cache: `num_pages` physical pages and `max_batch` slots.

    Raises:
      ValueError: a head_dim that does not fit the format.
      NotImplementedError: a format that no cache holds (`KVFormat.check_cacheable`).
    """
    kv_format.check_cacheable()
    words = kv_format.page_layout(head_dim).words
    dtype = jnp.dtype(kv_format.open_dtype)

    def rows(tokens: int) -> jax.Array:
        return jnp.zeros((max_batch, num_kv_heads, tokens, head_dim), dtype)

    sinks = kv_format.sink_tokens
    return LayerKV(
        pages=jnp.zeros((num_pages, num_kv_heads, words), jnp.uint32),
        open_k=rows(kv_format.open_tokens), open_v=rows(kv_format.open_tokens),
        sink_k=rows(sinks) if sinks else None, sink_v=rows(sinks) if sinks else None,
        transform=KeyTransform() if transform is None else transform)


def append(cache: LayerKV, k: jax.Array, v: jax.Array, where: Placement, *, kv_format: KVFormat) -> LayerKV:
    """Writes new tokens into the open pages and the sinks.

    Args:
      cache: the layer's cache.
      k, v: [B, T, K, H], keys after RoPE. Row b's first q_lens[b] tokens count.
      where: lengths before the call.
      kv_format: storage format.

    Returns:
      The cache with the tokens at positions kv_lens … kv_lens + q_lens - 1.
    """
    k = stored_keys(k, kv_format, cache.transform)
    v = rotate(v, kv_format.v_rotation, kv_format.rotation_block)
    offset = where.kv_lens % kv_format.open_tokens
    cache = dataclasses.replace(
        cache, open_k=write(cache.open_k, k, offset, where.q_lens), open_v=write(cache.open_v, v, offset, where.q_lens))
    if cache.sink_k is None or cache.sink_v is None:
        return cache
    return dataclasses.replace(
        cache, sink_k=write(cache.sink_k, k, where.kv_lens, where.q_lens),
        sink_v=write(cache.sink_v, v, where.kv_lens, where.q_lens))


def attend(
    cache: LayerKV, q: jax.Array, k: jax.Array, v: jax.Array, where: Placement, *, kv_format: KVFormat,
    sliding_window: int | None = None, implementation: str | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Appends new tokens and lets each of them attend to its sequence, itself included. Closes nothing: see `close_filled`.

    Args:
      cache: the layer's cache.
      q: [B, T, N, H].  k, v: [B, T, K, H].  q and k after RoPE.
      where: block table, lengths before the call, and valid tokens of each row.
      kv_format, sliding_window, implementation: as of `paged_attention`.

    Returns:
      (out [B, T, N, H] in q's dtype, zeros for tokens that do not count; the cache with the tokens in it).
    """
    cache = append(cache, k, v, where, kv_format=kv_format)
    q = stored_queries(q, kv_format, cache.transform)
    return _look(cache, q, where, kv_format, sliding_window, implementation), cache


def attend_heads(
    cache: LayerKV, heads: Heads, where: Placement, *, kv_format: KVFormat, sliding_window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, LayerKV]:
    """`attend` of heads as they are projected. With one token a row, norms, RoPE and append are one operation where that is known
    (`append_heads`): no norm over all heads at once, no clipping, no rotation or permutation of the cache's channels."""
    attention, (q, k, v) = heads.attention, heads.projected
    config = attention.config
    turned = cache.transform.k_perm is not None or (kv_format.k_rotation, kv_format.v_rotation) != ("none", "none")
    if q.shape[1] > 1 or turned or config.qk_norm == "full" or config.clip_qkv is not None:
        return attend(cache, *heads.qkv(), where, kv_format=kv_format, sliding_window=sliding_window, implementation=implementation)
    norms = config.qk_norm != "none"
    q, pages = append_heads(
        jnp.concatenate([q, k, v], axis=2)[:, 0], heads.cos[:, 0, 0], heads.sin[:, 0, 0],
        OpenPages(cache.open_k, cache.open_v, cache.sink_k, cache.sink_v), where.kv_lens, where.q_lens,
        num_heads=config.num_heads, eps=config.rms_norm_eps, q_scale=attention.q_norm.scale[...] if norms else None,
        k_scale=attention.k_norm.scale[...] if norms else None,
        implementation="reference" if implementation == "reference" else None)
    cache = dataclasses.replace(cache, **pages._asdict())
    return _look(cache, q[:, None], where, kv_format, sliding_window, implementation), cache


def _look(cache: LayerKV, q, where: Placement, kv_format: KVFormat, sliding_window, implementation) -> jax.Array:
    """Attention of stored queries [B, T, N, H] over the cache with their tokens in it."""
    kv_lens = jnp.where(where.q_lens > 0, where.kv_lens + where.q_lens, 0)
    out = paged_attention(
        q, cache.pages, cache.open_k, cache.open_v, where.block_table, kv_lens, where.q_lens, kv_format=kv_format,
        sink_k=cache.sink_k, sink_v=cache.sink_v, sm_scale=q.shape[-1] ** -0.5, sliding_window=sliding_window,
        implementation=implementation)
    return rotate(out, kv_format.v_rotation, kv_format.rotation_block)


def close_filled(
    caches: Sequence[LayerKV], where: Placement, *, formats: Sequence[KVFormat], implementation: str | None = None,
) -> tuple[LayerKV, ...]:
    """Closes, in all layers, the oldest open page of every row whose q_lens new tokens filled its newest. Call it after the last
    layer.

    A loop over the rows that filled, none of them in most steps: no row, no work, and the pools are updated in place. A row
    whose page the block table does not name is left alone, so that no other sequence's page can be overwritten. Layers of one
    format are closed together.

    Returns:
      The caches, same order.
    """
    layers_of: dict[KVFormat, list[int]] = {}
    for layer, kv_format in enumerate(formats):
        layers_of.setdefault(kv_format, []).append(layer)
    new = list(caches)
    for kv_format, layers in layers_of.items():
        pools = _close_layers([caches[layer] for layer in layers], where, kv_format, implementation)
        for layer, pages in zip(layers, pools):
            new[layer] = dataclasses.replace(caches[layer], pages=pages)
    return tuple(new)


def _close_layers(
    caches: Sequence[LayerKV], where: Placement, kv_format: KVFormat, implementation: str | None,
) -> tuple[jax.Array, ...]:
    """The pools of layers of one format with the pages in them that are due."""
    page_size = kv_format.page_size
    ends = where.kv_lens + where.q_lens
    oldest = ends // page_size - kv_format.open_pages
    page_ids = jnp.take_along_axis(where.block_table, jnp.maximum(oldest, 0)[:, None], axis=1)[:, 0]
    due = (where.q_lens > 0) & (ends % page_size == 0) & (oldest >= 0) & (page_ids >= 0)
    order = jnp.argsort(~due, stable=True)
    opened = tuple((c.open_k, c.open_v) for c in caches)

    def close_row(i: jax.Array, pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # With one slot nothing below depends on i, and XLA would move all of it in front of the loop: into every step.
        i, barred = jax.lax.optimization_barrier((i, opened))
        row = order[i]
        start = oldest[row] % kv_format.open_pages * page_size

        def page(buffer: jax.Array) -> jax.Array:
            buffer = jax.lax.dynamic_index_in_dim(buffer, row, keepdims=False)
            return jax.lax.dynamic_slice_in_dim(buffer, start, page_size, axis=1)

        k, v = (jnp.stack([page(layer[part]) for layer in barred]) for part in (0, 1))
        num_sinks = jnp.where(oldest[row] == 0, kv_format.sink_tokens, 0)
        words = close_page(k, v, kv_format=kv_format, num_sinks=num_sinks, implementation=implementation)
        return tuple(jax.lax.dynamic_update_index_in_dim(pool, words[at], page_ids[row], 0) for at, pool in enumerate(pools))

    return jax.lax.fori_loop(0, jnp.sum(due, dtype=jnp.int32), close_row, tuple(c.pages for c in caches))


def take_slot(cache: LayerKV, slot: jax.Array) -> LayerKV:
    """The cache as a batch of the one row `slot` (int32 scalar), with the same pool."""
    return _map_rows(lambda a: jax.lax.dynamic_slice_in_dim(a, slot, 1), cache)


def put_slot(cache: LayerKV, row: LayerKV, slot: jax.Array) -> LayerKV:
    """Inverse of `take_slot`: `cache` with the row, and the pool, of `row`."""
    merged = _map_rows(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, slot, 0), cache, row)
    return dataclasses.replace(merged, pages=row.pages)


def stored_keys(k: jax.Array, kv_format: KVFormat, transform: KeyTransform) -> jax.Array:
    """Keys [B, T, K, H] in the channels of the cache."""
    return _to_stored(k, kv_format, transform, transform.k_matrix)


def stored_queries(q: jax.Array, kv_format: KVFormat, transform: KeyTransform) -> jax.Array:
    """Queries [B, T, N, H] in the channels of the cache: their products with `stored_keys` are those of q and k."""
    return _to_stored(q, kv_format, transform, transform.q_matrix)


def _to_stored(x: jax.Array, kv_format: KVFormat, transform: KeyTransform, matrix: jax.Array | None) -> jax.Array:
    if kv_format.k_rotation == "calibrated":
        if matrix is None:
            raise ValueError("k_rotation='calibrated' needs the transforms of moejax.calibration")
        B, T, _, H = x.shape
        grouped = x.reshape(B, T, matrix.shape[0], -1, H)
        return jnp.einsum("btkgh,khi->btkgi", grouped, matrix.astype(x.dtype)).reshape(x.shape)
    return permute_channels(rotate(x, kv_format.k_rotation, kv_format.rotation_block), transform)


def rotate(x: jax.Array, rotation: str, block: int) -> jax.Array:
    """x [..., H] times the orthonormal Hadamard matrix of size H, or of size `block` along the diagonal; its own inverse."""
    if rotation == "none":
        return x
    size = x.shape[-1] if rotation == "hadamard" else block
    blocks = x.reshape(*x.shape[:-1], -1, size)
    return jnp.einsum("...h,hi->...i", blocks, jnp.asarray(hadamard(size), x.dtype)).reshape(x.shape)


def hadamard(size: int) -> np.ndarray:
    """Orthonormal Hadamard matrix (Sylvester), float32 [size, size]. `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    if len(matrix) != size:
        raise ValueError(f"{size=}: a Hadamard matrix needs a power of two")
    return (matrix / size**0.5).astype(np.float32)


def permute_channels(x: jax.Array, transform: KeyTransform) -> jax.Array:
    """Keys [B, T, K, H], or queries [B, T, N, H], with the channels of each KV head in stored order."""
    if transform.k_perm is None:
        return x
    heads = x.shape[2] // transform.k_perm.shape[0]
    perm = jnp.repeat(transform.k_perm, heads, axis=0)
    return jnp.take_along_axis(x, perm[None, None], axis=3)


def _map_rows(function, *caches: LayerKV) -> LayerKV:
    names = [name for name in ("open_k", "open_v", "sink_k", "sink_v") if getattr(caches[0], name) is not None]
    return dataclasses.replace(caches[0], **{name: function(*(getattr(c, name) for c in caches)) for name in names})
