"""The partial results of a row's splits, and the learned sinks, to the attention output: the Hopper kernel's second half.

A block merges 32 channels of eight query rows. Each of its warps takes every fourth split; all loads of several splits are on their
way before the first is used. Then the four warps' results are merged, always in the same order.
"""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sm90
from pallas_kernels.paged_attention.fragments import PER_QUERY, QUERY_ROWS, ROWS, WARPS
from pallas_kernels.paged_attention.work_list import Work, split_range
from pallas_kernels.pallas_utils import MASK_VALUE, cdiv

CHANNELS = 32
_MOST_AT_ONCE = 8  # splits a warp
# [channels, 8, 1]: a lane has one channel, a warp two query rows.
_OUT = plgpu.Layout.TILED(
    plgpu.Tiling(((CHANNELS, QUERY_ROWS, 1), (CHANNELS, QUERY_ROWS // WARPS, 1))), warp_dims=(-5,), lane_dims=(-3,), vector_dim=-1)
_OUT_QUERY = _OUT.reduce(0)


def padded_splits(num_splits: int) -> int:
    """Splits that the partial results must have room for, of which warps read four in a row."""
    return cdiv(num_splits, WARPS) * WARPS


def merge(
    work: Work, partial: jax.Array, stats: jax.Array, kv_lens: jax.Array, q_lens: jax.Array, sinks: jax.Array | None,
    num_queries: int, query_tiles: int, dtype, interpret: Any,
) -> jax.Array:
    """[rows * heads, 8, H].

    Args:
      work: how the call was cut.
      partial: float32 [rows * heads, splits, H, 8]; stats: float32 [.., splits, 2, 8], reference exponent (of 2) and denominator.
      kv_lens, q_lens: int32 [rows].
      sinks: float32 [heads, 8], as exponents of 2, or None.
      num_queries: query row r is query r % num_queries.
      query_tiles: tiles of query rows a KV head.
      dtype: of the result.
      interpret: see `paged_attention`.
    """
    tiles, _, head_dim, _ = partial.shape
    optional = [] if sinks is None else [sinks]
    out = plgpu.kernel(
        functools.partial(_body, work, num_queries, query_tiles, interpret is not None),
        out_type=jax.ShapeDtypeStruct((tiles, QUERY_ROWS, head_dim, 1), dtype),
        grid=(tiles, head_dim // CHANNELS), grid_names=("tile", "channels"),
        scratch_types={
            "stats_smem": plgpu.SMEM((2, WARPS, QUERY_ROWS, 1), jnp.float32),
            "sum_smem": plgpu.SMEM((WARPS, CHANNELS, QUERY_ROWS, 1), jnp.float32)},
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="paged_attention_merge", interpret=interpret)(partial, stats, kv_lens, q_lens, *optional)
    return out.reshape(tiles, QUERY_ROWS, head_dim)


def _body(
    work: Work, num_queries: int, query_tiles: int, use_twins: bool, partial_ref, stats_ref, kv_lens_ref, q_lens_ref, *refs,
    stats_smem, sum_smem,
):
    *sinks_ref, out_ref = refs
    sm90.after_previous_kernel(use_twins=use_twins)
    tile = lax.axis_index("tile")
    channels = pl.ds(lax.axis_index("channels") * CHANNELS, CHANNELS)
    row, head = lax.div(tile, work.heads), lax.rem(tile, work.heads)
    q_len = q_lens_ref[row]
    first, end = split_range(work, kv_lens_ref[row], q_len)
    m, l, acc = _warps_splits(partial_ref.at[tile, :, channels], stats_ref.at[tile], first, end)
    stats_smem.at[0, :, :, 0][...] = m
    stats_smem.at[1, :, :, 0][...] = l
    sum_smem.at[:, :, :, 0][...] = acc
    plgpu.commit_smem()

    def load(ref, layout=_OUT_QUERY):
        return plgpu.load(ref, layout=layout, optimized=False)

    def over_channels(x):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (CHANNELS, QUERY_ROWS, 1), [1, 2]), _OUT)

    of_warps = [load(stats_smem.at[0, w]) for w in range(WARPS)]
    m = functools.reduce(jnp.maximum, of_warps)
    if sinks_ref:
        sink = load(sinks_ref[0].at[head])
        m = jnp.maximum(m, sink)
    weights = [jnp.exp2(x - m) for x in of_warps]
    l = sum(load(stats_smem.at[1, w]) * weight for w, weight in enumerate(weights))
    if sinks_ref:
        l += jnp.exp2(sink - m)
    query = plgpu.broadcasted_iota(jnp.int32, (QUERY_ROWS, 1), 0, layout=_OUT_QUERY) + lax.rem(head, query_tiles) * QUERY_ROWS
    valid = (end > first) & (lax.rem(query, num_queries) < q_len) & (l > 0)
    inverse = jnp.where(valid, 1 / jnp.where(l > 0, l, 1.0), 0.0)
    out = sum(load(sum_smem.at[w], _OUT) * over_channels(weight) for w, weight in enumerate(weights))
    out_ref.at[tile, :, channels].transpose((1, 0, 2))[...] = (out * over_channels(inverse)).astype(out_ref.dtype)


def _warps_splits(partial_ref, stats_ref, first, end):
    """What each warp makes of its splits: maximum and denominator [4, 8], sum [4, channels, 8]."""
    splits = stats_ref.shape[0]
    at_once = min(_MOST_AT_ONCE, splits // WARPS)
    warp = plgpu.broadcasted_iota(jnp.int32, (WARPS, QUERY_ROWS), 0, layout=PER_QUERY)
    shape = (WARPS, CHANNELS, QUERY_ROWS)

    def over_channels(x):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0, 2]), ROWS)

    def some(i, state):
        loads = []
        for j in range(at_once):
            wanted = first + (i * at_once + j) * WARPS
            # What lies beyond the last split, or before the ones wanted, is not counted, but it is there.
            at = pl.ds(jnp.minimum(wanted, splits - WARPS), WARPS)
            split = jnp.minimum(wanted, splits - WARPS) + warp
            loads.append(((split >= wanted) & (split < end), *(
                plgpu.load(ref, layout=layout, optimized=False) for ref, layout in (
                    (stats_ref.at[at, 0], PER_QUERY), (stats_ref.at[at, 1], PER_QUERY), (partial_ref.at[at], ROWS)))))
        m, l, acc = state
        for counts, split_m, split_l, values in loads:
            split_m = jnp.where(counts, split_m, MASK_VALUE)
            new_m = jnp.maximum(m, split_m)
            old, new = jnp.exp2(m - new_m), jnp.where(counts, jnp.exp2(split_m - new_m), 0.0)
            l = l * old + jnp.where(counts, split_l, 0.0) * new
            acc = acc * over_channels(old) + jnp.where(over_channels(counts), values, 0.0) * over_channels(new)
            m = new_m
        return m, l, acc

    def full(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    start = (full(MASK_VALUE, (WARPS, QUERY_ROWS), PER_QUERY), full(0.0, (WARPS, QUERY_ROWS), PER_QUERY), full(0.0, shape, ROWS))
    return lax.fori_loop(0, lax.div(end - first + at_once * WARPS - 1, at_once * WARPS), some, start)
