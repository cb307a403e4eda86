"""Bytes, from the configuration alone: what a model's weights and cache occupy, and what one decode step has to read."""
from __future__ import annotations

import jax.numpy as jnp

from moejax.config import LayerConfig, ModelConfig, MoE
from pallas_kernels.kv_format import KVFormat

ROUTER_BYTES = 4  # router weights are float32 whatever the rest is


def cache_bytes(config: ModelConfig, kv_format: KVFormat, *, max_batch: int, num_pages: int) -> dict[str, int]:
    """Bytes of all layers' caches as `moejax.decode.init_state` allocates them.

    Returns:
      {"pages", "open", "sinks", "permutations"}: the pool of closed pages, the open pages, the sinks, and the order of the key
      channels (where channels are promoted).
    """
    heads = config.num_layers * config.num_kv_heads
    token = 2 * config.head_dim * jnp.dtype(kv_format.open_dtype).itemsize
    return {
        "pages": heads * max(num_pages, 1) * kv_format.page_layout(config.head_dim).page_bytes,
        "open": heads * max_batch * kv_format.page_size * token,
        "sinks": heads * max_batch * kv_format.sink_tokens * token,
        "permutations": heads * config.head_dim * 4 if kv_format.outlier_channels else 0,
    }


def sequence_bytes(config: ModelConfig, kv_format: KVFormat, tokens: int) -> int:
    """Cache bytes that one sequence of `tokens` tokens occupies: closed pages, its open page, its sinks; all layers."""
    layout = kv_format.page_layout(config.head_dim)
    return config.num_layers * config.num_kv_heads * layout.sequence_bytes(tokens)


def cache_bytes_per_token(config: ModelConfig, kv_format: KVFormat) -> float:
    """Bytes a token in closed pages takes, scales and padding included; all layers."""
    layout = kv_format.page_layout(config.head_dim)
    return config.num_layers * config.num_kv_heads * layout.page_bytes / kv_format.page_size


def weight_bytes(config: ModelConfig, param_dtype) -> dict[str, int]:
    """Bytes of all parameters kept in `param_dtype`.

    Returns:
      {"embedding", "lm_head" (0 when tied), "attention", "mlp" (dense and shared experts), "router", "experts", "norms"}.
    """
    D, itemsize = config.hidden_size, jnp.dtype(param_dtype).itemsize
    layers = [_layer_params(config, layer) for layer in config.layers]
    params = {name: sum(layer[name] for layer in layers) for name in layers[0]}
    params["norms"] += D
    return {
        "embedding": config.vocab_size * D * itemsize,
        "lm_head": 0 if config.tie_word_embeddings else config.vocab_size * D * itemsize,
        **{name: count * (ROUTER_BYTES if name == "router" else itemsize) for name, count in params.items()},
    }


def decode_step_bytes(
    config: ModelConfig, kv_format: KVFormat, *, batch: int, kv_len: int, param_dtype,
) -> dict[str, float]:
    """Bytes that one decode step of `batch` sequences of `kv_len` tokens has to read at least once.

    Returns:
      {"weights", "experts", "kv", "total"}. Experts are those expected to be chosen when every token chooses at random:
      E * (1 - (1 - X / E)**batch) a layer. "weights" is the rest: of the embedding, one row a sequence (all of it when tied,
      as it is the output projection then).
    """
    held = weight_bytes(config, param_dtype)
    row = config.hidden_size * jnp.dtype(param_dtype).itemsize
    embedding = held["embedding"] if config.tie_word_embeddings else batch * row
    weights = embedding + sum(held[name] for name in ("lm_head", "attention", "mlp", "router", "norms"))
    experts = sum(_expected_expert_bytes(config, layer, batch, param_dtype) for layer in config.layers)
    kv = float(batch * sum(_read_bytes(config, kv_format, layer, kv_len) for layer in config.layers))
    return {"weights": float(weights), "experts": experts, "kv": kv, "total": weights + experts + kv}


def _layer_params(config: ModelConfig, layer: LayerConfig) -> dict[str, int]:
    """Number of parameters of one block, by kind."""
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    attention = (2 * N + 2 * K) * H * D
    attention += (N + 2 * K) * H if config.attention_bias else 0
    attention += D if config.attention_out_bias else 0
    qk_norm = {"none": 0, "per_head": 2 * H, "full": (N + K) * H}[config.qk_norm]
    mlp = layer.mlp
    if isinstance(mlp, MoE):
        dense = 3 * D * mlp.shared_intermediate_size + (D if mlp.shared_gate else 0)
        router, experts = D * mlp.num_experts, 3 * D * mlp.moe_intermediate_size * mlp.num_experts
    else:
        F = mlp.intermediate_size
        dense, router, experts = 3 * D * F + (2 * F + D if mlp.bias else 0), 0, 0
    return {"attention": attention, "mlp": dense, "router": router, "experts": experts, "norms": 2 * D + qk_norm}


def _expected_expert_bytes(config: ModelConfig, layer: LayerConfig, batch: int, param_dtype) -> float:
    if not isinstance(layer.mlp, MoE):
        return 0.0
    E, X = layer.mlp.num_experts, layer.mlp.rule.num_experts_per_tok
    one = 3 * config.hidden_size * layer.mlp.moe_intermediate_size * jnp.dtype(param_dtype).itemsize
    return E * (1 - (1 - X / E) ** batch) * one


def _read_bytes(config: ModelConfig, kv_format: KVFormat, layer: LayerConfig, kv_len: int) -> int:
    """Cache bytes that one query at the end of `kv_len` tokens reads in one layer: visible closed pages, open tokens, sinks."""
    layout, page_size = kv_format.page_layout(config.head_dim), kv_format.page_size
    closed = max(kv_len - 1, 0) // page_size
    first = 0 if layer.sliding_window is None else max(kv_len - layer.sliding_window, 0)
    token = 2 * config.head_dim * jnp.dtype(kv_format.open_dtype).itemsize
    open_tokens = kv_len - max(closed * page_size, first)
    sinks = max(min(kv_format.sink_tokens, kv_len) - first, 0) if closed else 0
    pages = max(closed - first // page_size, 0)
    return config.num_kv_heads * (pages * layout.page_bytes + (open_tokens + sinks) * token)
