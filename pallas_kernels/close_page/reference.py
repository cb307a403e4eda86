"""Plain JAX `close_page` and its inverse: the specification of the bytes of a closed page."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import QUANT_BITS, KVFormat, PageLayout
from pallas_kernels.packing import pack_codes, packed_rows, unpack_codes
from pallas_kernels.quantize import bits_to_float32, float16_bits, quantize_groups


def close_page(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.close_page.close_page`. `num_sinks` is int32, broadcastable to [...]."""
    f, layout = kv_format, kv_format.page_layout(open_k.shape[-1])
    ranged = jnp.arange(f.page_size, dtype=jnp.int32) >= num_sinks[..., None]
    ranged = ranged[..., None, :, None]  # [..., 1 (K), Z, 1 (H)]
    base, outlier = jnp.split(open_k, [layout.base_channels], axis=-1)
    planes: dict[str, jax.Array | None] = {}
    planes["k_codes"], planes["k_scales"] = _encode(base, -2, f.k_bits, f.k_range, f.scale_dtype, ranged)
    planes["v_codes"], planes["v_scales"] = _encode(open_v, -1, f.v_bits, f.v_range, f.scale_dtype, None)
    if f.outlier_channels:
        planes["outlier_codes"], planes["outlier_scales"] = _encode(
            outlier, -2, f.outlier_bits, f.k_range, f.scale_dtype, ranged)
    return _join(planes, layout)


def open_page(words: jax.Array, *, kv_format: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.close_page.open_page`."""
    f, layout = kv_format, kv_format.page_layout(head_dim)
    plane = {name: words[..., first:first + size] for name, (first, size) in layout.planes().items()}
    k = _decode(plane["k_codes"], plane.get("k_scales"), -2, f.k_bits, layout.base_channels, f)
    v = _decode(plane["v_codes"], plane.get("v_scales"), -1, f.v_bits, head_dim, f)
    if f.outlier_channels:
        promoted = _decode(
            plane["outlier_codes"], plane.get("outlier_scales"), -2, f.outlier_bits, f.outlier_channels, f)
        k = jnp.concatenate([k, promoted], axis=-1)
    return k, v


def _encode(x, group_axis: int, bits: int, range_rule, scale_dtype: str, where) -> tuple[jax.Array, jax.Array | None]:
    """One plane of codes and one of scale words (None for plain floats), each flat: [..., words]."""
    scales = None
    if bits in QUANT_BITS:
        codes, scale, offset = quantize_groups(x, group_axis, bits, range_rule, scale_dtype, where)
        scales = (float16_bits(scale, scale_dtype) | (float16_bits(offset, scale_dtype) << 16)).squeeze(group_axis)
    elif bits == 16:
        codes = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    else:
        codes = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    words = pack_codes(codes, bits)
    return words.reshape(*words.shape[:-2], -1), scales


def _decode(words, scales, group_axis: int, bits: int, channels: int, kv_format: KVFormat) -> jax.Array:
    """float32 [..., Z, channels] of one plane of codes and one of scale words."""
    rows = kv_format.page_size
    codes = unpack_codes(words.reshape(*words.shape[:-1], packed_rows(rows, bits), channels), bits, rows)
    if bits in QUANT_BITS:
        scale = bits_to_float32(scales & 0xFFFF, kv_format.scale_dtype)
        offset = bits_to_float32(scales >> 16, kv_format.scale_dtype)
        # Codes fit int32; the conversion from unsigned integers is not vectorised by XLA on CPU.
        values = codes.astype(jnp.int32).astype(jnp.float32)
        return jnp.expand_dims(scale, group_axis) * values + jnp.expand_dims(offset, group_axis)
    if bits == 16:
        return bits_to_float32(codes, "bfloat16")
    return jax.lax.bitcast_convert_type(codes, jnp.float32)


def _join(planes: dict[str, jax.Array | None], layout: PageLayout) -> jax.Array:
    parts = [plane for name in layout.planes() if (plane := planes[name]) is not None]
    padding = jnp.zeros((*parts[0].shape[:-1], layout.words - layout.used_words), jnp.uint32)
    return jnp.concatenate([*parts, padding], axis=-1)
