"""Expert weights packed for the vector registers of a TPU: one contiguous matrix of words an expert, made once at load.

A matrix [k, n] becomes rows of 32-bit words, a lane a column. The contraction is cut into steps of 128 channels (256 at 3 bits, so
that every plane fills registers of 8 rows), the last one padded with zeros; codes of a step are packed like those of a page
(`tpu_tiles`), one step after the other. Rows of numbers follow, a row for each group of each 128 channels, larger groups repeated:

    codes of step 0 | codes of step 1 | … | scales (and zero points)

A word of numbers is a float32 scale, and rows of float32 zero points come after all rows of scales; or a bfloat16 scale in its low
half and a bfloat16 zero point in its high half. Zero points count from the lowest code, as codes do.

Columns come in blocks of 256, the last one padded with zeros. In a block the even runs of 16 columns come first, then the odd ones:
gate and up of `packed_weights.interleave` are then 128 lanes each.
"""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import stored_weights, tpu_tiles
from pallas_kernels.pallas_utils import align_to
from pallas_kernels.qarray import QArray
from pallas_kernels.stored_weights import MatrixLayout, StoredWeights, codes_of, lowest, weights_of

LANES = 128
COLUMNS = 2 * LANES  # columns come in blocks of this many
_RUN = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuWeightLayout(MatrixLayout):
    """How matrices [k, n] are packed: k is a multiple of 16, n of 32; group_size is k, a multiple of 128, or a divisor of 128."""

    def __post_init__(self):
        self.check(k=16, n=32)
        size = self.group_size
        if size < 1 or self.k % size or (size != self.k and size % LANES and LANES % size):
            raise ValueError(f"group_size={size}: must divide k={self.k}, and be k, a multiple of {LANES}, or a divisor of it")

    @property
    def step(self) -> int:
        """Channels whose codes are packed together."""
        return 2 * LANES if self.bits == 3 else LANES

    @property
    def steps(self) -> int:
        return self.padded_k // self.step

    @property
    def padded_k(self) -> int:
        return align_to(self.k, self.step)

    @property
    def columns(self) -> int:
        """Columns, padding included."""
        return align_to(self.n, COLUMNS)

    @property
    def step_rows(self) -> int:
        """Rows of words that the codes of a step take."""
        return tpu_tiles.plane_rows(self.step, self.bits)

    @property
    def groups(self) -> int:
        """Rows of scales for each 128 channels."""
        return LANES // self.group_size if self.bits < 16 and LANES % self.group_size == 0 else 1

    @property
    def scale_row(self) -> int:
        """First row of scales."""
        return self.steps * self.step_rows

    @property
    def scale_rows(self) -> int:
        return self.groups * self.padded_k // LANES if self.bits < 16 else 0

    @property
    def rows(self) -> int:
        """Rows of words of one expert, padding included."""
        planes = 1 + (self.has_zero and self.scale_dtype == "float32")
        return align_to(self.scale_row + planes * self.scale_rows, 8)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class TpuWeights(StoredWeights):
    """Packed matrices [k, n], of all experts or of one.

    Attributes:
      words: uint32 [..., layout.rows, layout.columns].
      layout: `TpuWeightLayout`.
    """

    layout: TpuWeightLayout

    matrix_axes = 2

    def unpack(self) -> QArray | jax.Array:
        return unpack_tpu_weights(self)


def pack_tpu_weights(w: QArray | jax.Array) -> TpuWeights:
    """Packs weights; `unpack_tpu_weights` is the inverse, bit for bit.

    Args:
      w: `QArray` [E, k, n] with groups along k (axis -2), or bfloat16 [E, k, n].

    Raises:
      ValueError: shapes, dtypes or groups that cannot be packed.
    """
    return TpuWeights(*stored_weights.pack(w, TpuWeightLayout, _pack))


def unpack_tpu_weights(packed: TpuWeights) -> QArray | jax.Array:
    """The inverse of `pack_tpu_weights`, any leading axes."""
    layout, words = packed.layout, packed.words
    lead = words.shape[:-2]
    pairs = tpu_tiles.unpack_pairs(
        words[..., :layout.scale_row, :].reshape(*lead, layout.steps, layout.step_rows, -1), layout.bits, layout.step)
    codes = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-2).reshape(*lead, layout.padded_k, -1)
    codes = split_runs(codes[..., :layout.k, :], layout.n)
    if layout.bits == 16:
        return weights_of(codes, None, None, layout)
    scale, zero = (None if x is None else split_runs(_each_group_once(x, layout), layout.n) for x in numbers(words, layout))
    assert scale is not None
    return weights_of(codes, scale.astype(layout.scale_dtype), None if zero is None else zero - lowest(layout.bits), layout)


def numbers(words: jax.Array, layout: TpuWeightLayout) -> tuple[jax.Array, jax.Array | None]:
    """Scales and zero points, float32 [..., layout.scale_rows, columns]; None without zero points."""
    first = words[..., layout.scale_row:layout.scale_row + layout.scale_rows, :]
    if layout.scale_dtype == "bfloat16":
        scale, zero = (lax.bitcast_convert_type(x, jnp.float32) for x in (first << 16, first & jnp.uint32(0xFFFF0000)))
    else:
        second = words[..., layout.scale_row + layout.scale_rows:layout.scale_row + 2 * layout.scale_rows, :]
        scale, zero = (lax.bitcast_convert_type(x, jnp.float32) for x in (first, second))
    return scale, zero if layout.has_zero else None


def join_runs(x: jax.Array) -> jax.Array:
    """[..., n] columns in the order in which they are stored, [..., columns], padded with zeros."""
    n = x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % COLUMNS)])
    return x.reshape(*x.shape[:-1], -1, LANES // _RUN, 2, _RUN).swapaxes(-3, -2).reshape(x.shape)


def split_runs(x: jax.Array, n: int) -> jax.Array:
    """The inverse of `join_runs`."""
    return x.reshape(*x.shape[:-1], -1, 2, LANES // _RUN, _RUN).swapaxes(-3, -2).reshape(x.shape)[..., :n]


def _pack(w: QArray | jax.Array, layout: TpuWeightLayout) -> jax.Array:
    """One matrix to uint32 [rows, columns]."""
    codes = jnp.pad(join_runs(codes_of(w)), [(0, layout.padded_k - layout.k), (0, 0)])
    codes = codes.reshape(layout.steps, layout.step // 2, 2, -1)
    words = [tpu_tiles.pack_pairs(codes[:, :, 0] | (codes[:, :, 1] << 16), layout.bits).reshape(layout.scale_row, -1)]
    if isinstance(w, QArray):
        scale = lax.bitcast_convert_type(_repeated(w.scale.astype(jnp.float32), layout), jnp.uint32)
        zero = jnp.zeros_like(scale)
        if w.zero_point is not None:
            zero = _repeated(w.zero_point.astype(jnp.float32) + lowest(layout.bits), layout)
            zero = lax.bitcast_convert_type(zero, jnp.uint32)
        if layout.scale_dtype == "bfloat16":
            words.append((scale >> 16) | zero)
        else:
            words += [scale, zero] if layout.has_zero else [scale]
    packed = jnp.concatenate(words, axis=0)
    return jnp.pad(packed, [(0, layout.rows - len(packed)), (0, 0)])


def _repeated(x: jax.Array, layout: TpuWeightLayout) -> jax.Array:
    """[k / group_size, n] to [layout.scale_rows, columns]: a row for each group of each 128 channels, then zeros."""
    x = join_runs(jnp.repeat(x, math.ceil(layout.group_size / LANES), axis=0))
    return jnp.pad(x, [(0, layout.scale_rows - len(x)), (0, 0)])


def _each_group_once(x: jax.Array, layout: TpuWeightLayout) -> jax.Array:
    """The inverse of `_repeated`, but for the order of columns."""
    return x[..., ::math.ceil(layout.group_size / LANES), :][..., :layout.k // layout.group_size, :]
