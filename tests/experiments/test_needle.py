"""`experiments.needle`: where the needle lies, what counts as found, bad input."""
import numpy as np
import pytest

import moejax
from experiments.needle import NEEDLE, QUESTION, Haystack, needle
from tests.experiments.conftest import TEXT, assert_refused


@pytest.fixture(scope="module")
def stack(checkpoint):
    _, tokenizer = moejax.load(checkpoint[0])
    return Haystack(tokenizer, tokenizer.encode(TEXT * 3), trials=3)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_window_is_hay_needle_question_and_key(stack, depth):
    for window, key_tokens in stack.windows(512, depth):
        assert len(window) == 513
        tokens = window.tolist()
        text = stack.tokenizer.decode(tokens)
        key = stack.tokenizer.decode(tokens[-key_tokens:]).strip()
        assert len(key) == 5 and key.isdecimal() and text.endswith(QUESTION.format(key=key)) and text.count(key) == 3
        before = text.index(NEEDLE.format(key=key).strip())
        assert before / len(text) == pytest.approx(depth * (len(text) - 110) / len(text), abs=0.05)


def test_windows_are_the_same_for_every_format_and_differ_by_trial(stack):
    twice = [[w for w, _ in stack.windows(512, 0.5)] for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*twice)) and not np.array_equal(twice[0][0], twice[0][1])


def test_table(checkpoint, run):
    done = run(needle, f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", f"--calibration_file={checkpoint[1]}",
               "--context=256", "--depth=0,1", "--trials=2", "--k_bits=2")
    assert done.code == 0, done.err
    rows = done.result["rows"]
    assert [(r["format"], r["depth"]) for r in rows] == [("16-bit cache", 0), ("16-bit cache", 1), ("k2v2", 0), ("k2v2", 1)]
    assert all(r["found_pct"] == 0 and r["log_prob"] < -5 for r in rows)  # an untrained model finds nothing
    assert rows[0]["log_prob"] != rows[2]["log_prob"]


@pytest.mark.parametrize("more, words", [
    (["--depth=1.5"], ["depth=1.5", "0 to 1"]), (["--trials=0"], ["trials=0"]), (["--context=100"], ["context=100", "page_size"]),
    (["--context=512"], ["context=512", "max_position_embeddings=256"]), (["--preset=none"], ["preset 'none'"]),
    (["--text=/nowhere.txt"], ["text=/nowhere.txt: No such file"]),
    (["--calibration_file=/nowhere.txt"], ["calibration_file=/nowhere.txt: No such file"]),
    (["--context=32", "--page_size=32"], ["context=32", "needle and question alone take"])])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(needle, f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", "--context=128", *more), *words)
