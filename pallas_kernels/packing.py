"""Packing of b-bit codes into 32-bit words, in the planar "linear" layout.

A matrix of codes with R rows (tokens) and C columns (channels) becomes uint32 words [R * b / 32, C]. Word i of column c holds
the codes of the rows i, i + n, i + 2n, ... of that column (n = R * b / 32 word rows), row j * n + i at bit j * b:

    rows       0 … n-1    n … 2n-1    …          word i, column c:   [ … | row 2n+i | row n+i | row i ]
    bit field     0          1        …                                  2b…3b-1     b…2b-1    0…b-1

so that field j of all the words is a contiguous run of rows: unpacking is a shift and a mask of whole vectors, and no code is
moved across lanes. Three-bit codes are two such planes, the low two bits (2R/32 word rows) and then the high bit (R/32 word
rows): every plane starts on a word. R is padded with zero codes to a multiple of 32.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.pallas_utils import align_to

WORD_BITS = 32
PACKED_BITS = (1, 2, 3, 4, 8, 16, 32)


def packed_rows(rows: int, bits: int) -> int:
    """Word rows that `pack_codes` makes of `rows` rows."""
    return align_to(rows, WORD_BITS) * bits // WORD_BITS


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes into words.

    Args:
      codes: uint32 [..., R, C], values below 2**bits (higher bits would spill into a neighbour; they are cut off).
      bits: one of 1, 2, 3, 4, 8, 16, 32.

    Returns:
      uint32 [..., ceil(R / 32) * bits, C].

    Raises:
      ValueError: another bit width, dtype or rank.
    """
    _check("codes", codes, bits)
    pad = -codes.shape[-2] % WORD_BITS
    if pad:
        codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 2) + [(0, pad), (0, 0)])
    if bits == 3:
        return jnp.concatenate([_pack_plane(codes & 3, 2), _pack_plane(codes >> 2, 1)], axis=-2)
    return _pack_plane(codes, bits)


def unpack_codes(words: jax.Array, bits: int, rows: int) -> jax.Array:
    """The inverse of `pack_codes`.

    Args:
      words: uint32 [..., packed_rows(rows, bits), C].
      bits: the width the codes were packed with.
      rows: R, the rows to give back.

    Returns:
      uint32 [..., rows, C].

    Raises:
      ValueError: a bit width, dtype, rank or number of word rows that does not fit.
    """
    _check("words", words, bits)
    expected = packed_rows(rows, bits)
    if words.shape[-2] != expected:
        raise ValueError(f"{words.shape=}: {rows} rows of {bits} bits take {expected} word rows, on the axis before the last")
    if bits == 3:
        low = expected * 2 // 3
        codes = _unpack_plane(words[..., :low, :], 2) | (_unpack_plane(words[..., low:, :], 1) << 2)
    else:
        codes = _unpack_plane(words, bits)
    return codes[..., :rows, :]


def _pack_plane(codes: jax.Array, bits: int) -> jax.Array:
    if bits == WORD_BITS:
        return codes
    *lead, rows, columns = codes.shape
    fields = WORD_BITS // bits
    split = (codes & _mask(bits)).reshape(*lead, fields, rows // fields, columns)
    words = split[..., 0, :, :]
    for j in range(1, fields):
        words = words | (split[..., j, :, :] << (j * bits))
    return words


def _unpack_plane(words: jax.Array, bits: int) -> jax.Array:
    if bits == WORD_BITS:
        return words
    *lead, word_rows, columns = words.shape
    fields = WORD_BITS // bits
    shifts = (jnp.arange(fields, dtype=jnp.uint32) * bits)[:, None, None]
    codes = (words[..., None, :, :] >> shifts) & _mask(bits)
    return codes.reshape(*lead, word_rows * fields, columns)


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _check(name: str, array: jax.Array, bits: int) -> None:
    if bits not in PACKED_BITS:
        raise ValueError(f"{bits=}: accepted are {', '.join(map(str, PACKED_BITS))}")
    if array.dtype != jnp.uint32:
        raise ValueError(f"{name}.dtype={array.dtype}: must be uint32")
    if array.ndim < 2:
        raise ValueError(f"{name}.shape={array.shape}: must be [..., rows, columns]")
