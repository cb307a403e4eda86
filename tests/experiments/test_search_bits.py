"""`experiments.search_bits`: the choice against brute force, the file it writes, bad input."""
import itertools

import numpy as np
import pytest

from experiments.decode import decode
from experiments.search_bits import cheapest, search_bits
from moejax import kv_schedule
from tests.experiments.conftest import assert_refused

SMALL = ("--page_size=32", "--context=96", "--windows=1", "--check_windows=1", "--k_bits=2,4", "--v_bits=2,4",
         "--sink_tokens=4")


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    costs, words = rng.random((4, 3)), np.array([3, 5, 9])
    for budget in (12, 17, 25, 40):
        best = min((c for c in itertools.product(range(3), repeat=4) if words[list(c)].sum() <= budget),
                   key=lambda c: sum(costs[i, j] for i, j in enumerate(c)))
        assert cheapest(costs, words, budget) == list(best)
    with pytest.raises(ValueError, match="budget=11"):
        cheapest(costs, words, 11)


def test_a_schedule_is_found_written_and_decoded_with(checkpoint, run, tmp_path):
    path = tmp_path / "schedule.json"
    flags = (f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", *SMALL, f"--schedule_file={path}")
    done = run(search_bits, *flags, "--budget=4")
    assert done.code == 0, done.err
    result = done.result
    formats = kv_schedule.load(path, 2)
    assert [f.name for f in formats] == result["schedule"] and kv_schedule.effective_bits(formats, 16) <= 4
    costs = np.array(result["sensitivity_kl"])
    assert costs.shape == (2, 4) and (costs > 0).all()
    cheap, dear = (result["candidates"].index(f"k{b}v{b}+sink4+page32") for b in (4, 2))
    assert (costs[:, cheap] < costs[:, dear]).all()
    assert result["rows"][0]["effective_bits"] <= 4 and result["rows"][0]["kl"] > 0
    done = run(decode, f"--checkpoint={checkpoint[0]}", f"--kv_schedule={path}", "--prompt=the quick brown fox", "--max_tokens=40",
               "--max_len=128", "--max_batch=1")
    assert done.code == 0 and done.result["effective_bits"] == result["rows"][0]["effective_bits"]


@pytest.mark.parametrize("more, words", [
    (["--budget=2"], ["budget=2.0", "smallest candidate"]), (["--context=100"], ["context=100"]), (["--windows=0"], ["windows=0"]),
    (["--schedule_file=/proc/s.json"], ["schedule_file=/proc/s.json", "not writable"]),
    (["--schedule_file=/dev"], ["schedule_file=/dev", "not a file"]),
    (["--text=/nowhere", "--budget=4"], ["text=/nowhere: No such file"]),
    (["--context=512"], ["context=512", "max_position_embeddings=256"]), (["--k_bits=5"], ["k_bits=5"])])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(search_bits, f"--checkpoint={checkpoint[0]}", f"--text={checkpoint[1]}", *SMALL, *more), *words)
