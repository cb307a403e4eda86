"""Asymmetric group quantisation of keys and values: x = scale * code + offset, code in [0, 2**bits - 1].

Scale and offset are rounded outwards to a 16-bit float before codes are chosen, so that the codes fit what is stored and the
range that the rule chose stays covered. Rounding works on the bits of the float32 value: `x.astype(bfloat16).astype(float32)`
is not a rounding inside jit, because XLA may keep the excess precision.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import QUANT_BITS, RangeRule

# Fractions of the range that the "clipped" rule tries, about the middle of the range. 1 comes first: ties go to it.
CLIP_FRACTIONS = tuple(1 - i / 20 for i in range(11))

# A smaller scale would be a float32 subnormal, which compiled code may flush to zero: such a group counts as constant.
_MIN_SCALE = 2.0**-126


def quantize_groups(
    x: jax.Array, axis: int, bits: int, range_rule: RangeRule = "minmax", scale_dtype: str = "bfloat16",
    where: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises every group of `x`; a group runs along `axis`.

    Args:
      x: float [...], magnitudes up to 1e38; computed in float32.
      axis: the axis that shares one scale and offset.
      bits: 2, 3, 4 or 8.
      range_rule: "minmax" or "clipped" (the fraction out of `CLIP_FRACTIONS` with the least squared error).
      scale_dtype: "bfloat16", or "float16" (scale and offset saturate at 65504).
      where: bool, broadcastable to `x`: elements that count for the range and the error. The others get the nearest code.

    Returns:
      codes uint32 [...]; scale and offset float32 of the shape of `x` with `axis` of size 1, values that `scale_dtype` holds
      exactly. A constant group that `scale_dtype` holds has scale 0, codes 0, and is exact.

    Raises:
      ValueError: `bits`, `range_rule` or `scale_dtype` not accepted.
    """
    if bits not in QUANT_BITS:
        raise ValueError(f"{bits=}: accepted are {', '.join(map(str, QUANT_BITS))}")
    if range_rule not in ("minmax", "clipped"):
        raise ValueError(f"{range_rule=}: accepted are minmax, clipped")
    x = x.astype(jnp.float32)
    low, high = _group_range(x, axis, where)
    best_scale, best_offset = _scale_offset(low, high, bits, scale_dtype)
    if range_rule == "clipped":
        def try_fraction(i, best):
            margin = (1 - jnp.asarray(CLIP_FRACTIONS, jnp.float32)[i]) / 2 * (high - low)
            scale, offset = _scale_offset(low + margin, high - margin, bits, scale_dtype)
            error = _squared_error(x, scale, offset, axis, bits, where)
            better = error < best[2]
            return tuple(jnp.where(better, new, old) for new, old in zip((scale, offset, error), best))

        error = _squared_error(x, best_scale, best_offset, axis, bits, where)
        best_scale, best_offset, _ = jax.lax.fori_loop(
            1, len(CLIP_FRACTIONS), try_fraction, (best_scale, best_offset, error))
    return _codes(x, best_scale, best_offset, bits).astype(jnp.uint32), best_scale, best_offset


def float16_bits(x: jax.Array, dtype: str) -> jax.Array:
    """The 16 bits of `x` (float32, values that `dtype` holds exactly) in the low half of a uint32."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint16).astype(jnp.uint32)


def bits_to_float32(bits: jax.Array, dtype: str) -> jax.Array:
    """The inverse of `float16_bits`: float32 of the 16-bit float in the low half of each uint32."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.dtype(dtype)).astype(jnp.float32)


def _group_range(x: jax.Array, axis: int, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if where is None:
        return jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    low = jnp.min(x, axis, keepdims=True, where=where, initial=jnp.inf)
    high = jnp.max(x, axis, keepdims=True, where=where, initial=-jnp.inf)
    empty = low > high
    return jnp.where(empty, 0.0, low), jnp.where(empty, 0.0, high)


def _scale_offset(low: jax.Array, high: jax.Array, bits: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    steps = (1 << bits) - 1
    offset = _round_outwards(low, dtype, up=False)
    scale = _round_outwards((high - offset) / steps, dtype, up=True)
    return jnp.where((high > offset) & (scale >= _MIN_SCALE), scale, 0.0), offset


def _codes(x: jax.Array, scale: jax.Array, offset: jax.Array, bits: int) -> jax.Array:
    """Nearest codes, as float32. A quotient that rounding or `where` puts out of the code's range is clipped into it."""
    code = jnp.where(scale > 0, (x - offset) / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.clip(jnp.round(code), 0, (1 << bits) - 1)


def _squared_error(x, scale, offset, axis: int, bits: int, where: jax.Array | None) -> jax.Array:
    error = scale * _codes(x, scale, offset, bits) + offset - x
    return jnp.sum(error * error, axis, keepdims=True, where=where)


def _round_outwards(x: jax.Array, dtype: str, *, up: bool) -> jax.Array:
    """The nearest value of `dtype` that is not below `x` (`up`) or not above it, as float32. float16 saturates."""
    away = x > 0 if up else x < 0
    if dtype == "bfloat16":
        return _cut_mantissa(x, 16, away)
    if dtype != "float16":
        raise ValueError(f"scale_dtype={dtype!r}: accepted are bfloat16, float16")
    subnormal = jnp.where(up, jnp.ceil(x * 2.0**24), jnp.floor(x * 2.0**24)) * 2.0**-24
    return jnp.clip(jnp.where(jnp.abs(x) < 2.0**-14, subnormal, _cut_mantissa(x, 13, away)), -65504, 65504)


def _cut_mantissa(x: jax.Array, bits: int, away: jax.Array) -> jax.Array:
    """Drops the low `bits` of the mantissa, away from zero where `away`, else towards it."""
    mask = (1 << bits) - 1
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    raw = jnp.where(away, raw + mask, raw) & ~jnp.uint32(mask)
    return jax.lax.bitcast_convert_type(raw, jnp.float32)
