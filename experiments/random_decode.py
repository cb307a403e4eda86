"""Decode steps of a model with random weights over a cache full of random pages: `experiments.decode --weights=random`."""
from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import inputs, profiles
from moejax import accounting, decode
from moejax import kv_schedule as schedules
from moejax import routing as routings
from moejax.config import ModelConfig, MoE, require_int
from moejax.experts import Experts
from moejax.hf_config import from_hf
from moejax.model import Transformer, packed_shapes
from moejax.random_model import filled_state, random_model
from moejax.weight_rules import Formats
from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat

GB = 1e9


def read_config(checkpoint: str) -> ModelConfig:
    """The config of a Hugging Face folder, or a config.json on its own. Raises ValueError that names it."""
    path = pathlib.Path(inputs.locate(checkpoint))
    with inputs.naming("checkpoint", checkpoint):
        return from_hf(json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")))


def prepare(
    config: ModelConfig, formats: Sequence[KVFormat], weights: Formats, *, batch: int, context: int, steps: int,
    steps_per_segment: int, profile_steps: int, routing: str = "router", routing_steps: int = 16,
) -> Callable[[], dict]:
    """Checks the sizes; the callable makes the model, fills the cache, and measures.

    Args:
      weights: formats of the packed matrices.
      batch, context: sequences, and tokens that each has in the cache to begin with: row b has up to a page more, so that pages
        do not all fill in the same step.
      steps: decode steps to time; once in segments of `steps_per_segment` on the device, once waiting for each step.
      profile_steps: decode steps of a profile afterwards; 0 for none.
      routing: how experts are chosen (`moejax.routing.named`).
      routing_steps: decode steps after the timed ones in which the experts that are hit are counted.
    """
    sizes = {"max_batch": batch, "context": context, "max_tokens": steps, "steps_per_segment": steps_per_segment,
             "routing_steps": routing_steps}
    for name, value in sizes.items():
        require_int(name, value)
    require_int("profile_steps", profile_steps, least=0)
    page_size = formats[0].page_size
    segments = -(-steps // steps_per_segment)
    lens = [context + b * page_size // batch for b in range(batch)]
    max_len = lens[-1] + (segments + 2) * steps_per_segment + steps + 2 + routing_steps + profile_steps
    frequencies = read_routing(routing, config)
    require_memory(packed_shapes(config, weights, param_dtype=jnp.bfloat16), formats, batch, max_len)

    def work() -> dict:
        started = time.perf_counter()
        model = random_model(config, weights)
        jax.block_until_ready(nnx.state(model))
        load_peak = peak("load_peak")
        if frequencies is not None:
            routings.skew(model, frequencies)
        spec, params = decode.split(model, formats)
        state = jax.block_until_ready(filled_state(spec, lens, max_len=max_len))
        made_s = time.perf_counter() - started
        print(f"made in {made_s:.1f} s", file=sys.stderr, flush=True)
        decodable = jnp.ones(config.vocab_size, bool)
        loop = _Loop(spec, params, decodable, steps_per_segment)
        state, compile_s = loop.warm_up(state)
        print(f"compiled in {compile_s:.1f} s", file=sys.stderr, flush=True)
        state, segment_ms = loop.times(state, segments, steps_per_segment)
        state, step_ms = loop.times(state, steps, 1)
        state, observed = routings.observe(spec, params, state, decodable, routing_steps)
        out = {
            "weights": "random", **_routing(routing, frequencies, observed, config, batch),
            "effective_weight_bits": effective_weight_bits(model), "kv_format": schedules.name(formats),
            "effective_bits": schedules.effective_bits(formats, config.head_dim), "kv_layout": spec.formats[0].layout,
            "batch": batch, "context": context, "steps": steps, "steps_per_segment": steps_per_segment,
            **{f"tpot_ms_p{q}": float(np.percentile(segment_ms, q)) for q in (50, 99)},
            **{f"waited_step_ms_p{q}": float(np.percentile(step_ms, q)) for q in (50, 99)},
            "tok_per_s": batch * 1e3 / float(np.mean(segment_ms)),
            "made_s": made_s, "compile_s": compile_s,
            **_bytes(config, model, observed, spec.formats, batch, context), **load_peak, **peak("peak"),
            **{f"{op}_implementation": dispatch.last_implementation(op)
               for op in ("paged_attention", "grouped_matmul", "fused_router", "close_page")},
            "device": jax.devices()[0].device_kind,
        }
        if profile_steps:
            _, out["profile_us"] = loop.profile(state, profile_steps)
        return out

    return work


class _Loop:
    """The jitted loop over one model: one program for segments and for single steps."""

    def __init__(self, spec: decode.DecodeSpec, params: decode.Params, decodable: jax.Array, num_steps: int):
        self.spec, self.params, self.decodable, self.num_steps = spec, params, decodable, num_steps

    def run(self, state: decode.DecodeState, steps: int) -> decode.DecodeState:
        """A segment of `steps` steps; returns when its tokens are on the host."""
        state, tokens = decode.generate(self.spec, self.params, state, self.decodable, num_steps=self.num_steps, limit=steps)
        np.asarray(tokens)
        return state

    def warm_up(self, state: decode.DecodeState) -> tuple[decode.DecodeState, float]:
        """Compiles, and runs two segments: (state, seconds)."""
        started = time.perf_counter()
        for _ in range(2):
            state = self.run(state, self.num_steps)
        return state, time.perf_counter() - started

    def times(self, state: decode.DecodeState, times: int, steps: int) -> tuple[decode.DecodeState, list[float]]:
        """(state, milliseconds of each step; those of a segment share its time equally)."""
        out: list[float] = []
        for _ in range(times):
            started = time.perf_counter()
            state = self.run(state, steps)
            out += [1e3 * (time.perf_counter() - started) / steps] * steps
        return state, out

    def profile(self, state: decode.DecodeState, steps: int) -> tuple[decode.DecodeState, dict[str, float]]:
        """(state, microseconds a step that each kernel takes)."""
        with profiles.recorded() as kernels:
            for _ in range(steps):
                state = self.run(state, 1)
        return state, {name: us / steps for name, us in kernels.items()}


def read_routing(routing: str, config: ModelConfig) -> routings.Frequencies | None:
    """`moejax.routing.named`, with the file looked up as every other is."""
    kind, _, path = routing.partition(":")
    if kind != "recorded" or not path:
        return routings.named(routing, config)
    with inputs.naming("routing=recorded", path):
        return routings.load(inputs.locate(path), config)


def _routing(
    routing: str, frequencies: routings.Frequencies | None, observed: routings.Observed, config: ModelConfig, batch: int,
) -> dict[str, Any]:
    """What was asked for and what was seen: different experts that a step hits, mean of the layers with experts."""
    def mean(rows: Sequence[np.ndarray | None]) -> float | None:
        hits = [routings.expected_hits(f, batch) for f in rows if f is not None]
        return float(np.mean(hits)) if hits else None

    equal = [routings.uniform(layer.mlp) if isinstance(layer.mlp, MoE) else None for layer in config.layers]
    how = "by a random router" if frequencies is None else f"by a random router with biases for {routing}"
    return {
        "routing": how, "routing_steps": observed.steps, "experts_hit": observed.mean_hits,
        "experts_hit_asked_for": None if frequencies is None else mean(frequencies), "experts_hit_if_uniform": mean(equal),
    }


def _bytes(
    config: ModelConfig, model: Transformer, observed: routings.Observed, formats: Sequence[KVFormat], batch: int, context: int,
) -> dict[str, float]:
    """What is held, and what a step must read at least: the cache, dense weights, and as many experts as were seen to be hit."""
    held = _nbytes(model)
    embedding = model.packed_embedding if model.embedding_packed else model.embedding_VD
    unread = 0.0 if config.tie_word_embeddings and not model.head_packed else _nbytes(embedding)
    for block, layer, hits in zip(model.blocks, config.layers, observed.hits):
        if isinstance(layer.mlp, MoE) and isinstance(block.mlp, Experts) and hits is not None:
            unread += (1 - hits / layer.mlp.num_experts) * sum(map(_nbytes, block.mlp.matrices()))
    kv = accounting.decode_step_bytes(config, formats, batch=batch, kv_len=context, param_dtype=jnp.bfloat16)["kv"]
    return {"weight_gb": held / GB, "read_weights_gb": (held - unread) / GB, "read_kv_gb": kv / GB}


def _nbytes(module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module) if isinstance(module, nnx.Module) else module))


def effective_weight_bits(model: Transformer) -> dict[str, float]:
    """Bits that a weight of each kind takes, scales, zero points and padding included; of the kinds that can be packed."""
    held = accounting.held_bytes(model.config, nnx.state(model))
    plain = accounting.held_bytes(model.config, nnx.state(packed_shapes(model.config, {}, param_dtype=jnp.bfloat16)))
    if held["lm_head"] and model.config.tie_word_embeddings:  # a packed copy
        plain["lm_head"] = plain["embedding"]
    return {kind: 16 * held[kind] / plain[kind] for kind in plain if plain[kind] and kind not in ("router", "norms")}


def require_memory(model: Transformer, formats: Sequence[KVFormat], batch: int, max_len: int) -> None:
    """Refuses what the device cannot hold: weights by kind, closed pages, open pages and sinks. `model` may consist of shapes."""
    spec, _ = decode.split(model, formats)
    cache = accounting.cache_bytes(model.config, spec.formats, max_batch=batch, num_pages=batch * spec.closed_pages(max_len))
    weights = accounting.held_bytes(model.config, nnx.state(model))
    accounting.require_memory(
        f"max_batch={batch} sequences of up to {max_len} tokens with the model",
        weights | {"closed KV pages": cache["pages"], "open KV pages": cache["open"], "KV sinks": cache["sinks"]})


def peak(name: str) -> dict[str, float]:
    """The most memory used so far, under the name of where it was: NAME_device_gb, or NAME_process_gb on a CPU."""
    where, count = accounting.peak_bytes()
    return {f"{name}_{where}_gb": count / GB}
