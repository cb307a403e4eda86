"""`close_page`: quantises and packs a full page of keys and values, once; `open_page` reads it back."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.close_page import reference
from pallas_kernels.kv_format import KVFormat

dispatch.register_mosaic("close_page")
dispatch.register("close_page", "reference", reference.close_page)

OPEN_DTYPES = ("bfloat16", "float32")


def close_page(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: int | jax.Array = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Quantises and packs full open pages.

    Args:
      open_k, open_v: [..., K, Z, H] bfloat16 or float32: keys and values of Z = page_size tokens, keys with promoted channels
        last. Values must be finite.
      kv_format: storage format.
      num_sinks: int32, broadcastable to the leading [...]: that many first tokens are kept out of the ranges of the key
        channels (they are read from the unquantised sinks; their codes are clipped and never read). Below page_size.
      implementation: None for the first of the platform's order that can serve the call, or a registered name.

    Returns:
      uint32 [..., K, words], words = `kv_format.page_layout(H).words`, in the order of `PageLayout.planes()`. Padding is 0.

    Raises:
      ValueError: shapes, dtypes or `num_sinks` that do not fit.
      NotImplementedError: no implementation can serve the call.
    """
    sinks = _check(open_k, open_v, kv_format, num_sinks)
    return dispatch.call("close_page", implementation, open_k, open_v, kv_format=kv_format, num_sinks=sinks)


def fake_quantize(
    open_k: jax.Array, open_v: jax.Array, *, kv_format: KVFormat, num_sinks: int | jax.Array = 0,
) -> tuple[jax.Array, jax.Array]:
    """What `open_page` gives back of `close_page`, bit for bit, without packing. Arguments and errors as of `close_page`.

    Returns:
      (k, v), float32 [..., K, Z, H].
    """
    sinks = _check(open_k, open_v, kv_format, num_sinks)
    return reference.fake_quantize(open_k, open_v, kv_format=kv_format, num_sinks=sinks)


def open_page(words: jax.Array, *, kv_format: KVFormat, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Dequantises closed pages.

    Args:
      words: uint32 [..., K, words] as `close_page` makes them.
      kv_format: the format they were closed with.
      head_dim: H.

    Returns:
      (k, v), float32 [..., K, Z, H], channels in the stored order.

    Raises:
      ValueError: dtype or number of words that does not fit the format.
    """
    expected = kv_format.page_layout(head_dim).words
    if words.dtype != jnp.uint32 or words.ndim < 1 or words.shape[-1] != expected:
        raise ValueError(
            f"{words.shape=}, {words.dtype=}: must be uint32 [..., {expected}] for {kv_format.name} and {head_dim=}")
    return reference.open_page(words, kv_format=kv_format, head_dim=head_dim)


def _check(open_k: jax.Array, open_v: jax.Array, kv_format: KVFormat, num_sinks: int | jax.Array) -> jax.Array:
    """`num_sinks` as int32. Raises ValueError as `close_page`."""
    if open_k.shape != open_v.shape or open_k.ndim < 3:
        raise ValueError(f"{open_k.shape=}, {open_v.shape=}: must be the same [..., K, Z, H]")
    for name, x in (("open_k", open_k), ("open_v", open_v)):
        if x.dtype.name not in OPEN_DTYPES:
            raise ValueError(f"{name}.dtype={x.dtype}: accepted are {', '.join(OPEN_DTYPES)}")
    if open_k.shape[-2] != kv_format.page_size:
        raise ValueError(f"{open_k.shape=}: the axis before the last must be page_size={kv_format.page_size}")
    if isinstance(num_sinks, int) and not 0 <= num_sinks < kv_format.page_size:
        raise ValueError(f"{num_sinks=}: must be at least 0 and below page_size={kv_format.page_size}")
    sinks = jnp.asarray(num_sinks, jnp.int32)
    lead = open_k.shape[:-3]
    if jnp.broadcast_shapes(sinks.shape, lead) != lead:
        raise ValueError(f"num_sinks.shape={sinks.shape}: must broadcast to {lead}, the leading axes of {open_k.shape=}")
    return sinks
