"""Expert weights packed for Hopper's warp-level tensor-core instruction: contiguous words, made once at load.

`mma.m16n8k16` multiplies a 16 x 16 tile A by a 16 x 8 tile B. Weights are A, transposed: its rows are output columns n, its columns
channels k of the contraction; tokens are B. Lane 4 g + i (g < 8, i < 4) of a warp holds A as four registers of two 16-bit elements:

    register a = u + 2 h:   row g + 8 u,  columns 8 h + 2 i + e, e = 0 and 1

A *unit* is 32 n by 32 k: the tiles r = 0, 1 along n and j = 0, 1 along k. Which channel is which column is free as long as tokens
agree: column 8 h + 2 i + e of tile j is channel 8 i + 4 j + 2 h + e, so that a lane's eight channels are contiguous in a token.
A lane has 16 slots in a unit, s = 4 a + 2 r + j; b-bit codes fill its words slot after slot, e = 0 in the low half of each word
and e = 1 in the high half. With F = 16 / b slots a word:

    word w of a lane:   | slot w F + F-1, e=1 | … | slot w F, e=1 || slot w F + F-1, e=0 | … | slot w F, e=0 |
                         31                                       15                                        0

Three-bit codes are a 2-bit plane and a plane of the third bit. A *chunk* is 32 n by up to 128 k: the words of its units, each as
[piece, lane, up to 4 words] so that a lane's load is 16 bytes and a warp's is contiguous, then scales, then zero points. One copy
brings a chunk. A matrix is [blocks of 32 n, chunks]; experts are the leading axis.

The instruction's register layout is NVIDIA's PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import stored_weights
from pallas_kernels.pallas_utils import align_to
from pallas_kernels.qarray import QArray
from pallas_kernels.stored_weights import MatrixLayout, StoredWeights, codes_of, weights_of

BLOCK = 32  # n of a unit, a chunk and a block
UNIT = 32  # k of a unit
MAX_CHUNK = 128
LANES = 32
SLOTS = 16
ALIGN_WORDS = 32  # a chunk is a multiple of 128 bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout(MatrixLayout):
    """How matrices [k, n] are packed: k, n and group_size are multiples of 32."""

    def __post_init__(self):
        self.check(k=UNIT, n=BLOCK, group_size=UNIT)
        if self.k % self.group_size or min(self.group_size % self.chunk, self.chunk % self.group_size):
            raise ValueError(f"group_size={self.group_size}: must divide k={self.k}, and divide or be divided by {self.chunk}")

    @property
    def chunk(self) -> int:
        """k of a chunk: no chunk is cut off at the end."""
        return math.gcd(self.k, MAX_CHUNK)

    @property
    def units(self) -> int:
        """Units of a chunk."""
        return self.chunk // UNIT

    @property
    def groups(self) -> int:
        """Scales a chunk and output column; larger groups are repeated in each of their chunks."""
        return max(1, self.chunk // self.group_size) if self.bits < 16 else 0

    @property
    def chunks(self) -> int:
        return self.k // self.chunk

    @property
    def blocks(self) -> int:
        return self.n // BLOCK

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane of codes."""
        return (2, 1) if self.bits == 3 else (self.bits,)

    @property
    def scale_word(self) -> int:
        """First word of the scales in a chunk."""
        return self.units * LANES * self.bits

    @property
    def scale_words(self) -> int:
        """Words that the scales of one group take."""
        return BLOCK * jnp.dtype(self.scale_dtype).itemsize // 4

    @property
    def zero_word(self) -> int:
        return self.scale_word + self.groups * self.scale_words

    @property
    def words(self) -> int:
        """Words a chunk, padding included."""
        return align_to(self.zero_word + (self.groups * BLOCK // 2 if self.has_zero else 0), ALIGN_WORDS)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PackedWeights(StoredWeights):
    """Packed matrices [k, n], of all experts or of one.

    Attributes:
      words: uint32 [..., n / 32, chunks, layout.words].
      layout: `WeightLayout`.
    """

    layout: WeightLayout

    matrix_axes = 3

    def unpack(self) -> QArray | jax.Array:
        return unpack_weights(self)


def pack_weights(w: QArray | jax.Array) -> PackedWeights:
    """Packs weights; `unpack_weights` is the inverse, bit for bit.

    Args:
      w: `QArray` [E, k, n] with groups along k (axis -2), or bfloat16 [E, k, n]. k and n are multiples of 32.

    Raises:
      ValueError: shapes, dtypes or groups that cannot be packed.
    """
    return PackedWeights(*stored_weights.pack(w, WeightLayout, _pack))


def unpack_weights(packed: PackedWeights) -> QArray | jax.Array:
    """The inverse of `pack_weights`, any leading axes."""
    layout = packed.layout
    codes, scale, zero = unpack_chunks(packed.words, layout)
    stride = max(1, layout.group_size // layout.chunk)
    scale, zero = (None if x is None else _join_chunks(x)[..., ::stride, :] for x in (scale, zero))
    return weights_of(_join_chunks(codes), scale, zero, layout)


def interleave(gate, up):
    """[..., n] twice to [..., 2 n], alternating in runs of 16: gate, up, gate, … A block of 32 columns then holds both of 16.

    `gate` and `up` are arrays, or QArrays of the same layout.
    """
    def one(a, b):
        a, b = (x.reshape(*x.shape[:-1], -1, 1, BLOCK // 2) for x in (a, b))
        return jnp.concatenate([a, b], axis=-2).reshape(*a.shape[:-3], -1)

    return jax.tree.map(one, gate, up)


def deinterleave(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `interleave`: gate and up."""
    pairs = x.reshape(*x.shape[:-1], -1, 2, BLOCK // 2)
    return pairs[..., 0, :].reshape(*x.shape[:-1], -1), pairs[..., 1, :].reshape(*x.shape[:-1], -1)


def unpack_chunks(words: jax.Array, layout: WeightLayout) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """uint32 [..., layout.words] chunks to codes, scales and zero points.

    Returns:
      codes: uint32 [..., chunk, 32], offset by 2**(bits - 1) (16 bits: the bits of a bfloat16).
      scale: layout.scale_dtype [..., groups, 32]; None for 16 bits.
      zero: bfloat16 [..., groups, 32], whole numbers; None without.
    """
    lead = words.shape[:-1]
    planes, first = [], 0
    for bits in layout.planes:
        size = layout.units * LANES * bits
        planes.append(_unpack_plane(words[..., first:first + size], bits, layout.units))
        first += size
    codes = functools.reduce(jnp.bitwise_or, [p << (2 * i) for i, p in enumerate(planes)])
    # [unit, g, i, h, u, r, j, e] -> [unit, i, j, h, e, r, u, g]
    codes = _transpose(codes.reshape(*lead, layout.units, 8, 4, 2, 2, 2, 2, 2), (0, 2, 6, 3, 7, 5, 4, 1))
    codes = codes.reshape(*lead, layout.chunk, BLOCK)
    if layout.bits == 16:
        return codes, None, None
    scale = _unpack_numbers(words[..., layout.scale_word:], layout.groups, layout.scale_dtype)
    zero = _unpack_numbers(words[..., layout.zero_word:], layout.groups, "bfloat16") if layout.has_zero else None
    return codes, scale, zero


def _pack(w: QArray | jax.Array, layout: WeightLayout) -> jax.Array:
    """One matrix to uint32 [blocks, chunks, words]."""
    # [chunk, unit, i, j, h, e, block, r, u, g] -> [block, chunk, unit, g, i, h, u, r, j, e]
    x = codes_of(w).reshape(layout.chunks, layout.units, 4, 2, 2, 2, layout.blocks, 2, 2, 8)
    x = x.transpose(6, 0, 1, 9, 2, 4, 8, 7, 3, 5).reshape(layout.blocks, layout.chunks, layout.units, LANES, SLOTS, 2)
    shifts = (0, 2) if layout.bits == 3 else (0,)
    parts = [_pack_plane(x >> shift, bits) for shift, bits in zip(shifts, layout.planes)]
    if isinstance(w, QArray):
        numbers = [w.scale] if w.zero_point is None else [w.scale, w.zero_point.astype(jnp.bfloat16)]
        parts += [_pack_numbers(x, layout) for x in numbers]
    words = jnp.concatenate(parts, axis=-1)
    return jnp.pad(words, [(0, 0), (0, 0), (0, layout.words - words.shape[-1])])


def _pack_plane(slots: jax.Array, bits: int) -> jax.Array:
    """[..., unit, lane, slot, e] to words [..., unit * lane * bits]."""
    *lead, units, lanes, _, _ = slots.shape
    fields = (slots & ((1 << bits) - 1)).reshape(*lead, units, lanes, bits, SLOTS // bits, 2)
    words = jnp.sum(fields << _shifts(bits), axis=(-2, -1), dtype=jnp.uint32)
    load = min(4, bits)
    return words.reshape(*lead, units, lanes, bits // load, load).swapaxes(-3, -2).reshape(*lead, -1)


def _unpack_plane(words: jax.Array, bits: int, units: int) -> jax.Array:
    """The inverse of `_pack_plane`."""
    lead, load = words.shape[:-1], min(4, bits)
    words = words.reshape(*lead, units, bits // load, LANES, load).swapaxes(-3, -2).reshape(*lead, units, LANES, bits, 1, 1)
    return ((words >> _shifts(bits)) & ((1 << bits) - 1)).reshape(*lead, units, LANES, SLOTS, 2)


def _shifts(bits: int) -> jax.Array:
    """uint32 [fields, 2]: bit of each field and each e in its word."""
    shape = (SLOTS // bits, 2)
    return 16 * lax.broadcasted_iota(jnp.uint32, shape, 1) + bits * lax.broadcasted_iota(jnp.uint32, shape, 0)


def _pack_numbers(x: jax.Array, layout: WeightLayout) -> jax.Array:
    """[k / group_size, n] to words [blocks, chunks, groups * 32 numbers], ordered as g, r, u; in halves of words, low first."""
    x = jnp.repeat(x, max(1, layout.group_size // layout.chunk), axis=0)
    # [chunk, group, block, r, u, g] -> [block, chunk, group, g, r, u]
    x = x.reshape(layout.chunks, layout.groups, layout.blocks, 2, 2, 8).transpose(2, 0, 1, 5, 3, 4)
    return lax.bitcast_convert_type(x, jnp.uint32).reshape(layout.blocks, layout.chunks, -1)


def _unpack_numbers(words: jax.Array, groups: int, dtype: str) -> jax.Array:
    """The first groups * 32 numbers of [..., words] to [..., groups, 32]."""
    lead, size = words.shape[:-1], groups * BLOCK * jnp.dtype(dtype).itemsize // 4
    x = lax.bitcast_convert_type(words[..., :size], jnp.dtype(dtype)).reshape(*lead, groups, 8, 2, 2)
    return _transpose(x, (0, 2, 3, 1)).reshape(*lead, groups, BLOCK)


def _join_chunks(x: jax.Array) -> jax.Array:
    """[..., blocks, chunks, rows, 32] to [..., chunks * rows, blocks * 32]."""
    *lead, blocks, chunks, rows, _ = x.shape
    return _transpose(x, (1, 2, 0, 3)).reshape(*lead, chunks * rows, blocks * BLOCK)


def _transpose(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Transposes the last `len(axes)` axes."""
    lead = x.ndim - len(axes)
    return x.transpose(*range(lead), *(a + lead for a in axes))
