"""Experts kept in few bits: the same as experts that were quantised and dequantised, and nothing else changes."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moejax
from moejax import checkpoint
from moejax.sharding import make_mesh
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
    assert all(block.mlp.stored_as is TpuWeights for block in packed.blocks)
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
        assert block.mlp.words_gate_up[...].nbytes == experts * 2 * 96 * (64 * bits // 8 + 4)


def test_what_cannot_be_kept_so_is_named(tmp_path):
    with pytest.raises(ValueError, match="expert_weights='int5': accepted are bf16, int8, int4, int3, int2"):
        moejax.load(MODEL, expert_weights="int5")
    with pytest.raises(ValueError, match="mesh"):
        moejax.load(MODEL, expert_weights="int4", mesh=make_mesh())
    with pytest.raises(ValueError, match="expert_weights='int4': experts of 40 x 24"):
        moejax.load("tests/golden/mixtral_window_yarn", expert_weights="int4")
    with pytest.raises(ValueError, match="no experts"):
        moejax.load("tests/golden/llama_llama3_biases", expert_weights="int4")
    packed, _ = moejax.load(MODEL, expert_weights="int2")
    with pytest.raises(ValueError, match="packed"):
        checkpoint.save_hf(packed, tmp_path / "out")
    assert not list(tmp_path.iterdir())
