"""Which key channels to promote: measured on a text, per layer and KV head, and turned into a channel order.

A key channel quantised with a step s adds to a logit an error of variance s^2 / 12 * q^2, and the step is proportional to the
channel's range over a page. So channels are ranked by (mean squared range over pages) * (mean squared query), and the highest
`outlier_channels` of them go to the end, where the cache keeps `outlier_bits`.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.attention import causal_attention
from moejax.decode import DecodeSpec
from moejax.kv_cache import KeyTransform, rotate

PAGES_PER_WINDOW = 4


def key_transforms(spec: DecodeSpec, params: nnx.State, tokens: Sequence[int]) -> tuple[KeyTransform, ...] | None:
    """The key channel order of each layer for `spec.kv_format`; None when the format promotes no channels.

    Args:
      spec, params: of `moejax.decode.split`.
      tokens: the calibration text, at least 2 tokens. It is read in windows of 4 pages, each as a sequence of its own.

    Raises:
      ValueError: the format promotes channels and there are fewer than 2 tokens.
    """
    kv_format = spec.kv_format
    if not kv_format.outlier_channels:
        return None
    if len(tokens) < 2:
        raise ValueError(f"len(calibration_tokens)={len(tokens)}: outlier_channels={kv_format.outlier_channels} are chosen on "
                         "a text of at least 2 tokens (some pages of it make a good choice)")
    length = PAGES_PER_WINDOW * kv_format.page_size
    total = None
    for start in range(0, len(tokens), length):
        part = np.asarray(tokens[start:start + length], np.int32)
        padded = np.zeros(length, np.int32)
        padded[:len(part)] = part
        scores = channel_scores(spec, params, padded, np.int32(len(part)))
        total = scores if total is None else total + scores
    return tuple(KeyTransform(jnp.asarray(order(s, kv_format.outlier_channels))) for s in np.asarray(total))


@functools.partial(jax.jit, static_argnames="spec")
def channel_scores(spec: DecodeSpec, params: nnx.State, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Summed squared range times mean squared query of every key channel: float32 [L, K, H].

    Args:
      tokens: int32 [T], T a multiple of the page size; those from `length` on only pad and do not count.
    """
    kv_format, model = spec.kv_format, nnx.merge(spec.graphdef, params)
    pages = tokens.shape[0] // kv_format.page_size
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    valid = positions < length
    ranged = (valid & (positions >= kv_format.sink_tokens)).reshape(pages, kv_format.page_size, 1, 1)
    scores = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        groups = (*k.shape[2:3], q.shape[2] // k.shape[2], q.shape[3])
        keys = rotate(k[0].astype(jnp.float32), kv_format.k_rotation).reshape(pages, kv_format.page_size, *k.shape[2:])
        queries = rotate(q[0].astype(jnp.float32), kv_format.k_rotation).reshape(-1, *groups)
        low = jnp.min(keys, axis=1, where=ranged, initial=jnp.inf)
        high = jnp.max(keys, axis=1, where=ranged, initial=-jnp.inf)
        squared = jnp.sum(jnp.where(high > low, high - low, 0.0) ** 2, axis=0)
        weight = jnp.mean(queries**2, axis=(0, 2), where=valid[:, None, None, None])
        scores.append(squared * weight)
        return causal_attention(q, k, v, spec.config.layers[layer].sliding_window)

    model(tokens[None], attend=attend, valid=valid[None], logit_positions=jnp.zeros(1, jnp.int32))
    return jnp.stack(scores)


def order(scores: np.ndarray, num_promoted: int) -> np.ndarray:
    """int32 [K, H] channel order: the `num_promoted` channels of the highest scores [K, H] last, each part in its old order."""
    ranked = np.argsort(scores, axis=-1, kind="stable")
    kept = np.sort(ranked[:, :-num_promoted], axis=-1)
    return np.concatenate([kept, np.sort(ranked[:, -num_promoted:], axis=-1)], axis=-1).astype(np.int32)
