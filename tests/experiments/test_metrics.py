"""Metrics by hand, and the interval against what it should cover."""
import math

import numpy as np
import pytest

from experiments import metrics


def test_perplexity_increase_by_hand():
    reference = np.full((2, 128), -2.0)
    result = metrics.perplexity_increase_pct(reference - math.log(1.02), reference)
    assert [round(v, 9) for v in result.values()] == [2, 2, 2]


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        _, low, high = metrics.bootstrap(rng.normal(0.1, 1, (4, 1024)), seed=trial)
        hits += low <= 0.1 <= high
    assert 0.88 < hits / 200 < 0.99


def test_blocks_that_move_together_widen_the_interval():
    rng = np.random.default_rng(0)
    blocks = np.repeat(rng.normal(size=64), metrics.BLOCK_TOKENS).reshape(4, -1)
    alone = rng.normal(size=blocks.shape)
    widths = [high - low for _, low, high in map(metrics.bootstrap, (blocks, alone))]
    assert widths[0] > 5 * widths[1]


def test_drift_is_the_slope():
    kl = np.tile(0.5 + 0.003 * np.arange(256), (3, 1))
    result = metrics.kl_metrics(kl)
    assert result["kl_drift_per_1k"] == pytest.approx(3) and result["kl"] == pytest.approx(kl.mean())
    assert result["kl_low"] < result["kl"] < result["kl_high"]
    np.testing.assert_allclose(result["kl_by_position"], [0.5 + 0.003 * (64 * i + 31.5) for i in range(4)])


def test_routing_flips_by_hand():
    """Order within a token's choice does not count; of 4 choices one is new."""
    ours, theirs = np.array([[0, 1], [2, 3]]), np.array([[1, 0], [2, 4]])
    assert metrics.routing_flips_pct([ours, None], [theirs, None]) == [25.0, None]
