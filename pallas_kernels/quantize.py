"""Group quantisation of keys and values, in every way that a `GroupFormat` can say: codes, scales and offsets, and back.

Uniform codes: x = scale * code + offset, code in [0, 2**bits - 1]. Scale and offset are rounded outwards to the scale's dtype
before codes are chosen, so that the codes fit what is stored and the range that the rule chose stays covered. Rounding works on
the bits of the float32 value: `x.astype(bfloat16).astype(float32)` is not a rounding inside jit, because XLA may keep the excess
precision.

Gaussian codes: x = scale * level[code] + offset; the levels minimise the squared error of a standard normal variable (Lloyd, IEEE
Trans. Inf. Theory 28(2), 1982; Max, IRE Trans. Inf. Theory 6(1), 1960).
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_format import QUANT_BITS, GroupFormat

# Fractions of the range that the "clipped" rule tries, about the middle of the range. 1 comes first: ties go to it.
CLIP_FRACTIONS = tuple(1 - i / 20 for i in range(11))

# A smaller scale would be a float32 subnormal, which compiled code may flush to zero: such a group counts as constant.
_MIN_SCALE = 2.0**-126

# dtype -> mantissa bits of float32 that it lacks, smallest normal, subnormal step, largest finite.
_SMALL_FLOATS = {"float16": (13, 2.0**-14, 2.0**-24, 65504.0), "float8_e4m3": (20, 2.0**-6, 2.0**-9, 448.0)}
_JAX_DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float8_e4m3": jnp.float8_e4m3fn}


class Quantized(NamedTuple):
    """A quantised matrix.

    Attributes:
      codes: uint32 [..., Z, C].
      scale: float32 [..., *GroupFormat.scale_shape(Z, C)], values that `scale_dtype` holds exactly; None for plain floats.
      offset: as scale; None for symmetric groups and plain floats.
    """

    codes: jax.Array
    scale: jax.Array | None = None
    offset: jax.Array | None = None


def quantize(x: jax.Array, g: GroupFormat, where: jax.Array | None = None) -> Quantized:
    """Quantises matrices.

    Args:
      x: float [..., Z, C], magnitudes up to 1e38; computed in float32.
      g: how; at 16 and 32 bits the codes are the bits of bfloat16 and float32 values.
      where: bool, broadcastable to `x`: elements that count for ranges and errors. The others get the nearest code.

    A constant group that `scale_dtype` holds has scale 0 and is exact, unless it is symmetric or its codes are not uniform.
    """
    if g.bits == 16:
        return Quantized(jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32))
    if g.bits == 32:
        return Quantized(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32))
    if g.bits not in QUANT_BITS:
        raise ValueError(f"bits={g.bits}: accepted are {', '.join(map(str, QUANT_BITS))}, 16, 32")
    grouped, axis = _groups(x.astype(jnp.float32), g)
    if where is not None:
        where, _ = _groups(jnp.broadcast_to(where, x.shape), g)
    codes, scale, offset = _ENCODERS[g.codes](grouped, axis, g, where)
    scale = scale.squeeze(axis)
    return Quantized(codes.reshape(x.shape), scale, None if g.symmetric else offset.squeeze(axis))


def dequantize(q: Quantized, g: GroupFormat) -> jax.Array:
    """float32 [..., Z, C], the values that the codes mean."""
    if g.bits == 16:
        return bits_to_float32(q.codes, "bfloat16")
    if g.bits == 32:
        return jax.lax.bitcast_convert_type(q.codes, jnp.float32)
    assert q.scale is not None
    codes, axis = _groups(q.codes, g)
    scale = jnp.expand_dims(q.scale, axis)
    values = _code_values(codes, g) * scale
    if q.offset is not None:
        values = values + jnp.expand_dims(q.offset, axis)
    elif g.codes == "uniform":
        values = values + _symmetric_offset(scale, g.bits)
    return values.reshape(q.codes.shape)


def float_bits(x: jax.Array, dtype: str) -> jax.Array:
    """The bits of `x` (float32, values that `dtype` holds exactly) in the low bits of a uint32."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    width = jnp.uint8 if dtype == "float8_e4m3" else jnp.uint16
    return jax.lax.bitcast_convert_type(x.astype(_JAX_DTYPES[dtype]), width).astype(jnp.uint32)


def bits_to_float32(bits: jax.Array, dtype: str) -> jax.Array:
    """The inverse of `float_bits`."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
    width = jnp.uint8 if dtype == "float8_e4m3" else jnp.uint16
    return jax.lax.bitcast_convert_type(bits.astype(width), _JAX_DTYPES[dtype]).astype(jnp.float32)


@functools.cache
def gaussian_levels(bits: int) -> np.ndarray:
    """The 2**bits levels, ascending float32, that minimise the squared error of a standard normal variable."""
    levels = np.linspace(-2, 2, 1 << bits)
    for _ in range(2000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-edges**2 / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(e / math.sqrt(2))) for e in edges])
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.astype(np.float32)


def _groups(x: jax.Array, g: GroupFormat) -> tuple[jax.Array, int]:
    """(x with one more axis, that axis): the elements of each group lie along it."""
    *lead, tokens, channels = x.shape
    if g.axis == "channel":
        size = g.group or tokens
        return x.reshape(*lead, tokens // size, size, channels), -2
    size = g.group or channels
    return x.reshape(*lead, tokens, channels // size, size), -1


def _encode_uniform(x, axis: int, g: GroupFormat, where):
    low, high = _group_range(x, axis, where)
    best_scale, best_offset = _scale_offset(low, high, g)
    if g.range_rule == "clipped":
        def try_fraction(i, best):
            fraction = jnp.asarray(CLIP_FRACTIONS, jnp.float32)[i]
            if g.symmetric:
                scale, offset = _scale_offset(low * fraction, high * fraction, g)
            else:
                margin = (1 - fraction) / 2 * (high - low)
                scale, offset = _scale_offset(low + margin, high - margin, g)
            error = _squared_error(x, scale, offset, axis, g.bits, where)
            better = error < best[2]
            return tuple(jnp.where(better, new, old) for new, old in zip((scale, offset, error), best))

        error = _squared_error(x, best_scale, best_offset, axis, g.bits, where)
        best_scale, best_offset, _ = jax.lax.fori_loop(
            1, len(CLIP_FRACTIONS), try_fraction, (best_scale, best_offset, error))
    return _codes(x, best_scale, best_offset, g.bits).astype(jnp.uint32), best_scale, best_offset


def _encode_gaussian(x, axis: int, g: GroupFormat, where):
    offset = 0.0 if g.symmetric else jnp.mean(x, axis, keepdims=True, where=where)
    offset = _round_nearest(jnp.nan_to_num(offset), g.scale_dtype)  # a group in which nothing counts has no mean
    scale = jnp.sqrt(jnp.mean((x - offset) ** 2, axis, keepdims=True, where=where))
    scale = _round_outwards(jnp.nan_to_num(scale), g.scale_dtype, up=True)
    levels = gaussian_levels(g.bits)
    unit = (x - offset) / jnp.where(scale > 0, scale, 1.0)
    codes = sum((unit > edge).astype(jnp.uint32) for edge in (levels[1:] + levels[:-1]) / 2)
    return codes, scale, offset


def _encode_float8(x, axis: int, g: GroupFormat, where):
    low, high = _group_range(x, axis, where)
    largest = _SMALL_FLOATS["float8_e4m3"][3]
    scale = _round_outwards(jnp.maximum(jnp.abs(low), jnp.abs(high)) / largest, g.scale_dtype, up=True)
    unit = jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1.0), 0.0)
    return float_bits(jnp.clip(unit, -largest, largest), "float8_e4m3"), scale, None


_ENCODERS = {"uniform": _encode_uniform, "gaussian": _encode_gaussian, "float8_e4m3": _encode_float8}


def _code_values(codes: jax.Array, g: GroupFormat) -> jax.Array:
    if g.codes == "gaussian":
        return jnp.asarray(gaussian_levels(g.bits))[codes]
    if g.codes == "float8_e4m3":
        return bits_to_float32(codes, "float8_e4m3")
    # Codes fit int32; the conversion from unsigned integers is not vectorised by XLA on CPU.
    return codes.astype(jnp.int32).astype(jnp.float32)


def _round_nearest(x, dtype: str) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if dtype in _SMALL_FLOATS:
        x = jnp.clip(x, -_SMALL_FLOATS[dtype][3], _SMALL_FLOATS[dtype][3])
    raw = jax.lax.bitcast_convert_type(x.astype(_JAX_DTYPES[dtype]), jnp.uint8 if dtype == "float8_e4m3" else jnp.uint16)
    return bits_to_float32(raw.astype(jnp.uint32), dtype)


def _group_range(x: jax.Array, axis: int, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if where is None:
        return jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    low = jnp.min(x, axis, keepdims=True, where=where, initial=jnp.inf)
    high = jnp.max(x, axis, keepdims=True, where=where, initial=-jnp.inf)
    empty = low > high
    return jnp.where(empty, 0.0, low), jnp.where(empty, 0.0, high)


def _scale_offset(low: jax.Array, high: jax.Array, g: GroupFormat) -> tuple[jax.Array, jax.Array]:
    """Of uniform codes. A symmetric group's offset is the lowest of its levels."""
    steps = (1 << g.bits) - 1
    if g.symmetric:
        scale = _round_outwards(jnp.maximum(jnp.abs(low), jnp.abs(high)) * np.float32(2 / steps), g.scale_dtype, up=True)
        scale = jnp.where(scale >= _MIN_SCALE, scale, 0.0)
        return scale, _symmetric_offset(scale, g.bits)
    offset = _round_outwards(low, g.scale_dtype, up=False)
    scale = _round_outwards((high - offset) * np.float32(1 / steps), g.scale_dtype, up=True)
    return jnp.where((high > offset) & (scale >= _MIN_SCALE), scale, 0.0), offset


def _symmetric_offset(scale: jax.Array, bits: int) -> jax.Array:
    return scale * (-((1 << bits) - 1) / 2)


def _codes(x: jax.Array, scale: jax.Array, offset: jax.Array, bits: int) -> jax.Array:
    """Nearest codes, as float32. A quotient that rounding or `where` puts out of the code's range is clipped into it."""
    # The reciprocal is written out: XLA makes one of a division on some platforms and not on others, and codes must not differ.
    code = jnp.where(scale > 0, (x - offset) * (1 / jnp.where(scale > 0, scale, 1.0)), 0.0)
    return jnp.clip(jnp.round(code), 0, (1 << bits) - 1)


def _squared_error(x, scale, offset, axis: int, bits: int, where: jax.Array | None) -> jax.Array:
    error = scale * _codes(x, scale, offset, bits) + offset - x
    return jnp.sum(error * error, axis, keepdims=True, where=where)


def _round_outwards(x: jax.Array, dtype: str, *, up: bool) -> jax.Array:
    """The nearest value of `dtype` that is not below `x` (`up`) or not above it, as float32. float16 and float8 saturate."""
    away = x > 0 if up else x < 0
    if dtype == "bfloat16":
        return _cut_mantissa(x, 16, away)
    if dtype not in _SMALL_FLOATS:
        raise ValueError(f"scale_dtype={dtype!r}: accepted are bfloat16, {', '.join(_SMALL_FLOATS)}")
    cut, least_normal, step, largest = _SMALL_FLOATS[dtype]
    subnormal = jnp.where(up, jnp.ceil(x / step), jnp.floor(x / step)) * step
    return jnp.clip(jnp.where(jnp.abs(x) < least_normal, subnormal, _cut_mantissa(x, cut, away)), -largest, largest)


def _cut_mantissa(x: jax.Array, bits: int, away: jax.Array) -> jax.Array:
    """Drops the low `bits` of the mantissa, away from zero where `away`, else towards it."""
    mask = (1 << bits) - 1
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    raw = jnp.where(away, raw + mask, raw) & ~jnp.uint32(mask)
    return jax.lax.bitcast_convert_type(raw, jnp.float32)
