"""Whole windows at once give what decoding gives, and the scores move when something is wrong."""
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import metrics
from moejax import calibration, decode, scoring
from moejax.scoring import Scorer
from pallas_kernels.kv_format import KVFormat
from tests.moejax import tiny
from tests.tolerances import assert_close

WINDOW = np.array(tiny.prompt(5 * tiny.PAGE + 1, seed=11), np.int32)
Z = tiny.PAGE
FORMATS = [
    tiny.EXACT, tiny.BF16, tiny.EVERYTHING,
    KVFormat(k_bits=4, v_bits=3, page_size=Z, k_axis="token", k_rotation="block_hadamard", rotation_block=8, v_symmetric=True),
    KVFormat(k_bits=3, v_bits=4, page_size=Z, outlier_channels=8, outlier_bits=8, k_rotation="calibrated", sink_tokens=2),
    (KVFormat(k_bits=2, v_bits=3, page_size=Z, k_sparse=4), KVFormat(k_bits=8, v_bits=4, page_size=Z, outlier_choice="page")),
    (KVFormat(k_bits=3, v_bits=4, page_size=Z, sink_tokens=5, open_pages=3), KVFormat(k_bits=2, page_size=Z, open_pages=2)),
]


@pytest.fixture(scope="module")
def scorer():
    return Scorer(tiny.model())


def scores(scorer, formats, transforms=None, reference=None):
    this = scorer.forward(WINDOW[:-1], formats, transforms)
    return this, scorer.compare(this.hidden, this.hidden if reference is None else reference.hidden, WINDOW[1:])


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f.name if isinstance(f, KVFormat) else "mixed")
def test_a_window_at_once_is_what_decoding_sees(scorer, formats):
    spec, params = decode.split(tiny.model(), formats)
    transforms = calibration.key_transforms(scorer, spec.formats, tiny.prompt(200, seed=3))
    paged, top1 = tiny.score_paged(spec, params, WINDOW, transforms)
    _, whole = scores(scorer, formats, transforms)
    if formats == tiny.EXACT:
        assert_close(whole.log_probs, paged, "decode_f32")
    # Float noise moves a number on a rounding boundary to the next bfloat16, and that one to the next code: rare and small.
    off = np.abs(whole.log_probs - paged)
    assert np.median(off) < 1e-3 and np.mean(off) < 0.02 and np.mean(whole.top1 == top1) >= 0.97


def test_quantised_pages_matter_from_the_second_page_on(scorer):
    _, exact = scores(scorer, tiny.BF16)
    _, coarse = scores(scorer, KVFormat(k_bits=2, v_bits=2, page_size=Z))
    assert_close(coarse.log_probs[:Z], exact.log_probs[:Z], "decode_f32")
    assert np.abs(coarse.log_probs - exact.log_probs)[Z:].max() > 0.1
    _, wider = scores(scorer, KVFormat(k_bits=2, v_bits=2, page_size=Z, open_pages=3))
    assert_close(wider.log_probs[:3 * Z], exact.log_probs[:3 * Z], "decode_f32")
    assert np.abs(wider.log_probs - exact.log_probs)[3 * Z:].max() > 0.05


def test_keys_before_rope_are_other_keys_and_the_same_where_nothing_is_lost(scorer):
    def log_probs(rope, k_bits, v_bits):
        return scores(scorer, KVFormat(k_bits=k_bits, v_bits=v_bits, page_size=Z, key_rope=rope))[1].log_probs

    assert_close(log_probs("pre", 32, 32), log_probs("post", 32, 32), "decode_f32")
    assert np.abs(log_probs("pre", 2, 16) - log_probs("post", 2, 16)).max() > 0.1


def test_a_planted_error_moves_every_metric(scorer, monkeypatch):
    """Keys decoded with the scales of the channel beside them: a fault of the kind that a fused kernel can have."""
    fmt = KVFormat(k_bits=4, v_bits=4, page_size=Z)
    exact, reference = scores(scorer, tiny.BF16)
    right, right_scores = scores(scorer, fmt, reference=exact)
    honest = scoring.fake_quantize

    def planted(k, v, **kwargs):
        k_hat, v_hat = honest(k, v, **kwargs)
        low, step = k.min(-2, keepdims=True), (k.max(-2, keepdims=True) - k.min(-2, keepdims=True)) / 15
        codes = ((k_hat - low) / step).round()
        return codes * jnp.roll(step, 1, axis=-1) + jnp.roll(low, 1, axis=-1), v_hat

    monkeypatch.setattr(scoring, "fake_quantize", planted)
    scoring._attend.clear_cache()
    try:
        wrong, wrong_scores = scores(scorer, fmt, reference=exact)
    finally:
        scoring._attend.clear_cache()
    good = metrics.perplexity_increase_pct(right_scores.log_probs[None], reference.log_probs[None])["perplexity_increase_pct"]
    bad = metrics.perplexity_increase_pct(wrong_scores.log_probs[None], reference.log_probs[None])["perplexity_increase_pct"]
    assert abs(bad) > 5 * abs(good) and wrong_scores.kl.mean() > 10 * right_scores.kl.mean()
    assert (wrong_scores.top1 == reference.top1).mean() < (right_scores.top1 == reference.top1).mean()
    flips = [metrics.routing_flips_pct(p.topk_idx, exact.topk_idx)[0] for p in (right, wrong)]
    assert flips[1] > flips[0]


def test_attention_error_by_hand(scorer):
    """Nothing lost, no error; and the error of a layer is that of its own quantisation alone."""
    assert not scorer.forward(WINDOW[:-1], tiny.BF16, measure_attention=True).attention_error.any()
    mixed = (tiny.BF16, KVFormat(k_bits=2, v_bits=2, page_size=Z))
    errors = scorer.forward(WINDOW[:-1], mixed, measure_attention=True).attention_error
    assert errors[0] == 0 and errors[1] > 0.01


@pytest.mark.parametrize(("tokens", "formats", "message"), [
    (WINDOW, tiny.BF16, "page_size=32"), (WINDOW[:-1], (tiny.BF16,), "2 layers"),
    (WINDOW[:-1], (tiny.BF16, KVFormat(page_size=64)), r"page_size=\[32, 64\]")])
def test_bad_input_is_named(scorer, tokens, formats, message):
    with pytest.raises(ValueError, match=message):
        scorer.forward(tokens, formats)
