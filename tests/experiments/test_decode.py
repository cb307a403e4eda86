"""`experiments.decode`: what it prints and reports, and what it refuses."""
import pytest

from experiments.decode import decode
from tests.experiments.conftest import assert_refused


def flags(checkpoint, *more):
    return (f"--checkpoint={checkpoint[0]}", "--prompt=the quick brown", "--prompt=again", "--page_size=32", "--max_len=96",
            "--max_batch=2", "--max_tokens=6", "--ignore_eos", "--steps_per_segment=4", *more)


def test_report(checkpoint, run):
    done = run(decode, *flags(checkpoint, "--k_bits=3", "--v_bits=2", "--repeats=2"))
    assert done.code == 0, done.err
    r = done.result
    assert r["kv_format"] == "k3v2+page32" and r["implementation"] == "reference" and r["generated_tokens"] == 12
    assert len(r["completions"]) == 2 and all(r["completions"])
    assert r["ttft_cold_ms"] > max(r["ttft_ms"])  # the first call compiles, the second does not
    assert r["compilations"] <= 4 and r["tpot_ms_p99"] >= r["tpot_ms_p50"] > 0


def test_a_seeded_sample_is_reproduced(checkpoint, run):
    def sample(seed):
        return run(decode, *flags(checkpoint, "--temperature=1.5", "--top_p=0.9", f"--seed={seed}")).result["completions"]

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("more, words", [
    (["--max_tokens=0"], ["max_tokens=0"]),
    (["--max_tokens=200"], ["max_tokens=200", "max_len=96"]),
    (["--temperature=-1"], ["temperature=-1"]),
    (["--top_p=0"], ["top_p=0"]),
    (["--page_size=33"], ["page_size=33", "multiple of 32"]),
    (["--max_batch=0"], ["max_batch=0"]),
    (["--num_pages=0", "--max_tokens=80"], ["num_pages=0"]),
    (["--prompt_file=/nowhere"], ["/nowhere"]),
    (["--checkpoint=nobody"], ["nobody"]),
])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(decode, *flags(checkpoint, *more)), *words)
