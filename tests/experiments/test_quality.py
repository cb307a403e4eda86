"""`experiments.quality`: numbers against a forward pass without a cache, formats, output files, bad input."""
import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

import moejax
from experiments.quality import CacheOptions, quality
from moejax import decode
from moejax.train import next_token_loss
from pallas_kernels.kv_format import KVFormat
from tests.experiments.conftest import assert_refused
from tests.moejax import tiny
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
    log_probs, top1 = tiny.score_paged(spec, params, window)
    graphdef, full = nnx.split(model)
    logits = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t).logits)(full, window[None, :-1])
    assert_close(log_probs, -np.asarray(next_token_loss(logits, window[None, 1:]))[0], "logits_f32")
    np.testing.assert_array_equal(top1, np.asarray(logits).argmax(-1)[0])


@pytest.mark.slow
def test_table_and_files(checkpoint, run, tmp_path):
    done = run(quality, *flags(checkpoint, "--k_bits=16,4,2", "--v_bits=16,4,2", f"--output_dir={tmp_path}"))
    assert done.code == 0, done.err
    rows = done.result["rows"]
    assert [row["format"] for row in rows] == ["k16v16+page32", "k4v4+page32", "k2v2+page32"]
    agreement = [row["top1_agreement_pct"] for row in rows]
    assert agreement[0] == 100 and agreement[0] > agreement[1] > agreement[2]
    # 2 layers, 2 KV heads; a page of 32 tokens: 16 channels x 2 bits x 2, one scale word a channel and a token: 112 words
    assert rows[2]["cache_bytes_per_token"] == 2 * 2 * 128 * 4 / 32
    assert rows[2]["effective_bits"] == 128 * 32 / (2 * 16 * 32)
    assert rows[0]["tpot_ms_p99"] >= rows[0]["tpot_ms_p50"] > 0 and rows[0]["timed_steps"] == 7
    assert all(math.isfinite(row["perplexity"]) and row["sample"] for row in rows)
    assert done.result["implementation"] == "reference" and done.result["scored_tokens"] == 192
    assert rows[0]["perplexity_increase_pct"] == rows[0]["kl"] == rows[0]["attention_error"] == 0
    assert 0 < rows[1]["kl"] < rows[2]["kl"] and rows[2]["kl_low"] < rows[2]["kl"] < rows[2]["kl_high"]
    assert 0 < rows[1]["routing_flip_pct"] < rows[2]["routing_flip_pct"] < 100
    assert rows[1]["attention_error"] < rows[2]["attention_error"] == pytest.approx(np.mean(rows[2]["attention_error_by_layer"]))
    assert "| k2v2" in done.out
    for name in ("perplexity_by_effective_bits", "kl_by_position"):
        png = (tmp_path / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000
    assert len(rows[1]["kl_by_position"]) == 3 and np.mean(rows[1]["kl_by_position"]) == pytest.approx(rows[1]["kl"])
    assert {p.name for p in tmp_path.iterdir()} >= {"results.jsonl", "config.gin", "environment.json"}


def test_presets_schedules_and_skipped_layers(checkpoint, run, tmp_path):
    schedule = tmp_path / "schedule.json"
    schedule.write_text('{"base": {"page_size": 32, "k_bits": 2, "v_bits": 2}, "layers": {"0": {"k_bits": 16, "v_bits": 16}}}')
    short = (f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", "--context=96", "--windows=2", "--sample_tokens=0")
    small = (*short, "--k_bits=2", "--page_size=32")
    whole, skipped, listed = (run(quality, *args).result["rows"][0] for args in (
        small, (*small, "--skip_first_layers=1"), (*short, f"--kv_schedule={schedule}")))
    assert skipped["kl"] < whole["kl"] and skipped["effective_bits"] == (16 + whole["effective_bits"]) / 2
    assert listed["kl"] == skipped["kl"] and listed["format"] == str(schedule) and whole["sample"] is None
    done = run(quality, f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", "--context=128", "--windows=1",
               "--sample_tokens=2", "--preset=naive-int2", "--preset=oscar-2")
    assert done.code == 0, done.err
    rows = done.result["rows"]
    assert [row["format"] for row in rows] == ["naive-int2", "oscar-2"]
    assert rows[0]["sample"] and rows[1]["sample"]


def test_options_are_the_fields_of_the_format():
    names = [{f.name for f in dataclasses.fields(kind)} for kind in (CacheOptions, KVFormat)]
    assert names[1] - names[0] == {"k_bits", "v_bits", "layout"} and names[0] < names[1]
    assert dataclasses.asdict(CacheOptions()).items() <= dataclasses.asdict(KVFormat()).items()


def test_the_baseline_is_run_even_when_it_is_not_asked_for(checkpoint, run):
    done = run(quality, *flags(checkpoint, "--k_bits=2", "--outlier_channels=8", "--sink_tokens=2"))
    (row,) = done.result["rows"]
    assert row["format"] == "k2v2+8ch@8+sink2+page32" and row["top1_agreement_pct"] < 100


def test_scoring_beyond_what_the_checkpoint_was_trained_on_is_said(trained_on, run):
    done = run(quality, *flags(trained_on(95), "--sample_tokens=0"))
    assert "context=96" in done.err and "was trained on sequences of 95 tokens" in done.err
    assert "sequences of 95 tokens" in done.result["beyond_training"]
    done = run(quality, *flags(trained_on(96), "--sample_tokens=0"))
    assert done.result["beyond_training"] is None and "was trained" not in done.err


@pytest.mark.parametrize("more, words", [
    (["--gin=quality.formats = [3]"], ["quality.formats=[3]", "a list of KVFormat"]),
    (["--k_bits=5"], ["k_bits=5"]),
    (["--k_bits=4,2", "--v_bits=4"], ["k_bits=[4, 2]", "one length"]), (["--v_bits=7"], ["v_bits=7", "accepted are"]),
    (["--preset=kivi-2"], ["page_size=32", "preset", "no effect"]),
    (["--k_bits=4", "--outlier_channels=8", "--outlier_bits=4"], ["outlier_channels=8", "outlier_bits=4"]),
    (["--k_bits=16", "--v_bits=4", "--k_sparse=4"], ["k_sparse=4", "k_bits=[16]"]), (["--rotation_block=1"], ["rotation_block=1"]),
    (["--context=100"], ["context=100", "page_size=32"]),
    (["--context=512"], ["context=512", "max_position_embeddings=256"]),
    (["--windows=0"], ["windows=0"]), (["--sample_tokens=-1"], ["sample_tokens=-1"]),
    (["--preset=kivi"], ["preset 'kivi'", "kivi-2"]),
    (["--skip_last_layers=9"], ["skip_last_layers=9", "2 layers"]), (["--k_group=12"], ["k_group=12", "multiple of 8"]),
    (["--windows=10000"], ["windows=10000", "tokens"]),
    (["--text=/nowhere.txt"], ["text=/nowhere.txt: No such file"]), (["--text="], ["text=: must not be empty"]),
    (["--checkpoint=/nowhere"], ["checkpoint=/nowhere: no such file"]),
    (["--k_rotation=fourier"], ["k_rotation='fourier'", "hadamard"]),
])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(quality, *flags(checkpoint, *more)), *words)
