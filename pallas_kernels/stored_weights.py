"""What weights packed for one kind of hardware or another have in common: `packed_weights` (Hopper) and `tpu_weights`."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.qarray import FLOAT_CODES, SCALE_DTYPES, WEIGHT_BITS, QArray, code_dtype

_BITS = {8: jnp.dtype("uint8"), 4: jnp.dtype("uint4")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """What is stored of matrices [k, n]; where everything lies is for the subclasses to say.

    Attributes:
      k: contraction.
      n: output columns.
      bits: 2, 3, 4 or 8, or 16 for bfloat16 numbers without scales.
      group_size: k of one scale. k for 16 bits.
      scale_dtype: float32 or bfloat16.
      has_zero: are there zero points?
      float_codes: are codes float8_e4m3fn (8 bits) or float4_e2m1fn (4) in place of integers?

    Raises:
      ValueError: a field out of what is accepted, by name.
    """

    k: int
    n: int
    bits: int
    group_size: int
    scale_dtype: str = "float32"
    has_zero: bool = False
    float_codes: bool = False

    def check(self, **units: int) -> None:
        """What holds for every layout, and that the fields named are multiples of these units."""
        for name, unit in units.items():
            if getattr(self, name) < 1 or getattr(self, name) % unit:
                raise ValueError(f"{name}={getattr(self, name)}: must be a multiple of {unit}")
        if self.bits not in (*WEIGHT_BITS, 16):
            raise ValueError(f"bits={self.bits}: accepted are {', '.join(map(str, (*WEIGHT_BITS, 16)))}")
        if self.float_codes and (self.bits not in FLOAT_CODES or self.has_zero):
            raise ValueError(f"float_codes=True: bits={self.bits}, has_zero={self.has_zero}: must be of "
                             f"{' or '.join(map(str, FLOAT_CODES))} bits without zero points")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: accepted are {', '.join(SCALE_DTYPES)}")


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Packed matrices [k, n], of all experts or of one. Subclasses say what a matrix is.

    Attributes:
      words: uint32 [..., the axes of a matrix].
      layout: how.
    """

    words: jax.Array
    layout: Any

    matrix_axes = 0

    def unpack(self) -> QArray | jax.Array:
        """What was packed, bit for bit; any leading axes."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return *self.words.shape[:self.words.ndim - self.matrix_axes], self.layout.k, self.layout.n

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The array, [..., k, n] in `dtype`; computed in float32."""
        unpacked = self.unpack()
        return unpacked.dequantize(dtype) if isinstance(unpacked, QArray) else unpacked.astype(dtype)


def pack[L: MatrixLayout](w: QArray | jax.Array, layout_type: type[L], pack_one: Callable[..., jax.Array]) -> tuple[jax.Array, L]:
    """Words of all experts and their layout.

    Args:
      w: `QArray` [E, k, n] with groups along k (axis -2), or bfloat16 [E, k, n].
      layout_type: a `MatrixLayout`.
      pack_one: (one expert's w, layout=) to its words.

    Raises:
      ValueError: shapes, dtypes or groups that cannot be packed.
    """
    if w.ndim != 3:
        raise ValueError(f"{w.shape=}: must be [E, k, n]")
    *_, k, n = w.shape
    if not isinstance(w, QArray):
        if w.dtype != jnp.bfloat16:
            raise ValueError(f"w.dtype={w.dtype}: must be bfloat16, or a QArray")
        layout = layout_type(k=k, n=n, bits=16, group_size=k)
    else:
        if w.axis != -2:
            raise ValueError(f"w.axis={w.axis}: quantisation groups must run along k, axis -2")
        layout = layout_type(
            k=k, n=n, bits=w.bits, group_size=w.group_size, scale_dtype=w.scale.dtype.name, has_zero=w.zero_point is not None,
            float_codes=w.has_float_codes)
    # An expert at a time: what is being packed takes four bytes a code.
    return lax.map(functools.partial(pack_one, layout=layout), w), layout


def codes_of(w: QArray | jax.Array) -> jax.Array:
    """uint32 codes, counted from the lowest; of float codes and of bfloat16 numbers their bits."""
    if isinstance(w, QArray) and w.has_float_codes:
        return lax.bitcast_convert_type(w.qvalue, _BITS[w.bits]).astype(jnp.uint32)
    if isinstance(w, QArray):
        return (w.qvalue.astype(jnp.int32) + lowest(w.bits)).astype(jnp.uint32)
    return lax.bitcast_convert_type(w, jnp.uint16).astype(jnp.uint32)


def weights_of(codes: jax.Array, scale: jax.Array | None, zero: jax.Array | None, layout: MatrixLayout) -> QArray | jax.Array:
    """The inverse of `codes_of`, with scales and signed zero points [..., k / group_size, n]; None for 16 bits, or without."""
    if scale is None:
        return lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.bfloat16)

    if layout.float_codes:
        qvalue = lax.bitcast_convert_type(codes.astype(_BITS[layout.bits]), FLOAT_CODES[layout.bits])
        return QArray(qvalue, scale, None, -2, layout.group_size, layout.bits)

    def stored(x: jax.Array) -> jax.Array:
        return x.astype(jnp.int8).astype(code_dtype(layout.bits))

    qvalue = stored(codes.astype(jnp.int32) - lowest(layout.bits))
    return QArray(qvalue, scale, None if zero is None else stored(zero), -2, layout.group_size, layout.bits)


def lowest(bits: int) -> int:
    """Minus the lowest code."""
    return 1 << bits - 1
