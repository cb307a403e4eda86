"""Rotary position embeddings: frequencies of every kind, and their application to q and k.

Channel i of a head turns with channel i + H/2 (the half-split order of Hugging Face checkpoints). Frequencies follow
transformers' `modeling_rope_utils`: linear position interpolation, dynamic NTK, YaRN (arXiv 2309.00071), Llama 3.
"""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import ModelConfig, RopeConfig
from pallas_kernels.append_heads.reference import rotate_pairs


def cos_sin(config: ModelConfig, positions: jax.Array, length: jax.Array | int = 0) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position and channel pair, attention factor included.

    Args:
      positions: int32 [B, T].
      length: tokens of the longest sequence, at most T; int or int32 scalar. Only "dynamic" frequencies depend on it, and
        only past max_position_embeddings.

    Returns:
      Two float32 arrays [B, T, 1, H/2].
    """
    freqs = jnp.asarray(frequencies(config.rope, config.head_dim))
    if config.rope.kind == "dynamic":
        beyond = max(positions.shape[1] - config.max_position_embeddings, 0)
        table = dynamic_frequencies(config.rope, config.head_dim, config.max_position_embeddings, beyond)
        freqs = jnp.asarray(table)[jnp.clip(length - config.max_position_embeddings, 0, beyond)]
    angles = positions.astype(jnp.float32)[:, :, None, None] * freqs[None, None, None, :]
    factor = attention_factor(config.rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the channel pairs of x [B, T, N, H] in float32; returns x's dtype."""
    return rotate_pairs(x_BTNH, cos, sin)


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each channel pair, float32 [head_dim/2]; of "dynamic", up to max_position_embeddings.

    Every step is rounded to float32 in the order in which transformers rounds it: models are trained with these very numbers, and
    a position multiplies the difference (one unit in the last place is seen in logits after 40 tokens).
    """
    powers = _powers(rope.theta, head_dim)
    freqs = 1 / powers
    if rope.kind == "linear":
        freqs = freqs / np.float32(rope.factor)
    elif rope.kind == "yarn":
        freqs = _yarn(rope, freqs, 1 / (np.float32(rope.factor) * powers), head_dim)
    elif rope.kind == "llama3":
        freqs = _llama3(rope, freqs)
    return freqs.astype(np.float32)


def dynamic_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int, beyond: int) -> np.ndarray:
    """NTK-aware frequencies, float32 [beyond + 1, head_dim/2]: row i for sequences of max_position_embeddings + i tokens.

    The base grows to theta * scale ** (H / (H - 2)), scale = factor * length / max_position_embeddings - (factor - 1).
    """
    lengths = np.arange(max_position_embeddings, max_position_embeddings + beyond + 1, dtype=np.float32)
    factor = np.float32(rope.factor)
    scale = factor * lengths / np.float32(max_position_embeddings) - np.float32(rope.factor - 1)
    growth = (scale.astype(np.float64) ** (head_dim / (head_dim - 2))).astype(np.float32)
    return 1 / _powers(np.float32(rope.theta) * growth[:, None], head_dim)


def _powers(base, head_dim: int) -> np.ndarray:
    """base ** (2 i / head_dim) for every channel pair i, rounded to float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(base) ** exponents.astype(np.float64)).astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by (so that q.k is by its square): 1 but for "yarn"."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _yarn(rope: RopeConfig, freqs: np.ndarray, stretched: np.ndarray, head_dim: int) -> np.ndarray:
    """Fast pairs keep their frequency, slow ones take the stretched one, with a linear ramp in between."""
    original = rope.original_max_position_embeddings
    assert original is not None  # checked by RopeConfig

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    slow = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    return stretched * slow + freqs * (1 - slow)


def _llama3(rope: RopeConfig, freqs: np.ndarray) -> np.ndarray:
    """Wavelengths over original/low_freq_factor are stretched by `factor`, those under original/high_freq_factor are kept."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None and low is not None and high is not None  # checked by RopeConfig
    rotations = np.float32(original) * (1 / (np.float32(2 * math.pi) * (1 / freqs)))  # rounded as a product of reciprocals
    keep = np.clip((rotations - np.float32(low)) / np.float32(high - low), 0, 1)
    blend = (1 - keep) * freqs / np.float32(rope.factor) + keep * freqs
    return np.where(keep == 1, freqs, blend)
