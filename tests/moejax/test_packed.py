"""Weights kept in few bits: the same as weights that were quantised and dequantised, and nothing else changes."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moejax
from moejax import checkpoint
from moejax.config import DenseMLP, LayerConfig, ModelConfig
from moejax.model import Transformer, abstract
from moejax.sharding import make_mesh, map_params
from moejax.weight_rules import formats_of
from pallas_kernels.qarray import quantize
from pallas_kernels.tpu_weights import TpuWeights

MODEL = "tests/golden/mixtral"  # experts of 64 x 96
TOKENS = jnp.asarray([[1, 5, 9, 20, 33, 7, 12, 4]], jnp.int32)


def logits(model) -> np.ndarray:
    graphdef, params = nnx.split(model)
    return np.asarray(jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens).logits)(params, TOKENS))


def rounded(w: nnx.Param, bits: int) -> None:
    q = quantize(w[...], bits=bits, group_size=math.gcd(w.shape[1], 128))
    w[...] = q.dequantize().astype(w.dtype)


@pytest.mark.parametrize("name", ["int4", "int3"])
def test_a_tpu_packs_them_for_its_kernel(name, monkeypatch):
    expected = logits(moejax.load(MODEL, expert_weights=name)[0])
    with monkeypatch.context() as on_a_tpu:
        on_a_tpu.setattr(jax, "default_backend", lambda: "tpu")
        packed, _ = moejax.load(MODEL, expert_weights=name, dtype="float32")
    assert all(block.mlp.gate_up.stored_as is TpuWeights for block in packed.blocks)
    np.testing.assert_array_equal(logits(packed), expected)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_packed_experts_are_rounded_experts(name, bits):
    model, _ = moejax.load(MODEL)
    plain = logits(model)
    for block in model.blocks:
        for w in (block.mlp.w_gate_EDF, block.mlp.w_up_EDF, block.mlp.w_down_EFD):
            rounded(w, bits)
    expected = logits(model)
    packed, _ = moejax.load(MODEL, expert_weights=name)
    got = logits(packed)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert np.abs(got - plain).max() > 1e-2
    for before, after in zip(model.blocks, packed.blocks):
        np.testing.assert_array_equal(before.mlp.router.w_router_DE[...], after.mlp.router.w_router_DE[...])
    experts = model.config.layers[0].mlp.num_experts
    for block in packed.blocks:  # codes, and a scale for every 64 channels
        assert block.mlp.gate_up.words[...].nbytes == experts * 2 * 96 * (64 * bits // 8 + 4)


def test_packed_bfloat16_is_exact():
    plain, _ = moejax.load(MODEL, dtype="bfloat16")
    exact = logits(moejax.load(MODEL)[0])
    packed, _ = moejax.load(MODEL, dtype="bfloat16", expert_weights="packed_bf16", dense_weights="packed_bf16")
    of_plain, of_packed = (np.linalg.norm(logits(model) - exact) for model in (plain, packed))
    assert of_packed < 1.2 * of_plain  # activations are in bfloat16: what is left differs in the order of sums
    for before, after in zip(plain.blocks, packed.blocks):
        np.testing.assert_array_equal(after.mlp.down.weights().dequantize("bfloat16"), before.mlp.w_down_EFD[...])


def rounded_dense(model) -> None:
    """Dense matrices [.., k], output axes first, as a packed model has them; a head of its own."""
    def round_one(w: nnx.Param, k: int) -> None:
        matrix = w[...].reshape(-1, k).T
        q = quantize(matrix[None], bits=8, group_size=math.gcd(k, 128))
        w[...] = q.dequantize()[0].T.reshape(w.shape).astype(w.dtype)

    D = model.config.hidden_size
    for block in model.blocks:
        attention = block.attention
        for w in (attention.w_q_NHD, attention.w_k_KHD, attention.w_v_KHD):
            round_one(w, D)
        round_one(attention.w_o_DNH, math.prod(attention.w_o_DNH.shape[1:]))
        for mlp in [block.mlp] if not block.is_moe else [block.mlp.shared] if block.mlp.has_shared else []:
            round_one(mlp.w_gate_FD, D)
            round_one(mlp.w_up_FD, D)
            round_one(mlp.w_down_DF, mlp.w_down_DF.shape[1])
    if model.config.tie_word_embeddings:
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
        model.lm_head_VD = nnx.Param(model.embedding_VD[...])
    round_one(model.lm_head_VD, D)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "biases", "tied"])
def test_packed_dense_weights_are_rounded_dense_weights(name):
    packed, expected = (model_of(name) for _ in range(2))
    plain = logits(packed)
    packed.pack(formats_of(packed.config, dense_weights="int8"))
    if expected.config.tie_word_embeddings:  # the packed head is a copy: embeddings stay
        np.testing.assert_array_equal(packed.embedding_VD[...], expected.embedding_VD[...])
    rounded_dense(expected)
    got, wanted = logits(packed), logits(expected)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4 * np.abs(plain).max())
    assert np.abs(got - plain).max() > 2e-3
    np.testing.assert_allclose(np.asarray(packed.head()), np.asarray(expected.head()), rtol=0, atol=1e-6)
    assert packed.is_packed and not expected.is_packed


def model_of(name: str) -> Transformer:
    """A golden model, or one without experts whose vocabulary is no multiple of what is packed: with biases, or tied."""
    if name not in ("biases", "tied"):
        return moejax.load(f"tests/golden/{name}")[0]
    biases = name == "biases"
    layer = LayerConfig(mlp=DenseMLP(intermediate_size=96, bias=biases))
    config = ModelConfig(vocab_size=77, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=64,
                         attention_bias=biases, attention_out_bias=biases, tie_word_embeddings=not biases, layers=(layer,) * 2)
    graphdef, shapes = abstract(config)
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: jnp.asarray(rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape), leaf.dtype)  # noqa: E731
    return nnx.merge(graphdef, map_params(draw, shapes))


def test_what_cannot_be_kept_so_is_named(tmp_path):
    with pytest.raises(ValueError, match="expert_weights='int5': accepted are bf16, packed_bf16, int8, int4, int3, int2"):
        moejax.load(MODEL, expert_weights="int5")
    with pytest.raises(ValueError, match="layers.0.experts.gate_up: .* mesh"):
        moejax.load(MODEL, expert_weights="int4", mesh=make_mesh())
    with pytest.raises(ValueError, match="layers.0.experts.gate_up in 'int4': matrices of 40 x 24"):
        moejax.load("tests/golden/mixtral_window_yarn", expert_weights="int4")
    with pytest.raises(ValueError, match="no experts"):
        moejax.load("tests/golden/llama_llama3_biases", expert_weights="int4")
    packed, _ = moejax.load(MODEL, expert_weights="int2")
    with pytest.raises(ValueError, match="packed"):
        checkpoint.save_hf(packed, tmp_path / "out")
    assert not list(tmp_path.iterdir())
