"""`experiments.train` from the command line: a killed run resumes, settings cannot be mixed, the export loads, bad input."""
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import moejax
from experiments import cli, results
from experiments.train import Run, train
from moejax.tokenizer_training import train_bpe
from tests.experiments.conftest import assert_refused

ROOT = pathlib.Path(__file__).parents[2]
GIN = """
train.model = @ModelConfig()
ModelConfig.vocab_size = 300
ModelConfig.hidden_size = 24
ModelConfig.num_heads = 2
ModelConfig.num_kv_heads = 1
ModelConfig.head_dim = 16
ModelConfig.qk_norm = "per_head"
ModelConfig.tie_word_embeddings = True
ModelConfig.max_position_embeddings = 64
ModelConfig.layers = @repeat_layers()
repeat_layers.num_layers = 2
repeat_layers.layer = @LayerConfig()
LayerConfig.mlp = @MoE()
MoE.num_experts = 3
MoE.moe_intermediate_size = 32
MoE.rule = @RouterRule()
RouterRule.num_experts_per_tok = 2
RouterRule.norm_topk_prob = True
TrainConfig.num_steps = 40
TrainConfig.batch_size = 2
TrainConfig.seq_len = 16
TrainConfig.warmup_steps = 4
TrainConfig.steps_per_call = 2
TrainConfig.eval_every = 20
TrainConfig.save_every = 2
TrainConfig.dtype = "float32"
"""
TEXT = "the quick brown fox jumps over the lazy dog, again and again. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gin file and prepared data."""
    root = tmp_path_factory.mktemp("train")
    (root / "run.gin").write_text(GIN)
    prepared = root / "prepared"
    prepared.mkdir()
    tokenizer = train_bpe([TEXT], 300)
    tokenizer.save(str(prepared / "tokenizer.json"))
    (prepared / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [0]}')
    ids = np.asarray([0, *tokenizer.encode(TEXT).ids], "<u2")
    ids.tofile(prepared / "train.bin")
    ids[:100].tofile(prepared / "heldout_fox.bin")
    (prepared / "data.json").write_text(json.dumps({"heldout_fox_tokens": 100, "heldout_fox_bytes": 300}))
    return root


def command(folder, run_dir, *flags):
    return [sys.executable, "-m", "experiments.train", f"--gin_file={folder / 'run.gin'}", f"--data_dir={folder / 'prepared'}",
            f"--run_dir={run_dir}", *flags]


def run(folder, run_dir, *flags):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command(folder, run_dir, *flags), cwd=ROOT, env=env, capture_output=True, text=True)


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}, [line for line in lines if "held_out_loss" in line]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end_and_exports(folder, tmp_path):
    whole = run(folder, tmp_path / "whole", f"--export_dir={tmp_path / 'export'}")
    assert whole.returncode == 0, whole.stderr
    result = json.loads(whole.stdout.splitlines()[-1])
    assert result["steps"] == 40 and result["resumed_at"] == 0 and result["tok_per_s"] > 0

    killed = subprocess.Popen(command(folder, tmp_path / "killed"), cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    newest = tmp_path / "killed" / "newest"
    while not any(path.name.isdigit() for path in newest.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again = run(folder, tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout.splitlines()[-1])
    assert result["steps"] == 40 and 0 < result["resumed_at"] < 40
    (a, held_a), (b, held_b) = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    assert a[40] == b[40] and held_a[-1] == held_b[-1]

    model, tokenizer = moejax.load(tmp_path / "export")
    assert model.config.num_layers == 2 and tokenizer.eos_ids == (0,)
    record = json.loads((tmp_path / "export" / "train_record.json").read_text())
    assert record["exported"]["fox_perplexity"] > 1 and record["train_config"]["num_steps"] == 40

    mixed = run(folder, tmp_path / "killed", "--learning_rate=0.5")
    assert mixed.returncode == 2 and "train_config.learning_rate" in mixed.stderr


def test_a_run_out_of_time_evaluates_saves_and_exports_where_it_stopped(folder, tmp_path, monkeypatch, capsys):
    log = Run.log

    def log_then_run_out(self, step, metrics, bar):
        log(self, step, metrics, bar)
        if step == 22:  # after the evaluation of step 20
            self.deadline = -math.inf

    monkeypatch.setattr(Run, "log", log_then_run_out)
    with pytest.raises(SystemExit) as exit_:
        cli.main(train, argv=command(folder, tmp_path / "run", "--max_minutes=5", f"--export_dir={tmp_path / 'export'}")[3:])
    assert exit_.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["stopped_early"] and result["steps"] == 22
    _, held_out = metrics(tmp_path / "run")
    assert [line["step"] for line in held_out] == [20, 22]
    assert result["fox_perplexity"] == held_out[-1]["fox_perplexity"]
    assert (tmp_path / "run" / "newest" / "22").is_dir()
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.fixture
def trained(folder, tmp_path):
    """Trains in this process into tmp_path/run, to the given step: a namespace of code, result, out, err."""
    def call(capsys, *flags):
        with pytest.raises(SystemExit) as exited:
            cli.main(train, argv=command(folder, tmp_path / "run", *flags)[3:])
        text = capsys.readouterr()
        result = json.loads(text.out.splitlines()[-1]) if text.out else None
        return types.SimpleNamespace(code=exited.value.code, result=result, out=text.out, err=text.err)

    return call


def test_a_damaged_checkpoint_and_a_torn_metrics_line_do_not_stop_a_resume(trained, tmp_path, capsys):
    assert trained(capsys, "--max_steps=4").result["steps"] == 4
    for path in (tmp_path / "run" / "newest" / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    again = trained(capsys, "--max_steps=6")
    assert again.code == 0 and again.result["resumed_at"] == 2 and again.result["steps"] == 6
    assert "step 4 is damaged" in again.err
    losses, _ = metrics(tmp_path / "run")
    assert losses.keys() == {2, 4, 6}


def test_a_run_without_a_readable_checkpoint_is_refused(trained, tmp_path, capsys):
    trained(capsys, "--max_steps=2")
    for path in (tmp_path / "run" / "newest" / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert_refused(trained(capsys, "--max_steps=4"), "newest: none of the checkpoints [2] can be read", "move the folder away")


def test_a_second_training_into_the_folder_is_refused(trained, tmp_path, capsys):
    with results.locked(tmp_path / "run" / "run.lock", ""):
        assert_refused(trained(capsys), f"run_dir={tmp_path / 'run'}: another process is training into it")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_training_holds_the_folder_until_it_ends(trained, tmp_path, capsys, monkeypatch):
    log, refused = Run.log, []

    def log_and_try(self, step, metrics, bar):
        log(self, step, metrics, bar)
        with pytest.raises(ValueError, match="taken"):
            results.locked(tmp_path / "run" / "run.lock", "taken")
        refused.append(step)

    monkeypatch.setattr(Run, "log", log_and_try)
    assert trained(capsys, "--max_steps=4").code == 0 and refused == [2, 4]
    results.locked(tmp_path / "run" / "run.lock", "taken").close()


@pytest.mark.parametrize("text, words", [("{", ["not JSON"]), ("[]", ["object"]), ('{"model": 3}', ["model, train_config, data"])])
def test_a_run_file_that_is_not_one_is_named(trained, tmp_path, capsys, text, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    assert_refused(trained(capsys), f"run_dir={tmp_path / 'run'}", "run.json", *words)


@pytest.mark.parametrize("text, words", [
    ("{}", ["heldout_fox_tokens=None", "integer"]), ("[", ["not JSON"]), ('{"heldout_fox_tokens": 9}', ["heldout_fox_bytes=None"])])
def test_prepared_data_that_does_not_say_its_counts_are_refused(folder, trained, tmp_path, capsys, text, words):
    shutil.copytree(folder / "prepared", tmp_path / "prepared")
    (tmp_path / "prepared" / "data.json").write_text(text)
    done = trained(capsys, f"--data_dir={tmp_path / 'prepared'}")
    assert_refused(done, f"data_dir={tmp_path / 'prepared'}", "data.json", *words)


def test_an_export_that_would_fail_is_refused_before_the_training(trained, tmp_path, capsys):
    for export, words in ((tmp_path / "run", ["holds run_dir"]), (tmp_path / "file" / "x", ["not a folder"]),
                          ("/proc/export", ["not writable"])):
        (tmp_path / "file").touch()
        assert_refused(trained(capsys, f"--export_dir={export}"), f"export_dir={export}", *words)
    done = trained(capsys, f"--export_dir={tmp_path / 'out'}", f"--output_dir={tmp_path / 'out'}")
    assert done.code == 1 and done.out == "" and "exists by now" in done.err and not (tmp_path / "run" / "newest" / "2").exists()


@pytest.mark.parametrize("flags, words", [
    (["--data_dir=/nowhere"], ["data_dir=/nowhere", "/nowhere/train.bin", "make data"]),
    (["--data_dir="], ["data_dir=''", "empty"]),
    (["--run_dir="], ["run_dir=''", "empty"]),
    (["--run_dir=/dev/null"], ["run_dir=/dev/null", "not a folder"]),
    (["--data_parallel=0"], ["data_parallel=0"]),
    (["--gin=train.model = 3"], ["train.model=3", "@ModelConfig()"]),
    (["--gin=ModelConfig.layers = 3"], ["ModelConfig.layers=3", "a list of LayerConfig"]),
    (["--gin=LayerConfig.mlp = @RouterRule()"], ["LayerConfig.mlp=", "DenseMLP", "MoE"]),
    (["--seq_len=65"], ["seq_len=65", "max_position_embeddings=64"]),
    (["--num_steps=5"], ["num_steps=5", "multiple of steps_per_call=2"]),
    (["--data_parallel=99"], ["99 devices"]),
    (["--export_dir=."], ["export_dir=.", "exists"]),
    (["--max_minutes=-1"], ["max_minutes=-1"]),
    (["--gin=ModelConfig.vocab_size = 50"], ["token id", "vocab_size is 50"]),
    (["--gin=ModelConfig.head_dim = 15"], ["head_dim=15"]),
])
def test_bad_input(folder, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as exit_:
        cli.main(train, argv=command(folder, tmp_path / "run", *flags)[3:])
    out = capsys.readouterr()
    assert exit_.value.code == 2 and out.out == ""
    assert len(out.err.strip().splitlines()) == 1 and all(word in out.err for word in words), out.err
    assert not (tmp_path / "run").exists()
