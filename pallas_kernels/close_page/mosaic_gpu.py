"""`close_page` on NVIDIA Hopper, in Pallas Mosaic GPU: pages in the layout "mma_sm90", the bits that the reference gives.

One block closes the keys or the values of one page of one KV head. In that layout a quad of 128 words is one word a thread, and
thread (g, i, h, u) packs codes of the same channels, or tokens, in every quad (`mma_sm90`):

    keys:    tokens 16 m + 8 u + g, channels of a tile 2 h + e (e = 0, 1) and i;    a group is a channel, over m, u and g
    values:  channels 16 c + 8 u + g, tokens 16 m + 8 h + 2 i + e;                  a group is a token, over c, u and g

So both are the same code: 128 elements at a time, an element a thread, as arrays [h, i0, u, g, i1, 1] with i = 2 i1 + i0; ranges
are the least and greatest over m (or c) in registers and over u and g by shuffles within a warp; packing is shifts and ors of a
thread's own codes. Shared memory and barriers are not needed. All index arithmetic lies in views of the arrays whose axes are
single bits; the last axis, of size 1, is there because a register holds neighbours along it.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_format import QUANT_BITS, KVFormat
from pallas_kernels.mma_sm90 import QUAD_WORDS, THREE_BIT_FIELDS, TILE, TOKEN_TILES, TOKENS
from pallas_kernels.page_layout import PageLayout

HEAD_DIMS = (64, 128, 256)
_ROW_WORDS = 16  # every plane of a page begins and ends at a multiple of this many words
_QUAD_ROWS = QUAD_WORDS // _ROW_WORDS
_SHAPE = (2, 2, 2, 8, 2, 1)  # h, i0, u, g, i1, 1
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling((_SHAPE,)), warp_dims=(-6, -5), lane_dims=(-4, -3, -2), vector_dim=-1)
_U, _G, _I1 = 2, 3, 4  # axes
_PER_GROUP = _LAYOUT.reduce((_U, _G))  # [h, i0, i1, 1]
_GROUP_SHAPE = (2, 2, 2, 1)
# A smaller scale counts as 0: see `quantize`.
_MIN_SCALE = 2.0**-126


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Key channels that are stored alike: first channel tile, tiles, bits; first rows of 16 words of codes and of scales."""

    tile: int
    tiles: int
    bits: int
    code_row: int
    scale_row: int


def close_page(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: jax.Array, interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.close_page.close_page`.

    Args:
      open_k, open_v: [..., K, 128, H] bfloat16.
      num_sinks: int32, broadcastable to [...].
      interpret: `plgpu.InterpretGPUParams()` to run on CPU.

    Returns:
      uint32 [..., K, words], the bits that the jitted reference gives on the same platform. The offset of a group whose least
      values are 0 and -0 is -0; XLA on CPU gives one or the other.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    _refuse(open_k, open_v, kv_format)
    *lead, kv_heads, _, head_dim = open_k.shape
    layout, count = kv_format.page_layout(head_dim), open_k.size // (TOKENS * head_dim)
    # Axes: page; token tile, u, g; channel tile, its four bits; 1.
    k = open_k.reshape(count, TOKEN_TILES, 2, 8, head_dim // TILE, 2, 2, 2, 2, 1)
    # Axes: page; token tile, h, i1, i0, e; channel tile, u, g; 1.
    v = open_v.reshape(count, TOKEN_TILES, 2, 2, 2, 2, head_dim // TILE, 2, 8, 1)
    sinks = num_sinks.reshape(1) if num_sinks.size == 1 else jnp.broadcast_to(num_sinks, lead).reshape(-1)
    words = plgpu.kernel(
        functools.partial(_kernel_body, layout, kv_heads),
        out_type=jax.ShapeDtypeStruct((count, layout.words // _ROW_WORDS, 2, 2, 2, 2, 1), jnp.uint32),
        grid=(count, 2), grid_names=("page", "part"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="close_page", interpret=interpret)(k, v, sinks)
    return words.reshape(*lead, kv_heads, layout.words)


def _refuse(open_k, open_v, kv_format: KVFormat) -> None:
    if kv_format.layout != "mma_sm90":
        raise NotImplementedError(f"mosaic_gpu: layout={kv_format.layout!r}: only 'mma_sm90' pages are written")
    for name in ("k_range", "v_range"):
        if getattr(kv_format, name) != "minmax":
            raise NotImplementedError(f"mosaic_gpu: {name}={getattr(kv_format, name)!r}: only 'minmax'")
    if open_k.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(
            f"mosaic_gpu: head_dim={open_k.shape[-1]} of {open_k.shape=}: only {', '.join(map(str, HEAD_DIMS))}")
    for name, x in (("open_k", open_k), ("open_v", open_v)):
        if x.dtype != jnp.bfloat16:
            raise NotImplementedError(f"mosaic_gpu: {name}.dtype={x.dtype}: only bfloat16")
    if not open_k.size:
        raise NotImplementedError(f"mosaic_gpu: {open_k.shape=}: no page to close")


def _kernel_body(layout: PageLayout, kv_heads: int, k_ref, v_ref, sinks_ref, out_ref):
    page = lax.axis_index("page")

    @pl.when(lax.axis_index("part") == 0)
    def _():
        num_sinks = sinks_ref[0 if sinks_ref.shape[0] == 1 else lax.div(page, kv_heads)]
        for segment in _segments(layout):
            _close_keys(segment, k_ref.at[page], num_sinks, out_ref.at[page])

    @pl.when(lax.axis_index("part") == 1)
    def _():
        _close_values(layout, v_ref.at[page], out_ref.at[page])
        _clear_padding(layout, out_ref.at[page])


def _segments(layout: PageLayout) -> list[_Segment]:
    fmt, base = layout.fmt, layout.base_channels // TILE
    rows = {name: first // _ROW_WORDS for name, (first, _) in layout.planes().items()}
    out = [_Segment(0, base, fmt.k_bits, rows["k_codes"], rows.get("k_scales", 0))]
    if fmt.outlier_channels:
        tiles = fmt.outlier_channels // TILE
        out.append(_Segment(base, tiles, fmt.outlier_bits, rows["outlier_codes"], rows.get("outlier_scales", 0)))
    return out


# Keys.


def _close_keys(segment: _Segment, k_ref, num_sinks, out_ref) -> None:
    """k_ref: one page's keys. Writes the segment's planes. A last tile without a partner has an order of its own."""
    token = plgpu.broadcasted_iota(jnp.int32, _SHAPE, _G, layout=_LAYOUT)
    token += 8 * plgpu.broadcasted_iota(jnp.int32, _SHAPE, _U, layout=_LAYOUT)
    close = functools.partial(_close_key_tiles, segment, k_ref, token, num_sinks, out_ref)

    @pl.loop(0, segment.tiles // 2)
    def _(pair):
        close(pair, 2)

    if segment.tiles % 2:
        close(segment.tiles // 2, 1)


def _close_key_tiles(segment: _Segment, k_ref, token, num_sinks, out_ref, pair, tiles: int) -> None:
    """Two tiles that share their channels (see `mma_sm90`), or the last one alone."""
    codes, scales = [], []
    for j in range(tiles):
        first = segment.tile + 2 * pair
        index = (pl.ds(first, 2), slice(None), j, slice(None)) if tiles == 2 else (first, *3 * (slice(None),))
        columns = [[_load(k_ref.at[(m, slice(None), slice(None), *index, e)], (4, 3, 0, 1, 2, 5)) for m in range(TOKEN_TILES)]
                   for e in range(2)]
        if segment.bits in QUANT_BITS:
            groups = [_key_group(x, token, num_sinks, segment.bits) for x in columns]
            scales.append([_high_half(low, 0) | _high_half(high, 16) for low, high in zip(*groups)])
            encoded = [[_codes(y, _over_group(_inverse(scale)), _over_group(offset), segment.bits) for y in x]
                       for x, (scale, offset) in zip(columns, groups)]
        else:
            encoded = [[_high_half(y, 0) for y in x] for x in columns]
        codes.append(list(zip(*encoded)))
    # Only now: the compiler moves no load across a store, and many loads must be on their way at once.
    for j, words in enumerate(scales):
        for half_row, word in zip((0, segment.tiles), words):
            _store_key_scales(word, out_ref, segment.scale_row, half_row + 2 * pair, j if tiles == 2 else None)
    if segment.bits == 3 and tiles == 2:
        octets = [[c for tile in codes for c in tile[4 * half:4 * half + 4]] for half in range(2)]
        _pack_three(octets, out_ref, segment.code_row + pair * 3 * _QUAD_ROWS)
    elif segment.bits == 3:
        _pack_three(codes, out_ref, segment.code_row + pair * 3 * _QUAD_ROWS)
    else:
        row = segment.code_row + pair * TOKEN_TILES * segment.bits // 8 * _QUAD_ROWS
        _pack([c for tile in codes for c in tile], segment.bits, out_ref, row)


def _key_group(x: list, token, num_sinks, bits: int):
    """Scale and offset of a channel's tokens in the tiles x[m]; the first `num_sinks` tokens do not count."""
    seen = [token >= num_sinks - TILE * m for m in range(TOKEN_TILES)]
    low = _reduce(jnp.minimum, jnp.min, [jnp.where(s, y, jnp.inf) for s, y in zip(seen, x)])
    high = _reduce(jnp.maximum, jnp.max, [jnp.where(s, y, -jnp.inf) for s, y in zip(seen, x)])
    empty = low > high
    return _scale_offset(jnp.where(empty, 0.0, low), jnp.where(empty, 0.0, high), bits)


def _store_key_scales(word, out_ref, row: int, half_row, j: int | None) -> None:
    """word [h, i0, i1, 1]: pairs of channels. Words of two tiles are interleaved, tile j's at i1, i0, j, h; else at i1, i0, h."""
    if j is None:
        _half_row(out_ref, row, half_row).transpose((2, 1, 0, 3))[...] = word
        return
    i1 = plgpu.broadcasted_iota(jnp.int32, _GROUP_SHAPE, 2, layout=_PER_GROUP)
    for value in range(2):
        # The half rows of i1 = 0 and 1 need not lie in the same row.
        part = jnp.sum(jnp.where(i1 == value, word, jnp.zeros_like(word)), axis=2, dtype=word.dtype)
        _half_row(out_ref, row, half_row + value).at[:, j].transpose((1, 0, 2))[...] = part


def _half_row(out_ref, row: int, half_row):
    """Eight words, [2, 2, 2, 1], the `half_row`-th from row `row`."""
    return out_ref.at[row + lax.div(half_row, 2), lax.rem(half_row, 2)]


# Values.


def _close_values(layout: PageLayout, v_ref, out_ref) -> None:
    """v_ref: one page's values. Writes their planes."""
    bits, tiles = layout.fmt.v_bits, layout.head_dim // TILE
    rows = {name: first // _ROW_WORDS for name, (first, _) in layout.planes().items()}
    at_once = 32 // tiles  # token tiles: 64 loads are on their way at once

    @pl.loop(0, TOKEN_TILES // at_once)
    def _(part):
        token_tiles = [part * at_once + m for m in range(at_once)]
        columns = [[[_load(v_ref.at[m, :, :, :, e, c], (0, 2, 3, 4, 1, 5)) for c in range(tiles)] for e in range(2)]
                   for m in token_tiles]
        codes: list = []
        for m, halves in zip(token_tiles, columns):
            if bits in QUANT_BITS:
                encoded = [_close_token(x, bits, e, out_ref.at[rows["v_scales"] + m]) for e, x in enumerate(halves)]
            else:
                encoded = [[_high_half(y, 0) for y in x] for x in halves]
            codes += zip(*encoded)
        row = rows["v_codes"] + part * at_once * tiles * bits // 16 * _QUAD_ROWS
        if bits == 3:
            _pack_three([codes[i:i + 8] for i in range(0, len(codes), 8)], out_ref, row)
        else:
            _pack(codes, bits, out_ref, row)


def _close_token(x: list, bits: int, e: int, scale_ref) -> list:
    """Codes of a token's channels in the tiles x[c]; writes its scale and offset."""
    scale, offset = _scale_offset(_reduce(jnp.minimum, jnp.min, x), _reduce(jnp.maximum, jnp.max, x), bits)
    scale_ref.at[:, :, :, e].transpose((0, 2, 1, 3))[...] = _high_half(scale, 0) | _high_half(offset, 16)
    return [_codes(y, _over_group(_inverse(scale)), _over_group(offset), bits) for y in x]


# Both.


def _load(ref, permutation: tuple[int, ...]):
    """float32 [h, i0, u, g, i1, 1] of a view of bfloat16 in device memory."""
    return plgpu.load(ref.transpose(permutation), layout=_LAYOUT, optimized=False).astype(jnp.float32)


def _reduce(pairwise, along, arrays: list):
    """Over all arrays, and over u and g: [h, i0, i1, 1]."""
    return along(along(functools.reduce(pairwise, arrays), axis=_U), axis=_U)


def _over_group(x):
    """[h, i0, i1, 1] to [h, i0, u, g, i1, 1]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, _SHAPE, [0, 1, _I1, _I1 + 1]), _LAYOUT)


def _high_half(x, place: int):
    """uint32: the high 16 bits of float32, at bit `place` (0 or 16)."""
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    return raw >> 16 if place == 0 else raw & jnp.uint32(0xFFFF0000)


def _scale_offset(low, high, bits: int):
    """As `quantize`; XLA turns its division by a constant into this multiplication."""
    offset = _round_outwards(low, low < 0)
    step = (high - offset) * np.float32(1 / np.float32((1 << bits) - 1))
    scale = _round_outwards(step, step > 0)
    return jnp.where((high > offset) & (scale >= _MIN_SCALE), scale, 0.0), offset


def _round_outwards(x, away):
    """float32 to bfloat16 values: away from zero where `away`, else towards it."""
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    raw = jnp.where(away, raw + jnp.uint32(0xFFFF), raw) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(raw, jnp.float32)


def _inverse(scale):
    """1 / scale, or 0 for scale 0. On a GPU it is the reciprocal that XLA's division of the reference is made of."""
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1.0), 0.0)


def _codes(x, inverse, offset, bits: int):
    """uint32: nearest codes, in range. `inverse` is 1 / scale, or 0 for scale 0."""
    return jnp.clip(jnp.round((x - offset) * inverse), 0, (1 << bits) - 1).astype(jnp.uint32)


def _pack(codes: list, bits: int, out_ref, row) -> None:
    """Writes the quads of tiles in a row, codes[tile][e], from row `row` on."""
    fields = 16 // bits
    for quad in range(len(codes) // fields):
        parts = [(codes[quad * fields + f][e], bits, bits * f + 16 * e) for f in range(fields) for e in range(2)]
        _store_quad(_joined(parts), out_ref, row + quad * _QUAD_ROWS)


def _pack_three(octets: list[list], out_ref, row) -> None:
    """The same for octets of 3-bit codes, [octet][tile][e]; the first is one of even number."""
    for first in range(0, len(octets), 2):
        parts: list[list] = [[], [], []]  # of the quads
        for odd, octet in enumerate(octets[first:first + 2]):
            for e in range(2):
                places = [(2 * odd, 16 * e), (1, 16 * e + 8 * odd)]  # quad and bit of the octet's x and y
                for code, (part, bit) in zip(octet[:7], THREE_BIT_FIELDS):
                    parts[places[part][0]].append((code[e], 3, places[part][1] + bit))
                parts[places[0][0]].append((octet[7][e], 1, places[0][1] + 15))
                parts[1].append((octet[7][e] >> 1, 2, places[1][1] + THREE_BIT_FIELDS[7][1]))
        for quad, fields in enumerate(parts):
            if fields:
                _store_quad(_joined(fields), out_ref, row + (first // 2 * 3 + quad) * _QUAD_ROWS)


def _joined(fields: list[tuple[Any, int, int]]):
    """The or of (codes, bits, place)s."""
    return functools.reduce(jnp.bitwise_or, [(x & jnp.uint32((1 << bits) - 1)) << jnp.uint32(place) for x, bits, place in fields])


def _store_quad(word, out_ref, row) -> None:
    out_ref.at[pl.ds(row, _QUAD_ROWS)].transpose((3, 2, 4, 0, 1, 5))[...] = word


def _clear_padding(layout: PageLayout, out_ref) -> None:
    zeros = plgpu.layout_cast(jnp.zeros((2, 2, 2, 2, 1), jnp.uint32), _LAYOUT.reduce((_G,)))
    end = 0
    for first, words in [*layout.planes().values(), (layout.words, 0)]:
        for row in range(end // _ROW_WORDS, first // _ROW_WORDS):
            out_ref.at[row].transpose((2, 1, 3, 0, 4))[...] = zeros
        end = first + words
