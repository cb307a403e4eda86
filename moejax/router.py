"""The router: token -> chosen experts and their weights. Its weights stay float32 whatever the model's dtype."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import MoE
from moejax.layers import normal_param
from pallas_kernels.fused_router import Routing, fused_router


class Router(nnx.Module):
    """Router logits -> scores -> top-k -> weights, by the layer's `RouterRule`."""

    def __init__(self, hidden_size: int, moe: MoE, *, rngs: nnx.Rngs):
        self.rule = moe.rule
        self.w_router_DE = normal_param(rngs, (hidden_size, moe.num_experts), jnp.float32)
        self.has_bias = False  # see `set_bias`

    def set_bias(self, bias_E: jax.Array) -> None:
        """Adds a bias, float32 [E], to the logits from now on. No checkpoint has one: it is for random weights."""
        self.b_router_E = nnx.Param(bias_E)
        self.has_bias = True

    def __call__(self, x_MD: jax.Array, valid: jax.Array | None) -> Routing:
        """x [tokens, D]; valid bool [tokens] or None: tokens marked False get weight 0 and wake no expert."""
        bias = self.b_router_E[...] if self.has_bias else None
        return fused_router(x_MD, self.w_router_DE[...], rule=self.rule, bias=bias, valid=valid)
