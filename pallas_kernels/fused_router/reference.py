"""Plain JAX `fused_router`: the specification of every routing rule."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fused_router.specs import RouterRule


class Routing(NamedTuple):
    """What a router decided for T tokens.

    Attributes:
      topk_idx: int32 [T, X], chosen experts, best first; E (out of range) in invalid rows.
      topk_weights: float32 [T, X], their weights in the sum; 0 in invalid rows.
      router_logits: float32 [T, E], before any score function.
      group_sizes: int32 [E], (token, choice) pairs an expert serves; sums to X * valid tokens.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    router_logits: jax.Array
    group_sizes: jax.Array


def fused_router(
    x_TD: jax.Array, w_DE: jax.Array, *, rule: RouterRule, bias: jax.Array | None, correction_bias: jax.Array | None,
    valid: jax.Array | None,
) -> Routing:
    """See `pallas_kernels.fused_router.fused_router`."""
    num_experts = w_DE.shape[1]
    logits_TE = jnp.dot(x_TD.astype(jnp.float32), w_DE, precision=jax.lax.Precision.HIGHEST)
    if bias is not None:
        logits_TE = logits_TE + bias
    scores_TE = scores_of(logits_TE, rule)
    choice_TE = scores_TE if correction_bias is None else scores_TE + correction_bias
    if rule.n_group > 1:
        choice_TE = _keep_best_groups(choice_TE, rule)
    _, topk_idx = jax.lax.top_k(choice_TE, rule.num_experts_per_tok)
    topk_weights = weights_of(jnp.take_along_axis(scores_TE, topk_idx, axis=-1), rule)
    if valid is not None:
        topk_idx = jnp.where(valid[:, None], topk_idx, num_experts)
        topk_weights = jnp.where(valid[:, None], topk_weights, 0.0)
    chosen = topk_idx[..., None] == jnp.arange(num_experts, dtype=topk_idx.dtype)
    group_sizes = jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
    return Routing(topk_idx, topk_weights, logits_TE, group_sizes)


def scores_of(logits_TE: jax.Array, rule: RouterRule) -> jax.Array:
    """[T, E]."""
    match rule.score_fn:
        case "softmax":
            return jax.nn.softmax(logits_TE, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits_TE)
        case "sqrt_softplus":
            return jnp.sqrt(jax.nn.softplus(logits_TE))
        case "topk_softmax":
            return logits_TE


def weights_of(scores_TX: jax.Array, rule: RouterRule) -> jax.Array:
    """The weights [T, X] of chosen experts with these scores."""
    weights = jax.nn.softmax(scores_TX, axis=-1) if rule.score_fn == "topk_softmax" else scores_TX
    if rule.norm_topk_prob:
        # The tiny term only matters where all the chosen scores underflow: weights 0 and not NaN.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * rule.routed_scaling_factor


def _keep_best_groups(choice_TE: jax.Array, rule: RouterRule) -> jax.Array:
    """`choice_TE` with minus infinity for the experts of groups that are not kept."""
    tokens, experts = choice_TE.shape
    grouped = choice_TE.reshape(tokens, rule.n_group, experts // rule.n_group)
    group_score = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    _, kept_idx = jax.lax.top_k(group_score, rule.topk_group)
    kept = (kept_idx[..., None] == jnp.arange(rule.n_group, dtype=kept_idx.dtype)).any(axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(tokens, experts)
