"""RMSNorm, projections and the gated MLP. Parameters keep `param_dtype` and are cast to the dtype of their input when used."""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import DenseMLP, ModelConfig
from moejax.packed import PackedMatrices
from moejax.weight_rules import Formats
from pallas_kernels.append_heads.reference import rms_norm
from pallas_kernels.packed_weights import interleave

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
INIT_STD = 0.02


@functools.cache  # one object an activation: kernels are compiled for each
def gated(hidden_act: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(gate, up) -> activation(gate) * up."""
    act = ACTIVATIONS[hidden_act]
    return lambda gate, up: act(gate) * up


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype, std: float = INIT_STD) -> nnx.Param:
    """A parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [B, T, in] @ w [out, in] (+ bias [out]) in the dtype of x.

    Weights are stored with the output axis first, as checkpoints have them: for one row in float32 on a CPU that is also the
    faster of the two orders.
    """
    y = jnp.einsum("...i,oi->...o", x, w.astype(x.dtype))
    return y if bias is None else y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32. `shape` is that of the trailing axes which are normalised together."""

    def __init__(self, shape: tuple[int, ...], eps: float, param_dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., *scale.shape] -> the same shape and dtype; the mean runs over all axes of `scale`."""
        return rms_norm(x, self.scale[...], self.eps)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with biases if the config asks for them."""

    def __init__(self, config: ModelConfig, mlp: DenseMLP, *, rngs: nnx.Rngs, param_dtype):
        D, F = config.hidden_size, mlp.intermediate_size
        self.gated = gated(config.hidden_act)
        self.w_gate_FD = normal_param(rngs, (F, D), param_dtype)
        self.w_up_FD = normal_param(rngs, (F, D), param_dtype)
        self.w_down_DF = normal_param(rngs, (D, F), param_dtype, out_std(config))
        if mlp.bias:
            self.b_gate_F = nnx.Param(jnp.zeros((F,), param_dtype))
            self.b_up_F = nnx.Param(jnp.zeros((F,), param_dtype))
            self.b_down_D = nnx.Param(jnp.zeros((D,), param_dtype))
        self.bias = mlp.bias
        self.packed = False  # see `pack`

    def pack(self, formats: Formats) -> None:
        """Keeps the matrices packed from now on (`PackedMatrices`) in the formats "gate_up", both in one, and "down"."""
        gate, up, down = (w[...].T[None] for w in (self.w_gate_FD, self.w_up_FD, self.w_down_DF))
        self.gate_up, self.down = PackedMatrices(formats["gate_up"], gate, up), PackedMatrices(formats["down"], down)
        self.packed = True
        del self.w_gate_FD, self.w_up_FD, self.w_down_DF

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D]."""
        if self.packed:
            return self._packed(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        gate = linear(x, self.w_gate_FD[...], self.b_gate_F[...] if self.bias else None)
        up = linear(x, self.w_up_FD[...], self.b_up_F[...] if self.bias else None)
        return linear(self.gated(gate, up), self.w_down_DF[...], self.b_down_D[...] if self.bias else None)

    def _packed(self, x_MD: jax.Array) -> jax.Array:
        bias_gate_up = interleave(self.b_gate_F[...], self.b_up_F[...])[None] if self.bias else None
        hidden = self.gate_up(x_MD, bias=bias_gate_up, glu=self.gated)
        return self.down(hidden, bias=self.b_down_D[...][None] if self.bias else None)


def out_std(config: ModelConfig) -> float:
    """Initial deviation of weights that write into the residual stream: its variance must not grow with depth."""
    return INIT_STD / (2 * config.num_layers) ** 0.5
