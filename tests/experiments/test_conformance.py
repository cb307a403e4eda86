"""The conformance experiment: the golden cases pass, and faults do not."""
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import conformance as module
from tests.experiments.conftest import assert_refused

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "golden.npz").is_file())
SMALLEST = "mixtral_window_yarn"


@pytest.fixture
def conform(run):
    """Runs the experiment with flags; see the fixture `run`."""
    return lambda *flags: run(module.conformance, *flags, positional="checkpoint")


@pytest.fixture
def case(tmp_path):
    shutil.copytree(GOLDEN / SMALLEST, tmp_path / "case")
    return tmp_path / "case"


def edit_json(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_golden(case: pathlib.Path, **changes) -> None:
    np.savez(case / "golden.npz", **(dict(np.load(case / "golden.npz")) | changes))


def test_there_are_cases_of_every_family():
    families = {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in CASES}
    assert families == {"llama", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}


@pytest.mark.parametrize("name", CASES)
def test_golden(name, conform):
    done = conform(f"--checkpoint={GOLDEN / name}")
    [case] = done.result["cases"]
    assert done.code == 0 and done.result["passed"]
    assert case["max_abs_logit_error"] <= 2e-4 and case["greedy_match"] and case["top1_agreement"] == 1.0
    assert case["parameters"] == sum(a.size for a in load_file(GOLDEN / name / "model.safetensors").values())


def test_through_the_paged_cache(conform):
    done = conform(GOLDEN / SMALLEST, "--paged_cache")
    assert done.code == 0 and done.result["cases"][0]["paged_greedy_match"]


def test_wrong_weights_fail(case, conform):
    """Swapping two experts' down projections is the kind of fault that reads fluently."""
    tensors = load_file(case / "model.safetensors")
    names = [f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight" for e in (0, 1)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    save_file(tensors, case / "model.safetensors")
    done = conform(case)
    assert done.code == 1 and not done.result["passed"] and done.result["cases"][0]["max_abs_logit_error"] > 2e-4


@pytest.mark.parametrize("changes", [
    {"sliding_window": None}, {"sliding_window": 8}, {"num_experts_per_tok": 1}, {"rms_norm_eps": 0.05}])
def test_wrong_switches_fail(changes, case, conform):
    edit_json(case / "config.json", **changes)
    done = conform(case)
    assert done.code == 1 and not done.result["passed"]


def test_other_greedy_tokens_and_nan_fail(case, conform):
    arrays = dict(np.load(case / "golden.npz"))
    edit_golden(case, greedy_ids=(arrays["greedy_ids"] + 1) % 211)
    done = conform(case)
    assert done.code == 1 and not done.result["cases"][0]["greedy_match"] and done.result["cases"][0]["max_abs_logit_error"] <= 2e-4
    edit_golden(case, greedy_ids=arrays["greedy_ids"], logits=np.full_like(arrays["logits"], np.nan))
    done = conform(case)
    assert done.code == 1 and done.result["cases"][0]["max_abs_logit_error"] is None


def cut(path: pathlib.Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def damaged_golden(case):
    """The archive's directory is whole, what it points to is not."""
    arrays = dict(np.load(case / "golden.npz"))
    np.savez_compressed(case / "golden.npz", **arrays)
    data = bytearray((case / "golden.npz").read_bytes())
    data[len(data) // 3:len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    (case / "golden.npz").write_bytes(data)


def bad_golden_shape(case):
    edit_golden(case, logits=np.zeros((2, 3, 4), np.float32))


@pytest.mark.parametrize("spoil, named", [
    (lambda case: edit_json(case / "config.json", model_type="gpt_oss"), "gpt_oss"),
    (lambda case: edit_json(case / "config.json", num_local_experts=4), "experts.3"),
    (lambda case: (case / "golden.npz").unlink(), "golden.npz"),
    (lambda case: (case / "golden.npz").write_bytes(b"x"), "golden.npz"),
    (lambda case: cut(case / "golden.npz", 0), "golden.npz"),
    (lambda case: cut(case / "golden.npz", 20_000), "golden.npz"),
    (damaged_golden, "golden.npz"),
    (lambda case: edit_golden(case, input_ids=np.zeros((2, 40))), "input_ids is of float64"),
    (lambda case: edit_golden(case, greedy_ids=np.zeros((2, 0), int)), "at least one"),
    (bad_golden_shape, "logits.shape"),
    (lambda case: shutil.rmtree(case), "no such folder"),
])
def test_bad_input_is_refused_before_any_work(spoil, named, case, conform):
    spoil(case)
    done = conform(GOLDEN / "olmoe", case)
    assert_refused(done, f"checkpoint={case}", named)


def test_paged_cache_refuses_what_it_cannot_serve(conform):
    done = conform(GOLDEN / "qwen3_moe_mixed_dynamic", "--paged_cache")
    assert_refused(done, "dynamic", "24")


@pytest.mark.parametrize("argv, named", [([], "checkpoint"), ([GOLDEN / SMALLEST, "--tolerance=0"], "tolerance=0")])
def test_bad_flags(argv, named, conform):
    done = conform(*argv)
    assert_refused(done, named)
