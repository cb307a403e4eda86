"""Rules of weight formats: which matrix gets what, what is refused, and that the model holds what they say."""
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from moejax import accounting
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE
from moejax.hf_tensors import HFSource
from moejax.model import Block
from moejax.packed import PackedEmbedding
from moejax.random_model import random_model
from moejax.weight_rules import WeightFormat, formats_of, matrices
from pallas_kernels import dispatch
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.qarray import quantize, quantize_fp8, quantize_mxfp4

MOE = MoE(num_experts=5, moe_intermediate_size=96, rule=RouterRule(num_experts_per_tok=2), shared_intermediate_size=32)
CONFIG = ModelConfig(
    vocab_size=77, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=64,
    layers=(LayerConfig(mlp=DenseMLP(intermediate_size=128)), LayerConfig(mlp=MOE), LayerConfig(mlp=MOE)))
GOLDEN = "tests/golden/qwen3_moe"


def names(*rules: str, **shorthands: str) -> dict[str, str]:
    return {name: f.name for name, f in formats_of(CONFIG, weight_rules=rules, **shorthands).items()}


def test_every_matrix_has_a_name_and_its_sizes():
    there = matrices(CONFIG)
    assert list(there) == ["embedding"] + [f"layers.{name}" for name in (
        "0.attention.qkv", "0.attention.out", "0.mlp.gate_up", "0.mlp.down",
        *(f"{i}.{name}" for i in (1, 2) for name in (
            "attention.qkv", "attention.out", "experts.gate_up", "experts.down", "shared.gate_up", "shared.down")))] + ["lm_head"]
    assert there["layers.0.attention.qkv"] == (64, 256) and there["layers.0.attention.out"] == (128, 64)
    assert there["layers.1.experts.down"] == (96, 64) and there["layers.1.shared.gate_up"] == (64, 32)


def test_shorthands():
    experts = {f"layers.{i}.experts.{name}": "int4" for i in (1, 2) for name in ("gate_up", "down")}
    assert names(expert_weights="int4") == experts
    dense = names(dense_weights="int8:g32:asym")
    assert set(dense) == set(matrices(CONFIG)) - set(experts) - {"embedding"} and set(dense.values()) == {"int8:g32:asym"}
    assert names() == {} == names(expert_weights="bf16")


def test_the_last_rule_that_matches_decides():
    got = names("layers.[12].experts=int3", "layers.2=bf16", "experts.down=int8:g32", "lm_head=int8", "embedding=int4:asym",
                "layers.2.experts.gate_up=packed_bf16", "shared=int2")
    assert got == {
        "embedding": "int4:asym", "lm_head": "int8",
        "layers.1.experts.gate_up": "int3", "layers.1.experts.down": "int8:g32",
        "layers.2.experts.gate_up": "packed_bf16", "layers.2.experts.down": "int8:g32",
        **{f"layers.{i}.shared.{name}": "int2" for i in (1, 2) for name in ("gate_up", "down")}}


@pytest.mark.parametrize(("rules", "words"), [
    (["expert=int4"], "weight_rules='expert=int4': matches no matrix; there are embedding, layers.N.attention.qkv, .*N from 0 to"),
    (["layers.3=int4"], "weight_rules='layers.3=int4': matches no matrix"),
    (["layers.0.experts=int4"], "matches no matrix"),  # a dense layer
    (["router=int8"], "weight_rules='router=int8': routers are never quantised"),
    (["layers.1.rout*=int8"], "routers are never quantised"),
    (["experts=int4", "layers.?.experts=int8"], "weight_rules='experts=int4': has no effect"),
    (["experts=int4", "experts=int4"], "has no effect"),
    (["experts"], "weight_rules='experts': must be PATTERN=FORMAT"),
    (["experts=int5"], "'int5': accepted are bf16, packed_bf16, int8, int4, int3, int2"),
    (["experts=int4:g16"], "group size 16: accepted are 32, 64, 128"),
    (["experts=int4:64"], "'int4:64': accepted are KIND"),
    (["experts=packed_bf16:g64"], "neither groups nor zero points"),
    (["experts=int4:g64"], "layers.1.experts.down in 'int4:g64': groups of 64 do not divide its 96 channels; accepted are 32"),
    (["experts.down=int4"], "layers.1.experts.down in 'int4': layers.1.experts.gate_up must be packed too"),
    (["embedding=mxfp4"], "embedding in 'mxfp4': accepted are bf16, int8"),
    (["experts=mxfp4:g64"], "groups of mxfp4 are of 32"), (["experts=fp8_e4m3:asym"], "fp8_e4m3 has no zero points"),
    (["embedding=packed_bf16"], "embedding in 'packed_bf16': accepted are bf16, int8"),
])
def test_what_is_refused(rules, words):
    with pytest.raises(ValueError, match=words):
        names(*rules)


def test_sizes_and_tied_embeddings_are_refused_before_anything_is_read():
    odd = dataclasses.replace(CONFIG, hidden_size=40)
    with pytest.raises(ValueError, match="layers.0.attention.qkv in 'int8': matrices of 40 x 256; both must be multiples of 32"):
        formats_of(odd, weight_rules=["layers.0.attention=int8"])
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="embedding in 'int8': it is the output projection too"):
        formats_of(tied, weight_rules=["embedding=int8"])
    assert set(formats_of(tied, weight_rules=["embedding=int8", "lm_head=int8"])) == {"embedding", "lm_head"}


@pytest.mark.parametrize("text", ["int8", "int8:asym", "int4:g32", "int3:g64:asym", "int2"])
def test_rows_of_a_packed_embedding(text):
    rows = jax.random.normal(jax.random.key(0), (19, 128)) * jnp.linspace(0.1, 4, 128) + 0.3
    weight_format = WeightFormat.parse(text)
    assert weight_format.name == text
    expected = quantize(rows, bits=weight_format.bits, axis=-1, group_size=weight_format.group_size or 128,
                        symmetric=weight_format.symmetric).dequantize()
    packed = PackedEmbedding(weight_format, rows)
    ids = jnp.asarray([[3, 18], [0, 3]])
    np.testing.assert_array_equal(packed(ids, jnp.float32), expected[ids])
    assert packed.words[...].nbytes == 19 * 128 * weight_format.bits // 8


def test_a_loaded_model_holds_what_the_rules_say():
    plain, _ = moejax.load(GOLDEN)  # three layers, hidden size 64
    rules = ["layers.0.experts=int4:g32:asym", "layers.1.experts=int8", "embedding=int8", "layers.2.attention=int8:g64"]
    packed, _ = moejax.load(GOLDEN, weight_rules=rules)
    layouts = [packed.blocks[0].mlp.gate_up.layout, packed.blocks[1].mlp.down.layout, packed.blocks[2].attention.qkv.layout]
    assert [(lay.bits, lay.group_size, lay.has_zero) for lay in layouts] == [(4, 32, True), (8, 32, False), (8, 64, False)]
    assert packed.embedding_packed and not packed.head_packed and packed.is_packed
    assert not packed.blocks[2].mlp.packed and not packed.blocks[0].attention.packed
    expected = quantize(plain.blocks[0].mlp.w_down_EFD[...], bits=4, group_size=32, symmetric=False).dequantize()
    np.testing.assert_array_equal(packed.blocks[0].mlp.down.weights().dequantize(), expected)
    tokens = jnp.asarray([[1, 5, 9]], jnp.int32)
    np.testing.assert_allclose(packed.embed(tokens), plain.embed(tokens), atol=0.02 * float(jnp.abs(plain.embed(tokens)).max()))
    np.testing.assert_array_equal(packed.blocks[0].mlp.router.w_router_DE[...], plain.blocks[0].mlp.router.w_router_DE[...])
    assert np.isfinite(np.asarray(packed(tokens).logits)).all()


@pytest.mark.parametrize(("kind", "quantized"), [("fp8_e4m3:g32", quantize_fp8), ("mxfp4", quantize_mxfp4)])
def test_float_codes_are_served_by_the_reference(kind, quantized):
    plain, _ = moejax.load(GOLDEN)
    packed, _ = moejax.load(GOLDEN, expert_weights=kind)
    down = plain.blocks[1].mlp.w_down_EFD[...]  # 32 channels
    np.testing.assert_array_equal(packed.blocks[1].mlp.down.weights().dequantize(), quantized(down).dequantize())
    tokens = jnp.asarray([[1, 5, 9]], jnp.int32)
    got = np.asarray(packed(tokens).logits)
    assert dispatch.last_implementation("grouped_matmul") == "reference"
    for block in plain.blocks:
        for w in (block.mlp.w_gate_EDF, block.mlp.w_up_EDF, block.mlp.w_down_EFD):
            w[...] = (functools.partial(quantize_fp8, group_size=32) if kind != "mxfp4" else quantize_mxfp4)(w[...]).dequantize()
    np.testing.assert_allclose(got, np.asarray(plain(tokens).logits), atol=1e-4)


def test_random_models_take_the_same_rules():
    formats = formats_of(CONFIG, weight_rules=["layers.2.experts=int4", "embedding=int8"])
    model = random_model(CONFIG, formats)
    assert [block.mlp.packed for block in model.blocks] == [False, False, True] and model.embedding_packed
    assert model.blocks[1].mlp.w_gate_EDF[...].dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(model(jnp.asarray([[1, 2]])).logits)).all()


def test_a_block_is_packed_before_the_next_is_read(monkeypatch):
    events, read, pack = [], HFSource.read, Block.pack
    monkeypatch.setattr(HFSource, "read", lambda self, path, *rest: (events.append(path[:2]), read(self, path, *rest))[1])
    monkeypatch.setattr(Block, "pack", lambda self, formats: (events.append("pack"), pack(self, formats))[1])
    moejax.load(GOLDEN, expert_weights="int4")
    kinds = [kind for kind, _ in itertools.groupby(events)]
    if kinds[0] == "pack":  # shapes alone, for the memory that will be needed
        del kinds[0]
    assert kinds[:6] == [("blocks", 0), "pack", ("blocks", 1), "pack", ("blocks", 2), "pack"]
    assert all(kind[0] != "blocks" for kind in kinds[6:])


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_read(monkeypatch):
    def never(*args):
        raise AssertionError("read")

    monkeypatch.setattr(HFSource, "read", never)
    monkeypatch.setattr(jax.Device, "memory_stats", lambda self: {"bytes_limit": 100_000}, raising=False)
    with pytest.raises(accounting.DoesNotFitError, match=r"the model takes at least .*experts .*the device has 0.0 GiB"):
        moejax.load(GOLDEN)
    with pytest.raises(accounting.DoesNotFitError, match="a block before it is packed"):
        moejax.load(GOLDEN, expert_weights="int4")
