"""The page layout "mma_sm90": codes in the order in which Hopper's warp-level tensor-core instruction takes them.

`mma.m16n8k16` multiplies a 16 x 16 tile A by a 16 x 8 tile B. Lane 4 g + i (g < 8, i < 4) of a warp holds A as four registers
of two 16-bit elements:

    register a = u + 2 h:   row g + 8 u,  columns 8 h + 2 i and 8 h + 2 i + 1

Keys are A with rows = tokens and columns = channels, values are A with rows = channels and columns = tokens. Codes are packed so
that one 16-byte load gives a lane its four registers a of several tiles at once, tile after tile in the bit *fields* of the
words, and one logical instruction turns a field of a word into two bfloat16 numbers (`paged_attention.fragments`):

    word [quad, lane, a]:   | tile F-1, e=1 | … | tile 1, e=1 | tile 0, e=1 || tile F-1, e=0 | … | tile 0, e=0 |
                             31           16 + bits                      16    15                               0

with F = 16 / bits tiles a quad. Tile t = 8 * (channel tile) + (token tile), so that at 2 bits the fields of a quad are the eight
token tiles of a page. Which channel is which column of a key tile is free as long as queries agree: column 8 h + 2 i + e of the
tiles 2 r and 2 r + 1 is channel 32 r + 8 i + 4 (tile % 2) + 2 h + e, so that a lane's channels of two tiles are contiguous in
queries and scales; a last tile without a partner takes channel 16 r + 4 i + 2 h + e.

Three-bit codes are a 2-bit plane and a plane of the third bit. That bit stands where a shift shared by several tiles puts it
right above the two others: see `third_bit_position`.

The instruction's register layout is NVIDIA's PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

TOKENS = 128  # tokens a page
TILE = 16
TOKEN_TILES = TOKENS // TILE
LANES = 32
QUAD_WORDS = LANES * 4


def third_bit_position(tile):
    """Bit (int, or an array of them), inside a 16-bit half of its word, of the third bit of tile `tile` (of 16 in a quad)."""
    return (2 * (tile % 8) + 2) % 16 + tile // 8


def plane_words(channels: int, bits: int) -> int:
    """Words that codes of 128 tokens by `channels` channels take, `bits` 2, 3, 4, 8 or 16."""
    tiles = TOKEN_TILES * channels // TILE
    if bits == 3:
        return plane_words(channels, 2) + -(-tiles // 16) * QUAD_WORDS
    return -(-tiles * bits // 16) * QUAD_WORDS


def pack_keys(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 [..., 128, C] key codes to uint32 [..., plane_words(C, bits)]. C is a multiple of 16."""
    return _pack(_key_tiles(codes), bits)


def unpack_keys(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_keys`: uint32 [..., 128, channels]."""
    return _keys_of_tiles(_unpack(words, bits, TOKEN_TILES * channels // TILE))


def pack_values(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 [..., 128, C] value codes to uint32 [..., plane_words(C, bits)]. C is a multiple of 16."""
    *lead, _, channels = codes.shape
    # [m, h, i, e, c, u, g] -> [c, m, g, i, h, u, e]
    x = codes.reshape(*lead, TOKEN_TILES, 2, 4, 2, channels // TILE, 2, 8)
    x = _transpose(x, (4, 0, 6, 2, 1, 5, 3), len(lead))
    return _pack(x.reshape(*lead, -1, LANES, 4, 2), bits)


def unpack_values(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_values`: uint32 [..., 128, channels]."""
    tiles = _unpack(words, bits, TOKEN_TILES * channels // TILE)
    lead = tiles.shape[:-4]
    x = tiles.reshape(*lead, channels // TILE, TOKEN_TILES, 8, 4, 2, 2, 2)
    x = _transpose(x, (1, 4, 3, 6, 0, 5, 2), len(lead))
    return x.reshape(*lead, TOKENS, channels)


def pack_pairs(x: jax.Array) -> jax.Array:
    """uint32 [..., C] of 16-bit values to uint32 [..., C / 2]: two neighbours a word, the first in the low half."""
    x = x.reshape(*x.shape[:-1], -1, 2)
    return x[..., 0] | (x[..., 1] << 16)


def unpack_pairs(words: jax.Array) -> jax.Array:
    """The inverse of `pack_pairs`."""
    return jnp.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(*words.shape[:-1], -1)


def _key_tiles(codes: jax.Array) -> jax.Array:
    """[..., 128, C] -> [..., tiles, lane, a, e]."""
    *lead, _, channels = codes.shape
    n = len(lead)
    paired = channels // 32 * 32
    # [m, u, g, r, i, j, h, e] -> [r, j, m, g, i, h, u, e]
    x = codes[..., :paired].reshape(*lead, TOKEN_TILES, 2, 8, channels // 32, 4, 2, 2, 2)
    parts = [_transpose(x, (3, 5, 0, 2, 4, 6, 1, 7), n).reshape(*lead, -1, LANES, 4, 2)]
    if channels > paired:  # [m, u, g, i, h, e] -> [m, g, i, h, u, e]
        x = codes[..., paired:].reshape(*lead, TOKEN_TILES, 2, 8, 4, 2, 2)
        parts.append(_transpose(x, (0, 2, 3, 4, 1, 5), n).reshape(*lead, -1, LANES, 4, 2))
    return jnp.concatenate(parts, axis=-4)


def _keys_of_tiles(tiles: jax.Array) -> jax.Array:
    """The inverse of `_key_tiles`."""
    *lead, count, _, _, _ = tiles.shape
    n, channels = len(lead), count * TILE // TOKEN_TILES
    paired = channels // 32 * 2 * TOKEN_TILES
    x = tiles[..., :paired, :, :, :].reshape(*lead, channels // 32, 2, TOKEN_TILES, 8, 4, 2, 2, 2)
    parts = [_transpose(x, (2, 6, 3, 0, 4, 1, 5, 7), n).reshape(*lead, TOKENS, -1)]
    if count > paired:
        x = tiles[..., paired:, :, :, :].reshape(*lead, TOKEN_TILES, 8, 4, 2, 2, 2)
        parts.append(_transpose(x, (0, 4, 1, 2, 3, 5), n).reshape(*lead, TOKENS, -1))
    return jnp.concatenate(parts, axis=-1)


def _pack(tiles: jax.Array, bits: int) -> jax.Array:
    """[..., tiles, lane, a, e] -> [..., words]."""
    if bits == 3:
        return jnp.concatenate([_pack(tiles & 3, 2), _pack_plane(tiles >> 2, 1)], axis=-1)
    return _pack_plane(tiles, bits)


def _pack_plane(tiles: jax.Array, bits: int) -> jax.Array:
    fields = 16 // bits
    *lead, count, lanes, regs, _ = tiles.shape
    tiles = tiles & ((1 << bits) - 1)
    if count % fields:
        tiles = jnp.pad(tiles, [(0, 0)] * len(lead) + [(0, -count % fields), (0, 0), (0, 0), (0, 0)])
    halves = tiles.reshape(*lead, -1, fields, lanes, regs, 2)
    shifts = _shifts(bits)
    return jnp.sum(halves << shifts, axis=(-4, -1), dtype=jnp.uint32).reshape(*lead, -1)


def _unpack(words: jax.Array, bits: int, count: int) -> jax.Array:
    """[..., words] -> [..., count, lane, a, e]."""
    if bits == 3:
        low = -(-count // 8) * QUAD_WORDS
        return _unpack_plane(words[..., :low], 2, count) | (_unpack_plane(words[..., low:], 1, count) << 2)
    return _unpack_plane(words, bits, count)


def _unpack_plane(words: jax.Array, bits: int, count: int) -> jax.Array:
    lead = words.shape[:-1]
    shifts = _shifts(bits)
    fields = (words.reshape(*lead, -1, 1, LANES, 4, 1) >> shifts) & ((1 << bits) - 1)
    return fields.reshape(*lead, -1, LANES, 4, 2)[..., :count, :, :, :]


def _shifts(bits: int) -> jax.Array:
    """uint32 [fields, 1, 1, 2]: bit of each tile of a quad and each e in its word."""
    field = jax.lax.broadcasted_iota(jnp.uint32, (16 // bits, 1, 1, 2), 0)
    e = jax.lax.broadcasted_iota(jnp.uint32, (16 // bits, 1, 1, 2), 3)
    return 16 * e + (third_bit_position(field) if bits == 1 else bits * field)


def _transpose(x: jax.Array, axes: tuple[int, ...], lead: int) -> jax.Array:
    return x.transpose(*range(lead), *(a + lead for a in axes))
