"""moejax: decode Mixture-of-Experts language models with a paged 2-4 bit KV cache.

    model, tokenizer = moejax.load("path/to/checkpoint")
"""
from moejax.checkpoint import load, restore_orbax, save_hf, save_orbax
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE, RopeConfig
from moejax.model import Transformer
from moejax.tokenizer import Tokenizer
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.kv_format import KVFormat

__all__ = [
    "DenseMLP",
    "KVFormat",
    "LayerConfig",
    "MoE",
    "ModelConfig",
    "RopeConfig",
    "RouterRule",
    "Tokenizer",
    "Transformer",
    "load",
    "restore_orbax",
    "save_hf",
    "save_orbax",
]
