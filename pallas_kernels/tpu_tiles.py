"""The page layout "tpu": codes in rows of 128 words, a token a lane, so that the heads of any size fill a TPU's vector registers.

A page has as many tokens as a register has lanes, 128, and every plane of codes is a matrix of 32-bit words with the tokens along
its rows. Its rows are channels, packed like this (n = word rows of the plane, F = 16 / bits fields in each half of a word):

    word [i, token]:   | field F-1, e=1 | … | field 0, e=1 || field F-1, e=0 | … | field 0, e=0 |
                        31                16 + bits       16 15                bits           0

with field f of half e of word row i being channel 2 n f + 2 i + e. One shift and one mask of a whole register make 16-bit codes
of two neighbouring channels, and reading that register as one of 16-bit elements, whose rows stand in pairs, is free: codes come
out in the order of the channels, and no code changes its lane. Three-bit codes are a plane of the low two bits and a plane of the
third, whose channels are padded to a multiple of 32.

Keys [128, H] and values [128, H] both lie transposed in this way. Scores are queries times the keys' plane; outputs are weights
times the values' plane, contracted over lanes; the scale of a value's token lies in its lane. Scales and offsets are a word each
pair, the scale in the low half: one for each key channel, promoted channels last, filled up to whole rows, and one for each token.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pallas_utils import cdiv

TOKENS = 128  # tokens a page: lanes of a register
CHANNELS = 16  # channels of a plane come in multiples of this many


def plane_rows(channels: int, bits: int) -> int:
    """Rows of 128 words that codes of `channels` channels take, `bits` 1, 2, 3, 4, 8 or 16."""
    if bits == 3:
        return plane_rows(channels, 2) + plane_rows(channels, 1)
    return cdiv(channels * bits, 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 [..., 128, C] codes below 2**bits to words [..., plane_rows(C, bits) * 128]. C is a multiple of 16."""
    pairs = jnp.swapaxes(codes, -1, -2)
    words = pack_pairs(pairs[..., ::2, :] | (pairs[..., 1::2, :] << 16), bits)
    return words.reshape(*words.shape[:-2], -1)


def unpack(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack`: uint32 [..., 128, channels]."""
    pairs = unpack_pairs(words.reshape(*words.shape[:-1], -1, TOKENS), bits, channels)
    codes = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-2)
    return jnp.swapaxes(codes.reshape(*pairs.shape[:-2], channels, TOKENS), -1, -2)


def pack_pairs(pairs: jax.Array, bits: int) -> jax.Array:
    """Packs pairs of neighbouring channels' codes.

    Args:
      pairs: uint32 [..., C / 2, 128]; row p holds the code of channel 2 p in its low half, that of channel 2 p + 1 in the other.

    Returns:
      uint32 [..., plane_rows(C, bits), 128].
    """
    if bits == 3:
        low, high = pairs & 0x00030003, (pairs >> 2) & 0x00010001
        return jnp.concatenate([pack_pairs(low, 2), pack_pairs(high, 1)], axis=-2)
    rows = plane_rows(2 * pairs.shape[-2], bits)
    words = pairs[..., :rows, :]
    for field in range(1, cdiv(pairs.shape[-2], rows)):
        part = pairs[..., field * rows:(field + 1) * rows, :] << (bits * field)
        if part.shape[-2] < rows:
            part = jnp.concatenate([part, jnp.zeros_like(words[..., part.shape[-2]:, :])], axis=-2)
        words = words | part
    return words


def unpack_pairs(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_pairs`: uint32 [..., channels / 2, 128]."""
    if bits == 3:
        low = plane_rows(channels, 2)
        return unpack_pairs(words[..., :low, :], 2, channels) | (unpack_pairs(words[..., low:, :], 1, channels) << 2)
    mask = np.uint32(((1 << bits) - 1) * 0x10001)
    fields = [(words >> (bits * field)) & mask for field in range(16 // bits)]
    return jnp.concatenate(fields, axis=-2)[..., :channels // 2, :]
