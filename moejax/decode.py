"""Decoding over one donated state: prefill a slot in pieces, insert it, generate for all slots at once.

Everything here is a pure function under `jax.jit`. What is static is one `DecodeSpec`; the state is donated, so pools and open
pages are updated in place. Shapes come in few sizes (`piece_lengths`), and `compilations` counts every one that was traced.

    spec, params = split(model, kv_format)
    state = init_state(spec, max_batch=4, num_pages=64, max_len=2048)
    for tokens, q_len in pieces(prompt, 0, page_size):
        state, logits = prefill_piece(spec, params, state, slot, tokens, q_len)
    state, first = insert(state, slot, logits, request, decodable)
    state, packed = generate(spec, params, state, decodable, num_steps=16)
"""
from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp

from moejax import kv_cache, sampling
from moejax.attention import Heads
from moejax.decode_state import (
    MAX_STOP_IDS,
    NO_TOKEN,
    DecodeSpec,
    DecodeState,
    Params,
    Request,
    init_state,
    piece_lengths,
    pieces,
    split,
    with_table,
)
from moejax.kv_cache import LayerKV, Placement

__all__ = [
    "MAX_STOP_IDS", "NO_TOKEN", "DecodeSpec", "DecodeState", "Params", "Request", "compilations", "copy_slot", "decode_step",
    "forward", "generate", "init_state", "insert", "piece_lengths", "pieces", "prefill_piece", "score_piece", "split", "with_table",
]

compilations: collections.Counter[str] = collections.Counter()
"""Function name -> shapes traced (each is one compilation, or one look into the persistent cache) in this process."""


def forward(
    spec: DecodeSpec, params: Params, caches: tuple[LayerKV, ...], tokens: jax.Array, where: Placement,
    logit_positions: jax.Array | None = None,
) -> tuple[jax.Array, tuple[LayerKV, ...]]:
    """Runs the model on the new tokens of each row over the caches. Not jitted: the body of the functions below.

    Args:
      tokens: int32 [B, T]; those from q_lens on only pad.
      where: block table, lengths before the call, tokens that count.
      logit_positions: int32 [B], the one token of each row that logits are wanted for.

    Returns:
      (logits float32 [B, T or 1, V], caches with the tokens in them and filled pages closed).
    """
    model = spec.model(params)
    new = list(caches)

    def attend(layer: int, heads: Heads) -> jax.Array:
        out, new[layer] = kv_cache.attend_heads(
            new[layer], heads, where, kv_format=spec.formats[layer],
            sliding_window=spec.config.layers[layer].sliding_window, implementation=spec.implementation)
        return out

    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    output = model(tokens, positions=where.kv_lens[:, None] + index, attend=attend, valid=index < where.q_lens[:, None],
                   logit_positions=logit_positions)
    # Pages are written after all attention has read them. Unless that order is a dependency, XLA copies the last layer's pool.
    logits, new = jax.lax.optimization_barrier((output.logits, new))
    return logits, kv_cache.close_filled(new, where, formats=spec.formats, implementation=spec.implementation)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def prefill_piece(
    spec: DecodeSpec, params: Params, state: DecodeState, slot: jax.Array, tokens: jax.Array, q_len: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Appends one piece of a prompt to a slot.

    Args:
      slot: int32 scalar.
      tokens: int32 [T], a piece of `pieces`; it must not cross the end of a page.
      q_len: int32 scalar, tokens that count.

    Returns:
      (state, logits float32 [V] after the last of them).
    """
    compilations["prefill_piece"] += 1
    last = (q_len - 1).astype(jnp.int32)[None]
    state, logits = _append_piece(spec, params, state, slot, tokens, q_len, last)
    return state, logits[0]


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def score_piece(
    spec: DecodeSpec, params: Params, state: DecodeState, slot: jax.Array, tokens: jax.Array, q_len: jax.Array,
    targets: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """As `prefill_piece`, and scores what comes next, as decoding would have seen it.

    Args:
      targets: int32 [T], the token that follows each of `tokens`.

    Returns:
      (state, log-probability of each target float32 [T] in nats, most probable token int32 [T]); garbage from q_len on.
    """
    compilations["score_piece"] += 1
    state, logits = _append_piece(spec, params, state, slot, tokens, q_len, None)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[:, None], axis=1)[:, 0]
    return state, log_probs, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _append_piece(spec, params, state: DecodeState, slot, tokens, q_len, logit_positions) -> tuple[DecodeState, jax.Array]:
    """(state, logits [T or 1, V])."""
    table_row = jax.lax.dynamic_index_in_dim(state.block_table, slot)
    where = Placement(table_row, state.kv_lens[slot][None], jnp.asarray(q_len, jnp.int32)[None])
    rows = tuple(kv_cache.take_slot(c, slot) for c in state.caches)
    logits, rows = forward(spec, params, rows, tokens[None], where, logit_positions)
    caches = tuple(kv_cache.put_slot(c, row, slot) for c, row in zip(state.caches, rows))
    return dataclasses.replace(state, caches=caches, kv_lens=state.kv_lens.at[slot].add(q_len)), logits[0]


@functools.partial(jax.jit, donate_argnames="state")
def insert(
    state: DecodeState, slot: jax.Array, logits: jax.Array, request: Request, decodable: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Starts a request in a slot whose prompt is in the cache: chooses its first token.

    Args:
      slot: int32 scalar.
      logits: float32 [V] after the prompt.
      request: its scalars, and stop ids [MAX_STOP_IDS].
      decodable: bool [V], ids that may be chosen.

    Returns:
      (state, int32 [2]: the token, and 1 if the request goes on).
    """
    compilations["insert"] += 1
    rows = jax.tree.map(lambda a: jnp.asarray(a)[None], request)
    token = sampling.sample(logits[None], rows.sampling, jnp.zeros(1, jnp.int32), decodable)
    going_on = _going_on(token, jnp.ones(1, jnp.int32), rows)

    def put(array: jax.Array, value) -> jax.Array:
        return array.at[slot].set(value)

    state = dataclasses.replace(
        state, last_tokens=put(state.last_tokens, token[0]), num_generated=put(state.num_generated, 1),
        active=put(state.active, going_on[0]), requests=jax.tree.map(put, state.requests, request))
    return state, jnp.concatenate([token, going_on.astype(jnp.int32)])


@functools.partial(jax.jit, donate_argnames="state")
def copy_slot(state: DecodeState, source: jax.Array, target: jax.Array) -> DecodeState:
    """Copies the open pages, the sinks and the length of slot `source` to `target`; `page_table.fork` shares the pages."""
    compilations["copy_slot"] += 1
    caches = tuple(kv_cache.put_slot(c, kv_cache.take_slot(c, source), target) for c in state.caches)
    return dataclasses.replace(state, caches=caches, kv_lens=state.kv_lens.at[target].set(state.kv_lens[source]))


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def decode_step(
    spec: DecodeSpec, params: Params, state: DecodeState, decodable: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """One token for every active slot: (state, int32 [B], NO_TOKEN for the others)."""
    compilations["decode_step"] += 1
    return _step(spec, params, state, decodable)


@functools.partial(jax.jit, static_argnames=("spec", "num_steps"), donate_argnames="state")
def generate(
    spec: DecodeSpec, params: Params, state: DecodeState, decodable: jax.Array, *, num_steps: int,
    limit: jax.Array | int | None = None,
) -> tuple[DecodeState, jax.Array]:
    """Up to `num_steps` steps in one loop on the device, which ends early when no slot is active.

    Args:
      limit: int32, at most so many steps of the `num_steps` that this program is compiled for; None for all.

    Returns:
      (state, int32 [B, num_steps + 1]: the tokens of each slot in order, NO_TOKEN where there is none; the last column is 1 for
      slots that are still active).
    """
    compilations["generate"] += 1
    max_batch = state.active.shape[0]
    last = num_steps if limit is None else jnp.minimum(limit, num_steps)

    def go_on(carry) -> jax.Array:
        i, state, _ = carry
        return (i < last) & jnp.any(state.active)

    def step(carry):
        i, state, out = carry
        state, tokens = _step(spec, params, state, decodable)
        return i + 1, state, jax.lax.dynamic_update_index_in_dim(out, tokens, i, 1)

    out = jnp.full((max_batch, num_steps), NO_TOKEN, jnp.int32)
    _, state, out = jax.lax.while_loop(go_on, step, (jnp.int32(0), state, out))
    return state, jnp.concatenate([out, state.active.astype(jnp.int32)[:, None]], axis=1)


def _step(spec: DecodeSpec, params, state: DecodeState, decodable) -> tuple[DecodeState, jax.Array]:
    q_lens = state.active.astype(jnp.int32)
    where = Placement(state.block_table, state.kv_lens, q_lens)
    logits, caches = forward(spec, params, state.caches, state.last_tokens[:, None], where)
    tokens = sampling.sample(logits[:, 0], state.requests.sampling, state.num_generated, decodable)
    num_generated = state.num_generated + q_lens
    state = dataclasses.replace(
        state, caches=caches, kv_lens=state.kv_lens + q_lens, num_generated=num_generated,
        last_tokens=jnp.where(state.active, tokens, state.last_tokens),
        active=state.active & _going_on(tokens, num_generated, state.requests))
    return state, jnp.where(q_lens > 0, tokens, NO_TOKEN)


def _going_on(tokens: jax.Array, num_generated: jax.Array, requests: Request) -> jax.Array:
    """bool [B]: the token just chosen neither ends its request nor is its last."""
    stopped = jnp.any(tokens[:, None] == requests.stop_ids, axis=1)
    return ~stopped & (num_generated < requests.max_tokens)
