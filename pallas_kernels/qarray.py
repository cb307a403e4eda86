"""Quantised weights: x ≈ (qvalue − zero_point) · scale, groups along one axis."""
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

WEIGHT_BITS = (2, 3, 4, 8)
SCALE_DTYPES = ("float32", "bfloat16")
FLOAT_CODES = {8: jnp.dtype(jnp.float8_e4m3fn), 4: jnp.dtype(jnp.float4_e2m1fn)}  # by bits
MX_GROUP = 32


def code_dtype(bits: int) -> jnp.dtype:
    """Dtype of the codes of a `QArray`."""
    return jnp.dtype("int8" if bits == 8 else "int4")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale", "zero_point"], meta_fields=["axis", "group_size", "bits"])
@dataclasses.dataclass(frozen=True)
class QArray:
    """A quantised array.

    Attributes:
      qvalue: int8 for 8 bits, int4 for fewer, [..., k, ...], within ±2**(bits - 1); or float8_e4m3fn, float4_e2m1fn.
      scale: float32 or bfloat16, the shape of `qvalue` but k // group_size on `axis`. Multiplies.
      zero_point: like `scale`, in the dtype of `qvalue`; None if symmetric. Subtracted from `qvalue`.
      axis: the quantised axis, negative, counted from the end (so that leading axes may be added or mapped over).
      group_size: consecutive elements along `axis` that share a scale.
      bits: of a code: 2, 3, 4 or 8.
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    axis: int
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def has_float_codes(self) -> bool:
        return self.qvalue.dtype in FLOAT_CODES.values()

    @property
    def nbytes(self) -> int:
        """Bytes stored: values of 4 bits count half a byte each."""
        value_bits = (jnp.finfo if self.has_float_codes else jnp.iinfo)(self.qvalue.dtype).bits
        zero_bits = 0 if self.zero_point is None else self.zero_point.size * value_bits
        return (self.qvalue.size * value_bits + zero_bits) // 8 + self.scale.nbytes

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The array, [..., k, ...] in `dtype`; computed in float32."""
        values = _split_groups(self.qvalue.astype(jnp.float32), self.axis, self.group_size)
        if self.zero_point is not None:
            values = values - jnp.expand_dims(self.zero_point.astype(jnp.float32), self.axis)
        return (values * jnp.expand_dims(self.scale.astype(jnp.float32), self.axis)).reshape(self.shape).astype(dtype)


def quantize(
    w: jax.Array, *, bits: int, axis: int = -2, group_size: int | None = None, symmetric: bool = True,
    scale_dtype=jnp.float32,
) -> QArray:
    """Quantises weights, round to nearest.

    Args:
      w: float [..., k, ...].
      bits: 2, 3, 4 or 8.
      axis: the axis groups run along; of [E, k, n] expert weights the contraction, -2.
      group_size: elements a group; must divide k. None for the whole axis.
      symmetric: codes within ±(2**(bits-1) - 1) and no zero point; else the whole code range, which then always holds 0
        exactly.
      scale_dtype: float32 or bfloat16. Codes are nearest with the rounded scale.

    Raises:
      ValueError: an argument that does not fit.
    """
    if bits not in WEIGHT_BITS:
        raise ValueError(f"{bits=}: accepted are {', '.join(map(str, WEIGHT_BITS))}")
    if jnp.dtype(scale_dtype).name not in SCALE_DTYPES:
        raise ValueError(f"{scale_dtype=}: accepted are {', '.join(SCALE_DTYPES)}")
    groups, axis, group_size = _groups(w, axis, group_size)
    dtype = code_dtype(bits)
    top = 2 ** (bits - 1) - 1
    if symmetric:
        scale = (jnp.max(jnp.abs(groups), axis, keepdims=True) / top).astype(scale_dtype).astype(jnp.float32)
        zero, bottom = None, -top
    else:
        low = jnp.minimum(jnp.min(groups, axis, keepdims=True), 0.0)
        high = jnp.maximum(jnp.max(groups, axis, keepdims=True), 0.0)
        scale = (high / (2 * top + 1) - low / (2 * top + 1)).astype(scale_dtype).astype(jnp.float32)
        bottom = -top - 1
        zero = jnp.clip(jnp.round(bottom - low / jnp.where(scale > 0, scale, 1.0)), bottom, top)
    codes = jnp.round(groups / jnp.where(scale > 0, scale, 1.0)) + (0.0 if zero is None else zero)
    qvalue = jnp.clip(codes, bottom, top).reshape(w.shape).astype(jnp.int8).astype(dtype)
    zero_point = None if zero is None else zero.squeeze(axis).astype(jnp.int8).astype(dtype)
    return QArray(qvalue, scale.squeeze(axis).astype(scale_dtype), zero_point, axis, group_size, bits)


def quantize_fp8(w: jax.Array, *, axis: int = -2, group_size: int | None = None) -> QArray:
    """Rounds to float8_e4m3fn times a float32 scale a group, with which the largest of the group becomes the largest code, 448.

    Arguments and errors as of `quantize`.
    """
    groups, axis, group_size = _groups(w, axis, group_size)
    scale = jnp.max(jnp.abs(groups), axis, keepdims=True) / 448
    codes = jnp.clip(groups / jnp.where(scale > 0, scale, 1.0), -448, 448).astype(FLOAT_CODES[8])
    return QArray(codes.reshape(w.shape), scale.squeeze(axis), None, axis, group_size, 8)


def quantize_mxfp4(w: jax.Array, *, axis: int = -2) -> QArray:
    """Rounds to MXFP4 (OCP Microscaling Formats 1.0): float4_e2m1fn times a power of two for each 32 elements.

    The power is that of the group's largest magnitude, less 2, the largest exponent of a code; what is then beyond 6, the largest
    code, becomes 6. Scales are kept as bfloat16, which holds them exactly, in 16 bits; the standard takes 8.

    Args:
      w: float [..., k, ...], k a multiple of 32.
      axis: as of `quantize`.

    Raises:
      ValueError: an axis or size that does not fit.
    """
    groups, axis, group_size = _groups(w, axis, MX_GROUP)
    largest = jnp.max(jnp.abs(groups), axis, keepdims=True)
    exponent = jnp.clip(jnp.frexp(largest)[1] - 3, -126, 127)  # frexp's mantissa is from a half to one: one more than floor(log2)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    codes = jnp.clip(groups / scale, -6, 6).astype(FLOAT_CODES[4])
    return QArray(codes.reshape(w.shape), scale.squeeze(axis).astype(jnp.bfloat16), None, axis, group_size, 4)


def _groups(w: jax.Array, axis: int, group_size: int | None) -> tuple[jax.Array, int, int]:
    """(`w` in float32 and in groups, the negative axis, elements a group). Raises ValueError for what does not fit."""
    if not -w.ndim <= axis < w.ndim:
        raise ValueError(f"{axis=}: {w.shape=} has no such axis")
    axis = axis - w.ndim if axis >= 0 else axis
    size = w.shape[axis]
    group_size = size if group_size is None else group_size
    if group_size < 1 or size % group_size:
        raise ValueError(f"{group_size=}: must divide the {size} elements of axis {axis} of {w.shape=}")
    return _split_groups(w.astype(jnp.float32), axis, group_size), axis, group_size


def _split_groups(x: jax.Array, axis: int, group_size: int) -> jax.Array:
    """[..., k, ...] -> [..., k // group_size, group_size, ...]: the group's elements stand at `axis` again."""
    position = x.ndim + axis
    return x.reshape(*x.shape[:position], -1, group_size, *x.shape[position + 1:])
