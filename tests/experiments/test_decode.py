"""`experiments.decode`: what it prints and reports, and what it refuses."""
import jax
import pytest

from experiments import random_decode
from experiments.decode import decode
from experiments.routing import routing
from moejax.engine import Engine
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
    assert 0 < r["load_peak_process_gb"] <= r["peak_process_gb"]
    assert r["compilations"] <= 4 and r["tpot_ms_p99"] >= r["tpot_ms_p50"] > 0


def test_packed_experts(run):
    flags = ("--prompt=The function", "--max_tokens=3", "--max_len=128", "--max_batch=1")
    packed, plain = (run(decode, *flags, f"--expert_weights={name}").result for name in ("int4", "bf16"))
    assert packed["weight_rules"] == "experts=int4" and packed["expert_implementation"] == "reference"
    experts = 8 * 16 * 3 * 256 * 64  # weights; float32 on a CPU, then 4 bits, and float32 scales for 128 and for 64 channels
    scales = 8 * 16 * 4 * (2 * 128 + 256)
    assert plain["weight_bytes"] - packed["weight_bytes"] == experts * 4 - experts // 2 - scales
    assert packed["effective_weight_bits"]["experts"] == 4 + 32 * scales / 4 / experts and plain["weight_rules"] == "none"
    assert_refused(run(decode, *flags, "--expert_weights=4"), "expert_weights='4'")
    assert_refused(run(decode, *flags, "--weight_rules=router=int8"), "checkpoint=checkpoints/moe_10m", "never quantised")


def test_weight_rules_of_random_models(run):
    flags = ("--weights=random", "--checkpoint=tests/golden/qwen3_moe", "--context=40", "--max_batch=1", "--max_tokens=1",
             "--steps_per_segment=1", "--routing_steps=1", "--expert_weights=int4", "--weight_rules=embedding=int8:g32:asym",
             "--weight_rules=layers.1.experts=packed_bf16")
    r = run(decode, *flags).result
    assert r["weight_rules"] == "experts=int4, embedding=int8:g32:asym, layers.1.experts=packed_bf16"
    bits = r["effective_weight_bits"]
    assert bits["embedding"] == 8 + 40 / 32 and bits["lm_head"] == bits["attention"] == 16
    assert bits["experts"] == pytest.approx((16 + 2 * (4 + 32 * 256 / (64 * 32 * 3) / 2)) / 3, rel=0.1)
    assert_refused(run(decode, *flags, "--weight_rules=lm_head=int7"), "weight_rules='lm_head=int7'", "int8")
    assert_refused(run(decode, *flags, "--weight_rules=layers.7=int8"), "weight_rules='layers.7=int8'", "N from 0 to 2")


def test_random_weights_at_the_size_of_a_config(run):
    flags = ("--weights=random", "--checkpoint=tests/golden/qwen3_moe/config.json", "--expert_weights=int4", "--dense_weights=int8",
             "--max_batch=3", "--context=150", "--k_bits=3", "--v_bits=2", "--max_tokens=5", "--steps_per_segment=4")
    done = run(decode, *flags)
    assert done.code == 0, done.err
    r = done.result
    assert (r["weights"], r["kv_format"], r["batch"], r["context"], r["steps"]) == ("random", "k3v2", 3, 150, 5)
    assert r["tpot_ms_p99"] >= r["tpot_ms_p50"] > 0 and r["waited_step_ms_p50"] > 0
    assert 0 < r["read_weights_gb"] < r["weight_gb"]
    assert 0 < r["load_peak_process_gb"] <= r["peak_process_gb"]
    assert r["routing"] == "by a random router" and r["experts_hit_asked_for"] is None
    assert 4 < r["experts_hit"] <= 8 and r["experts_hit_if_uniform"] == pytest.approx(8 * (1 - 0.5**3))
    assert_refused(run(decode, *flags, "--prompt=x"), "prompt=['x']")
    assert_refused(run(decode, *flags, "--context=0"), "context=0")
    assert_refused(run(decode, "--context=10"), "context=10")
    assert_refused(run(decode, "--weights=random", "--checkpoint=nowhere.json"), "checkpoint=nowhere.json")
    assert_refused(run(decode, "--weights=zeros"), "weights='zeros'")


def test_random_models_that_do_not_fit_are_refused_before_they_are_made(run, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("allocated")

    monkeypatch.setattr(random_decode, "random_model", never)
    monkeypatch.setattr(random_decode, "filled_state", never)
    monkeypatch.setattr(jax.Device, "memory_stats", lambda self: {"bytes_limit": 80 * 2**30}, raising=False)
    done = run(decode, "--weights=random", "--checkpoint=configs/models/qwen3_30b_a3b.json", "--expert_weights=int4",
               "--max_batch=32", "--context=32768")
    assert_refused(done, "max_batch=32", "114.4 GiB (closed KV pages 96.75, experts 14.34", "the device has 80.0 GiB")


def test_skewed_routing_of_random_weights(run):
    flags = ("--weights=random", "--checkpoint=tests/golden/qwen3_moe/config.json", "--max_batch=4", "--context=100",
             "--max_tokens=2", "--steps_per_segment=2")
    skewed = run(decode, *flags, "--routing=zipf:8").result  # three of eight experts always, one mostly
    assert skewed["routing"] == "by a random router with biases for zipf:8"
    assert skewed["experts_hit"] == pytest.approx(skewed["experts_hit_asked_for"], rel=0.1) and skewed["experts_hit"] < 5.5
    plain = run(decode, *flags).result
    experts = 3 * 3 * 64 * 32 * 2 / 1e9  # of all layers, one of each, gate, up and down, bfloat16
    for r in (skewed, plain):
        assert r["weight_gb"] - r["read_weights_gb"] == pytest.approx((8 - r["experts_hit"]) * experts + 320 * 64 * 2 / 1e9)
    assert_refused(run(decode, *flags, "--routing=zipf"), "routing='zipf'", "zipf:EXPONENT")
    assert_refused(run(decode, *flags, "--routing=zipf:-1"), "routing='zipf:-1'", "0 to 8")
    assert_refused(run(decode, *flags, "--routing=recorded:/nowhere"), "/nowhere")
    assert_refused(run(decode, "--routing=zipf:1"), "routing='zipf:1'", "random")


def test_recorded_routing_of_random_weights(run, tmp_path):
    file = tmp_path / "recorded.json"
    assert run(routing, "--context=32", "--windows=2", "--batch=8", f"--routing_file={file}").code == 0
    flags = ("--weights=random", "--max_batch=4", "--context=100", "--max_tokens=2", "--steps_per_segment=2",
             f"--routing=recorded:{file}")
    r = run(decode, *flags).result
    assert r["experts_hit"] == pytest.approx(r["experts_hit_asked_for"], rel=0.15)
    assert_refused(run(decode, *flags, "--checkpoint=tests/golden/qwen3_moe"), f"routing=recorded={file}", "layers")


def test_one_repeat_times_no_compilation(checkpoint, run, monkeypatch):
    compiled = []
    generate = Engine.generate

    def counted(engine, *args, **kwargs):
        try:
            return generate(engine, *args, **kwargs)
        finally:
            compiled.append(engine.num_compilations)

    monkeypatch.setattr(Engine, "generate", counted)
    r = run(decode, *flags(checkpoint, "--num_samples=2", "--temperature=1", "--page_size=64", "--max_len=128")).result
    assert len(compiled) == 2 and compiled[0] == compiled[1] > 0  # all before the run that is timed
    assert r["ttft_cold_ms"] > max(r["ttft_ms"]) and r["tpot_ms_p99"] < r["ttft_cold_ms"] and r["decode_steps"] > 0


def test_decoding_beyond_what_the_checkpoint_was_trained_on_is_said(trained_on, run):
    beyond = run(decode, *flags(trained_on(9), "--max_tokens=6"))
    assert beyond.code == 0 and "was trained on sequences of 9 tokens" in beyond.err
    assert "prompt and max_tokens=" in beyond.result["beyond_training"]
    within = run(decode, *flags(trained_on(90), "--max_tokens=6"))
    assert within.result["beyond_training"] is None and "was trained" not in within.err


def test_it_runs_from_any_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(decode, "--gin_file=configs/runs/decode.gin", "--max_tokens=0")  # the checkpoint is loaded before
    assert_refused(done, "max_tokens=0")
    done = run(decode, "--prompt=a", "--max_tokens=2", "--max_len=128", "--max_batch=1")
    assert done.code == 0 and done.result["checkpoint"] == "checkpoints/moe_10m"


def test_a_file_is_one_more_prompt(checkpoint, run, tmp_path):
    (tmp_path / "text").write_text("The file ends")
    file = f"--prompt_file={tmp_path / 'text'}"
    both = run(decode, *flags(checkpoint, file)).result["completions"]
    assert len(both) == len(run(decode, *flags(checkpoint)).result["completions"]) + 1
    alone = run(decode, *(f for f in flags(checkpoint, file) if not f.startswith("--prompt="))).result["completions"]
    assert alone == both[-1:]


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
    (["--prompt_file=/nowhere"], ["prompt_file=/nowhere: No such file"]),
    (["--prompt_file="], ["prompt_file=''", "empty"]),
    (["--prompt_tokens=-1"], ["prompt_tokens=-1", "at least 1"]),
    (["--checkpoint=nobody"], ["checkpoint=nobody: no such file or folder"]),
    (["--kv_schedule=/nowhere.json"], ["/nowhere.json", "no effect"]),
    (["--k_rotation=calibrated", "--calibration_file=/nowhere.txt"], ["calibration_file=/nowhere.txt: No such file"]),
])
def test_bad_input(checkpoint, run, more, words):
    assert_refused(run(decode, *flags(checkpoint, *more)), *words)
