"""`experiments.quality`: numbers against a forward pass without a cache, formats, output files, bad input."""
import math

import jax
import numpy as np
import pytest
from flax import nnx

import moejax
from experiments.quality import quality, score_window
from moejax import decode
from moejax.train import next_token_loss
from pallas_kernels.kv_format import KVFormat
from tests.experiments.conftest import assert_refused
from tests.tolerances import assert_close

SMALL = ("--page_size=32", "--context=96", "--windows=2", "--sample_tokens=8")


def flags(checkpoint, *more):
    return (f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", *SMALL, *more)


@pytest.fixture(scope="module")
def window(checkpoint):
    _, tokenizer = moejax.load(checkpoint[0])
    return np.asarray(tokenizer.encode(checkpoint[1].read_text())[:97], np.int32)


def test_scores_of_an_exact_cache_are_those_of_the_full_forward(checkpoint, window):
    model, _ = moejax.load(checkpoint[0])
    spec, params = decode.split(model, KVFormat(k_bits=32, v_bits=32, page_size=32))
    log_probs, top1 = score_window(spec, params, window)
    graphdef, full = nnx.split(model)
    logits = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t).logits)(full, window[None, :-1])
    assert_close(log_probs, -np.asarray(next_token_loss(logits, window[None, 1:]))[0], "logits_f32")
    np.testing.assert_array_equal(top1, np.asarray(logits).argmax(-1)[0])


@pytest.mark.slow
def test_table_and_files(checkpoint, run, tmp_path):
    done = run(quality, *flags(checkpoint, "--k_bits=16,4,2", "--v_bits=16,4,2", f"--output_dir={tmp_path}"))
    assert done.code == 0, done.err
    rows = done.result["rows"]
    assert [row["format"] for row in rows] == ["k16v16", "k4v4", "k2v2"]
    agreement = [row["top1_agreement_pct"] for row in rows]
    assert agreement[0] == 100 and agreement[0] > agreement[1] > agreement[2]
    # 2 layers, 2 KV heads; a page of 32 tokens: 16 channels x 2 bits x 2, one scale word a channel and a token: 112 words
    assert rows[2]["cache_bytes_per_token"] == 2 * 2 * 128 * 4 / 32
    assert rows[2]["effective_bits"] == 128 * 32 / (2 * 16 * 32)
    assert rows[0]["tpot_ms_p99"] >= rows[0]["tpot_ms_p50"] > 0 and rows[0]["timed_steps"] == 7
    assert all(math.isfinite(row["perplexity"]) and row["sample"] for row in rows)
    assert done.result["implementation"] == "reference" and done.result["scored_tokens"] == 192
    assert "| k2v2" in done.out
    png = (tmp_path / "perplexity_by_effective_bits.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000
    assert {p.name for p in tmp_path.iterdir()} >= {"results.jsonl", "config.gin", "environment.json"}


def test_the_baseline_is_run_even_when_it_is_not_asked_for(checkpoint, run):
    done = run(quality, *flags(checkpoint, "--k_bits=2", "--outlier_channels=8", "--sink_tokens=2"))
    (row,) = done.result["rows"]
    assert row["format"] == "k2v2+8ch@8+sink2" and row["top1_agreement_pct"] < 100


@pytest.mark.parametrize("more, words", [
    (["--k_bits=5"], ["k_bits=5"]),
    (["--k_bits=4,2", "--v_bits=4"], ["k_bits=[4, 2]", "one length"]),
    (["--context=100"], ["context=100", "page_size=32"]),
    (["--context=512"], ["context=512", "max_position_embeddings=256"]),
    (["--windows=0"], ["windows=0"]),
    (["--windows=10000"], ["windows=10000", "tokens"]),
    (["--text=/nowhere.txt"], ["/nowhere.txt"]),
    (["--checkpoint=/nowhere"], ["/nowhere"]),
    (["--k_rotation=fourier"], ["k_rotation='fourier'", "hadamard"]),
])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(quality, *flags(checkpoint, *more)), *words)
