"""Grouped-query attention: project; hand the heads to an `Attend`; project back.

`Attend` is where a KV cache comes in: it gets the layer's index and its `Heads`, which are normed, clipped and rotated when it asks
for q, k, v, and returns the attention output. The model knows nothing of caches, and `causal_attention` below is the one that needs
none.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import rope
from moejax.config import ModelConfig
from moejax.layers import RMSNorm, linear, normal_param, out_std
from moejax.packed import PackedMatrices
from moejax.weight_rules import Formats
from pallas_kernels.pallas_utils import MASK_VALUE

# Heads of B x T tokens -> [B, T, N, H], in one layer
LayerAttend = Callable[["Heads"], jax.Array]
# The same with the layer's index in front.
Attend = Callable[[int, "Heads"], jax.Array]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, sliding_window: int | None = None) -> jax.Array:
    """Causal attention of T tokens among themselves; scores and softmax in float32.

    Args:
      q: [B, T, N, H].  k, v: [B, T, K, H], N a multiple of K.
      sliding_window: w lets the query at t see positions s with t - s < w; None, all of the past.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * H**-0.5
    back = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    visible = back >= 0 if sliding_window is None else (back >= 0) & (back < sliding_window)
    scores = jnp.where(visible[None, None, None], scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


class Attention(nnx.Module):
    """The attention of one block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.w_q_NHD = normal_param(rngs, (N, H, D), param_dtype)
        self.w_k_KHD = normal_param(rngs, (K, H, D), param_dtype)
        self.w_v_KHD = normal_param(rngs, (K, H, D), param_dtype)
        self.w_o_DNH = normal_param(rngs, (D, N, H), param_dtype, out_std(config))
        if config.attention_bias:
            self.b_q_NH = nnx.Param(jnp.zeros((N, H), param_dtype))
            self.b_k_KH = nnx.Param(jnp.zeros((K, H), param_dtype))
            self.b_v_KH = nnx.Param(jnp.zeros((K, H), param_dtype))
        if config.attention_out_bias:
            self.b_o_D = nnx.Param(jnp.zeros((D,), param_dtype))
        if config.qk_norm != "none":
            full = config.qk_norm == "full"
            self.q_norm = RMSNorm((N, H) if full else (H,), config.rms_norm_eps, param_dtype)
            self.k_norm = RMSNorm((K, H) if full else (H,), config.rms_norm_eps, param_dtype)
        self.packed = False  # see `pack`

    def pack(self, formats: Formats) -> None:
        """Keeps the projections packed from now on (`PackedMatrices`) in the formats "qkv", those three in one, and "out"."""
        D = self.config.hidden_size
        qkv = jnp.concatenate([w[...].reshape(-1, D) for w in (self.w_q_NHD, self.w_k_KHD, self.w_v_KHD)])
        self.qkv = PackedMatrices(formats["qkv"], qkv.T[None])
        self.out = PackedMatrices(formats["out"], self.w_o_DNH[...].reshape(D, -1).T[None])
        self.packed = True
        del self.w_q_NHD, self.w_k_KHD, self.w_v_KHD, self.w_o_DNH

    def __call__(self, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array, attend: LayerAttend) -> jax.Array:
        """x [B, T, D], cos and sin [B, T, 1, H/2] -> [B, T, D]."""
        return self.output(attend(Heads(self, self.projected(x_BTD), cos, sin)))

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] -> q [B, T, N, H], k and v [B, T, K, H], normed and clipped, before RoPE."""
        return self.normed(self.projected(x_BTD))

    def normed(self, projected: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v of `projected`, normed and clipped."""
        config, (q, k, v) = self.config, projected
        if config.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(a, -config.clip_qkv, config.clip_qkv) for a in (q, k, v))
        return q, k, v

    def projected(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """x [B, T, D] -> q [B, T, N, H], k and v [B, T, K, H], as they are projected."""
        config = self.config
        has_bias = config.attention_bias
        if self.packed:
            q, k, v = self._packed_heads(x_BTD, [self.b_q_NH, self.b_k_KH, self.b_v_KH] if has_bias else [])
        else:
            q = self._heads(x_BTD, self.w_q_NHD, self.b_q_NH if has_bias else None)
            k = self._heads(x_BTD, self.w_k_KHD, self.b_k_KH if has_bias else None)
            v = self._heads(x_BTD, self.w_v_KHD, self.b_v_KH if has_bias else None)
        return q, k, v

    def output(self, out_BTNH: jax.Array) -> jax.Array:
        """The heads' outputs [B, T, N, H] -> [B, T, D]."""
        B, T = out_BTNH.shape[:2]
        bias = self.b_o_D[...] if self.config.attention_out_bias else None
        if self.packed:
            return self.out(out_BTNH.reshape(B * T, -1), bias=None if bias is None else bias[None]).reshape(B, T, -1)
        w_o = self.w_o_DNH[...]
        return linear(out_BTNH.reshape(B, T, -1), w_o.reshape(w_o.shape[0], -1), bias)

    def _packed_heads(self, x_BTD: jax.Array, biases: list[nnx.Param]) -> list[jax.Array]:
        """q, k and v [B, T, heads, H]."""
        (B, T, D), N, K = x_BTD.shape, self.config.num_heads, self.config.num_kv_heads
        bias = jnp.concatenate([b[...].reshape(1, -1) for b in biases], axis=1) if biases else None
        heads = self.qkv(x_BTD.reshape(-1, D), bias=bias).reshape(B, T, N + 2 * K, -1)
        return jnp.split(heads, (N, N + K), axis=2)

    def _heads(self, x_BTD: jax.Array, w: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        heads, head_dim, width = w.shape
        y = linear(x_BTD, w[...].reshape(-1, width), None if bias is None else bias[...].reshape(-1))
        return y.reshape(*x_BTD.shape[:2], heads, head_dim)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of one layer as they are projected, and what is still to be done to them.

    Attributes:
      attention: whose they are.
      projected: q [B, T, N, H], k and v [B, T, K, H].
      cos, sin: [B, T, 1, H/2], of the tokens' positions.
    """

    attention: Attention
    projected: tuple[jax.Array, ...]
    cos: jax.Array
    sin: jax.Array

    def qkv(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v, normed, clipped and rotated."""
        q, k, v = self.attention.normed(self.projected)
        return rope.apply(q, self.cos, self.sin), rope.apply(k, self.cos, self.sin), v
