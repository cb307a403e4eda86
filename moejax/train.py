"""Trains a Transformer: next-token loss with the router's balance and z losses, AdamW, checkpoints that resume bit for bit.

    config = TrainConfig(num_steps=1000, ...)
    trainer = Trainer(model, config, mesh)
    state = Checkpoints(folder).restore(trainer) or trainer.init()   # moejax.train_checkpoints
    state, metrics = trainer.run(state, batches)             # batches int32 [steps, B, T + 1]
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.config import require_in, require_int, require_positive
from moejax.model import Transformer
from moejax.sharding import map_params, param_shardings
from pallas_kernels.fused_router import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train.

    Attributes:
      num_steps: optimizer steps; the learning rate falls along a cosine over all of them after `warmup_steps`.
      batch_size: sequences a step, over all devices.
      seq_len: tokens a sequence.
      learning_rate, final_learning_rate: peak and end.
      weight_decay: AdamW's, on matrices alone (no norm scales, no biases).
      clip_norm: the gradient's global norm is cut to this.
      balance_loss: weight of the load-balancing loss (`load_balancing_loss`).
      z_loss: weight of the router's z loss (`router_z_loss`).
      dtype: of the computation; parameters and optimizer state are float32.
      seed: of the initial parameters and of the data's order.
      steps_per_call: steps a jitted call makes; divides eval_every, save_every and num_steps.
      eval_every, save_every: steps between evaluations on held-out text / between checkpoints.

    Raises:
      ValueError: a field out of what is accepted.
    """

    num_steps: int = 1000
    batch_size: int = 16
    seq_len: int = 1024
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    balance_loss: float = 0.01
    z_loss: float = 0.001
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    steps_per_call: int = 10
    eval_every: int = 100
    save_every: int = 100

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "seq_len", "steps_per_call", "eval_every", "save_every"):
            require_int(f"TrainConfig.{name}", getattr(self, name))
        require_int("TrainConfig.warmup_steps", self.warmup_steps, least=0)
        require_int("TrainConfig.seed", self.seed, least=0)
        for name in ("learning_rate", "final_learning_rate", "clip_norm"):
            require_positive(f"TrainConfig.{name}", getattr(self, name))
        for name in ("weight_decay", "balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"TrainConfig.{name}={getattr(self, name)!r}: must be a number of at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name}={getattr(self, name)!r}: must be at least 0 and below 1")
        require_in("TrainConfig.dtype", self.dtype, ("bfloat16", "float32"))
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"TrainConfig.warmup_steps={self.warmup_steps}: must be below num_steps={self.num_steps}")
        for name in ("num_steps", "eval_every", "save_every"):
            if getattr(self, name) % self.steps_per_call:
                raise ValueError(f"TrainConfig.{name}={getattr(self, name)}: must be a multiple of "
                                 f"steps_per_call={self.steps_per_call}")


class TrainState(NamedTuple):
    """Everything a step changes: float32 `params`, the optimizer's state, and the number of steps made, int32 []."""

    params: nnx.State
    opt_state: Any
    step: jax.Array


def next_token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of each target, float32 [B, T]. logits float32 [B, T, V], targets int32 [B, T]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def load_balancing_loss(routing: Routing) -> jax.Array:
    """E * sum_e(f_e * p_e), 1 when balanced: f_e is expert e's share of the chosen pairs, p_e its mean softmax probability.

    Fedus, Zoph, Shazeer, "Switch Transformers", 2021, section 2.2, with top-k pairs in place of the one choice.
    """
    share = routing.group_sizes.astype(jnp.float32) / jnp.sum(routing.group_sizes).astype(jnp.float32)
    probability = jnp.mean(jax.nn.softmax(routing.router_logits, axis=-1), axis=0)
    return routing.router_logits.shape[-1] * jnp.sum(share * probability)


def router_z_loss(routing: Routing) -> jax.Array:
    """Mean squared log-sum-exp of the router logits, which keeps them small. Zoph et al., "ST-MoE", 2022, equation 5."""
    return jnp.mean(jax.nn.logsumexp(routing.router_logits, axis=-1) ** 2)


def is_decayed(path: tuple[Any, ...]) -> bool:
    """Weight decay applies to projections, experts, embeddings; not to norm scales and biases."""
    return path[-1].startswith(("w_", "embedding_", "lm_head_"))


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, with warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps, config.final_learning_rate)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay,
                    mask=lambda params: map_params(lambda path, _: is_decayed(path), params)))


class Trainer:
    """Jitted training and evaluation of one model on one mesh, data-parallel over its "data" axis.

    Args:
      model: what to train; its parameters are the initial ones. Computes in `config.dtype`.
      config: how.
      mesh: from `moejax.sharding.make_mesh`; "data" must divide the batch size.
    """

    def __init__(self, model: Transformer, config: TrainConfig, mesh: Mesh):
        if config.batch_size % mesh.shape["data"]:
            raise ValueError(f"TrainConfig.batch_size={config.batch_size}: must be a multiple of the mesh's "
                             f"data={mesh.shape['data']}")
        self.config, self.mesh = config, mesh
        self.optimizer = make_optimizer(config)
        self.graphdef, self._initial = nnx.split(model)
        self._steps = jax.jit(self._run_steps, donate_argnums=0)
        self._losses = jax.jit(self._window_losses)

    def init(self) -> TrainState:
        """The state before the first step, laid out over the mesh."""
        copied = jax.tree.map(jnp.copy, self._initial)  # `run` donates the state, and the initial parameters must outlive it
        shardings = param_shardings(copied, self.mesh)
        params = jax.device_put(copied, shardings)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        opt_state = optax.tree.map_params(
            self.optimizer, jax.device_put, self.optimizer.init(params), shardings,
            transform_non_params=lambda x: jax.device_put(x, replicated))
        return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), replicated))

    def run(self, state: TrainState, batches: np.ndarray) -> tuple[TrainState, dict[str, jax.Array]]:
        """One call of `len(batches)` steps. `state` is donated.

        Args:
          batches: [steps, B, T + 1] token ids.

        Returns:
          (state, metrics): each metric float32 [steps]: loss, balance, z, grad_norm, max_expert_share.
        """
        return self._steps(state, self._put(batches, PartitionSpec(None, "data")))

    def evaluate(self, params: nnx.State, windows: np.ndarray) -> float:
        """Mean negative log-likelihood (nats a token) over windows [W, T + 1]."""
        rows = self.config.batch_size
        total = 0.0
        for first in range(0, len(windows), rows):
            part = windows[first:first + rows]
            padded = np.concatenate([part, np.repeat(part[-1:], rows - len(part), axis=0)])
            losses = self._losses(params, self._put(padded, PartitionSpec("data")))
            total += float(np.asarray(losses, np.float64)[:len(part)].sum())
        return total / len(windows)

    def _put(self, tokens: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(tokens.astype(np.int32), NamedSharding(self.mesh, spec))

    def _run_steps(self, state: TrainState, batches: jax.Array):
        return jax.lax.scan(self._step, state, batches)

    def _step(self, state: TrainState, tokens: jax.Array):
        (_, metrics), grads = jax.value_and_grad(self._loss, has_aux=True)(state.params, tokens)
        metrics["grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    def _loss(self, params: nnx.State, tokens: jax.Array):
        out = nnx.merge(self.graphdef, params)(tokens[:, :-1])
        loss = jnp.mean(next_token_loss(out.logits, tokens[:, 1:]))
        routed = [r for r in out.router if r is not None]
        mean = functools.partial(_mean_over, routed)
        metrics = {"loss": loss, "balance": mean(load_balancing_loss), "z": mean(router_z_loss),
                   "max_expert_share": mean(lambda r: jnp.max(r.group_sizes) / jnp.sum(r.group_sizes))}
        total = loss + self.config.balance_loss * metrics["balance"] + self.config.z_loss * metrics["z"]
        return total, metrics

    def _window_losses(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(self.graphdef, params)(tokens[:, :-1]).logits
        return jnp.mean(next_token_loss(logits, tokens[:, 1:]), axis=-1)


def _mean_over(routed: list[Routing], fn) -> jax.Array:
    """Mean of fn over the MoE layers; 0 for a dense model."""
    values = [fn(r) for r in routed]
    return jnp.mean(jnp.stack(values)) if values else jnp.zeros((), jnp.float32)
