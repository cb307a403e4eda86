"""Models and caches full of random numbers, at any size and made on the device: for measuring, not for text."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax import decode_state
from moejax.config import ModelConfig
from moejax.decode_state import DecodeSpec, DecodeState
from moejax.kv_cache import LayerKV
from moejax.model import Block, Transformer, packed_shapes
from moejax.weight_rules import Formats, of_layer
from pallas_kernels.close_page import close_page
from pallas_kernels.kv_format import KVFormat

STOCK_PAGES = 64  # distinct random pages a layer; its pool is made of copies of them
KEY_OUTLIER = 8.0  # size of the last key channel, the others' is 1


def random_model(config: ModelConfig, formats: Formats | None = None, *, dtype=jnp.bfloat16, seed: int = 0) -> Transformer:
    """A model with normal weights, packed block by block: at most one block is held in `dtype` beside what is kept.

    Args:
      formats: of the packed matrices (`weight_rules.resolve`); None packs none.
      dtype: of the parameters that are not packed, and of the computation.
    """
    formats = {} if formats is None else formats
    graphdef, shapes = nnx.split(packed_shapes(config, formats, param_dtype=dtype))

    @functools.partial(jax.jit, static_argnames="layer")
    def block(key: jax.Array, layer: int) -> dict:
        made = Block(config, layer, rngs=nnx.Rngs(key), param_dtype=dtype)
        made.pack(of_layer(formats, layer))
        return nnx.to_pure_dict(nnx.state(made))

    @jax.jit
    def rest(key: jax.Array) -> dict:
        made = Transformer(dataclasses.replace(config, layers=config.layers[:1]), rngs=nnx.Rngs(key), param_dtype=dtype)
        made.pack_ends(formats)
        pure = nnx.to_pure_dict(nnx.state(made))
        del pure["blocks"]
        return pure

    def kind(layer: int) -> tuple:
        return config.layers[layer], tuple(of_layer(formats, layer).items())

    keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    first_of = {kind(layer): layer for layer in reversed(range(config.num_layers))}  # equal blocks are compiled once
    pure = rest(keys[-1]) | {"blocks": {
        i: jax.block_until_ready(block(keys[i], first_of[kind(i)])) for i in range(config.num_layers)}}
    nnx.replace_by_pure_dict(shapes, pure)
    return nnx.merge(graphdef, shapes)


def filled_state(spec: DecodeSpec, kv_lens: Sequence[int], *, max_len: int, seed: int = 0) -> DecodeState:
    """A state in which every slot is active and has a random sequence in its cache; greedy, without an end.

    Args:
      kv_lens: tokens of each slot's sequence, at least 1.
      max_len: tokens a slot can hold; pages are there for all of them.
    """
    lens, batch = np.asarray(kv_lens, np.int32), len(kv_lens)
    pages = spec.closed_pages(max_len)
    state = decode_state.init_state(spec, max_batch=batch, num_pages=batch * pages, max_len=max_len)
    rng = np.random.default_rng(seed)
    table = np.full(state.block_table.shape, -1, np.int32)
    table[:, :pages] = rng.permutation(batch * pages).reshape(batch, pages)
    keys = jax.random.split(jax.random.key(seed), spec.config.num_layers)
    caches = tuple(_filled(key, cache, kv_format) for key, cache, kv_format in zip(keys, state.caches, spec.formats))
    return dataclasses.replace(
        state, caches=caches, block_table=jnp.asarray(table), kv_lens=jnp.asarray(lens),
        last_tokens=jnp.asarray(rng.integers(spec.config.vocab_size, size=batch), jnp.int32),
        active=jnp.ones(batch, bool),
        requests=dataclasses.replace(state.requests, max_tokens=jnp.full(batch, np.iinfo(np.int32).max)))


@functools.partial(jax.jit, static_argnames="kv_format", donate_argnames="cache")
def _filled(key: jax.Array, cache: LayerKV, kv_format: KVFormat) -> LayerKV:
    """The cache with random keys, values and closed pages of such."""
    pages, heads, _ = cache.pages.shape
    head_dim = cache.open_k.shape[-1]
    sizes = jnp.ones(head_dim).at[-1].set(KEY_OUTLIER)
    k_key, v_key, page_key, *more = jax.random.split(key, 7)

    def tokens(key: jax.Array, shape, scale) -> jax.Array:
        return (jax.random.normal(key, shape) * scale).astype(cache.open_k.dtype)

    shape = (STOCK_PAGES, heads, kv_format.page_size, head_dim)
    stock = close_page(tokens(k_key, shape, sizes), tokens(v_key, shape, 1.0), kv_format=kv_format)
    new = dataclasses.replace(
        cache, pages=stock[jax.random.randint(page_key, (pages,), 0, STOCK_PAGES)],
        open_k=tokens(more[0], cache.open_k.shape, sizes), open_v=tokens(more[1], cache.open_v.shape, 1.0))
    if cache.sink_k is None or cache.sink_v is None:
        return new
    return dataclasses.replace(
        new, sink_k=tokens(more[2], cache.sink_k.shape, sizes), sink_v=tokens(more[3], cache.sink_v.shape, 1.0))
