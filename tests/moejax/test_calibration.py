"""Promoted channels are those that cost most when quantised."""
import numpy as np
import pytest

from moejax import calibration, decode
from pallas_kernels.kv_format import KVFormat
from tests.moejax import tiny

FORMAT = KVFormat(k_bits=2, v_bits=2, page_size=tiny.PAGE, outlier_channels=8, sink_tokens=2)
TEXT = tiny.prompt(200, seed=3)


@pytest.fixture(scope="module")
def split():
    return decode.split(tiny.model(), FORMAT)


def test_order_puts_the_highest_scores_last_and_keeps_the_rest():
    scores = np.array([[5, 1, 9, 2], [0, 3, 0, 0]], np.float32)
    assert calibration.order(scores, 2).tolist() == [[1, 3, 0, 2], [0, 2, 1, 3]]


def test_transforms_are_permutations_and_promote_the_outlier_channel(split):
    transforms = calibration.key_transforms(*split, TEXT)
    assert len(transforms) == tiny.config().num_layers
    scores = np.asarray(calibration.channel_scores(*split, np.array(TEXT[:128], np.int32), np.int32(128)))
    for layer, t in enumerate(transforms):
        assert np.sort(t.k_perm, axis=1).tolist() == [list(range(16))] * 2
        for head, row in enumerate(np.asarray(t.k_perm)):
            assert np.argmax(scores[layer, head]) in row[-8:]


def test_padding_does_not_count(split):
    """Three tokens in a buffer of 128: what stands behind them changes nothing."""
    results = []
    for fill in (0, 7):
        tokens = np.full(128, fill, np.int32)
        tokens[:3] = TEXT[:3]
        results.append(np.asarray(calibration.channel_scores(*split, tokens, np.int32(3))))
    assert np.array_equal(*results) and np.isfinite(results[0]).all()


def test_one_token_after_the_sinks_has_no_range(split):
    tokens = np.array(TEXT[:128], np.int32)
    assert not np.asarray(calibration.channel_scores(*split, tokens, np.int32(3))).any()
    assert np.asarray(calibration.channel_scores(*split, tokens, np.int32(4))).any()


def test_a_format_without_promoted_channels_needs_no_text():
    assert calibration.key_transforms(*decode.split(tiny.model(), tiny.BF16), []) is None
