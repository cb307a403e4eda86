"""A mixture-of-experts layer: route, sort (token, expert) pairs by expert, two grouped matmuls, weighted sum back."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import DenseMLP, ModelConfig, MoE
from moejax.layers import MLP, gated, linear, normal_param, out_std
from moejax.packed import PackedMatrices
from moejax.router import Router
from moejax.weight_rules import Formats
from pallas_kernels.fused_router import Routing
from pallas_kernels.grouped_matmul import grouped_matmul

# Up to so many pairs are sorted by comparing each with every other: two small kernels on a GPU, where a sort is four.
MOST_COMPARED = 1024


def permute(x_TD: jax.Array, topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of x once per chosen expert, sorted by expert; pairs of one expert keep the order of their tokens.

    Args:
      x_TD: [T, D].
      topk_idx: int32 [T, X] expert ids; an id past the last expert sorts to the end.

    Returns:
      (rows [T*X, D], place int32 [T*X]): pair i, of token i // X, is row place[i].
    """
    pairs = topk_idx.reshape(-1)
    count = pairs.shape[0]
    if count > MOST_COMPARED:
        order = jnp.argsort(pairs, stable=True)
        return x_TD[order // topk_idx.shape[1]], jnp.argsort(order)
    index = jnp.arange(count, dtype=jnp.int32)
    before = (pairs < pairs[:, None]) | ((pairs == pairs[:, None]) & (index < index[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(place == index[:, None], index, 0), axis=1, dtype=jnp.int32)
    return x_TD[order // topk_idx.shape[1]], place


def combine(y_MD: jax.Array, place: jax.Array, topk_weights: jax.Array) -> jax.Array:
    """Undoes `permute` and sums each token's X rows times their weights, in float32. [T*X, D] -> [T, D] in y's dtype.

    The X terms of a token are added in the order of `topk_weights`, so a token's result does not depend on the other tokens.
    """
    T, X = topk_weights.shape
    y_TXD = y_MD[place].reshape(T, X, -1)
    return jnp.sum(y_TXD.astype(jnp.float32) * topk_weights[:, :, None], axis=1).astype(y_MD.dtype)


class Experts(nnx.Module):
    """Router, experts and the shared expert of one block."""

    def __init__(self, config: ModelConfig, moe: MoE, *, rngs: nnx.Rngs, param_dtype):
        D, E, F = config.hidden_size, moe.num_experts, moe.moe_intermediate_size
        self.gated = gated(config.hidden_act)
        self.router = Router(D, moe, rngs=rngs)
        self.w_gate_EDF = normal_param(rngs, (E, D, F), param_dtype)
        self.w_up_EDF = normal_param(rngs, (E, D, F), param_dtype)
        self.w_down_EFD = normal_param(rngs, (E, F, D), param_dtype, out_std(config))
        # True: every token passes every expert and unchosen ones weigh 0. For training, where no kernel is differentiable
        # and fast at once and E is small; set by `model.set_attributes(all_experts=True)`.
        self.all_experts = False
        self.packed = False  # see `pack`
        self.has_shared, self.has_shared_gate = moe.shared_intermediate_size > 0, moe.shared_gate
        if self.has_shared:
            shared = DenseMLP(intermediate_size=moe.shared_intermediate_size)
            self.shared = MLP(config, shared, rngs=rngs, param_dtype=param_dtype)
        if self.has_shared_gate:
            self.w_shared_gate_D = normal_param(rngs, (D,), param_dtype)

    def pack(self, formats: Formats) -> None:
        """Keeps the experts' matrices packed from now on (`PackedMatrices`) in the formats "gate_up", both in one, and "down";
        router and shared expert stay as they are."""
        self.gate_up = PackedMatrices(formats["gate_up"], self.w_gate_EDF[...], self.w_up_EDF[...])
        self.down = PackedMatrices(formats["down"], self.w_down_EFD[...])
        self.packed = True
        del self.w_gate_EDF, self.w_up_EDF, self.w_down_EFD

    def matrices(self) -> tuple[nnx.Module | nnx.Param, ...]:
        """All that is held of the experts themselves."""
        return (self.gate_up, self.down) if self.packed else (self.w_gate_EDF, self.w_up_EDF, self.w_down_EFD)

    def __call__(self, x_BTD: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, Routing]:
        """x [B, T, D], valid bool [B, T] or None -> ([B, T, D], Routing over the B*T tokens)."""
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        routing = self.router(x_MD, None if valid is None else valid.reshape(-1))
        out = self._all(x_MD, routing) if self.all_experts else self._routed(x_MD, routing)
        if self.has_shared:
            shared = self.shared(x_MD)
            if self.has_shared_gate:
                shared = shared * jax.nn.sigmoid(linear(x_MD, self.w_shared_gate_D[...][None]))
            out = out + shared
        return out.reshape(x_BTD.shape), routing

    def _routed(self, x_MD: jax.Array, routing: Routing) -> jax.Array:
        rows, place = permute(x_MD, routing.topk_idx)
        if self.packed:
            hidden = self.gate_up(rows, routing.group_sizes, glu=self.gated)
            return combine(self.down(hidden, routing.group_sizes), place, routing.topk_weights)
        gate = self._grouped(rows, self.w_gate_EDF, routing.group_sizes)
        up = self._grouped(rows, self.w_up_EDF, routing.group_sizes)
        out = self._grouped(self.gated(gate, up), self.w_down_EFD, routing.group_sizes)
        return combine(out, place, routing.topk_weights)

    def _all(self, x_MD: jax.Array, routing: Routing) -> jax.Array:
        w_gate, w_up, w_down = (w[...].astype(x_MD.dtype) for w in (self.w_gate_EDF, self.w_up_EDF, self.w_down_EFD))
        gate = jnp.einsum("md,edf->mef", x_MD, w_gate)
        up = jnp.einsum("md,edf->mef", x_MD, w_up)
        chosen = routing.topk_idx[..., None] == jnp.arange(w_gate.shape[0], dtype=jnp.int32)
        weights_ME = jnp.sum(jnp.where(chosen, routing.topk_weights[..., None], 0.0), axis=1).astype(x_MD.dtype)
        return jnp.einsum("mef,efd->md", self.gated(gate, up) * weights_ME[..., None], w_down)

    @staticmethod
    def _grouped(rows: jax.Array, w: nnx.Param, group_sizes: jax.Array) -> jax.Array:
        return grouped_matmul(rows, w[...].astype(rows.dtype), group_sizes)
