"""Computed bytes are the arrays' bytes, and a step's traffic is what a hand count gives."""
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moejax import accounting, decode
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE
from moejax.kv_cache import KeyTransform
from moejax.model import abstract, packed_shapes
from moejax.weight_rules import formats_of
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.kv_format import KVFormat

RULE = RouterRule(num_experts_per_tok=2)
LAYERS = (
    LayerConfig(mlp=MoE(num_experts=5, moe_intermediate_size=24, rule=RULE, shared_intermediate_size=16, shared_gate=True)),
    LayerConfig(mlp=DenseMLP(intermediate_size=56, bias=True), sliding_window=45),
    LayerConfig(mlp=MoE(num_experts=3, moe_intermediate_size=8, rule=RULE)))
BASE = dict(vocab_size=101, hidden_size=40, num_heads=6, num_kv_heads=2, head_dim=16, layers=LAYERS,  # noqa: C408
            max_position_embeddings=512)
CONFIGS = [
    ModelConfig(**BASE),
    ModelConfig(**BASE, tie_word_embeddings=True, qk_norm="per_head"),
    ModelConfig(**BASE, attention_bias=True, attention_out_bias=True, qk_norm="full"),
]
FORMATS = [
    KVFormat(), KVFormat(k_bits=32, v_bits=32, page_size=64), KVFormat(k_bits=2, v_bits=3, page_size=32),
    KVFormat(k_bits=2, v_bits=2, page_size=96, outlier_channels=8, outlier_bits=16, sink_tokens=5),
    KVFormat(k_bits=8, v_bits=4, page_size=32, sink_tokens=1), KVFormat(k_bits=2, page_size=32, k_rotation="calibrated"),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weight_bytes_are_those_of_the_parameters(config, dtype):
    _, params = abstract(config, param_dtype=dtype)
    assert sum(accounting.weight_bytes(config, dtype).values()) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("config", CONFIGS)
def test_held_bytes_of_each_kind(config):
    held = accounting.held_bytes(config, abstract(config, param_dtype=jnp.bfloat16)[1])
    held["mlp"] += held.pop("shared")
    assert held == accounting.weight_bytes(config, jnp.bfloat16)


def test_held_bytes_of_packed_weights():
    moe = MoE(num_experts=5, moe_intermediate_size=64, rule=RULE, shared_intermediate_size=32, shared_gate=True)
    layers = (LayerConfig(mlp=moe), LayerConfig(mlp=DenseMLP(intermediate_size=96)))
    config = ModelConfig(**BASE | {"layers": layers, "hidden_size": 128, "head_dim": 16, "num_heads": 8})
    packed, plain = (
        accounting.held_bytes(config, nnx.state(packed_shapes(config, formats, param_dtype=jnp.bfloat16)))
        for formats in (formats_of(config, "int4", "int8"), {}))
    assert packed["experts"] == 5 * 3 * 128 * 64 // 2 + 5 * 4 * (2 * 64 + 128)  # codes, a float32 scale for 128 or 64 channels
    assert packed["mlp"] == 3 * 128 * 96 + 4 * (2 * 96 + 3 * 128)  # 96 channels: groups of 32
    assert packed["shared"] == 3 * 128 * 32 + 4 * (2 * 32 + 128) + 2 * 128  # and the gate, bfloat16
    assert packed["lm_head"] == 128 * 128 + 4 * 128  # the vocabulary, padded to 128
    for kind in ("embedding", "router", "norms"):
        assert packed[kind] == plain[kind] > 0


def test_what_does_not_fit_is_said_by_part(monkeypatch):
    monkeypatch.setattr(jax.Device, "memory_stats", lambda self: {"bytes_limit": 4 << 30}, raising=False)
    accounting.require_memory("this", {"weights": 3 << 30, "pages": 1 << 30})
    words = r"this takes at least 5.0 GiB \(pages 3.00, weights 2.00\), the device has 4.0 GiB"
    with pytest.raises(accounting.DoesNotFitError, match=words):
        accounting.require_memory("this", {"weights": 2 << 30, "none": 0, "pages": 3 << 30})


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda f: f.name)
def test_cache_bytes_are_those_of_the_arrays(kv_format):
    config = CONFIGS[0]
    spec = decode.DecodeSpec(None, None, config, (kv_format,) * config.num_layers)
    K, H = config.num_kv_heads, config.head_dim
    transform = KeyTransform(k_perm=jnp.zeros((K, H), jnp.int32))
    if kv_format.k_rotation == "calibrated":
        transform = KeyTransform(k_matrix=jnp.zeros((K, H, H)), q_matrix=jnp.zeros((K, H, H)))
    transforms = [transform] * config.num_layers if kv_format.needs_calibration else None
    state = decode.init_state(spec, max_batch=3, num_pages=7, max_len=300, transforms=transforms)
    computed = accounting.cache_bytes(config, kv_format, max_batch=3, num_pages=7)
    assert computed["pages"] == sum(c.pages.nbytes for c in state.caches)
    assert computed["open"] == sum(c.open_k.nbytes + c.open_v.nbytes for c in state.caches)
    assert sum(computed.values()) == sum(a.nbytes for a in jax.tree.leaves(state.caches))


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda f: f.name)
def test_bytes_of_one_sequence(kv_format):
    config, tokens = CONFIGS[0], 3 * kv_format.page_size + 5
    whole = accounting.cache_bytes(config, kv_format, max_batch=1, num_pages=3)
    assert accounting.sequence_bytes(config, kv_format, tokens) == sum(whole.values()) - whole["transforms"]
    assert accounting.cache_bytes_per_token(config, kv_format) == whole["pages"] / (3 * kv_format.page_size)


def test_bytes_follow_both_bit_widths():
    pairs = {(k, v): accounting.cache_bytes_per_token(CONFIGS[0], KVFormat(k_bits=k, v_bits=v))
             for k in (2, 3, 4, 8, 16) for v in (2, 3, 4, 8, 16)}
    assert all(pairs[k, v] < pairs[k2, v2] for k, v in pairs for k2, v2 in pairs if k <= k2 and v <= v2 and (k, v) != (k2, v2))


def test_step_bytes_by_hand():
    kv_format, config = KVFormat(k_bits=4, v_bits=4, page_size=32, sink_tokens=4), CONFIGS[0]
    page = kv_format.page_layout(16).page_bytes
    step = accounting.decode_step_bytes(config, kv_format, batch=1, kv_len=100, param_dtype=jnp.float32)
    # 3 closed pages, 4 tokens in the open one, 4 sinks; the window of 45 tokens sees from 55 on: pages 1 and 2, no sinks.
    full, window = 2 * (3 * page + 8 * 2 * 16 * 2), 2 * (2 * page + 4 * 2 * 16 * 2)
    assert step["kv"] == 2 * full + window
    assert step["experts"] == pytest.approx(2 * 3 * 40 * (24 + 8) * 4)  # two experts a token and layer
    held = accounting.weight_bytes(config, jnp.float32)
    assert step["weights"] == sum(held.values()) - held["experts"] - held["embedding"] + 40 * 4
    assert step["total"] == pytest.approx(step["weights"] + step["experts"] + step["kv"])
    many = accounting.decode_step_bytes(config, kv_format, batch=64, kv_len=100, param_dtype=jnp.float32)
    assert many["kv"] == 64 * step["kv"] and many["experts"] == pytest.approx(held["experts"], rel=1e-6)
