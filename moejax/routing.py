"""Which experts a model with random weights wakes: biases that make its routers choose with given frequencies, and what was chosen.

Random routers choose nearly uniformly, real ones do not, and how many different experts a step hits decides how many bytes it
reads. A frequency is the share of tokens that choose an expert; those of a layer sum to X. Tokens are taken to choose
independently of each other, as tokens of different sequences nearly do.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import decode
from moejax.config import ModelConfig, MoE
from moejax.decode_state import DecodeSpec, DecodeState, Params
from moejax.experts import Experts
from moejax.kv_cache import Placement
from moejax.model import Transformer
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.fused_router.reference import fused_router

# One entry a layer: float64 [E], or None for a dense layer.
Frequencies = tuple[np.ndarray | None, ...]

FIT_TOKENS = 4096
FIT_STEPS = 60


def named(routing: str, config: ModelConfig, seed: int = 0) -> Frequencies | None:
    """The frequencies that a name stands for.

    Args:
      routing: "router" for what random routers choose (None), "zipf:S" (`zipf` with exponent S, the order of the experts drawn anew
        for each layer), or "recorded:FILE" (`load`).

    Raises:
      ValueError: another name, an exponent that is no number from 0 to 8, a file that does not fit; or a model without experts.
    """
    if routing == "router":
        return None
    if not any(isinstance(layer.mlp, MoE) for layer in config.layers):
        raise ValueError(f"{routing=}: the model has no experts")
    kind, colon, value = routing.partition(":")
    if kind == "recorded" and value:
        return load(value, config)
    if kind != "zipf" or not colon:
        raise ValueError(f"{routing=}: accepted are router, zipf:EXPONENT, recorded:FILE")
    try:
        exponent = float(value)
    except ValueError:
        exponent = np.nan
    if not 0 <= exponent <= 8:
        raise ValueError(f"{routing=}: the exponent must be a number from 0 to 8")
    rng = np.random.default_rng(seed)
    return tuple(
        rng.permutation(zipf(layer.mlp.num_experts, layer.mlp.rule.num_experts_per_tok, exponent))
        if isinstance(layer.mlp, MoE) else None for layer in config.layers)


def zipf(num_experts: int, num_experts_per_tok: int, exponent: float) -> np.ndarray:
    """Frequencies proportional to rank**-exponent that sum to `num_experts_per_tok`; none exceeds 1, as no token chooses an expert
    twice: what would, is 1, and the others share the rest in proportion."""
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    for always in range(num_experts_per_tok + 1):
        rest = (num_experts_per_tok - always) * weights[always:] / weights[always:].sum()
        if always == num_experts or rest[0] <= 1:
            return np.concatenate([np.ones(always), rest])
    raise AssertionError("at most X experts can be chosen by every token")


def expected_hits(frequencies: np.ndarray, batch: int) -> float:
    """Experts of a layer that `batch` tokens which choose independently wake, in the mean."""
    return float(np.sum(1 - (1 - np.clip(frequencies, 0, 1)) ** batch))


def uniform(layer: MoE) -> np.ndarray:
    """Equal frequencies."""
    return np.full(layer.num_experts, layer.rule.num_experts_per_tok / layer.num_experts)


def dump(frequencies: Frequencies, tokens: int, about: str = "") -> str:
    """The JSON text that `load` reads; `tokens`, on how many they were counted."""
    layers = {str(i): [float(x) for x in f] for i, f in enumerate(frequencies) if f is not None}
    return json.dumps({"about": about, "tokens": tokens, "frequencies": layers}) + "\n"


def load(path: str | os.PathLike, config: ModelConfig) -> Frequencies:
    """Frequencies of a file that `experiments.routing` wrote.

    Raises:
      ValueError: it is none, or of a model with other layers, numbers of experts, or experts a token.
      OSError: it cannot be read.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        recorded = {int(layer): np.asarray(values, np.float64) for layer, values in data["frequencies"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not a file of recorded frequencies ({type(e).__name__}: {e})") from None
    wanted = {i: layer.mlp for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoE)}
    if recorded.keys() != wanted.keys():
        raise ValueError(f"{path}: has frequencies of layers {sorted(recorded)}, the model has experts in layers {sorted(wanted)}")
    for i, moe in wanted.items():
        f, X = recorded[i], moe.rule.num_experts_per_tok
        if f.shape != (moe.num_experts,):
            raise ValueError(f"{path}: layer {i} has frequencies {f.shape}, the model {moe.num_experts} experts")
        if not (np.all(f >= 0) and np.all(f <= 1) and abs(f.sum() - X) < 1e-3 * X):
            raise ValueError(f"{path}: layer {i}: frequencies must be from 0 to 1 and sum to num_experts_per_tok={X}, "
                             f"they sum to {f.sum():.4g}")
    return tuple(recorded.get(i) for i in range(config.num_layers))


def skew(model: Transformer, frequencies: Frequencies, seed: int = 0) -> None:
    """Gives every router of a model with random weights the bias with which its experts are chosen so often."""
    keys = jax.random.split(jax.random.key(seed), len(model.blocks))
    for key, block, layer_frequencies in zip(keys, model.blocks, frequencies):
        if isinstance(block.mlp, Experts) and layer_frequencies is not None:
            router = block.mlp.router
            router.set_bias(_bias(key, router.w_router_DE[...], jnp.asarray(layer_frequencies, jnp.float32), router.rule))


@functools.partial(jax.jit, static_argnames="rule")
def _bias(key: jax.Array, w_DE: jax.Array, frequencies_E: jax.Array, rule: RouterRule) -> jax.Array:
    """float32 [E]: the bias of the logits with which normed random tokens choose experts with these frequencies.

    Were all logits normal and the last place among the chosen always at 0, it would be the quantile of the frequency times the
    deviation of the logit. From there, what is chosen too seldom is raised by the difference of the quantiles.
    """
    D, E = w_DE.shape
    noise_TE = jax.random.normal(key, (FIT_TOKENS, D), jnp.float32) @ w_DE
    std_E = jnp.linalg.norm(w_DE, axis=0)
    least = 0.5 / FIT_TOKENS

    def quantile(f: jax.Array) -> jax.Array:
        return jax.scipy.special.ndtri(jnp.clip(f, least, 1 - least))

    def step(_, bias: jax.Array) -> jax.Array:
        chosen = fused_router(noise_TE + bias, jnp.eye(E), rule=rule, bias=None, correction_bias=None, valid=None).group_sizes
        return bias + 0.5 * std_E * (quantile(frequencies_E) - quantile(chosen / FIT_TOKENS))

    return jax.lax.fori_loop(0, FIT_STEPS, step, std_E * quantile(frequencies_E))


@dataclasses.dataclass(frozen=True)
class Observed:
    """What the routers of a decode loop did in some steps.

    Attributes:
      steps: how many.
      hits: one entry a layer: the mean number of different experts that a step woke; None for a dense layer.
      frequencies: one entry a layer, of the tokens of all steps.
    """

    steps: int
    hits: tuple[float | None, ...]
    frequencies: Frequencies

    @property
    def mean_hits(self) -> float | None:
        """Mean of `hits` over the layers with experts; None without."""
        hits = [h for h in self.hits if h is not None]
        return float(np.mean(hits)) if hits else None


def observe(
    spec: DecodeSpec, params: Params, state: DecodeState, decodable: jax.Array, steps: int,
) -> tuple[DecodeState, Observed]:
    """Greedy decode steps of all active slots whose routing is looked at; the state is donated.

    Args:
      decodable: bool [V], ids that may be chosen.
      steps: at least 1.
    """
    rows = []
    for _ in range(steps):
        state, group_sizes = _routed_step(spec, params, state, decodable)
        rows.append([None if s is None else np.asarray(s) for s in group_sizes])
    layers = [None if sizes[0] is None else np.stack(sizes) for sizes in zip(*rows)]
    return state, _observed(layers, spec.config)


def _observed(layers: Sequence[np.ndarray | None], config: ModelConfig) -> Observed:
    """Of pairs [steps, E] that each expert served, one entry a layer."""
    hits: list[float | None] = []
    frequencies: list[np.ndarray | None] = []
    for sizes, layer in zip(layers, config.layers):
        if sizes is None or not isinstance(layer.mlp, MoE):
            hits.append(None)
            frequencies.append(None)
            continue
        hits.append(float(np.mean(np.sum(sizes > 0, axis=1))))
        frequencies.append(sizes.sum(0) / (sizes.sum() / layer.mlp.rule.num_experts_per_tok))
    return Observed(max(len(s) for s in layers if s is not None) if any(h is not None for h in hits) else 0,
                    tuple(hits), tuple(frequencies))


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def _routed_step(
    spec: DecodeSpec, params: Params, state: DecodeState, decodable: jax.Array,
) -> tuple[DecodeState, tuple[jax.Array | None, ...]]:
    """A greedy decode step: (state, int32 [E] a layer: pairs that each expert served)."""
    watched: Any = _Watched(spec)
    q_lens = state.active.astype(jnp.int32)
    where = Placement(state.block_table, state.kv_lens, q_lens)
    logits, caches = decode.forward(watched, params, state.caches, state.last_tokens[:, None], where)
    tokens = jnp.argmax(jnp.where(decodable, logits[:, 0], -jnp.inf), axis=-1).astype(jnp.int32)
    state = dataclasses.replace(
        state, caches=caches, kv_lens=state.kv_lens + q_lens, num_generated=state.num_generated + q_lens,
        last_tokens=jnp.where(state.active, tokens, state.last_tokens))
    return state, watched.group_sizes


class _Watched:
    """A `DecodeSpec` whose model leaves what its routers decided in `group_sizes`."""

    def __init__(self, spec: DecodeSpec):
        self._spec = spec
        self.group_sizes: tuple[jax.Array | None, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def model(self, params: Params):
        model = self._spec.model(params)

        def call(*args, **kwargs):
            output = model(*args, **kwargs)
            self.group_sizes = tuple(None if r is None else r.group_sizes for r in output.router)
            return output

        return call
