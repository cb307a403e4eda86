"""config.json in both directions, and what is refused."""
import copy
import dataclasses
import logging

import pytest

from moejax.config import DenseMLP, MoE, RopeConfig
from moejax.hf_config import FAMILIES, from_hf, to_hf
from tests.moejax.hf_configs import CONFIGS


def edited(family: str, **changes) -> dict:
    """The family's config with changes; a value of ... removes the key."""
    config = copy.deepcopy(CONFIGS[family]) | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("family", CONFIGS)
def test_round_trip(family):
    config = from_hf(CONFIGS[family])
    written = to_hf(dataclasses.replace(config, decodable_vocab_size=90))
    assert from_hf(written) == config
    assert written["model_type"] == family
    assert written["architectures"] == [FAMILIES[family].architecture]


def test_every_family_is_covered():
    assert set(CONFIGS) == set(FAMILIES)


def test_switches_of_each_family():
    llama, mixtral, qwen3, qwen2, olmoe = (from_hf(CONFIGS[f]) for f in ("llama", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe"))
    assert llama.attention_bias and llama.attention_out_bias and llama.layers[0].mlp == DenseMLP(intermediate_size=56, bias=True)
    assert llama.rope == RopeConfig(theta=1e5, kind="linear", factor=2.0)
    assert [layer.sliding_window for layer in mixtral.layers] == [7, 7, 7]
    assert mixtral.layers[0].mlp.rule.norm_topk_prob and mixtral.qk_norm == "none"
    assert [type(layer.mlp) for layer in qwen3.layers] == [MoE, DenseMLP, MoE]
    assert qwen3.qk_norm == "per_head" and not qwen3.attention_bias and qwen3.max_cached_positions == 512
    assert qwen2.attention_bias and not qwen2.attention_out_bias and qwen2.tie_word_embeddings
    assert [layer.sliding_window for layer in qwen2.layers] == [None, 9, None]
    assert qwen2.layers[0].mlp.shared_intermediate_size == 72 and qwen2.layers[0].mlp.shared_gate
    assert olmoe.qk_norm == "full" and olmoe.clip_qkv == 0.8 and not olmoe.layers[0].mlp.rule.norm_topk_prob
    assert olmoe.eos_token_ids == (2, 5) and olmoe.max_cached_positions is None


@pytest.mark.parametrize("family, changes, expected", [
    ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, [DenseMLP, MoE, DenseMLP]),
    ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, [DenseMLP, DenseMLP, DenseMLP]),
    ("qwen2_moe", {"mlp_only_layers": None, "decoder_sparse_step": ...}, [MoE, MoE, MoE]),
    ("qwen3_moe", {"mlp_only_layers": [], "num_experts": 0}, [DenseMLP, DenseMLP, DenseMLP]),
])
def test_sparse_layers(family, changes, expected):
    assert [type(layer.mlp) for layer in from_hf(edited(family, **changes)).layers] == expected


@pytest.mark.parametrize("family, changes, expected", [
    ("mixtral", {"sliding_window": None}, [None, None, None]),
    ("qwen3_moe", {"sliding_window": 5}, [None, None, None]),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, [5, 5, 5]),
    ("qwen3_moe", {"use_sliding_window": True}, [None, None, None]),  # an explicit null
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": ...}, [4096, 4096, 4096]),
    ("qwen2_moe", {"layer_types": None}, [9, None, 9]),
    ("qwen2_moe", {"layer_types": None, "max_window_layers": 2}, [9, None, None]),
])
def test_sliding_windows(family, changes, expected):
    assert [layer.sliding_window for layer in from_hf(edited(family, **changes)).layers] == expected


@pytest.mark.parametrize("family, default", [("qwen3_moe", False), ("qwen2_moe", False), ("olmoe", False)])
def test_absent_switch_takes_the_family_default_and_says_so(family, default, caplog):
    with caplog.at_level(logging.INFO):
        config = from_hf(edited(family, norm_topk_prob=...))
    assert config.layers[0].mlp.rule.norm_topk_prob is default
    assert "norm_topk_prob" in caplog.text


def test_defaults_of_absent_heads():
    config = from_hf(edited("llama", head_dim=None, num_key_value_heads=None, hidden_size=48))
    assert (config.head_dim, config.num_kv_heads) == (8, 6)
    assert from_hf(edited("mixtral", rope_parameters=...)).rope.theta == 1e6
    assert from_hf(edited("olmoe", rope_parameters=...)).rope.theta == 1e4


@pytest.mark.parametrize("family, changes, named", [
    ("llama", {"model_type": "gpt_oss"}, "model_type='gpt_oss'"),
    ("llama", {"model_type": ...}, "model_type=None"),
    ("llama", {"model_type": ["llama"]}, "model_type="), ("llama", {"rope_scaling": {"type": ["linear"]}}, "rope_type="),
    ("llama", {"eos_token_id": "x"}, "eos_token_id='x'"), ("llama", {"bos_token_id": "x"}, "bos_token_id='x'"),
    ("qwen2_moe", {"layer_types": 3}, "layer_types=3"), ("qwen3_moe", {"max_window_layers": "x"}, "max_window_layers='x'"),
    ("llama", {"logit_softcap": 30.0}, "logit_softcap=30.0"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"hidden_act": "mish"}, "hidden_act='mish'"),
    ("llama", {"attention_bias": "yes"}, "attention_bias='yes'"),
    ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    ("llama", {"hidden_size": 40.0}, "hidden_size=40.0"),
    ("llama", {"num_attention_heads": 5}, "num_heads=5"),
    ("llama", {"head_dim": None}, "num_attention_heads=6"),
    ("llama", {"head_dim": 15}, "head_dim=15"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "linear needs factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3"),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two types"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
    ("llama", {"rope_parameters": {"type": "linear", "factor": 3.0}}, "disagree about factor"),
    ("llama", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta=5.0"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
     "original_max_position_embeddings=64"),
    ("qwen2_moe", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
    ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
    ("mixtral", {"num_experts": 4}, "disagree"),
    ("mixtral", {"num_experts_per_tok": 4}, "num_experts_per_tok=4"),
    ("mixtral", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, "max_window_layers=2"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1"),
    ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen2_moe", {"use_sliding_window": False}, "sliding_attention"),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_intermediate_size"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv=-1.0"),
    ("olmoe", {"sliding_window": 16}, "sliding_window=16"),
])
def test_refused_by_name(family, changes, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        from_hf(edited(family, **changes))


def test_off_switches_and_bookkeeping_are_accepted():
    plain = from_hf(CONFIGS["mixtral"])
    harmless = {"attention_bias": False, "quantization_config": None, "use_cache": True, "router_aux_loss_coef": 0.1}
    assert from_hf(edited("mixtral", **harmless)) == plain


def test_config_that_no_family_expresses():
    config = from_hf(CONFIGS["mixtral"])
    rule = dataclasses.replace(config.layers[0].mlp.rule, score_fn="sigmoid")
    layer = dataclasses.replace(config.layers[0], mlp=dataclasses.replace(config.layers[0].mlp, rule=rule))
    with pytest.raises(ValueError, match="no Hugging Face architecture"):
        to_hf(dataclasses.replace(config, layers=(layer,) * 3))
