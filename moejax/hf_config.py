"""config.json of Hugging Face checkpoints <-> `ModelConfig`, for the families in `FAMILIES`.

Semantics follow transformers' configuration and modeling files of each family. Numbers that shape the model must be in the
file; switches that are absent get the family's own default, which is logged.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moejax.config import DenseMLP, HiddenAct, LayerConfig, ModelConfig, MoE, require_in, token_ids
from moejax.hf_fields import Fields
from moejax.hf_rope import read_rope, write_rope
from pallas_kernels.fused_router import RouterRule

ACTS: dict[str, HiddenAct] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "relu": "relu", "quick_gelu": "quick_gelu",
}


def from_hf(data: dict[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of a config.json.

    Raises:
      ValueError: unknown model_type, missing number, contradictory or unsupported switch; the message names it.
    """
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"config.json: model_type={model_type!r} is not supported; accepted are {', '.join(FAMILIES)}")
    fields = Fields(data)
    config = FAMILIES[model_type].read(fields)
    fields.finish()
    return config


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of the first family that can express `config` exactly (that is: `from_hf` gives `config` back).

    `decodable_vocab_size` is a property of the tokenizer and not part of it.

    Raises:
      ValueError: no family can.
    """
    config = dataclasses.replace(config, decodable_vocab_size=None)
    for model_type, family in FAMILIES.items():
        data = {"model_type": model_type, "architectures": [family.architecture], **_write_common(config), **family.write(config)}
        try:
            if from_hf(data) == config:
                return data
        except ValueError:
            continue
    raise ValueError(f"no Hugging Face architecture out of {', '.join(FAMILIES)} can express {config}")


def _read_common(f: Fields, *, layers: list[LayerConfig], default_theta: float = 10000.0, **switches) -> ModelConfig:
    hidden_size, num_heads = f.int("hidden_size"), f.int("num_attention_heads")
    if f.get("head_dim", default=None) is None and hidden_size % num_heads:
        raise ValueError(f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads} "
                         "and there is no head_dim")
    act = f.get("hidden_act", default="silu")
    require_in("config.json: hidden_act", act, tuple(ACTS))
    max_positions = f.int("max_position_embeddings")
    return ModelConfig(
        vocab_size=f.int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=f.int("num_key_value_heads", default=num_heads),
        head_dim=f.int("head_dim", default=hidden_size // num_heads),
        layers=tuple(layers),
        max_position_embeddings=max_positions,
        rms_norm_eps=f.get("rms_norm_eps"),
        rope=read_rope(f, max_positions, default_theta),
        tie_word_embeddings=f.flag("tie_word_embeddings", False),
        hidden_act=ACTS[act],
        bos_token_id=f.get("bos_token_id", default=None),
        eos_token_ids=token_ids("config.json: eos_token_id", f.get("eos_token_id", default=None)),
        pad_token_id=f.get("pad_token_id", default=None),
        **switches,
    )


def _rule(f: Fields, norm_topk_prob: bool) -> RouterRule:
    return RouterRule(num_experts_per_tok=f.int("num_experts_per_tok"), score_fn="softmax", norm_topk_prob=norm_topk_prob,
                      routed_scaling_factor=1.0, n_group=1, topk_group=1)


def _read_llama(f: Fields) -> ModelConfig:
    bias = f.flag("attention_bias", False)
    mlp = DenseMLP(intermediate_size=f.int("intermediate_size"), bias=f.flag("mlp_bias", False))
    return _read_common(f, layers=[LayerConfig(mlp=mlp)] * f.int("num_hidden_layers"), attention_bias=bias,
                        attention_out_bias=bias)


def _read_mixtral(f: Fields) -> ModelConfig:
    moe = MoE(num_experts=f.int("num_local_experts", "num_experts"), moe_intermediate_size=f.int("intermediate_size"),
              rule=_rule(f, norm_topk_prob=True))
    layer = LayerConfig(mlp=moe, sliding_window=f.get("sliding_window", default=None))
    return _read_common(f, layers=[layer] * f.int("num_hidden_layers"), default_theta=1e6)


def _read_olmoe(f: Fields) -> ModelConfig:
    moe = MoE(num_experts=f.int("num_experts", "num_local_experts"), moe_intermediate_size=f.int("intermediate_size"),
              rule=_rule(f, f.flag("norm_topk_prob", False)))
    bias = f.flag("attention_bias", False)
    return _read_common(f, layers=[LayerConfig(mlp=moe)] * f.int("num_hidden_layers"), attention_bias=bias,
                        attention_out_bias=bias, qk_norm="full", clip_qkv=f.get("clip_qkv", default=None))


def _read_qwen3_moe(f: Fields) -> ModelConfig:
    num_layers = f.int("num_hidden_layers")
    window = _qwen_window(f)
    # transformers reads neither of the two in this family: the window holds for every layer. Another reading is refused.
    below = f.int("max_window_layers", default=num_layers, least=0)
    if window is not None and below < num_layers:
        raise ValueError(f"config.json: max_window_layers={below}: qwen3_moe applies sliding_window to all "
                         f"num_hidden_layers={num_layers} layers")
    expected = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if f.get("layer_types", default=expected) != expected:
        raise ValueError(f"config.json: layer_types={f.data['layer_types']}: qwen3_moe accepts {expected} with "
                         f"use_sliding_window={window is not None}")
    bias = f.flag("attention_bias", False)
    layers = [LayerConfig(mlp=mlp, sliding_window=window) for mlp in _qwen_mlps(f, num_layers)]
    return _read_common(f, layers=layers, attention_bias=bias, attention_out_bias=bias, qk_norm="per_head")


def _read_qwen2_moe(f: Fields) -> ModelConfig:
    num_layers = f.int("num_hidden_layers")
    window = _qwen_window(f)
    below = f.int("max_window_layers", default=28, least=0)
    use = f.flag("use_sliding_window", False)
    default = ["sliding_attention" if use and i % 2 == 0 and i < below else "full_attention" for i in range(num_layers)]
    types = f.get("layer_types", default=default)
    good = isinstance(types, list) and all(kind in ("full_attention", "sliding_attention") for kind in types)
    if not good or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types={types}: must be {num_layers} of full_attention, sliding_attention")
    if "sliding_attention" in types and window is None:
        raise ValueError("config.json: layer_types has sliding_attention, which needs use_sliding_window=true and sliding_window")
    layers = [LayerConfig(mlp=mlp, sliding_window=window if kind == "sliding_attention" else None)
              for mlp, kind in zip(_qwen_mlps(f, num_layers, shared=True), types)]
    return _read_common(f, layers=layers, attention_bias=f.flag("qkv_bias", True))


def _qwen_window(f: Fields) -> int | None:
    f.read.add("sliding_window")
    window = f.data.get("sliding_window", 4096)  # an explicit null means none, an absent key the families' default
    return window if f.flag("use_sliding_window", False) else None


def _qwen_mlps(f: Fields, num_layers: int, shared: bool = False) -> list[DenseMLP | MoE]:
    num_experts = f.int("num_experts", "num_local_experts", least=0)
    only, step = f.get("mlp_only_layers", default=[]), f.int("decoder_sparse_step", default=1)
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise ValueError(f"config.json: mlp_only_layers={only!r}: must be a list of layer numbers")
    is_moe = [i not in only and num_experts > 0 and (i + 1) % step == 0 for i in range(num_layers)]
    norm = f.flag("norm_topk_prob", False)
    # A width that no layer uses need not be there.
    dense_size = f.get("intermediate_size", default=None)
    sizes = f.get("moe_intermediate_size", default=None), f.get("shared_expert_intermediate_size", default=0) if shared else 0
    rule = _rule(f, norm)
    return [MoE(num_experts=num_experts, moe_intermediate_size=sizes[0], rule=rule, shared_intermediate_size=sizes[1],
                shared_gate=shared) if moe else DenseMLP(intermediate_size=dense_size) for moe in is_moe]


def _write_common(config: ModelConfig) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
    }


def _first(config: ModelConfig, kind: type) -> Any:
    return next((layer.mlp for layer in config.layers if isinstance(layer.mlp, kind)), None)


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    dense = _first(config, DenseMLP)
    return {"intermediate_size": dense and dense.intermediate_size, "mlp_bias": bool(dense and dense.bias),
            "attention_bias": config.attention_bias}


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    moe = _first(config, MoE)
    return {**_write_experts(moe), "num_local_experts": moe and moe.num_experts, "sliding_window": config.layers[0].sliding_window,
            "intermediate_size": moe and moe.moe_intermediate_size} if moe else {}


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    moe = _first(config, MoE)
    return {**_write_experts(moe), "num_experts": moe.num_experts, "norm_topk_prob": moe.rule.norm_topk_prob,
            "intermediate_size": moe.moe_intermediate_size, "attention_bias": config.attention_bias,
            "clip_qkv": config.clip_qkv} if moe else {}


def _write_experts(moe: MoE | None) -> dict[str, Any]:
    return {"num_experts_per_tok": moe.rule.num_experts_per_tok} if moe else {}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    dense, moe = _first(config, DenseMLP), _first(config, MoE)
    windows = [layer.sliding_window for layer in config.layers if layer.sliding_window is not None]
    return {
        **_write_experts(moe),
        "num_experts": moe.num_experts if moe else 0,
        "moe_intermediate_size": moe and moe.moe_intermediate_size,
        "norm_topk_prob": bool(moe and moe.rule.norm_topk_prob),
        "mlp_only_layers": [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, DenseMLP)],
        "decoder_sparse_step": 1,
        # Without dense layers nothing reads it, but transformers wants a number there.
        "intermediate_size": dense.intermediate_size if dense else moe and moe.moe_intermediate_size,
        "use_sliding_window": bool(windows),
        "sliding_window": min(windows, default=None),
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(config), "attention_bias": config.attention_bias}


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    moe = _first(config, MoE)
    types = ["full_attention" if layer.sliding_window is None else "sliding_attention" for layer in config.layers]
    return {**_write_qwen(config), "qkv_bias": config.attention_bias, "layer_types": types,
            "shared_expert_intermediate_size": moe and moe.shared_intermediate_size}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers: how its config.json is read and written."""

    architecture: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral),
    "olmoe": Family("OlmoeForCausalLM", _read_olmoe, _write_olmoe),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe),
}
