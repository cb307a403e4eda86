"""What a quantised cache costs, from per-token scores: means with bootstrap error bars, drift along the window, routing flips."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BLOCK_TOKENS = 64  # consecutive tokens are resampled together: their errors are not independent
RESAMPLES = 1000
CONFIDENCE = 95.0


def bootstrap(per_token: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean of per_token [W, T] and the ends of its 95 % interval, by resampling blocks of `BLOCK_TOKENS` tokens.

    Percentile bootstrap over non-overlapping blocks (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 8, 13). The
    same seed gives the same draw, so that formats scored on the same windows are resampled alike.
    """
    size = math.gcd(BLOCK_TOKENS, per_token.shape[1])
    blocks = per_token.reshape(-1, size).mean(axis=1)
    draws = np.random.default_rng(seed).integers(len(blocks), size=(RESAMPLES, len(blocks)))
    low, high = np.percentile(blocks[draws].mean(axis=1), (50 - CONFIDENCE / 2, 50 + CONFIDENCE / 2))
    return float(per_token.mean()), float(low), float(high)


def perplexity_increase_pct(log_probs: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Relative increase of perplexity over `reference` in percent, paired token by token; log_probs in nats, [W, T]."""
    mean, low, high = (100 * math.expm1(d) for d in bootstrap(reference - log_probs))
    return {"perplexity_increase_pct": mean, "perplexity_increase_pct_low": low, "perplexity_increase_pct_high": high}


def kl_metrics(kl: np.ndarray) -> dict[str, float | list[float]]:
    """Mean KL divergence in nats with its interval; its drift: the slope of a straight line through the KL of each position, in
    nats per 1,000 positions; and by position: the mean of each `BLOCK_TOKENS` positions in turn. kl [W, T]."""
    mean, low, high = bootstrap(kl)
    positions = np.arange(kl.shape[1])
    slope = float(np.polyfit(positions, kl.mean(axis=0), 1)[0]) if kl.shape[1] > 1 else 0.0
    by_position = kl.mean(axis=0).reshape(-1, math.gcd(BLOCK_TOKENS, kl.shape[1])).mean(axis=1)
    return {"kl": mean, "kl_low": low, "kl_high": high, "kl_drift_per_1k": 1000 * slope, "kl_by_position": by_position.tolist()}


def routing_flips_pct(
    chosen: Sequence[np.ndarray | None], reference: Sequence[np.ndarray | None],
) -> list[float | None]:
    """Share of the chosen experts, in percent, that `reference` did not choose, of each layer; None for dense layers.

    chosen, reference: one entry a layer, int [tokens, X] expert ids without repeats in a row, or None.
    """
    flips: list[float | None] = []
    for ours, theirs in zip(chosen, reference):
        if ours is None or theirs is None:
            flips.append(None)
            continue
        kept = np.any(ours[:, :, None] == theirs[:, None, :], axis=2)
        flips.append(100 * float(1 - kept.mean()))
    return flips
