"""A tiny checkpoint with a tokenizer, and a caller that runs an experiment in this process."""
import json
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import cli
from moejax.checkpoint import save_hf
from moejax.config import LayerConfig, ModelConfig, MoE, repeat_layers
from moejax.model import Transformer
from moejax.tokenizer import Tokenizer
from moejax.tokenizer_training import train_bpe
from pallas_kernels.fused_router import RouterRule

TEXT = "the quick brown fox jumps over the lazy dog; 12 dogs and 345 foxes were seen, again and again.\n" * 60


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """(folder of a two-layer MoE in the Hugging Face format, path of a text)."""
    root = tmp_path_factory.mktemp("checkpoint")
    rule = RouterRule(num_experts_per_tok=2, norm_topk_prob=True)
    config = ModelConfig(
        vocab_size=300, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm="per_head", max_position_embeddings=256,
        layers=repeat_layers(2, LayerConfig(mlp=MoE(num_experts=3, moe_intermediate_size=32, rule=rule))))
    model = Transformer(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):  # wide enough that the cache decides the logits
        if leaf[...].ndim > 1:
            leaf[...] = jnp.asarray(rng.normal(0, 2 / leaf[...].shape[-1] ** 0.5, leaf[...].shape), jnp.float32)
    tokenizer = Tokenizer(train_bpe([TEXT], 300), bos_id=0, eos_ids=(0,), add_bos=True)
    save_hf(model, root / "model", tokenizer=tokenizer, dtype="float32")
    (root / "text.txt").write_text(TEXT)
    return root / "model", root / "text.txt"


@pytest.fixture
def trained_on(checkpoint, tmp_path):
    """The same checkpoint with a record that it was trained on sequences of so many tokens."""
    def copy(tokens: int):
        folder = tmp_path / f"trained_on_{tokens}"
        shutil.copytree(checkpoint[0], folder)
        (folder / "train_record.json").write_text(json.dumps({"exported": {"seq_len": tokens}}))
        return folder, checkpoint[1]

    return copy


@pytest.fixture
def run(capsys):
    """Runs an experiment with flags: a namespace of code, result (None after an error), out, err."""
    def call(experiment, *flags, positional=None):
        with pytest.raises(SystemExit) as exited:
            cli.main(experiment, argv=list(map(str, flags)), positional=positional)
        text = capsys.readouterr()
        result = json.loads(text.out.splitlines()[-1]) if text.out else None
        return types.SimpleNamespace(code=exited.value.code, result=result, out=text.out, err=text.err)

    return call


def assert_refused(done, *words):
    """Exit code 2, nothing on stdout, one line on stderr that has all the words."""
    assert done.code == 2 and done.out == ""
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and all(word in lines[0] for word in words), done.err
