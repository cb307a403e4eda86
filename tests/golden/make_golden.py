"""Writes tiny random-weight checkpoints in the Hugging Face format, with the logits and greedy tokens they must give.

Each case becomes a folder with config.json, safetensors and golden.npz (input_ids int32 [B, T], logits float32 [B, T, V],
greedy_ids int32 [B, N]), computed by transformers in float32 on the CPU with eager attention, from the files just written.

Needs torch and transformers, which the project itself does not:
    python make_golden.py OUT_DIR [CASE ...]      # all cases, or those named

COMMITTED are the cases kept in this folder. Beside them lie mixtral, qwen3_moe, qwen2_moe and olmoe, which an earlier script made
with other seeds (plain settings, hidden size 64, 3 layers); they stay as they are.
"""
from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

COMMITTED = ("llama_llama3_biases", "mixtral_window_yarn", "olmoe_clip_bias_linear", "qwen2_moe_mixed_layers",
             "qwen3_moe_mixed_dynamic")

BASE = {
    "vocab_size": 211, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ODD = {**BASE, "hidden_size": 48}  # hidden / heads is a whole number, and not head_dim
LLAMA = {**ODD, "intermediate_size": 56}
MIXTRAL = {**BASE, "intermediate_size": 24, "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN3 = {**BASE, "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3,
         "norm_topk_prob": True}
QWEN2 = {**BASE, "intermediate_size": 56, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 72, "num_experts": 5,
         "num_experts_per_tok": 2}
OLMOE = {**BASE, "hidden_size": 48, "head_dim": 8, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}


def rope(kind: str, theta: float = 10000.0, **settings) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


YARN = rope("yarn", 50000.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24)
DYNAMIC = {**rope("dynamic", factor=3.0), "max_position_embeddings": 24}
LINEAR = rope("linear", 20000.0, factor=2.5)


def legacy(**entries):
    """Edits config.json to the spelling before transformers 5."""
    def edit(config: dict) -> None:
        del config["rope_parameters"]
        config.update(entries)
    return edit


def without(*keys):
    def edit(config: dict) -> None:
        for key in keys:
            del config[key]
    return edit


SMALL = {"dtype": torch.bfloat16}  # weights of half the size; the logits are still those of a float32 computation

# name -> (class prefix, config arguments, options of `build`)
CASES: dict[str, tuple[str, dict, dict]] = {
    "llama_plain": ("Llama", LLAMA, {}),
    "llama_mha": ("Llama", {**LLAMA, "num_key_value_heads": 6}, {}),
    "llama_biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "llama_tied_gelu": ("Llama", {**LLAMA, "tie_word_embeddings": True, "hidden_act": "gelu"}, {}),
    "llama_gelu_new": ("Llama", {**LLAMA, "hidden_act": "gelu_new"}, {}),
    "llama_relu_mqa": ("Llama", {**LLAMA, "hidden_act": "relu", "num_key_value_heads": 1}, {}),
    "llama_linear": ("Llama", {**LLAMA, **LINEAR}, {}),
    "llama_dynamic": ("Llama", {**LLAMA, **DYNAMIC}, {}),
    "llama_dynamic_crossing": ("Llama", {**LLAMA, **DYNAMIC, "max_position_embeddings": 35}, {"length": 30}),
    "llama_yarn": ("Llama", {**LLAMA, **YARN}, {}),
    "llama_yarn_untruncated": ("Llama", {**LLAMA, **rope("yarn", factor=8.0, original_max_position_embeddings=32, truncate=False,
                                                         beta_fast=16.0, beta_slow=2.0)}, {}),
    "llama_yarn_mscale": ("Llama", {**LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9,
                                                    mscale_all_dim=0.4)}, {}),
    "llama_yarn_attention_factor": ("Llama", {**LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16,
                                                              attention_factor=0.8)}, {}),
    "llama_yarn_no_original": ("Llama", {**LLAMA, **rope("yarn", factor=4.0), "max_position_embeddings": 32}, {}),
    "llama_llama3_biases": ("Llama", {**LLAMA, **LLAMA3, "attention_bias": True, "mlp_bias": True}, SMALL),
    "llama_legacy_linear": ("Llama", LLAMA, {"edit": legacy(rope_theta=20000.0, rope_scaling={"type": "linear", "factor": 2.0})}),
    "llama_legacy_dynamic": ("Llama", {**LLAMA, "max_position_embeddings": 24}, {
        "edit": legacy(rope_theta=20000.0, rope_scaling={"type": "dynamic", "factor": 2.0})}),
    "llama_legacy_yarn": ("Llama", LLAMA, {"edit": legacy(rope_theta=1e5, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1})}),
    "llama_legacy_llama3": ("Llama", LLAMA, {"edit": legacy(rope_theta=5e5, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24})}),
    "llama_legacy_plain": ("Llama", LLAMA, {"edit": legacy(rope_theta=1e6, rope_scaling=None)}),
    "llama_no_head_dim": ("Llama", {**LLAMA, "head_dim": None}, {"edit": without("head_dim")}),
    "llama_bfloat16_file": ("Llama", LLAMA, {"dtype": torch.bfloat16}),
    "mixtral_plain": ("Mixtral", MIXTRAL, {}),
    "mixtral_head_dim_null": ("Mixtral", {**MIXTRAL, "hidden_size": 48, "head_dim": None}, {}),
    "mixtral_window": ("Mixtral", {**MIXTRAL, "sliding_window": 5}, {}),
    "mixtral_window_yarn": ("Mixtral", {**MIXTRAL, **YARN, "sliding_window": 7}, SMALL),
    "mixtral_tied_top3": ("Mixtral", {**MIXTRAL, "tie_word_embeddings": True, "num_experts_per_tok": 3}, {}),
    "mixtral_top1_9experts": ("Mixtral", {**MIXTRAL, "num_local_experts": 9, "num_experts_per_tok": 1}, {}),
    "mixtral_dynamic": ("Mixtral", {**MIXTRAL, **DYNAMIC}, {}),
    "mixtral_llama3": ("Mixtral", {**MIXTRAL, **LLAMA3}, {}),
    "mixtral_linear_sharded": ("Mixtral", {**MIXTRAL, **LINEAR}, {"shard": "60KB"}),
    "mixtral_no_theta": ("Mixtral", MIXTRAL, {"edit": without("rope_parameters")}),
    "mixtral_one_layer_odd": ("Mixtral", {**MIXTRAL, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
                                          "head_dim": 10, "vocab_size": 97, "intermediate_size": 20}, {}),
    "qwen3_moe_plain": ("Qwen3Moe", QWEN3, {}),
    "qwen3_moe_no_norm": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False}, {}),
    "qwen3_moe_norm_absent": ("Qwen3Moe", QWEN3, {"edit": without("norm_topk_prob")}),
    "qwen3_moe_only_layers": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [0, 2]}, {}),
    "qwen3_moe_sparse_step": ("Qwen3Moe", {**QWEN3, "decoder_sparse_step": 2, "num_hidden_layers": 4}, {}),
    "qwen3_moe_window": ("Qwen3Moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 6}, {}),
    "qwen3_moe_window_off": ("Qwen3Moe", {**QWEN3, "use_sliding_window": False, "sliding_window": 6}, {}),
    "qwen3_moe_bias_tied": ("Qwen3Moe", {**QWEN3, "attention_bias": True, "tie_word_embeddings": True}, {}),
    "qwen3_moe_no_head_dim": ("Qwen3Moe", {k: v for k, v in {**QWEN3, "hidden_size": 48}.items() if k != "head_dim"}, {}),
    "qwen3_moe_yarn": ("Qwen3Moe", {**QWEN3, **YARN}, {}),
    "qwen3_moe_dense_only": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [0, 1, 2]}, {}),
    "qwen3_moe_mixed_dynamic": ("Qwen3Moe", {**QWEN3, **DYNAMIC, "mlp_only_layers": [1], "attention_bias": True,
                                             "use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": False}, SMALL),
    "qwen3_moe_experts_alias": ("Qwen3Moe", QWEN3, {"edit": lambda c: c.update(num_experts=c.pop("num_local_experts"))}),
    "qwen3_moe_sharded": ("Qwen3Moe", QWEN3, {"shard": "50KB"}),
    "qwen3_moe_one_kv_head": ("Qwen3Moe", {**QWEN3, "num_key_value_heads": 1, "num_attention_heads": 5}, {}),
    "qwen2_moe_plain": ("Qwen2Moe", QWEN2, {}),
    "qwen2_moe_no_bias_norm": ("Qwen2Moe", {**QWEN2, "qkv_bias": False, "norm_topk_prob": True}, {}),
    "qwen2_moe_layer_types": ("Qwen2Moe", {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}, {}),
    "qwen2_moe_window_inferred": ("Qwen2Moe", {**QWEN2, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 5,
                                               "max_window_layers": 3}, {}),
    "qwen2_moe_window_by_reader": ("Qwen2Moe", {**QWEN2, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 5,
                                                "max_window_layers": 4}, {"edit": without("layer_types")}),
    "qwen2_moe_mixed_layers": ("Qwen2Moe", {**QWEN2, **LLAMA3, "mlp_only_layers": [1], "use_sliding_window": True,
                                            "sliding_window": 8, "tie_word_embeddings": True}, SMALL),
    "qwen2_moe_step_yarn": ("Qwen2Moe", {**QWEN2, **YARN, "decoder_sparse_step": 2, "num_hidden_layers": 4}, {}),
    "qwen2_moe_bias_absent": ("Qwen2Moe", QWEN2, {"edit": without("qkv_bias", "decoder_sparse_step", "mlp_only_layers",
                                                                  "use_sliding_window", "layer_types")}),
    "qwen2_moe_legacy": ("Qwen2Moe", QWEN2, {"edit": legacy(rope_theta=1e6)}),
    "qwen2_moe_wide_shared": ("Qwen2Moe", {**QWEN2, "num_experts": 7, "num_experts_per_tok": 7, "hidden_act": "gelu_pytorch_tanh",
                                           "shared_expert_intermediate_size": 8}, {}),
    "olmoe_plain": ("Olmoe", OLMOE, {}),
    "olmoe_clip": ("Olmoe", {**OLMOE, "clip_qkv": 0.7}, {}),
    "olmoe_norm_tied": ("Olmoe", {**OLMOE, "norm_topk_prob": True, "tie_word_embeddings": True}, {}),
    "olmoe_mha": ("Olmoe", {**OLMOE, "num_key_value_heads": None}, {}),
    "olmoe_clip_bias_linear": ("Olmoe", {**OLMOE, **LINEAR, "clip_qkv": 0.9, "attention_bias": True}, SMALL),
    "olmoe_dynamic": ("Olmoe", {**OLMOE, **DYNAMIC}, {}),
    "olmoe_yarn_sharded": ("Olmoe", {**OLMOE, **YARN}, {"shard": "40KB"}),
    "olmoe_legacy": ("Olmoe", OLMOE, {"edit": legacy(rope_theta=1e4, rope_scaling=None)}),
    "olmoe_eos_list": ("Olmoe", {**OLMOE, "eos_token_id": [2, 7], "pad_token_id": None}, {}),
}


def build(name: str, out_dir: pathlib.Path, steps: int = 12, batch: int = 2) -> None:
    """Writes one case and prints one JSON line about it."""
    family, arguments, options = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**arguments)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(config).eval()
    randomise(model)
    case = out_dir / name
    case.mkdir(parents=True, exist_ok=True)
    model.to(options.get("dtype", torch.float32)).save_pretrained(case, max_shard_size=options.get("shard", "1GB"))
    (case / "generation_config.json").unlink(missing_ok=True)
    if "edit" in options:
        path = case / "config.json"
        edited = json.loads(path.read_text())
        options["edit"](edited)
        path.write_text(json.dumps(edited, indent=2) + "\n")
    model = model_class.from_pretrained(case, dtype=torch.float32, attn_implementation="eager").eval()
    length = options.get("length", 40)
    with torch.no_grad():
        ids = torch.randint(3, config.vocab_size, (batch, length))
        logits = model(ids, use_cache=False).logits
        sequence = ids
        for _ in range(steps):
            following = model(sequence, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            sequence = torch.cat([sequence, following], dim=1)
    np.savez_compressed(case / "golden.npz", input_ids=ids.numpy().astype(np.int32), logits=logits.numpy().astype(np.float32),
                        greedy_ids=sequence[:, length:].numpy().astype(np.int32))
    size = sum(file.stat().st_size for file in case.iterdir())
    print(json.dumps({"case": name, "bytes": size, "logit_std": float(logits.std()), "torch": torch.__version__,
                      "transformers": transformers.__version__}))


@torch.no_grad()
def randomise(model) -> None:
    """Weights wide enough that routing, attention, norms and biases all matter to the logits."""
    for name, p in model.named_parameters():
        if p.ndim == 1 and "bias" not in name:
            p.copy_(1.0 + 0.2 * torch.randn_like(p))
        else:
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 2.0 / p.shape[-1] ** 0.5))


def main(argv: list[str]) -> None:
    for name in argv[2:] or CASES:
        build(name, pathlib.Path(argv[1]))


if __name__ == "__main__":
    main(sys.argv)
