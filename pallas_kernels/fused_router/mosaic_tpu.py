"""`fused_router` on TPU, in Pallas Mosaic TPU: logits, scores, groups, top-k, weights and the experts' loads in one kernel.

The grid runs over tiles of tokens and, inside, over tiles of the model's width, whose products add up in the block of logits. With
the last of them a tile of tokens is routed: experts lie along lanes, and each of the X choices is a maximum over them, its lowest
lane, and a mask. What a choice needs stays in registers and VMEM; XLA's top_k sorts.

Gradients are those of the reference, which is computed again for them.
"""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_router import reference
from pallas_kernels.fused_router.reference import Routing
from pallas_kernels.fused_router.specs import RouterRule
from pallas_kernels.pallas_utils import align_to

MAX_EXPERTS, MAX_CHOICES = 1024, 32
TOKENS, WIDTH = 128, 1024  # of a tile, at most
LANES, SUBLANES = 128, 16


def fused_router(
    x_TD: jax.Array, w_DE: jax.Array, *, rule: RouterRule, bias: jax.Array | None, correction_bias: jax.Array | None,
    valid: jax.Array | None, interpret: Any = False,
) -> Routing:
    """See `pallas_kernels.fused_router.fused_router`.

    Args:
      interpret: `pltpu.InterpretParams()` to run on CPU.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    _refuse(x_TD, w_DE, rule)
    experts = w_DE.shape[1]
    zeros = jnp.zeros(experts, jnp.float32)
    valid = jnp.ones(x_TD.shape[0], bool) if valid is None else valid
    biases = (zeros if b is None else b for b in (bias, correction_bias))
    return _differentiable(rule, interpret, x_TD, w_DE, *biases, valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(rule: RouterRule, interpret, x, w, bias, correction_bias, valid) -> Routing:
    return _call(rule, interpret, x, w, bias, correction_bias, valid)


def _forward(rule: RouterRule, interpret, *arrays):
    return _call(rule, interpret, *arrays), arrays


def _backward(rule: RouterRule, interpret, arrays, cotangent: Routing):
    *floats, valid = arrays

    def outputs(x, w, bias, correction_bias):
        routing = reference.fused_router(x, w, rule=rule, bias=bias, correction_bias=correction_bias, valid=valid)
        return routing.topk_weights, routing.router_logits

    return *jax.vjp(outputs, *floats)[1]((cotangent.topk_weights, cotangent.router_logits)), None


_differentiable.defvjp(_forward, _backward)


def _refuse(x, w, rule: RouterRule) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"mosaic_tpu: x.dtype={x.dtype}: only bfloat16, float32")
    if not x.size:
        raise NotImplementedError(f"mosaic_tpu: {x.shape=}: no token to route")
    if w.shape[1] > MAX_EXPERTS:
        raise NotImplementedError(f"mosaic_tpu: {w.shape[1]} experts: at most {MAX_EXPERTS}")
    if rule.num_experts_per_tok > MAX_CHOICES:
        raise NotImplementedError(f"mosaic_tpu: num_experts_per_tok={rule.num_experts_per_tok}: at most {MAX_CHOICES}")


def tile_sizes(tokens: int, width: int) -> tuple[int, int]:
    """(tokens, width) of a tile. A width that no multiple of 128 up to WIDTH divides is one tile: weights are whole then."""
    tile = next((n for n in range(WIDTH, 0, -LANES) if width % n == 0), width)
    return min(align_to(tokens, SUBLANES), TOKENS), tile


def _call(rule: RouterRule, interpret, x, w, bias, correction_bias, valid) -> Routing:
    (tokens, width), experts, choices = x.shape, w.shape[1], rule.num_experts_per_tok
    tile, depth = tile_sizes(tokens, width)
    padding = align_to(tokens, tile) - tokens
    x, valid = jnp.pad(x, ((0, padding), (0, 0))), jnp.pad(valid, (0, padding))
    row = pl.BlockSpec((1, experts), lambda i, d: (0, 0))
    idx, weights, logits, sizes = pl.pallas_call(
        functools.partial(_kernel_body, rule), grid=((tokens + padding) // tile, width // depth),
        in_specs=[pl.BlockSpec((tile, depth), lambda i, d: (i, d)), pl.BlockSpec((depth, experts), lambda i, d: (d, 0)), row, row,
                  pl.BlockSpec((tile, 1), lambda i, d: (i, 0))],
        out_specs=[*[pl.BlockSpec((tile, n), lambda i, d: (i, 0)) for n in (choices, choices, experts)], row],
        out_shape=[jax.ShapeDtypeStruct((tokens + padding, n), dtype)
                   for n, dtype in ((choices, jnp.int32), (choices, jnp.float32), (experts, jnp.float32))]
        + [jax.ShapeDtypeStruct((1, experts), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")), name="fused_router",
        interpret=interpret,
    )(x, w, bias[None], correction_bias[None], valid.astype(jnp.int32)[:, None])
    return Routing(idx[:tokens], weights[:tokens], logits[:tokens], sizes[0])


def _kernel_body(rule: RouterRule, x_ref, w_ref, bias_ref, correction_ref, valid_ref, idx_ref, weights_ref, logits_ref, sizes_ref):
    """Blocks: x [t, d], w [d, E], biases [1, E], valid int32 [t, 1] -> ids, weights [t, X], logits [t, E], sizes [1, E]."""
    @pl.when(pl.program_id(1) == 0)
    def _start():
        logits_ref[...] = jnp.broadcast_to(bias_ref[...], logits_ref.shape)

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _no_pairs():
        sizes_ref[...] = jnp.zeros_like(sizes_ref)

    logits_ref[...] += jnp.dot(x_ref[...].astype(jnp.float32), w_ref[...], precision=lax.Precision.HIGHEST,
                               preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _route():
        valid = valid_ref[...] != 0
        idx, weights, taken = _choose(logits_ref[...], correction_ref[...], rule)
        idx_ref[...] = jnp.where(valid, idx, logits_ref.shape[1])
        weights_ref[...] = jnp.where(valid, weights, 0.0)
        sizes_ref[...] += jnp.sum((taken & valid).astype(jnp.int32), axis=0, keepdims=True)


def _choose(logits, correction, rule: RouterRule) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(ids int32 [t, X], weights float32 [t, X], bool [t, E]: chosen) of logits [t, E]."""
    scores = reference.scores_of(logits, rule)
    choice = scores + correction
    if rule.n_group > 1:
        choice = _keep_best_groups(choice, rule)
    idx, taken = _top(choice, rule.num_experts_per_tok)
    lane, column = _lanes(choice), _lanes(idx)
    chosen = jnp.zeros_like(idx)
    for i in range(rule.num_experts_per_tok):
        at_i = jnp.sum(jnp.where(lane == _pick(idx, i), scores, 0.0), axis=1, keepdims=True)
        chosen = jnp.where(column == i, at_i, chosen)
    return idx.astype(jnp.int32), reference.weights_of(chosen, rule), taken


def _keep_best_groups(choice, rule: RouterRule) -> jax.Array:
    """`choice` [t, E] with minus infinity for the experts of groups that are not kept."""
    size = choice.shape[1] // rule.n_group
    lane = lax.broadcasted_iota(jnp.int32, choice.shape, 1)
    group = lax.broadcasted_iota(jnp.int32, (choice.shape[0], rule.n_group), 1)
    scores = jnp.zeros(group.shape, jnp.float32)
    for g in range(rule.n_group):
        inside = jnp.where((lane >= g * size) & (lane < (g + 1) * size), choice, -jnp.inf)
        best = jnp.max(inside, axis=1, keepdims=True)
        first = jnp.min(jnp.where(inside == best, _lanes(choice), float(lane.shape[1])), axis=1, keepdims=True)
        second = jnp.max(jnp.where(_lanes(choice) == first, -jnp.inf, inside), axis=1, keepdims=True)
        scores = jnp.where(group == g, best + second, scores)
    kept, _ = _top(scores, rule.topk_group)
    keep = jnp.zeros(choice.shape, bool)
    for i in range(rule.topk_group):
        first = _pick(kept, i) * size
        keep |= (_lanes(choice) >= first) & (_lanes(choice) < first + size)
    return jnp.where(keep, choice, -jnp.inf)


def _top(x, count: int) -> tuple[jax.Array, jax.Array]:
    """(columns of the `count` largest of each row, as float32 [t, count], best first; bool [t, n]: they). Ties: lower column."""
    lane = _lanes(x)
    column = lax.broadcasted_iota(jnp.int32, (x.shape[0], count), 1)
    idx, taken = jnp.zeros(column.shape, jnp.float32), jnp.zeros(x.shape, bool)
    for i in range(count):
        best = jnp.max(jnp.where(taken, -jnp.inf, x), axis=1, keepdims=True)
        first = jnp.min(jnp.where((x == best) & ~taken, lane, float(x.shape[1])), axis=1, keepdims=True)
        idx = jnp.where(column == i, first, idx)
        taken |= lane == first
    return idx, taken


def _lanes(x) -> jax.Array:
    """The column of each element, as float32: lanes are reduced in that dtype."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 1).astype(jnp.float32)


def _pick(x, column: int) -> jax.Array:
    """x[:, column:column + 1]."""
    return lax.slice_in_dim(x, column, column + 1, axis=1)
