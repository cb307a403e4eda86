"""`close_page` on TPU, in Pallas Mosaic TPU: pages in the layout "tpu", the bits that the reference gives.

One grid step closes one page of one KV head. A scale belongs to a row or to a column of the matrix, and its word must come to lie
in the lane of that channel or token; so both are quantised column by column, in the arithmetic of `quantize` itself:

    keys    [128, H]   a column is a channel; codes are turned after that
    values  [H, 128]   turned first; a column is a token

The matrix unit is not needed. Codes are small enough to be turned as float32. `tpu_tiles` packs them, [H, 128], in pairs of rows:
in a register of 16-bit elements two rows share a row of words.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_format import GroupFormat, KVFormat
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.quantize import float_bits, quantize
from pallas_kernels.tpu_tiles import TOKENS, pack_pairs

HEAD_DIMS = (64, 128, 256)


def close_page(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: jax.Array, interpret: Any = False,
) -> jax.Array:
    """See `pallas_kernels.close_page.close_page`.

    Args:
      open_k, open_v: [..., K, 128, H] bfloat16.
      num_sinks: int32, broadcastable to [...].
      interpret: `pltpu.InterpretParams()` to run on CPU.

    Returns:
      uint32 [..., K, words].

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    _refuse(open_k, open_v, kv_format)
    *lead, kv_heads, _, head_dim = open_k.shape
    layout, count = kv_format.page_layout(head_dim), open_k.size // (TOKENS * head_dim)
    sinks = jnp.broadcast_to(num_sinks, lead).reshape(-1)
    words = pl.pallas_call(
        functools.partial(_kernel_body, layout, kv_heads),
        out_shape=jax.ShapeDtypeStruct((count, layout.words // TOKENS, TOKENS), jnp.uint32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(count,), in_specs=[pl.BlockSpec((1, TOKENS, head_dim), lambda i, _: (i, 0, 0))] * 2,
            out_specs=pl.BlockSpec((1, layout.words // TOKENS, TOKENS), lambda i, _: (i, 0, 0))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)), name="close_page", interpret=interpret,
    )(sinks, *(x.reshape(count, TOKENS, head_dim) for x in (open_k, open_v)))
    return words.reshape(*lead, kv_heads, layout.words)


def _refuse(open_k, open_v, kv_format: KVFormat) -> None:
    if kv_format.layout != "tpu":
        raise NotImplementedError(f"mosaic_tpu: layout={kv_format.layout!r}: only 'tpu' pages are written")
    for name in ("k_range", "v_range"):
        if getattr(kv_format, name) != "minmax":
            raise NotImplementedError(f"mosaic_tpu: {name}={getattr(kv_format, name)!r}: only 'minmax'")
    if open_k.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(
            f"mosaic_tpu: head_dim={open_k.shape[-1]} of {open_k.shape=}: only {', '.join(map(str, HEAD_DIMS))}")
    for name, x in (("open_k", open_k), ("open_v", open_v)):
        if x.dtype != jnp.bfloat16:
            raise NotImplementedError(f"mosaic_tpu: {name}.dtype={x.dtype}: only bfloat16")
    if not open_k.size:
        raise NotImplementedError(f"mosaic_tpu: {open_k.shape=}: no page to close")


def _kernel_body(layout: PageLayout, kv_heads: int, sinks_ref, k_ref, v_ref, out_ref):
    """sinks_ref int32 [pages]; k_ref, v_ref [1, 128, H]; out_ref [1, rows, 128]."""
    first_row = {name: first // TOKENS for name, (first, _) in layout.planes().items()}
    _close_keys(layout, first_row, k_ref[0].astype(jnp.float32), sinks_ref[lax.div(pl.program_id(0), kv_heads)], out_ref)
    codes, scales = _quantize_columns(v_ref[0].astype(jnp.float32).T, layout.fmt.values)
    _store_codes(codes, layout.fmt.v_bits, first_row["v_codes"], out_ref)
    if scales is not None:
        out_ref[0, pl.ds(first_row["v_scales"], 1)] = scales


def _close_keys(layout: PageLayout, first_row: dict[str, int], k, num_sinks, out_ref) -> None:
    """k [128, H]. All channels are quantised as the base ones and as the promoted ones: cheaper than to cut lanes."""
    f, base = layout.fmt, layout.base_channels
    ranged = lax.broadcasted_iota(jnp.int32, k.shape, 0) >= num_sinks
    codes, scales = _quantize_columns(k, f.keys, ranged)
    _store_codes(codes.T[:base], f.k_bits, first_row["k_codes"], out_ref)
    if f.outlier_channels:
        codes, promoted_scales = _quantize_columns(k, f.outliers, ranged)
        _store_codes(codes.T[base:], f.outlier_bits, first_row["outlier_codes"], out_ref)
        if scales is not None:  # else the promoted channels, of more bits, have none either
            channel = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
            scales = jnp.where(channel < base, scales, jnp.zeros_like(scales) if promoted_scales is None else promoted_scales)
    if scales is not None:
        _store_key_scales(scales, first_row["k_scales"], out_ref)


def _store_key_scales(scales, row: int, out_ref) -> None:
    """scales uint32 [1, H], in rows of 128; the last one is filled up with zeros."""
    for i in range(0, scales.shape[1], TOKENS):
        part = scales[:, i:i + TOKENS]
        if part.shape[1] < TOKENS:
            out_ref[0, pl.ds(row + i // TOKENS, 1)] = jnp.zeros((1, TOKENS), jnp.uint32)
        out_ref[0, pl.ds(row + i // TOKENS, 1), pl.ds(0, part.shape[1])] = part


def _quantize_columns(x, g: GroupFormat, ranged=None) -> tuple[jax.Array, jax.Array | None]:
    """Codes of x [m, n], one group a column, as float32 [m, n]; words of scale and offset, uint32 [1, n].

    At 16 bits: x, and None.
    """
    if not g.is_quantized:
        return x, None
    q = quantize(x, dataclasses.replace(g, axis="channel"), ranged)
    assert q.scale is not None and q.offset is not None
    return q.codes.astype(jnp.int32).astype(jnp.float32), float_bits(q.scale, "bfloat16") | (float_bits(q.offset, "bfloat16") << 16)


def _store_codes(codes, bits: int, row: int, out_ref) -> None:
    """codes float32 [C, 128], or at 16 bits values: packed into rows of words from `row` on."""
    halves = codes.astype(jnp.bfloat16) if bits == 16 else codes.astype(jnp.int32).astype(jnp.uint16)
    words = pack_pairs(pltpu.bitcast(halves, jnp.uint32), bits)
    out_ref[0, pl.ds(row, words.shape[0])] = words
