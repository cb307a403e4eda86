"""Small config.json contents of every family, for tests."""

COMMON = {
    "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 5],
    "pad_token_id": None, "tie_word_embeddings": False, "transformers_version": "5.24.0", "torch_dtype": "float32",
}
QWEN = {"intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [1], "use_sliding_window": False, "sliding_window": None}

CONFIGS = {
    "llama": {"model_type": "llama", **COMMON, "intermediate_size": 56, "attention_bias": True, "mlp_bias": True,
              "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mixtral": {"model_type": "mixtral", **COMMON, "intermediate_size": 24, "num_local_experts": 3, "num_experts_per_tok": 2,
                "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **QWEN, "attention_bias": False,
                  "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}},
    "qwen2_moe": {"model_type": "qwen2_moe", **COMMON, **QWEN, "shared_expert_intermediate_size": 72, "tie_word_embeddings": True,
                  "use_sliding_window": True, "sliding_window": 9,
                  "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                  "rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "olmoe": {"model_type": "olmoe", **COMMON, "intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3,
              "norm_topk_prob": False, "clip_qkv": 0.8, "attention_bias": False,
              "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}},
}
