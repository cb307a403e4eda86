"""The page layout "mma_sm90": codes in the order in which Hopper's warp-level tensor-core instruction takes them.

`mma.m16n8k16` multiplies a 16 x 16 tile A by a 16 x 8 tile B. Lane 4 g + i (g < 8, i < 4) of a warp holds A as four registers
of two 16-bit elements:

    register a = u + 2 h:   row g + 8 u,  columns 8 h + 2 i and 8 h + 2 i + 1

Keys are A with rows = tokens and columns = channels, values are A with rows = channels and columns = tokens. Codes are packed so
that one 16-byte load gives a lane its four registers a of several tiles at once, tile after tile in the bit *fields* of the
words, and one logical instruction turns a field of a word into two bfloat16 numbers (`paged_attention.fragments`):

    word [quad, lane, a]:   | tile F-1, e=1 | … | tile 1, e=1 | tile 0, e=1 || tile F-1, e=0 | … | tile 0, e=0 |
                             31           16 + bits                      16    15                               0

with F = 16 / bits tiles a quad. Tiles are numbered so that rows come first: t = 8 * (channel tile) + (token tile) for keys,
t = (head_dim / 16) * (token tile) + (channel tile) for values. Eight tiles in a row are an *octet*. Which channel is which column
of a key tile is free as long as queries agree: column 8 h + 2 i + e of the tiles 2 r and 2 r + 1 is channel
32 r + 8 i + 4 (tile % 2) + 2 h + e, so that a lane's channels of two tiles are contiguous in queries and scales; a last tile
without a partner takes channel 16 r + 4 i + 2 h + e.

Codes of three bits: two octets are three quads, x of the first, y of both, x of the second (a last octet alone: x and y). A half
of x holds the codes 0, 1, 2, 3 and 6 of its octet and the low bit of code 7, from bit 0 on; the octet's byte of a half of y (the
low byte is the first octet's) holds the codes 4 and 5 and the two high bits of code 7. So every code lies within a byte once its
word is shifted, and the tiles f and f + 4 of an octet at the same place of it: see `THREE_BIT_FIELDS`. For keys, an octet holds
four token tiles of two channel tiles: tile f of it is token tile f % 4 (+ 4 in the second octet) of channel tile f // 4.

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


# Of the tiles 0 … 7 of an octet: the quad (0 is x, 1 is y) that holds the code and the bit, of a half or byte, at which it begins.
# Tile 7 has its low bit at bit 15 of x and the others where this says.
THREE_BIT_FIELDS = ((0, 0), (0, 3), (0, 6), (0, 9), (1, 0), (1, 3), (0, 12), (1, 6))


def plane_words(channels: int, bits: int) -> int:
    """Words that codes of 128 tokens by `channels` channels take, `bits` 2, 3, 4, 8 or 16."""
    tiles = TOKEN_TILES * channels // TILE
    if bits == 3:
        return (tiles // 16 * 3 + tiles % 16 // 8 * 2) * QUAD_WORDS
    return -(-tiles * bits // 16) * QUAD_WORDS


def pack_keys(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 [..., 128, C] key codes to uint32 [..., plane_words(C, bits)]. C is a multiple of 16."""
    tiles = _key_tiles(codes)
    return _pack(_mixed_octets(tiles) if bits == 3 else tiles, bits)


def unpack_keys(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_keys`: uint32 [..., 128, channels]."""
    tiles = _unpack(words, bits, TOKEN_TILES * channels // TILE)
    return _keys_of_tiles(_mixed_octets(tiles) if bits == 3 else tiles)


def pack_values(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 [..., 128, C] value codes to uint32 [..., plane_words(C, bits)]. C is a multiple of 16."""
    *lead, _, channels = codes.shape
    # [m, h, i, e, c, u, g] -> [m, c, g, i, h, u, e]
    x = codes.reshape(*lead, TOKEN_TILES, 2, 4, 2, channels // TILE, 2, 8)
    x = _transpose(x, (0, 4, 6, 2, 1, 5, 3), len(lead))
    return _pack(x.reshape(*lead, -1, LANES, 4, 2), bits)


def unpack_values(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_values`: uint32 [..., 128, channels]."""
    tiles = _unpack(words, bits, TOKEN_TILES * channels // TILE)
    lead = tiles.shape[:-4]
    x = tiles.reshape(*lead, TOKEN_TILES, channels // TILE, 8, 4, 2, 2, 2)
    x = _transpose(x, (0, 4, 3, 6, 1, 5, 2), len(lead))
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


def _mixed_octets(tiles: jax.Array) -> jax.Array:
    """Octets of four token tiles of two channel tiles, in place of eight of one, or back. [..., tiles, lane, a, e]."""
    *lead, count, _, _, _ = tiles.shape
    paired = count // 16 * 16
    x = tiles[..., :paired, :, :, :].reshape(*lead, -1, 2, 2, 4, LANES, 4, 2)
    x = jnp.swapaxes(x, -6, -5).reshape(*lead, paired, LANES, 4, 2)
    return jnp.concatenate([x, tiles[..., paired:, :, :, :]], axis=-4)


def _pack(tiles: jax.Array, bits: int) -> jax.Array:
    """[..., tiles, lane, a, e] -> [..., words]."""
    if bits == 3:
        return _pack_three(tiles & 7)
    lead = tiles.shape[:-4]
    halves = (tiles & ((1 << bits) - 1)).reshape(*lead, -1, 16 // bits, LANES, 4, 2)
    return _words(jnp.sum(halves << _shifts(bits), axis=-4, dtype=jnp.uint32))


def _unpack(words: jax.Array, bits: int, count: int) -> jax.Array:
    """[..., words] -> [..., count, lane, a, e]."""
    lead = words.shape[:-1]
    if bits == 3:
        return _unpack_three(_halves(words), count)
    fields = (_halves(words)[..., None, :, :, :] >> _shifts(bits)) & ((1 << bits) - 1)
    return fields.reshape(*lead, count, LANES, 4, 2)


def _pack_three(tiles: jax.Array) -> jax.Array:
    *lead, count, _, _, _ = tiles.shape
    octets = jnp.moveaxis(tiles.reshape(*lead, count // 8, 8, LANES, 4, 2), -4, 0)
    x, y = (sum(jnp.where(quad == q, t << bit, 0) for t, (q, bit) in zip(octets[:7], THREE_BIT_FIELDS)) for quad in (0, 1))
    x, y = x | ((octets[7] & 1) << 15), y | ((octets[7] >> 1) << THREE_BIT_FIELDS[7][1])
    pad = [(0, 0)] * len(lead) + [(0, count // 8 % 2), (0, 0), (0, 0), (0, 0)]
    x, y = (jnp.pad(part, pad).reshape(*lead, -1, 2, LANES, 4, 2) for part in (x, y))
    quads = jnp.stack([x[..., 0, :, :, :], y[..., 0, :, :, :] | (y[..., 1, :, :, :] << 8), x[..., 1, :, :, :]], axis=-4)
    quads = quads.reshape(*lead, -1, LANES, 4, 2)
    return _words(quads[..., :count // 16 * 3 + count % 16 // 8 * 2, :, :, :])


def _unpack_three(quads: jax.Array, count: int) -> jax.Array:
    *lead, size, _, _, _ = quads.shape
    quads = jnp.pad(quads, [(0, 0)] * len(lead) + [(0, -size % 3), (0, 0), (0, 0), (0, 0)]).reshape(*lead, -1, 3, LANES, 4, 2)
    y = quads[..., 1, :, :, :]
    x, y = quads[..., ::2, :, :, :], jnp.stack([y & 0xFF, y >> 8], axis=-4)
    octets = [((y if q else x) >> bit) & 7 for q, bit in THREE_BIT_FIELDS[:7]]
    octets.append((x >> 15) | ((y >> THREE_BIT_FIELDS[7][1]) << 1))
    return jnp.stack(octets, axis=-4).reshape(*lead, -1, LANES, 4, 2)[..., :count, :, :, :]


def _words(halves: jax.Array) -> jax.Array:
    """[..., quad, lane, a, e] of 16 bits -> [..., words]."""
    return (halves[..., 0] | (halves[..., 1] << 16)).reshape(*halves.shape[:-4], -1)


def _halves(words: jax.Array) -> jax.Array:
    """The inverse of `_words`."""
    return jnp.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(*words.shape[:-1], -1, LANES, 4, 2)


def _shifts(bits: int) -> jax.Array:
    """uint32 [fields, 1, 1, 1]: bit of each tile of a quad."""
    return bits * jax.lax.broadcasted_iota(jnp.uint32, (16 // bits, 1, 1, 1), 0)


def _transpose(x: jax.Array, axes: tuple[int, ...], lead: int) -> jax.Array:
    return x.transpose(*range(lead), *(a + lead for a in axes))
