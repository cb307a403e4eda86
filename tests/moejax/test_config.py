"""Checks of the configuration values, and their JSON form."""
import dataclasses
import json

import pytest

from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE, RopeConfig, repeat_layers
from moejax.hf_config import from_hf
from pallas_kernels.fused_router import RouterRule
from tests.moejax.hf_configs import CONFIGS

LAYER = LayerConfig(mlp=DenseMLP(intermediate_size=8))
GOOD = {"vocab_size": 11, "hidden_size": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "layers": (LAYER,),
        "max_position_embeddings": 16}


@pytest.mark.parametrize("family", CONFIGS)
def test_json_round_trip(family):
    config = dataclasses.replace(from_hf(CONFIGS[family]), decodable_vocab_size=91)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


@pytest.mark.parametrize("changes, named", [
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"hidden_size": True}, "hidden_size=True"),
    ({"num_heads": 3}, "num_heads=3"),
    ({"head_dim": 5}, "head_dim=5"),
    ({"head_dim": 2, "rope": RopeConfig(kind="dynamic", factor=2.0)}, "head_dim=2"),
    ({"layers": ()}, "layers"),
    ({"eos_token_ids": ("x",)}, "eos_token_ids='x'"),
    ({"vocab_size": 2**31}, "vocab_size=2147483648"),
    ({"layers": [LAYER]}, "layers"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"qk_norm": "head"}, "qk_norm='head'"),
    ({"hidden_act": "swish"}, "hidden_act='swish'"),
    ({"clip_qkv": 0.0}, "clip_qkv=0.0"),
    ({"decodable_vocab_size": 12}, "decodable_vocab_size=12"),
])
def test_model_config_refuses(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig(**{**GOOD, **changes})


@pytest.mark.parametrize("make, named", [
    (lambda: DenseMLP(intermediate_size=0), "intermediate_size=0"),
    (lambda: LayerConfig(mlp=DenseMLP(intermediate_size=8), sliding_window=0), "sliding_window=0"),
    (lambda: MoE(num_experts=2, moe_intermediate_size=8, rule=RouterRule(num_experts_per_tok=3)), "num_experts_per_tok=3"),
    (lambda: MoE(num_experts=2, moe_intermediate_size=8, rule=RouterRule(num_experts_per_tok=1), shared_gate=True), "shared_gate"),
    (lambda: RopeConfig(kind="longrope"), "kind='longrope'"),
    (lambda: RopeConfig(kind="linear", factor=0.5), "factor=0.5"),
    (lambda: RopeConfig(theta=1.0), "theta=1.0"),
    (lambda: RopeConfig(kind="yarn", factor=2.0), "original_max_position_embeddings=None"),
    (lambda: RopeConfig(kind="llama3", factor=2.0, original_max_position_embeddings=8, low_freq_factor=4.0, high_freq_factor=1.0),
     "high_freq_factor=1.0"),
    (lambda: repeat_layers(0, LAYER), "num_layers=0"),
])
def test_parts_refuse(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_num_decodable():
    assert ModelConfig(**GOOD).num_decodable == 11
    assert ModelConfig(**GOOD, decodable_vocab_size=9).num_decodable == 9
