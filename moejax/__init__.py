"""moejax: decode Mixture-of-Experts language models with a paged 2-4 bit KV cache.

    model, tokenizer = moejax.load("path/to/checkpoint")
    engine = moejax.Engine(model, tokenizer, kv_format=moejax.KVFormat(k_bits=3, v_bits=2))
    [done] = engine.generate(["Once upon a time"], moejax.SamplingParams(max_tokens=32))
"""
from moejax.checkpoint import load, restore_orbax, save_hf, save_orbax
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE, RopeConfig
from moejax.engine import Engine
from moejax.model import Transformer
from moejax.requests import Completion
from moejax.sampling import SamplingParams
from moejax.tokenizer import Tokenizer
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.kv_format import KVFormat

__all__ = [
    "Completion",
    "DenseMLP",
    "Engine",
    "KVFormat",
    "LayerConfig",
    "MoE",
    "ModelConfig",
    "RopeConfig",
    "RouterRule",
    "SamplingParams",
    "Tokenizer",
    "Transformer",
    "load",
    "restore_orbax",
    "save_hf",
    "save_orbax",
]
