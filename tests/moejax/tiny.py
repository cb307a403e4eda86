"""A tiny model with everything that can go wrong in a cache, and its full forward pass, compiled once a process."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax import decode, page_table
from moejax.attention import causal_attention
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE
from moejax.model import Transformer, abstract
from moejax.sharding import map_params
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.kv_format import KVFormat

PAGE = 32
VOCAB, DECODABLE = 101, 90
FULL_LENGTH = 160  # the padded length of the forward pass without a cache
MAX_BATCH, MAX_LEN, NUM_PAGES, STEPS = 3, 128, 6, 5  # of every state, so that tests share compiled functions

EXACT = KVFormat(k_bits=32, v_bits=32, page_size=PAGE)
BF16 = KVFormat(page_size=PAGE)
EVERYTHING = KVFormat(k_bits=3, v_bits=2, page_size=PAGE, sink_tokens=3, outlier_channels=8, v_rotation="hadamard",
                      k_rotation="hadamard")
# Layers that keep different numbers of open pages.
OPEN = tuple(KVFormat(k_bits=3, v_bits=2, page_size=PAGE, sink_tokens=3, open_pages=n) for n in (2, 3))


@functools.cache
def config(num_layers: int = 2) -> ModelConfig:
    """A layer of experts and a dense one with a sliding window; one layer is the dense one, without a window."""
    rule = RouterRule(num_experts_per_tok=2)
    layers = (LayerConfig(mlp=MoE(num_experts=5, moe_intermediate_size=24, rule=rule)),
              LayerConfig(mlp=DenseMLP(intermediate_size=56), sliding_window=45 if num_layers > 1 else None))
    return ModelConfig(
        vocab_size=VOCAB, decodable_vocab_size=DECODABLE, hidden_size=40, num_heads=6, num_kv_heads=2, head_dim=16,
        max_position_embeddings=512, qk_norm="per_head", attention_bias=True, layers=layers[-num_layers:])


@functools.cache
def model(num_layers: int = 2) -> Transformer:
    """Weights wide enough that attention and routing decide the logits, and one key channel of 20 times the size of the others."""
    graphdef, shapes = abstract(config(num_layers))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        std = 0.3 if leaf.ndim == 1 else 1.8 / leaf.shape[-1] ** 0.5
        value = rng.normal(0, std, leaf.shape).astype(np.float32)
        if path[-1] != "scale":
            return jnp.asarray(value)
        if path[-2] in ("q_norm", "k_norm"):
            value[5] = 19 if path[-2] == "k_norm" else -0.9
        return jnp.asarray(1 + value)

    return nnx.merge(graphdef, map_params(draw, shapes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, DECODABLE, length).tolist()


@functools.cache
def _full(round_kv: bool, num_layers: int):
    graphdef, params = nnx.split(model(num_layers))

    def attend(layer, heads):
        q, k, v = heads.qkv()
        k, v = (jax.lax.reduce_precision(x, 8, 7) for x in (k, v))
        return causal_attention(q, k, v, config(num_layers).layers[layer].sliding_window)

    @jax.jit
    def forward(tokens, length):
        valid = jnp.arange(FULL_LENGTH) < length
        return nnx.merge(graphdef, params)(tokens[None], attend=attend if round_kv else None, valid=valid[None]).logits[0]

    return forward


def full_logits(tokens: list[int], round_kv: bool = False, num_layers: int = 2) -> np.ndarray:
    """Logits [T, V] of the forward pass without a cache; `round_kv` rounds keys and values to bfloat16."""
    padded = np.zeros(FULL_LENGTH, np.int32)
    padded[:len(tokens)] = tokens
    return np.asarray(_full(round_kv, num_layers)(padded, np.int32(len(tokens))))[:len(tokens)]


def full_greedy(tokens: list[int], count: int, round_kv: bool = False) -> list[int]:
    """`count` greedy tokens, each from a whole forward pass."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(np.argmax(full_logits(tokens, round_kv)[-1, :DECODABLE])))
    return tokens[-count:]


def all_nan(array: jax.Array) -> jax.Array:
    """The same array full of NaN: words are a NaN in float32, in both bfloat16 halves and as scale and offset; ids are kept."""
    if array.dtype == jnp.uint32:
        return jnp.full_like(array, 0xFFFFFFFF)
    return jnp.full_like(array, jnp.nan) if jnp.issubdtype(array.dtype, jnp.floating) else array


def score_paged(spec, params, window: np.ndarray, transforms=None) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of window[1:], most probable next tokens) [T] of one sequence that goes through the paged cache."""
    length = len(window) - 1
    pages = spec.closed_pages(length)
    table = page_table.allocate(page_table.create(
        max_batch=1, num_pages=pages, max_len=length, page_size=spec.page_size, open_pages=spec.open_pages), 0, length)
    state = decode.with_table(
        decode.init_state(spec, max_batch=1, num_pages=pages, max_len=length, transforms=transforms), table)
    parts, done = [], 0
    for tokens, q_len in decode.pieces(window[:-1].tolist(), 0, spec.page_size):
        targets = np.zeros(len(tokens), np.int32)
        targets[:q_len] = window[done + 1:done + 1 + q_len]
        state, *scores = decode.score_piece(spec, params, state, np.int32(0), tokens, np.int32(q_len), targets)
        parts.append([np.asarray(a)[:q_len] for a in scores])
        done += q_len
    log_probs, top1 = map(np.concatenate, zip(*parts))
    return log_probs, top1
