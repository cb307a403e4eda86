"""Rotary embeddings: properties, and frequencies worked out by hand."""
import math

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import rope
from moejax.config import DenseMLP, LayerConfig, ModelConfig, RopeConfig
from tests.tolerances import assert_close

H = 16
KINDS = {
    "default": RopeConfig(theta=1e4),
    "linear": RopeConfig(theta=1e4, kind="linear", factor=4.0),
    "dynamic": RopeConfig(theta=1e4, kind="dynamic", factor=4.0),
    "yarn": RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": RopeConfig(theta=1e4, kind="llama3", factor=4.0, original_max_position_embeddings=64, low_freq_factor=1.0,
                         high_freq_factor=4.0),
}


def config(kind: str, max_position_embeddings: int = 32) -> ModelConfig:
    return ModelConfig(vocab_size=11, hidden_size=12, num_heads=2, num_kv_heads=1, head_dim=H, rope=KINDS[kind],
                       layers=(LayerConfig(mlp=DenseMLP(intermediate_size=8)),), max_position_embeddings=max_position_embeddings)


def default_frequencies() -> np.ndarray:
    return 1e4 ** -(np.arange(0, H, 2) / H)


def test_default_and_linear_frequencies():
    assert_close(rope.frequencies(KINDS["default"], H), default_frequencies(), "rope_frequencies")
    assert_close(rope.frequencies(KINDS["linear"], H), default_frequencies() / 4, "rope_frequencies")


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_scaled_kinds_keep_fast_pairs_and_stretch_slow_ones(kind):
    freqs, default = rope.frequencies(KINDS[kind], H), default_frequencies()
    assert_close(freqs[0], default[0], "rope_frequencies")
    assert_close(freqs[-1], default[-1] / 4, "rope_frequencies")
    assert (freqs <= default * 1.000001).all() and (freqs >= default / 4 * 0.999999).all()
    blended = (freqs < default * 0.99) & (freqs > default / 4 * 1.01)
    assert blended.any()


def test_llama3_blend_by_hand():
    # The pair that turns r times over the original context keeps (r - low) / (high - low) of its frequency.
    pair = 2
    default = default_frequencies()[pair]
    rotations = 64 * default / (2 * math.pi)
    assert 1 < rotations < 4
    keep = (rotations - 1) / 3
    assert_close(rope.frequencies(KINDS["llama3"], H)[pair], default * keep + default / 4 * (1 - keep), "rope_frequencies")


def test_yarn_attention_factor():
    assert rope.attention_factor(KINDS["yarn"]) == pytest.approx(0.1 * math.log(4) + 1)
    given = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.7)
    assert rope.attention_factor(given) == 0.7
    scaled = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.5, mscale_all_dim=0.25)
    assert rope.attention_factor(scaled) == pytest.approx((0.05 * math.log(4) + 1) / (0.025 * math.log(4) + 1))
    assert rope.attention_factor(KINDS["llama3"]) == 1.0


def test_dynamic_frequencies_by_hand():
    table = rope.dynamic_frequencies(KINDS["dynamic"], H, 32, 32)
    assert table.shape == (33, H // 2)
    assert_close(table[0], default_frequencies(), "rope_frequencies")
    base = 1e4 * (4 * 64 / 32 - 3) ** (H / (H - 2))
    assert_close(table[32], base ** -(np.arange(0, H, 2) / H), "rope_frequencies")


def test_dynamic_follows_the_length_only_past_the_maximum():
    cfg = config("dynamic")
    positions = jnp.arange(40, dtype=jnp.int32)[None]
    short, at_max = rope.cos_sin(cfg, positions, 5), rope.cos_sin(cfg, positions, 32)
    longer = rope.cos_sin(cfg, positions, jnp.int32(40))
    np.testing.assert_array_equal(short[0], at_max[0])
    np.testing.assert_array_equal(rope.cos_sin(cfg, positions)[0], at_max[0])
    assert np.abs(np.asarray(longer[0] - at_max[0])).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_distance_only(kind):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, H)), jnp.float32) for _ in range(2))

    def score(position_q: int, position_k: int) -> float:
        rotated = [rope.apply(x, *rope.cos_sin(config(kind), jnp.full((1, 1), p, jnp.int32)))
                   for x, p in ((q, position_q), (k, position_k))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(27, 23), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 5), abs=1e-2)


def test_apply_turns_halves_and_keeps_dtype():
    x = jnp.ones((1, 2, 3, 4), jnp.bfloat16)
    quarter = jnp.full((1, 2, 1, 2), math.pi / 2, jnp.float32)
    y = rope.apply(x, jnp.cos(quarter), jnp.sin(quarter))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), np.broadcast_to([-1, -1, 1, 1], (1, 2, 3, 4)), atol=1e-2)
