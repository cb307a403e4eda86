"""Bytes, from the configuration alone: what a model's weights and cache occupy, and what one decode step has to read."""
from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import LayerConfig, ModelConfig, MoE
from moejax.kv_schedule import per_layer
from pallas_kernels.kv_format import KVFormat

# One for all layers, or one a layer.
Formats = KVFormat | Sequence[KVFormat]

GIB = 1 << 30
ROUTER_BYTES = 4  # router weights are float32 whatever the rest is


class DoesNotFitError(ValueError):
    """More memory is needed than there is."""


def require_memory(what: str, needed: int | Mapping[str, int]) -> None:
    """Refuses what the default device cannot hold, before it is allocated.

    Args:
      what: what takes it, for the message.
      needed: bytes, or bytes of each part.

    Raises:
      DoesNotFitError: it is more than the device's memory; the message has the parts above a thousandth, largest first, and what
        there is.
    """
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has none: all of the machine's memory
    held = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = needed if isinstance(needed, int) else sum(needed.values())
    parts = "" if isinstance(needed, int) else " ({})".format(", ".join(
        f"{name} {count / GIB:,.2f}" for name, count in sorted(needed.items(), key=lambda item: -item[1]) if count > total / 1000))
    if total > held:
        raise DoesNotFitError(f"{what} takes at least {total / GIB:,.1f} GiB{parts}, the device has {held / GIB:,.1f} GiB")


def peak_bytes() -> tuple[str, int]:
    """Most memory that has been in use at once since the process began.

    Returns:
      ("device", bytes of the default device); ("process", resident bytes of this process) where it keeps no count, as on a CPU.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return "device", stats["peak_bytes_in_use"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return "process", resident * (1 if sys.platform == "darwin" else 1024)


def held_bytes(config: ModelConfig, params: nnx.State) -> dict[str, int]:
    """Bytes of a model's state (arrays, or their shapes), packed or not, by kind: as `weight_bytes`, and "shared" experts apart
    from dense "mlp"."""
    total = dict.fromkeys(("embedding", "lm_head", "attention", "mlp", "shared", "router", "experts", "norms"), 0)
    for path, leaf in nnx.to_flat_state(params):
        total[_kind(config, path)] += nbytes(leaf)
    return total


def nbytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array or of its shape."""
    return math.prod(array.shape) * array.dtype.itemsize


def _kind(config: ModelConfig, path: tuple[Any, ...]) -> str:
    if len(path) > 1 and str(path[-2]).endswith("_norm"):
        return "norms"
    if path[0] != "blocks":
        return "embedding" if "embedding" in path[0] else "lm_head"
    if path[2] != "mlp" or path[3] in ("router", "shared"):
        return path[3] if path[2] == "mlp" else path[2]
    if path[3] == "w_shared_gate_D":
        return "shared"
    return "experts" if isinstance(config.layers[path[1]].mlp, MoE) else "mlp"


def cache_bytes(config: ModelConfig, kv_format: Formats, *, max_batch: int, num_pages: int) -> dict[str, int]:
    """Bytes of all layers' caches as `moejax.decode.init_state` allocates them.

    Returns:
      {"pages", "open", "sinks", "transforms"}: the pool of closed pages, the open pages, the sinks, and the order or the matrices
      of the key channels (of calibrated formats).
    """
    total = dict.fromkeys(("pages", "open", "sinks", "transforms"), 0)
    for f in per_layer(kv_format, config.num_layers):
        token = 2 * config.head_dim * jnp.dtype(f.open_dtype).itemsize
        total["pages"] += max(num_pages, 1) * f.page_layout(config.head_dim).page_bytes
        total["open"] += max_batch * f.open_tokens * token
        total["sinks"] += max_batch * f.sink_tokens * token
        if f.needs_calibration:
            total["transforms"] += config.head_dim * 4 * (2 * config.head_dim if f.k_rotation == "calibrated" else 1)
    return {name: config.num_kv_heads * count for name, count in total.items()}


def sequence_bytes(config: ModelConfig, kv_format: Formats, tokens: int) -> int:
    """Cache bytes that one sequence of `tokens` tokens occupies: closed pages, its open pages, its sinks; all layers."""
    return config.num_kv_heads * sum(
        f.page_layout(config.head_dim).sequence_bytes(tokens) for f in per_layer(kv_format, config.num_layers))


def cache_bytes_per_token(config: ModelConfig, kv_format: Formats) -> float:
    """Bytes a token in closed pages takes, scales and padding included; all layers."""
    return config.num_kv_heads * sum(
        f.page_layout(config.head_dim).page_bytes / f.page_size for f in per_layer(kv_format, config.num_layers))


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
    config: ModelConfig, kv_format: Formats, *, batch: int, kv_len: int, param_dtype,
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
    formats = per_layer(kv_format, config.num_layers)
    kv = float(batch * sum(_read_bytes(config, f, layer, kv_len) for f, layer in zip(formats, config.layers)))
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
    closed = kv_format.closed_pages(kv_len)
    first = 0 if layer.sliding_window is None else max(kv_len - layer.sliding_window, 0)
    token = 2 * config.head_dim * jnp.dtype(kv_format.open_dtype).itemsize
    open_tokens = kv_len - max(closed * page_size, first)
    sinks = max(min(kv_format.sink_tokens, kv_len) - first, 0) if closed else 0
    pages = max(closed - first // page_size, 0)
    return config.num_kv_heads * (pages * layout.page_bytes + (open_tokens + sinks) * token)
