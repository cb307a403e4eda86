"""What decoding is given: the static `DecodeSpec`, the donated `DecodeState`, and prompts cut into pieces."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax import kv_cache, kv_schedule, page_table, sampling
from moejax.config import ModelConfig
from moejax.kv_cache import KeyTransform, LayerKV
from moejax.model import Transformer
from moejax.page_table import PageTable
from moejax.sampling import RowSampling
from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.pallas_utils import INVALID, cdiv

# Leaves of a model's state. A flat tuple: to flatten an `nnx.State` of a deep model takes milliseconds, and every call would.
Params = tuple[jax.Array, ...]

NO_TOKEN = -1
MAX_STOP_IDS = 16


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """All that is static: part of the key of every compiled function.

    Attributes:
      graphdef, config: of the `Transformer`.
      treedef: of its state, whose leaves the functions take.
      formats: storage format of each layer's cache; all of one page size.
      implementation: of `paged_attention` and `close_page`; None picks by platform.
    """

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    config: ModelConfig
    formats: tuple[KVFormat, ...]
    implementation: str | None = None

    def model(self, params: Params) -> Transformer:
        """The model with these parameters."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, params))

    @property
    def page_size(self) -> int:
        """Tokens a page, of all layers."""
        return self.formats[0].page_size

    @property
    def open_pages(self) -> int:
        """Open pages of a sequence; of layers that differ, the fewest: that many need no page of the pool."""
        return min(f.open_pages for f in self.formats)

    def closed_pages(self, num_tokens: int) -> int:
        """Pages of the pool that a sequence of `num_tokens` tokens needs."""
        return page_table.closed_pages(num_tokens, self.page_size, self.open_pages)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.graphdef, self.treedef, self.config, self.formats, self.implementation))

    def __hash__(self) -> int:
        """Cached: hashing the graph of a deep model takes milliseconds, and every call needs the hash."""
        return self._hash


def split(
    model: Transformer, kv_format: KVFormat | Sequence[KVFormat], *, implementation: str | None = None,
) -> tuple[DecodeSpec, Params]:
    """The static and the array part of a model that decodes with this cache: one format for all layers, or one for each.

    Pages of formats in "linear" layout lie as this platform's kernels read them, where they can; with `implementation`, linear.

    Raises:
      ValueError: they do not fit.
      NotImplementedError: a format that no cache holds.
    """
    formats = kv_schedule.per_layer(kv_format, model.config.num_layers)
    if implementation is None:
        stored = {f: dispatch.with_layout(f, None, model.config.head_dim) for f in dict.fromkeys(formats) if f.layout == "linear"}
        formats = tuple(stored.get(f, f) for f in formats)
    for f in set(formats):
        f.check_head_dim(model.config.head_dim)
        f.check_cacheable()
    graphdef, params = nnx.split(model)
    leaves, treedef = jax.tree.flatten(params)
    return DecodeSpec(graphdef, treedef, model.config, formats, implementation), tuple(leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What a slot has to know of the request it serves; arrays have a leading [B] in the state and none in `insert`.

    Attributes:
      sampling: how tokens are chosen.
      max_tokens: int32, tokens to generate.
      stop_ids: int32 [MAX_STOP_IDS], padded with NO_TOKEN.
    """

    sampling: RowSampling
    max_tokens: jax.Array
    stop_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes while decoding. Donated to every function that takes it.

    Attributes:
      caches: one a layer.
      block_table: int32 [B, J]; written by the host between calls.
      kv_lens: int32 [B], tokens in each slot's cache. The last generated token is not in it yet.
      last_tokens: int32 [B], each slot's newest token, the input of the next step.
      num_generated: int32 [B].
      active: bool [B]; slots that still generate. The others cost no attention, wake no expert and do not change.
      requests: of each slot.
    """

    caches: tuple[LayerKV, ...]
    block_table: jax.Array
    kv_lens: jax.Array
    last_tokens: jax.Array
    num_generated: jax.Array
    active: jax.Array
    requests: Request


def init_state(
    spec: DecodeSpec, *, max_batch: int, num_pages: int, max_len: int, transforms: Sequence[KeyTransform] | None = None,
) -> DecodeState:
    """An empty state: `max_batch` slots of up to `max_len` tokens, `num_pages` pages a layer (at least one is made).

    `transforms`: of each layer's keys (`moejax.calibration`), None for none. They are copied, because the
    state is donated.
    """
    config = spec.config
    caches = tuple(
        kv_cache.init_layer(
            spec.formats[layer], num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_pages=max(num_pages, 1),
            max_batch=max_batch, transform=None if transforms is None else jax.tree.map(jnp.copy, transforms[layer]))
        for layer in range(config.num_layers))

    def integers(*shape: int, fill: int = 0) -> jax.Array:
        return jnp.full(shape, fill, jnp.int32)

    return DecodeState(
        caches=caches, block_table=integers(max_batch, cdiv(max_len, spec.page_size), fill=INVALID),
        kv_lens=integers(max_batch), last_tokens=integers(max_batch), num_generated=integers(max_batch),
        active=jnp.zeros(max_batch, bool),
        requests=Request(sampling.empty_rows(max_batch), integers(max_batch),
                         integers(max_batch, MAX_STOP_IDS, fill=NO_TOKEN)))


def with_table(state: DecodeState, table: PageTable) -> DecodeState:
    """The state with copies of the host's block table and lengths (the state is donated, the table is not)."""
    return dataclasses.replace(state, block_table=jnp.array(table.block_table), kv_lens=jnp.array(table.kv_lens))


def piece_lengths(page_size: int) -> tuple[int, ...]:
    """The padded lengths of prefill pieces: few, so that few shapes are compiled."""
    return (16, page_size)


def pieces(tokens: Sequence[int], start: int, page_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Cuts tokens that begin at position `start` where pages end.

    Yields:
      (int32 [T] padded to one of `piece_lengths`, number of tokens that count).
    """
    done = 0
    while done < len(tokens):
        q_len = min(page_size - (start + done) % page_size, len(tokens) - done)
        padded = np.zeros(next(n for n in piece_lengths(page_size) if n >= q_len), np.int32)
        padded[:q_len] = tokens[done:done + q_len]
        yield padded, q_len
        done += q_len
