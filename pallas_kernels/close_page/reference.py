"""Plain JAX `close_page` and its inverse: the specification of the bytes of a closed page.

Both go through `_Page`, what a page holds before it is packed; `fake_quantize` stops there and turns back.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mma_sm90, tpu_tiles
from pallas_kernels.kv_format import GroupFormat, KVFormat
from pallas_kernels.packing import pack_codes, packed_rows, unpack_codes
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.pallas_utils import align_to
from pallas_kernels.quantize import Quantized, bits_to_float32, dequantize, float_bits, quantize


class _Sparse(NamedTuple):
    """Elements kept as they are: position token * channels + channel and bfloat16 bits, uint32 [..., n] each."""

    position: jax.Array
    value: jax.Array


class _Page(NamedTuple):
    """A quantised page. `outlier_index`: uint32 [..., n], ascending; None where there is nothing of the kind."""

    keys: Quantized
    values: Quantized
    outliers: Quantized | None = None
    outlier_index: jax.Array | None = None
    k_sparse: _Sparse | None = None
    v_sparse: _Sparse | None = None


def close_page(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.close_page.close_page`. `num_sinks` is int32, broadcastable to [...]."""
    return _pack(_quantize_page(open_k, open_v, kv_format, num_sinks), kv_format.page_layout(open_k.shape[-1]))


def open_page(words: jax.Array, *, kv_format: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.close_page.open_page`."""
    return _dequantize_page(_unpack(words, kv_format.page_layout(head_dim)), kv_format, head_dim)


def fake_quantize(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.close_page.fake_quantize`."""
    kv_format.check_head_dim(open_k.shape[-1])
    return _dequantize_page(_quantize_page(open_k, open_v, kv_format, num_sinks), kv_format, open_k.shape[-1])


def _quantize_page(k, v, f: KVFormat, num_sinks: jax.Array) -> _Page:
    ranged = jnp.arange(f.page_size, dtype=jnp.int32) >= num_sinks[..., None]
    ranged = ranged[..., None, :, None]  # [..., 1 (K), Z, 1 (H)]
    outliers = outlier_index = k_sparse = v_sparse = None
    if f.outlier_channels and f.outlier_choice == "page":
        outlier_index = _widest_channels(k, ranged, f.outlier_channels)
        k = jnp.take_along_axis(k, _promoted_last(outlier_index, k.shape[-1])[..., None, :], axis=-1)
    k_ranged: jax.Array = ranged
    v_ranged: jax.Array | None = ranged if f.v_axis == "channel" else None  # by token, a sink has a range of its own
    if f.k_sparse:
        k_sparse, k_ranged = _take_sparse(k, f.keys, ranged, f.k_sparse)
    if f.v_sparse:
        v_sparse, v_ranged = _take_sparse(v, f.values, ranged, f.v_sparse)
    base = k.shape[-1] - f.outlier_channels
    base_ranged, outlier_ranged = (k_ranged, k_ranged) if k_ranged.shape[-1] == 1 else (
        k_ranged[..., :base], k_ranged[..., base:])
    keys = quantize(k[..., :base], f.keys, base_ranged)
    if f.outlier_channels:
        outliers = quantize(k[..., base:], f.outliers, outlier_ranged)
    return _Page(keys, quantize(v, f.values, v_ranged), outliers, outlier_index, k_sparse, v_sparse)


def _dequantize_page(page: _Page, f: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """float32 [..., Z, H] each."""
    k, v = dequantize(page.keys, f.keys), dequantize(page.values, f.values)
    if page.outliers is not None:
        k = jnp.concatenate([k, dequantize(page.outliers, f.outliers)], axis=-1)
    if page.k_sparse is not None:
        k = _put_sparse(k, page.k_sparse)
    if page.v_sparse is not None:
        v = _put_sparse(v, page.v_sparse)
    if page.outlier_index is not None:
        back = jnp.argsort(_promoted_last(page.outlier_index, head_dim), axis=-1)
        k = jnp.take_along_axis(k, back[..., None, :], axis=-1)
    return k, v


def _widest_channels(k, ranged, count: int) -> jax.Array:
    """The `count` channels of the widest range in each page, ascending: uint32 [..., count]."""
    k = k.astype(jnp.float32)
    low = jnp.min(k, axis=-2, where=ranged, initial=jnp.inf)
    high = jnp.max(k, axis=-2, where=ranged, initial=-jnp.inf)
    _, index = jax.lax.top_k(high - low, count)
    return jnp.sort(index, axis=-1).astype(jnp.uint32)


def _promoted_last(index, channels: int) -> jax.Array:
    """int32 [..., channels]: the order in which the channels of `index` come last, and all else stays in order."""
    promoted = jnp.any(jnp.arange(channels, dtype=jnp.uint32)[:, None] == index[..., None, :], axis=-1)
    return jnp.argsort(promoted, axis=-1, stable=True)


def _take_sparse(x, g: GroupFormat, ranged, count: int) -> tuple[_Sparse, jax.Array]:
    """The `count` elements that lie farthest from the mean of their channel or token, and `ranged` without them."""
    x32, axis = x.astype(jnp.float32), -2 if g.axis == "channel" else -1
    ranged = jnp.broadcast_to(ranged, x.shape)
    mean = jnp.mean(x32, axis, keepdims=True, where=ranged)
    deviation = jnp.std(x32, axis, keepdims=True, where=ranged)
    far = jnp.where(ranged & (deviation > 0), jnp.abs(x32 - mean) / deviation, -1.0)
    *lead, tokens, channels = x.shape
    _, position = jax.lax.top_k(far.reshape(*lead, tokens * channels), count)
    flat = x32.reshape(*lead, tokens * channels)
    value = jax.lax.bitcast_convert_type(jnp.take_along_axis(flat, position, -1).astype(jnp.bfloat16), jnp.uint16)
    kept = jnp.put_along_axis(ranged.reshape(flat.shape), position, False, axis=-1, inplace=False)
    return _Sparse(position.astype(jnp.uint32), value.astype(jnp.uint32)), kept.reshape(x.shape)


def _put_sparse(x, sparse: _Sparse) -> jax.Array:
    *lead, tokens, channels = x.shape
    flat = x.reshape(*lead, tokens * channels)
    flat = jnp.put_along_axis(
        flat, sparse.position.astype(jnp.int32), bits_to_float32(sparse.value, "bfloat16"), axis=-1, inplace=False)
    return flat.reshape(x.shape)


def _pack(page: _Page, layout: PageLayout) -> jax.Array:
    f = layout.fmt
    planes = {
        "k_codes": _pack_codes(page.keys.codes, f.k_bits, f, keys=True), "k_scales": _pack_scales(page.keys, f.keys, f, keys=True),
        "v_codes": _pack_codes(page.values.codes, f.v_bits, f, keys=False),
        "v_scales": _pack_scales(page.values, f.values, f, keys=False),
    }
    if page.outliers is not None:
        planes["outlier_codes"] = _pack_codes(page.outliers.codes, f.outlier_bits, f, keys=True)
        planes["outlier_scales"] = _pack_scales(page.outliers, f.outliers, f, keys=True)
    if page.outlier_index is not None:
        planes["outlier_index"] = _pack_fields(page.outlier_index, 8)
    for name, sparse in (("k_sparse", page.k_sparse), ("v_sparse", page.v_sparse)):
        if sparse is not None:
            planes[name] = sparse.position | (sparse.value << 16)
    return _join(planes, layout)


def _unpack(words, layout: PageLayout) -> _Page:
    f = layout.fmt
    plane = {name: words[..., first:first + size] for name, (first, size) in layout.planes().items()}

    def matrix(name: str, channels: int, g: GroupFormat, keys: bool) -> Quantized:
        codes = _unpack_codes(plane[f"{name}_codes"], g.bits, channels, f, keys)
        if not g.is_quantized:
            return Quantized(codes)
        return Quantized(codes, *_unpack_scales(plane[f"{name}_scales"], channels, g, f, keys))

    def sparse(name: str) -> _Sparse | None:
        return _Sparse(plane[name] & 0xFFFF, plane[name] >> 16) if name in plane else None

    promoted = f.outlier_channels
    return _Page(
        keys=matrix("k", layout.base_channels, f.keys, True), values=matrix("v", layout.head_dim, f.values, False),
        outliers=matrix("outlier", promoted, f.outliers, True) if promoted else None,
        outlier_index=_unpack_fields(plane["outlier_index"], 8, promoted) if "outlier_index" in plane else None,
        k_sparse=sparse("k_sparse"), v_sparse=sparse("v_sparse"))


def _pack_codes(codes, bits: int, f: KVFormat, *, keys: bool) -> jax.Array:
    """Flat words [..., n]."""
    if f.layout == "mma_sm90":
        words = mma_sm90.pack_keys(codes, bits) if keys else mma_sm90.pack_values(codes, bits)
        return words.reshape(*codes.shape[:-2], -1)
    if f.layout == "tpu":
        return tpu_tiles.pack(codes, bits)
    words = pack_codes(codes, bits)
    return words.reshape(*words.shape[:-2], -1)


def _unpack_codes(words, bits: int, channels: int, f: KVFormat, keys: bool) -> jax.Array:
    """[..., Z, channels]."""
    if f.layout == "mma_sm90":
        return mma_sm90.unpack_keys(words, bits, channels) if keys else mma_sm90.unpack_values(words, bits, channels)
    if f.layout == "tpu":
        return tpu_tiles.unpack(words, bits, channels)
    return unpack_codes(words.reshape(*words.shape[:-1], packed_rows(f.page_size, bits), channels), bits, f.page_size)


def _pack_scales(q: Quantized, g: GroupFormat, f: KVFormat, *, keys: bool) -> jax.Array | None:
    """Flat words [..., n]; None for plain floats."""
    if q.scale is None:
        return None
    scalars = [float_bits(s, g.scale_dtype).reshape(*s.shape[:-2], -1) for s in (q.scale, q.offset) if s is not None]
    if keys and f.layout == "mma_sm90":
        return jnp.concatenate([mma_sm90.pack_pairs(s) for s in scalars], -1)
    fields = jnp.stack(scalars, axis=-1).reshape(*scalars[0].shape[:-1], -1)
    return _pack_fields(fields, g.scale_bits)


def _unpack_scales(words, channels: int, g: GroupFormat, f: KVFormat, keys: bool) -> list[jax.Array]:
    """[scale] or [scale, offset], float32 [..., *scale_shape]."""
    shape = g.scale_shape(f.page_size, channels)
    if keys and f.layout == "mma_sm90":
        scalars = jnp.split(mma_sm90.unpack_pairs(words), 2, axis=-1)
    else:
        count = 1 if g.symmetric else 2
        fields = _unpack_fields(words, g.scale_bits, count * shape[0] * shape[1])
        fields = fields.reshape(*words.shape[:-1], -1, count)
        scalars = [fields[..., i] for i in range(count)]
    return [bits_to_float32(s.reshape(*s.shape[:-1], *shape), g.scale_dtype) for s in scalars]


def _pack_fields(fields, width: int) -> jax.Array:
    """Words [..., ceil(n * width / 32)] of the `width`-bit fields [..., n], from the low bits of each word on."""
    per_word = 32 // width
    pad = align_to(fields.shape[-1], per_word) - fields.shape[-1]
    fields = jnp.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, pad)]).reshape(*fields.shape[:-1], -1, per_word)
    words = fields[..., 0]
    for i in range(1, per_word):
        words = words | (fields[..., i] << (i * width))
    return words


def _unpack_fields(words, width: int, count: int) -> jax.Array:
    shifts = jnp.arange(32 // width, dtype=jnp.uint32) * width
    fields = (words[..., None] >> shifts) & ((1 << width) - 1)
    return fields.reshape(*words.shape[:-1], -1)[..., :count]


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
