"""How keys are turned for the cache, measured on a text, per layer and KV head.

Promoted channels. A key channel quantised with a step s adds to a logit an error of variance s^2 / 12 * q^2, and the step is
proportional to the channel's range over a page. So channels are ranked by (mean squared range over pages) * (mean squared query),
and the highest `outlier_channels` of them go to the end, where the cache keeps `outlier_bits`.

The rotation "calibrated". With S the second moment of the queries, the mean squared error of a logit is e' S e for a key error e,
so keys matter in the coordinates S^(1/2) k. There, the eigenvectors of the keys' covariance within a page (each channel's offset
absorbs the page's mean) are the transform of the largest coding gain (Karhunen-Loeve; Goyal, IEEE Signal Processing Magazine 18(5),
2001). The channels with the largest eigenvalues come last, where they can be promoted. Queries get the inverse transpose.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kv_cache import KeyTransform, rotate
from moejax.scoring import Scorer
from pallas_kernels.kv_format import KVFormat

PAGES_PER_WINDOW = 16
DAMPING = 0.01  # of the mean eigenvalue of the queries' second moment: directions that the text did not show still count


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of one layer. range_sq: mean squared range over pages [K, H]; covariance of keys within a page, and second moment of queries
    [K, H, H]; all float64, keys and queries rotated as the format says."""

    range_sq: np.ndarray
    key_cov: np.ndarray
    query_moment: np.ndarray


def key_transforms(scorer: Scorer, formats: Sequence[KVFormat], tokens: Sequence[int]) -> tuple[KeyTransform, ...] | None:
    """The transform of each layer's keys; None when no format asks for one.

    Args:
      scorer: holds the model.
      formats: one a layer.
      tokens: the calibration text, at least 2 tokens; some thousand make a good choice. It is read in windows of 16 pages, each
        as a sequence of its own.

    Raises:
      ValueError: a format needs calibration and there are fewer than 2 tokens.
    """
    needing = [f for f in formats if f.needs_calibration]
    if not needing:
        return None
    if len(tokens) < 2:
        raise ValueError(f"len(calibration_tokens)={len(tokens)}: {needing[0].name} is calibrated on a text of at least 2 tokens "
                         "(some thousand make a good choice)")
    transforms: list[KeyTransform] = [KeyTransform()] * len(formats)
    for key in dict.fromkeys(map(_statistics_key, needing)):
        measured = statistics(scorer, tokens, *key)
        for layer, f in enumerate(formats):
            if f.needs_calibration and _statistics_key(f) == key:
                transforms[layer] = _transform(f, measured[layer])
    return tuple(transforms)


def statistics(
    scorer: Scorer, tokens: Sequence[int], page_size: int, sink_tokens: int, rotation: str, block: int,
) -> list[Statistics]:
    """Statistics of every layer on a text, with keys and queries after RoPE. Kept by the scorer: a sweep asks for them often."""
    key = (tuple(tokens), page_size, sink_tokens, rotation, block)
    if key not in scorer.memo:
        length = PAGES_PER_WINDOW * page_size
        total: list[tuple] = []
        for start in range(0, len(tokens), length):
            part = np.asarray(tokens[start:start + length], np.int32)
            padded = np.zeros(-(-len(part) // page_size) * page_size, np.int32)
            padded[:len(part)] = part
            measure = functools.partial(_sums, length=np.int32(len(part)), page_size=page_size, sink_tokens=sink_tokens,
                                        rotation=rotation, block=block)
            sums = scorer.collect(padded, measure)
            sums = [tuple(np.asarray(a, np.float64) for a in layer) for layer in sums]
            total = sums if not total else [tuple(a + b for a, b in zip(x, y)) for x, y in zip(total, sums)]
        scorer.memo[key] = [Statistics(r / pages, c / keys, s / queries) for r, c, s, pages, keys, queries in total]
    return scorer.memo[key]


def _statistics_key(f: KVFormat) -> tuple[int, int, str, int]:
    rotation = "none" if f.k_rotation == "calibrated" else f.k_rotation
    return f.page_size, f.sink_tokens, rotation, f.rotation_block


@jax.jit(static_argnames=("page_size", "sink_tokens", "rotation", "block"))
def _sums(q, k, length, page_size: int, sink_tokens: int, rotation: str, block: int):
    """Sums over the first `length` tokens of q [1, T, N, H], k [1, T, K, H], and their numbers of pages, keys and queries."""
    T, K, H = k.shape[1:]
    positions = jnp.arange(T, dtype=jnp.int32)
    valid = positions < length
    ranged = (valid & (positions >= sink_tokens)).reshape(-1, page_size, 1, 1)
    keys = rotate(k[0].astype(jnp.float32), rotation, block).reshape(-1, page_size, K, H)
    queries = jnp.where(valid[:, None, None, None], rotate(q[0].astype(jnp.float32), rotation, block).reshape(T, K, -1, H), 0.0)
    low = jnp.min(keys, axis=1, where=ranged, initial=jnp.inf)
    high = jnp.max(keys, axis=1, where=ranged, initial=-jnp.inf)
    range_sq = jnp.sum(jnp.where(high > low, high - low, 0.0) ** 2, axis=0)
    count = jnp.sum(ranged, axis=1, keepdims=True)
    mean = jnp.sum(jnp.where(ranged, keys, 0.0), axis=1, keepdims=True) / jnp.maximum(count, 1)
    centred = jnp.where(ranged, keys - mean, 0.0)
    key_cov = jnp.einsum("pzkh,pzki->khi", centred, centred)
    moment = jnp.einsum("tkgh,tkgi->khi", queries, queries)
    return range_sq, key_cov, moment, jnp.sum(count > 0), jnp.sum(ranged), jnp.sum(valid) * (q.shape[2] // K)


def _transform(f: KVFormat, measured: Statistics) -> KeyTransform:
    if f.k_rotation == "calibrated":
        k_matrix, q_matrix = coding_transform(measured.key_cov, measured.query_moment)
        return KeyTransform(k_matrix=jnp.asarray(k_matrix), q_matrix=jnp.asarray(q_matrix))
    scores = measured.range_sq * np.einsum("khh->kh", measured.query_moment)
    return KeyTransform(k_perm=jnp.asarray(order(scores, f.outlier_channels)))


def coding_transform(key_cov: np.ndarray, query_moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(k_matrix, q_matrix) of `KeyTransform`, float32 [K, H, H], from float64 [K, H, H] moments. Most energy last.

    With M = S^(1/2) and M C M = U diag(w) U', stored keys are k M U and queries q M^(-1) U, scaled so that M has mean eigenvalue 1.
    """
    values, vectors = np.linalg.eigh(query_moment)
    values = np.maximum(values, 0)
    values = np.sqrt(values + DAMPING * np.mean(values, axis=-1, keepdims=True) + np.finfo(np.float64).tiny)
    values /= np.mean(values, axis=-1, keepdims=True)
    root = np.einsum("kij,kj,klj->kil", vectors, values, vectors)
    inverse = np.einsum("kij,kj,klj->kil", vectors, 1 / values, vectors)
    _, basis = np.linalg.eigh(root @ key_cov @ root)
    return (root @ basis).astype(np.float32), (inverse @ basis).astype(np.float32)


def order(scores: np.ndarray, num_promoted: int) -> np.ndarray:
    """int32 [K, H] channel order: the `num_promoted` channels of the highest scores [K, H] last, each part in its old order."""
    ranked = np.argsort(scores, axis=-1, kind="stable")
    kept = np.sort(ranked[:, :-num_promoted], axis=-1)
    return np.concatenate([kept, np.sort(ranked[:, -num_promoted:], axis=-1)], axis=-1).astype(np.int32)
