"""Choosing the next token, a row of the batch at a time: greedy, temperature, top-k, top-p, min-p.

Order of the filters: temperature, top-k, top-p of what top-k left, min-p. No sort: each filter keeps the tokens whose
probability reaches a threshold, and the threshold is found exactly by bisection on the bits of the float, some thirty passes
over the vocabulary. Tokens that tie with the last one kept are kept as well.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax.config import require_int, token_ids

FLOAT32_RANGE = (1e-37, 3e38)  # of its normal numbers
_ONE_BITS = 0x3F800000  # float32 1.0; the bits of non-negative floats are ordered as the floats are


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
      max_tokens: tokens to generate at most.
      temperature: divides the logits; 0 is greedy, whatever the filters.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens that together reach this probability; 1 keeps all.
      min_p: keep tokens of at least this fraction of the highest probability; 0 keeps all.
      seed: token i of a request is drawn with the key fold_in(key(seed), i), so it depends on nothing else in the batch.
      stop_token_ids: ids that end the request, beside the tokenizer's end-of-sequence ids.
      ignore_eos: do not stop at the tokenizer's end-of-sequence ids.

    Raises:
      ValueError: a field out of what is accepted; the message names field, value and accepted values.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        require_int("SamplingParams.max_tokens", self.max_tokens)
        require_int("SamplingParams.top_k", self.top_k, least=0)
        require_int("SamplingParams.seed", self.seed, least=0)
        least, most = FLOAT32_RANGE
        _require_range("temperature", self.temperature, 0, most, f"0, or from {least} to {most}")
        if self.temperature:  # must not become 0, which is greedy, in float32
            _require_range("temperature", self.temperature, least, most, f"0, or from {least} to {most}")
        _require_range("top_p", self.top_p, math.ulp(0.0), 1, "above 0 and at most 1")
        _require_range("min_p", self.min_p, 0, 1, "between 0 and 1")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ValueError(f"SamplingParams.stop_token_ids={self.stop_token_ids!r}: must be a list of token ids")
        object.__setattr__(self, "stop_token_ids", token_ids("SamplingParams.stop_token_ids", self.stop_token_ids))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """`SamplingParams` of every slot as arrays: temperature, top_p, min_p float32 [B]; top_k, seed int32 [B]."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def empty_rows(max_batch: int) -> RowSampling:
    """Greedy rows."""
    row = row_of(SamplingParams())
    return jax.tree.map(lambda scalar: jnp.full(max_batch, scalar), row)


def row_of(params: SamplingParams) -> RowSampling:
    """One request's values as scalars, to be written into a slot."""
    return RowSampling(jnp.float32(params.temperature), jnp.int32(params.top_k), jnp.float32(params.top_p),
                       jnp.float32(params.min_p), jnp.int32(params.seed))


def sample(logits: jax.Array, rows: RowSampling, num_generated: jax.Array, decodable: jax.Array) -> jax.Array:
    """The next token of every row.

    Args:
      logits: float32 [B, V].
      rows: how each row is sampled.
      num_generated: int32 [B], tokens generated so far.
      decodable: bool [V], the ids that may be chosen.

    Returns:
      int32 [B]. A batch of greedy rows pays for an argmax alone.
    """
    logits = jnp.where(decodable[None], logits, -jnp.inf)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        def row(logits, rows, count):
            probabilities = filtered(logits, rows)
            key = jax.random.fold_in(jax.random.key(rows.seed), count)
            noise = jax.random.gumbel(key, logits.shape)
            return jnp.argmax(jnp.where(probabilities > 0, jnp.log(probabilities) + noise, -jnp.inf)).astype(jnp.int32)

        return jnp.where(rows.temperature > 0, jax.vmap(row)(logits, rows, num_generated), greedy)

    return jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)


def filtered(logits: jax.Array, row: RowSampling) -> jax.Array:
    """Unnormalised probabilities of one row after all filters: float32 [V], 0 for what is out."""
    temperature = jnp.where(row.temperature > 0, row.temperature, 1.0)
    # Subtract before dividing: a tiny temperature must not turn the largest logit into infinity.
    p = jnp.exp((logits - jnp.max(logits)) / temperature)
    kept = jnp.where(row.top_k > 0, jnp.minimum(row.top_k, p.size), p.size)
    p = jnp.where(p >= _threshold(lambda t: jnp.sum(p >= t) >= kept), p, 0.0)
    mass = row.top_p * jnp.sum(p)
    nucleus = _threshold(lambda t: jnp.sum(jnp.where(p >= t, p, 0.0)) >= mass)
    p = jnp.where((row.top_p >= 1) | (p >= nucleus), p, 0.0)
    return jnp.where(p >= row.min_p, p, 0.0)


def _threshold(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest float32 t in [0, 1] for which `enough(t)` holds; it must hold at 0 and, once false, stay false."""

    def halve(_, bounds):
        low, high = bounds  # enough at low, not known to be at high + 1
        middle = low + (high - low + 1) // 2
        ok = enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.int32(_ONE_BITS)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _require_range(name: str, value, least: float, most: float, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"SamplingParams.{name}={value!r}: must be {accepted}")
