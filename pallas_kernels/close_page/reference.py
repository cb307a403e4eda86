"""Plain JAX `close_page` and its inverse: the specification of the bytes of a closed page."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import mma_sm90
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
    planes["k_codes"], planes["k_scales"] = _encode_keys(base, f.k_bits, ranged, f)
    planes["v_codes"], planes["v_scales"] = _encode_values(open_v, f)
    if f.outlier_channels:
        planes["outlier_codes"], planes["outlier_scales"] = _encode_keys(outlier, f.outlier_bits, ranged, f)
    return _join(planes, layout)


def open_page(words: jax.Array, *, kv_format: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.close_page.open_page`."""
    f, layout = kv_format, kv_format.page_layout(head_dim)
    plane = {name: words[..., first:first + size] for name, (first, size) in layout.planes().items()}
    k = _decode_keys(plane["k_codes"], plane.get("k_scales"), f.k_bits, layout.base_channels, f)
    v = _decode_values(plane["v_codes"], plane.get("v_scales"), head_dim, f)
    if f.outlier_channels:
        promoted = _decode_keys(
            plane["outlier_codes"], plane.get("outlier_scales"), f.outlier_bits, f.outlier_channels, f)
        k = jnp.concatenate([k, promoted], axis=-1)
    return k, v


def _encode_keys(x, bits: int, where, f: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    """Planes of codes and of scale words (None for plain floats), each flat: [..., words]."""
    codes, scale, offset = _quantize(x, -2, bits, f.k_range, f, where)
    if f.layout == "mma_sm90":
        scales = None if scale is None else jnp.concatenate([mma_sm90.pack_pairs(scale), mma_sm90.pack_pairs(offset)], -1)
        return mma_sm90.pack_keys(codes, bits), scales
    words = pack_codes(codes, bits)
    return words.reshape(*words.shape[:-2], -1), None if scale is None else scale | (offset << 16)


def _encode_values(x, f: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    codes, scale, offset = _quantize(x, -1, f.v_bits, f.v_range, f, None)
    words = mma_sm90.pack_values(codes, f.v_bits) if f.layout == "mma_sm90" else pack_codes(codes, f.v_bits)
    return words.reshape(*x.shape[:-2], -1), None if scale is None else scale | (offset << 16)


def _decode_keys(words, scales, bits: int, channels: int, f: KVFormat) -> jax.Array:
    """float32 [..., Z, channels]."""
    if f.layout == "mma_sm90":
        codes = mma_sm90.unpack_keys(words, bits, channels)
        if bits in QUANT_BITS:
            scale, offset = jnp.split(mma_sm90.unpack_pairs(scales), 2, axis=-1)
            return _dequantize(codes, scale[..., None, :], offset[..., None, :], f)
    else:
        codes = unpack_codes(words.reshape(*words.shape[:-1], packed_rows(f.page_size, bits), channels), bits, f.page_size)
        if bits in QUANT_BITS:
            return _dequantize(codes, (scales & 0xFFFF)[..., None, :], (scales >> 16)[..., None, :], f)
    return _floats(codes, bits)


def _decode_values(words, scales, channels: int, f: KVFormat) -> jax.Array:
    """float32 [..., Z, channels]."""
    if f.layout == "mma_sm90":
        codes = mma_sm90.unpack_values(words, f.v_bits, channels)
    else:
        rows = packed_rows(f.page_size, f.v_bits)
        codes = unpack_codes(words.reshape(*words.shape[:-1], rows, channels), f.v_bits, f.page_size)
    if f.v_bits in QUANT_BITS:
        return _dequantize(codes, (scales & 0xFFFF)[..., None], (scales >> 16)[..., None], f)
    return _floats(codes, f.v_bits)


def _quantize(x, group_axis: int, bits: int, range_rule, f: KVFormat, where):
    """Codes [..., Z, C] and the 16 bits of scale and offset of each group (None, None for plain floats), all uint32."""
    if bits in QUANT_BITS:
        codes, scale, offset = quantize_groups(x, group_axis, bits, range_rule, f.scale_dtype, where)
        return codes, *(float16_bits(s, f.scale_dtype).squeeze(group_axis) for s in (scale, offset))
    if bits == 16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32), None, None
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32), None, None


def _dequantize(codes, scale, offset, f: KVFormat) -> jax.Array:
    """Scale and offset as 16 bits in uint32."""
    # Codes fit int32; the conversion from unsigned integers is not vectorised by XLA on CPU.
    values = codes.astype(jnp.int32).astype(jnp.float32)
    return bits_to_float32(scale, f.scale_dtype) * values + bits_to_float32(offset, f.scale_dtype)


def _floats(codes, bits: int) -> jax.Array:
    return bits_to_float32(codes, "bfloat16") if bits == 16 else jax.lax.bitcast_convert_type(codes, jnp.float32)


def _join(planes: dict[str, jax.Array | None], layout: PageLayout) -> jax.Array:
    parts, end = [], 0
    lead = next(plane for plane in planes.values() if plane is not None).shape[:-1]
    for name, (first, words) in [*layout.planes().items(), ("end", (layout.words, 0))]:
        if first > end:
            parts.append(jnp.zeros((*lead, first - end), jnp.uint32))
        if (plane := planes.get(name)) is not None:
            parts.append(plane)
        end = first + words
    return jnp.concatenate(parts, axis=-1)
