"""Plain JAX `append_heads`, and the formulas of RMSNorm and RoPE."""
from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the axes of `scale`, which are x's last ones; computed in float32, in the dtype of x.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    x32 = x.astype(jnp.float32)
    inv = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    return (x32 * inv * scale).astype(x.dtype)


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE (Su et al., RoFormer, 2021) of x [..., H] with channel i and i + H / 2 as pairs; in float32, in the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def write(buffer: jax.Array, new: jax.Array, offsets: jax.Array, q_lens: jax.Array) -> jax.Array:
    """buffer [B, K, Z, H] with token i < q_lens[b] of new [B, T, K, H] at offsets[b] + i; what falls outside is dropped."""
    source = jnp.arange(buffer.shape[2], dtype=jnp.int32)[None] - offsets[:, None]
    written = (source >= 0) & (source < q_lens[:, None])
    new = new.astype(buffer.dtype)
    if new.shape[1] > 1:
        new = jnp.take_along_axis(new, jnp.clip(source, 0, new.shape[1] - 1)[:, :, None, None], axis=1)
    return jnp.where(written[:, None, :, None], new.swapaxes(1, 2), buffer)


def append_heads(heads, cos, sin, pages, kv_lens, q_lens, scales, *, num_heads, eps) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """See `pallas_kernels.append_heads.append_heads`. `pages`: two or four buffers; `scales`: two [H], or none."""
    K = pages[0].shape[1]
    q, k, v = jnp.split(heads, (num_heads, num_heads + K), axis=1)
    if scales:
        q, k = rms_norm(q, scales[0], eps), rms_norm(k, scales[1], eps)
    q, k = (rotate_pairs(x, cos[:, None], sin[:, None]) for x in (q, k))
    places = [kv_lens % pages[0].shape[2]] * 2 + [kv_lens] * 2
    new = tuple(write(page, x[:, None], place, q_lens) for page, x, place in zip(pages, (k, v, k, v), places))
    return q, new
