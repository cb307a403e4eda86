"""`experiments.inputs`: paths from any folder, messages that name the parameter, what a checkpoint was trained on."""
import json

import pytest

from experiments import inputs


def test_paths_are_looked_up_here_and_then_under_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inputs.locate("data/heldout_austen.txt") == str(inputs.ROOT / "data" / "heldout_austen.txt")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout_austen.txt").write_text("mine")
    assert inputs.read_text("text", "data/heldout_austen.txt") == "mine"
    assert inputs.locate("nowhere/to/be/found") == "nowhere/to/be/found"


@pytest.mark.parametrize("read, message", [
    (lambda: inputs.read_text("text", "gone.txt"), r"text=gone.txt: No such file or directory \(looked in .* and .*\)"),
    (lambda: inputs.read_text("text", ""), "text=: must not be empty"),
    (lambda: inputs.read_text("text", "."), "text=.: Is a directory"),
    (lambda: inputs.read_text("text", "latin1.txt"), "text=latin1.txt: is not UTF-8"),
    (lambda: inputs.load_checkpoint("nobody"), "checkpoint=nobody: no such file or folder"),
    (lambda: inputs.load_checkpoint("empty"), "checkpoint=empty: empty/config.json: no such file"),
    (lambda: inputs.load_schedule("bits.json", 2), "kv_schedule=bits.json: layer 0: KVFormat.k_bits=5: accepted are"),
    (lambda: inputs.load_schedule("gone.json", 2), "kv_schedule=gone.json: No such file"),
])
def test_messages_name_the_parameter_and_its_value(tmp_path, monkeypatch, read, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bits.json").write_text('{"layers": {"0": {"k_bits": 5}}}')
    with pytest.raises(ValueError, match=f"^{message}"):
        read()


def test_a_checkpoint_says_what_it_was_trained_on(tmp_path, caplog):
    assert inputs.trained_tokens("checkpoints/moe_10m") == 2048
    assert inputs.beyond_training("checkpoints/moe_10m", "context", 2048) is None and not caplog.text
    assert "context=2049" in inputs.beyond_training("checkpoints/moe_10m", "context", 2049)
    assert "2048 tokens" in caplog.text
    assert inputs.trained_tokens(str(tmp_path)) is None and inputs.beyond_training(str(tmp_path), "context", 10**6) is None
    (tmp_path / "train_record.json").write_text(json.dumps({"exported": {"seq_len": "2048"}}))
    with pytest.raises(ValueError, match=r"train_record.json: exported.seq_len='2048'"):
        inputs.trained_tokens(str(tmp_path))
