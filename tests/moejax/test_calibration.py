"""Promoted channels are those that cost most when quantised; the calibrated rotation concentrates what the queries feel."""
import numpy as np
import pytest

from moejax import calibration
from moejax.scoring import Scorer
from pallas_kernels import fake_quantize
from pallas_kernels.kv_format import KVFormat
from tests.moejax import tiny

FORMAT = KVFormat(k_bits=2, v_bits=2, page_size=tiny.PAGE, outlier_channels=8, sink_tokens=2)
TEXT = tiny.prompt(200, seed=3)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(tiny.model())


def measured(scorer, tokens, sink_tokens=2):
    return calibration.statistics(scorer, tokens, tiny.PAGE, sink_tokens, "none", 32)


def test_order_puts_the_highest_scores_last_and_keeps_the_rest():
    scores = np.array([[5, 1, 9, 2], [0, 3, 0, 0]], np.float32)
    assert calibration.order(scores, 2).tolist() == [[1, 3, 0, 2], [0, 2, 1, 3]]


def test_transforms_are_permutations_and_promote_the_outlier_channel(scorer):
    transforms = calibration.key_transforms(scorer, (FORMAT, KVFormat(page_size=tiny.PAGE)), TEXT)
    assert transforms[1].k_perm is None
    perm = np.asarray(transforms[0].k_perm)
    assert np.sort(perm, axis=1).tolist() == [list(range(16))] * 2
    stats = measured(scorer, TEXT)[0]
    scores = stats.range_sq * np.einsum("khh->kh", stats.query_moment)
    for head, row in enumerate(perm):
        assert np.argmax(scores[head]) in row[-8:]


def test_statistics_by_plain_indexing(scorer):
    """Two windows, the second not full, the last page cut short."""
    tokens = tiny.prompt(16 * tiny.PAGE + 40, seed=5)
    first, second = tokens[:16 * tiny.PAGE], tokens[16 * tiny.PAGE:] + [0] * 24
    heads = [scorer.collect(np.array(part, np.int32), lambda q, k: (np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)))
             for part in (first, second)]
    for layer, stats in enumerate(measured(scorer, tokens)):
        ranges, centred, moments = [], [], []
        for (q, k), length in zip((h[layer] for h in heads), (len(first), 40)):
            moments += list(q[:length].reshape(length, 2, 3, 16).swapaxes(1, 2).reshape(-1, 2, 16))
            for start in range(0, length, tiny.PAGE):
                page = k[max(start, 2 if start == 0 else 0):min(start + tiny.PAGE, length)]
                ranges.append((page.max(0) - page.min(0)) ** 2)
                centred += list(page - page.mean(0))
        np.testing.assert_allclose(stats.range_sq, np.mean(ranges, axis=0), rtol=1e-4)
        np.testing.assert_allclose(stats.key_cov, np.einsum("nkh,nki->khi", centred, centred) / len(centred), rtol=1e-3, atol=1e-3)
        moment = np.einsum("nkh,nki->khi", moments, moments) / len(moments)
        np.testing.assert_allclose(stats.query_moment, moment, rtol=1e-3, atol=1e-3)


def test_one_token_after_the_sinks_has_no_range(scorer):
    assert not measured(scorer, TEXT[:3])[0].range_sq.any()
    assert measured(scorer, TEXT[:4])[0].range_sq.any()


def test_coding_transform_diagonalises_and_inverts():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 8, 8))
    key_cov, moment = a @ a.swapaxes(1, 2), b @ b.swapaxes(1, 2) + np.eye(8)
    k_matrix, q_matrix = (m.astype(np.float64) for m in calibration.coding_transform(key_cov, moment))
    np.testing.assert_allclose(k_matrix @ q_matrix.swapaxes(1, 2), np.tile(np.eye(8), (3, 1, 1)), atol=1e-4)
    stored = k_matrix.swapaxes(1, 2) @ key_cov @ k_matrix
    energy = np.einsum("khh->kh", stored)
    assert (np.diff(energy) >= -1e-6).all()
    assert np.abs(stored - np.einsum("kh,hi->khi", energy, np.eye(8))).max() < 1e-3 * energy.max()
    # An error in any stored channel costs the same, up to the damping: stored queries are white.
    queries = np.einsum("khh->kh", q_matrix.swapaxes(1, 2) @ moment @ q_matrix)
    assert (queries.std(axis=1) < 0.1 * queries.mean(axis=1)).all()


def test_coding_transform_lowers_the_logit_error_of_correlated_keys():
    """Keys that move together: at equal bits (2, a quarter of the channels at 4) products with the queries come out closer."""
    rng, H = np.random.default_rng(0), 32
    mix = rng.normal(size=(H, H)) * np.exp(-np.arange(H) / 6)  # a few directions carry most
    k = (rng.normal(size=(1, 4, 128, H)) @ mix.T).astype(np.float32)
    q = (rng.normal(size=(4096, H)) * np.linspace(0.2, 2, H)).astype(np.float32)
    moment, cov = (q.T @ q / len(q))[None].astype(np.float64), np.cov(k.reshape(-1, H).T)[None]
    promoted = calibration.order((k[0].max((0, 1)) - k[0].min((0, 1)))[None] ** 2 * np.diag(moment[0])[None], 8)[0]
    k_matrix, q_matrix = (m[0] for m in calibration.coding_transform(cov, moment))
    fmt = KVFormat(k_bits=2, v_bits=2, outlier_channels=8, outlier_bits=4)

    def error(keys, queries):
        k_hat, _ = fake_quantize(keys, keys, kv_format=fmt)
        return np.sqrt(np.mean(((np.asarray(k_hat) - keys) @ queries.T) ** 2))

    assert error(k @ k_matrix, q @ q_matrix) < 0.7 * error(k[..., promoted], q[:, promoted])


def test_formats_that_need_no_text(scorer):
    assert calibration.key_transforms(scorer, (tiny.BF16,) * 2, []) is None
    by_page = KVFormat(k_bits=2, page_size=tiny.PAGE, outlier_channels=8, outlier_choice="page")
    assert calibration.key_transforms(scorer, (by_page,) * 2, []) is None
    with pytest.raises(ValueError, match="calibration_tokens"):
        calibration.key_transforms(scorer, (FORMAT,) * 2, [5])
