"""Teacher-forced scoring of whole windows of text, as decoding would see them, one layer at a time.

A token of page p sees the pages before p as they were quantised when they closed, and its own page unquantised. Teacher forcing
makes every token known, so all pages of a window can be computed at once: in each layer, all pages' keys and values are quantised
and dequantised together, and the attention of page p reads the quantised rows of pages < p and the exact rows of page p. What a
layer hands on is what decoding would hand on, so errors compound over layers and positions as they do there
(`tests/moejax/test_scoring.py` holds the two to each other). Layers of one shape share their compiled functions; a format costs one
small function.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax import kv_schedule, rope
from moejax.kv_cache import KeyTransform, rotate, stored_keys, stored_queries
from moejax.model import Transformer
from pallas_kernels.close_page import fake_quantize
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.pallas_utils import MASK_VALUE

KEY_PAGES = 4  # a query page reads keys up to the next multiple of so many pages
LOGIT_CHUNK = 64  # tokens whose logits exist at once


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass over a window of T tokens.

    Attributes:
      hidden: float [T, D] after the last norm: times the head, the logits.
      topk_idx: one entry a layer: int32 [T, X] chosen experts, None for a dense layer.
      attention_error: float [L]: relative L2 error of each layer's attention output against the same layer with an exact cache and
        the same input; None unless asked for.
    """

    hidden: jax.Array
    topk_idx: tuple[np.ndarray | None, ...]
    attention_error: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Scores of the T tokens of a window, float32 [T] in nats and int32 [T].

    Attributes:
      log_probs: log-probability of the true next token.
      top1: the most probable next token.
      kl: KL(reference || this) of the next token's distribution.
    """

    log_probs: np.ndarray
    top1: np.ndarray
    kl: np.ndarray


class Scorer:
    """Scores windows with one model under any per-layer cache formats."""

    def __init__(self, model: Transformer):
        self.config, self.dtype = model.config, model.dtype
        self.embed_rows, self.head, self.final_norm = model.embed, model.head(), model.final_norm
        self.blocks = [nnx.split(block) for block in model.blocks]
        self._cos_sin: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.memo: dict = {}  # statistics of `moejax.calibration`, by what they were measured on

    def forward(
        self, tokens: np.ndarray, formats: KVFormat | Sequence[KVFormat], transforms: Sequence[KeyTransform] | None = None,
        measure_attention: bool = False,
    ) -> Pass:
        """Runs the window.

        Args:
          tokens: int32 [T], T a multiple of the page size.
          formats: one for all layers, or one a layer, all of one page size.
          transforms: of `moejax.calibration`, for formats that promote calibrated channels.
          measure_attention: fill `Pass.attention_error`, which costs a second attention.

        Raises:
          ValueError: T, or the number or page sizes of the formats, does not fit.
        """
        formats = kv_schedule.per_layer(formats, self.config.num_layers)
        check_window(tokens, formats[0].page_size)
        x = self.embed(tokens)
        chosen, errors = [], []
        for layer, kv_format in enumerate(formats):
            transform = KeyTransform() if transforms is None else transforms[layer]
            x, topk_idx, error = self.layer(layer, x, kv_format, transform, measure_attention)
            chosen.append(None if topk_idx is None else np.asarray(topk_idx))
            errors.append(error)
        return Pass(self.normed(x), tuple(chosen), np.asarray(jnp.stack(errors)) if measure_attention else None)

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """The first block's input [1, T, D]."""
        return self.embed_rows(jnp.asarray(tokens))[None]

    def cos_sin(self, length: int) -> tuple[jax.Array, jax.Array]:
        """RoPE of a window of `length` tokens; kept, every layer asks for it."""
        if length not in self._cos_sin:
            self._cos_sin[length] = rope.cos_sin(self.config, jnp.arange(length, dtype=jnp.int32)[None])
        return self._cos_sin[length]

    def layer(self, layer: int, x, kv_format: KVFormat, transform: KeyTransform, measure: bool = False):
        """One block over a whole window: x [1, T, D] -> (x, chosen experts [T, X] or None, attention error or 0)."""
        graphdef, params = self.blocks[layer]
        out, error = _attend(
            *_project(graphdef, params, x), *self.cos_sin(x.shape[1]), transform, kv_format=kv_format, measure=measure,
            sliding_window=self.config.layers[layer].sliding_window)
        return *_finish(graphdef, params, x, out), error

    def normed(self, x: jax.Array) -> jax.Array:
        """What `compare` takes, [T, D], of the last block's output x [1, T, D]."""
        return self.final_norm(x)[0]

    def collect(self, tokens: np.ndarray, function: Callable) -> list:
        """function(q [1, T, N, H], k [1, T, K, H]), after RoPE, of every layer of a pass with the 16-bit cache.

        Args:
          tokens: int32 [T], T a multiple of 32.
        """
        f = KVFormat(page_size=32)
        cos, sin = self.cos_sin(len(tokens))
        x, collected = self.embed(tokens), []
        for layer, (graphdef, params) in enumerate(self.blocks):
            q, k, v = _project(graphdef, params, x)
            collected.append(function(rope.apply(q, cos, sin), rope.apply(k, cos, sin)))
            out, _ = _attend(q, k, v, cos, sin, KeyTransform(), kv_format=f, measure=False,
                             sliding_window=self.config.layers[layer].sliding_window)
            x, _ = _finish(graphdef, params, x, out)
        return collected

    def compare(self, this: jax.Array, reference: jax.Array, targets: np.ndarray) -> Comparison:
        """Scores `this` hidden state [T, D] against `reference` [T, D]; targets int32 [T] are the true next tokens."""
        return Comparison(*map(np.asarray, _compare(self.head, this, reference, jnp.asarray(targets))))


def check_window(tokens: np.ndarray, page_size: int) -> None:
    """Raises ValueError when the window is not made of whole pages."""
    if not len(tokens) or len(tokens) % page_size:
        raise ValueError(f"{len(tokens)=}: must be a positive multiple of page_size={page_size}")


@functools.partial(jax.jit, static_argnames="graphdef")
def _project(graphdef, params, x):
    block = nnx.merge(graphdef, params)
    return block.attention.project(block.attention_norm(x))


@functools.partial(jax.jit, static_argnames="graphdef")
def _finish(graphdef, params, x, out):
    block = nnx.merge(graphdef, params)
    x, routing = block.feed_forward(x + block.attention.output(out), None)
    return x, None if routing is None else routing.topk_idx


@functools.partial(jax.jit, static_argnames=("kv_format", "measure", "sliding_window"))
def _attend(q, k, v, cos, sin, transform, *, kv_format: KVFormat, measure: bool, sliding_window):
    """q [1, T, N, H], k and v [1, T, K, H] before RoPE -> (out [1, T, N, H], relative error or 0)."""
    f = kv_format
    q = rope.apply(q, cos, sin)
    if f.key_rope == "post":
        q, k = stored_queries(q, f, transform), stored_keys(rope.apply(k, cos, sin), f, transform)
    else:
        k = rotate(k, f.k_rotation, f.rotation_block)
    v = rotate(v, f.v_rotation, f.rotation_block)
    k, v = (a.astype(f.open_dtype).astype(a.dtype) for a in (k, v))
    k_hat, v_hat = _quantized(k, v, f)
    if f.key_rope == "pre":
        k, k_hat = (rope.apply(rotate(a, f.k_rotation, f.rotation_block), cos, sin) for a in (k, k_hat))
    out = _paged(q, k, v, k_hat, v_hat, f, sliding_window)
    error = jnp.float32(0)
    if measure:
        exact = _paged(q, k, v, k, v, f, sliding_window)
        error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)
    return rotate(out, f.v_rotation, f.rotation_block), error


def _quantized(k, v, f: KVFormat):
    """k and v [1, T, K, H] as attention reads them from closed pages; sinks are exact."""
    def pages(x):
        return x[0].reshape(-1, f.page_size, *x.shape[2:]).swapaxes(1, 2)  # [pages, K, Z, H]

    def tokens(x, exact):
        x = x.swapaxes(1, 2).reshape(exact.shape).astype(exact.dtype)
        return jnp.where((jnp.arange(x.shape[1]) < f.sink_tokens)[None, :, None, None], exact, x)

    k_pages, v_pages = pages(k), pages(v)
    num_sinks = jnp.where(jnp.arange(len(k_pages)) == 0, f.sink_tokens, 0)
    k_hat, v_hat = fake_quantize(k_pages, v_pages, kv_format=f, num_sinks=num_sinks)
    return tokens(k_hat, k), tokens(v_hat, v)


def _paged(q, k, v, k_hat, v_hat, f: KVFormat, sliding_window):
    """Attention in which the last `open_pages` pages of each query are exact and those before them quantised."""
    B, T, N, H = q.shape
    K, Z = k.shape[2], f.page_size
    window = min(f.open_pages * Z, T)
    q, k, v, k_hat, v_hat = (a[0].swapaxes(0, 1) for a in (q, k, v, k_hat, v_hat))  # [heads, T, H]
    q = q.reshape(K, N // K, T // Z, Z, H)

    def query_page(page, end: int):
        """Queries of one page, keys before `end`, which is static: [K, G, Z, H]."""
        rows = jax.lax.dynamic_index_in_dim(q, page, axis=2, keepdims=False) * H**-0.5
        first = jnp.maximum((page + 1) * Z - window, 0)
        t = page * Z + jnp.arange(Z, dtype=jnp.int32)[:, None]
        s = jnp.arange(end + window, dtype=jnp.int32)[None]
        s = jnp.where(s < end, s, s - end + first)  # the closed keys, then the open ones
        is_open = jnp.arange(end + window)[None] >= end
        seen = jnp.where(is_open, s <= t, s < first)
        if sliding_window is not None:
            seen &= t - s < sliding_window
        open_k, open_v = (jax.lax.dynamic_slice_in_dim(a, first, window, axis=1) for a in (k, v))
        scores = jnp.concatenate([jnp.einsum("kgth,ksh->kgts", rows, keys, preferred_element_type=jnp.float32)
                                  for keys in (k_hat[:, :end], open_k)], axis=-1)
        weights = jax.nn.softmax(jnp.where(seen, scores, MASK_VALUE), axis=-1).astype(v.dtype)
        return (jnp.einsum("kgts,ksh->kgth", weights[..., :end], v_hat[:, :end])
                + jnp.einsum("kgts,ksh->kgth", weights[..., end:], open_v))

    parts = []
    for start in range(0, T // Z, KEY_PAGES):
        end = min(start + KEY_PAGES, T // Z)
        parts.append(jax.lax.map(functools.partial(query_page, end=end * Z), jnp.arange(start, end, dtype=jnp.int32)))
    out = jnp.concatenate(parts)  # [pages, K, G, Z, H]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@jax.jit
def _compare(head_VD, this, reference, targets):
    def log_probs(hidden):
        logits = jnp.einsum("td,vd->tv", hidden, head_VD.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(logits, axis=-1)

    def chunk(args):
        this, reference, targets = args
        mine, theirs = log_probs(this), log_probs(reference)
        target = jnp.take_along_axis(mine, targets[:, None], axis=1)[:, 0]
        kl = jnp.sum(jnp.exp(theirs) * (theirs - mine), axis=-1)
        return target, jnp.argmax(mine, axis=-1).astype(jnp.int32), kl

    size = LOGIT_CHUNK if len(targets) % LOGIT_CHUNK == 0 else len(targets)
    parts = jax.lax.map(chunk, jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), (this, reference, targets)))
    return jax.tree.map(jnp.ravel, parts)
