"""Generates text: `python -m experiments.decode --prompt="The function returns" --k_bits=3 --v_bits=2`."""
from __future__ import annotations

import dataclasses
import sys
import time
from typing import Literal

import jax
import numpy as np
from flax import nnx

from experiments import cli, inputs, random_decode
from moejax import compilation_cache, kv_presets
from moejax import kv_schedule as schedules
from moejax import weight_rules as weights_of
from moejax.config import ModelConfig, require_int
from moejax.engine import Engine
from moejax.requests import make_jobs
from moejax.sampling import SamplingParams
from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat

PROMPTS = ["It is a truth universally acknowledged, that", "The function returns a new"]


@cli.configurable
def decode(
    checkpoint: str = "checkpoints/moe_10m",
    weights: Literal["checkpoint", "random"] = "checkpoint",
    expert_weights: str = "bf16",
    dense_weights: str = "bf16",
    weight_rules: list[str] | None = None,
    prompt: list[str] | None = None,
    prompt_file: str | None = None,
    prompt_tokens: int | None = None,
    sampling: SamplingParams = SamplingParams(),
    kv_format: KVFormat = KVFormat(),
    preset: str | None = None,
    kv_schedule: str | None = None,
    num_samples: int = 1,
    max_batch: int = 8,
    max_len: int = 2048,
    num_pages: int | None = None,
    steps_per_segment: int = 16,
    calibration_file: str = "data/heldout_python_docs.txt",
    repeats: int = 1,
    context: int | None = None,
    routing: str = "router",
    routing_steps: int = 16,
    profile_steps: int = 0,
) -> cli.Work:
    """Continues prompts with the continuous-batching engine and reports times, bytes and compilations.

    Prints every completion. Before anything is timed two tokens of each completion are generated, which compiles everything:
    ttft_cold_ms is the first token's time then, compilation (or reading the persistent cache) included. ttft_ms and tpot_ms, of
    decode steps, are those of the last repeat. load_peak_device_gb is the most memory in use while the model was loaded or made,
    peak_device_gb the most until the end, of this process (on a CPU load_peak_process_gb and peak_process_gb: resident memory).

    With weights="random" nothing is read but the config: the model is made on the device at its full size, every one of max_batch
    slots holds `context` tokens of random keys and values, and max_tokens decode steps are timed: in segments of steps_per_segment
    steps on the device (tpot_ms), and one by one, waiting for each token (waited_step_ms). A random router chooses nearly evenly;
    `routing` has it choose as real ones do. experts_hit is the number of different experts that a step was seen to wake: the mean
    over the layers and over routing_steps steps after the timed ones.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer; a config.json with weights="random".
      weights: "checkpoint" or "random".
      expert_weights: what routed experts are kept in: int8, int4, int3, int2 or packed_bf16, for the kernels of Hopper and TPU,
        with group size and zero points behind it, as in int4:g64:asym; bf16 leaves them as they are loaded.
      dense_weights: the same for the projections of attention, dense and shared MLPs and the output projection.
      weight_rules: PATTERN=FORMAT each, which win over the two, the last one first (`moejax.weight_rules`): embedding=int8,
        layers.0=bf16, experts.down=int8:g64.
      prompt: texts to continue; without them and prompt_file, two of ours.
      prompt_file: a UTF-8 file whose text is one more prompt.
      prompt_tokens: cut each prompt to its first so many tokens.
      sampling: max_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids, ignore_eos.
      kv_format: the cache's format.
      preset: a named format, in place of kv_format (`moejax.kv_presets`).
      kv_schedule: a JSON file with a format for each layer, in place of kv_format (`experiments.search_bits` writes such files).
      num_samples: completions a prompt; they share the prompt's pages.
      max_batch, max_len, num_pages, steps_per_segment: of the engine.
      calibration_file: text on which promoted key channels and calibrated rotations are measured, read when the format has them.
      repeats: run everything so many times.
      context: tokens in the cache of each slot, with weights="random" only.
      routing: with weights="random": "router" leaves it to the random router, "zipf:S" gives each layer's router biases with which
        the experts' frequencies fall as rank**-S, "recorded:FILE" such that they are those of a file of `experiments.routing`.
      routing_steps: steps in which the experts that are hit are counted, with weights="random" only.
      profile_steps: steps whose kernels are timed one by one at the end, with weights="random" only; 0 for none.
    """
    if weights == "random":
        given = {"prompt": prompt, "prompt_file": prompt_file, "prompt_tokens": prompt_tokens, "num_pages": num_pages}
        if unused := {name: value for name, value in given.items() if value is not None}:
            raise ValueError(f"weights='random' has no text; not accepted: {', '.join(f'{k}={v!r}' for k, v in unused.items())}")
        config = random_decode.read_config(checkpoint)
        compilation_cache.enable()
        rules = weights_of.rules_of(config, expert_weights, dense_weights, weight_rules or ())
        prepared = random_decode.prepare(
            config, formats_of(config, kv_format, preset, kv_schedule), weights_of.resolve(config, rules), batch=max_batch,
            context=2048 if context is None else context, steps=sampling.max_tokens, steps_per_segment=steps_per_segment,
            profile_steps=profile_steps, routing=routing, routing_steps=routing_steps)
        return lambda: {"checkpoint": checkpoint, "weight_rules": weights_of.described(rules), **prepared()}
    if context is not None or profile_steps or routing != "router":
        raise ValueError(f"{context=}, {profile_steps=}, {routing=}: only with weights='random'")
    for name, value in (("num_samples", num_samples), ("repeats", repeats), ("prompt_tokens", prompt_tokens)):
        if value is not None:
            require_int(name, value)
    texts = texts_of(prompt, prompt_file)
    started = time.perf_counter()
    compilation_cache.enable()
    model, tokenizer = inputs.load_checkpoint(checkpoint, expert_weights, dense_weights, weight_rules or ())
    jax.block_until_ready(nnx.state(model))
    load_peak = random_decode.peak("load_peak")
    rules = weights_of.rules_of(model.config, expert_weights, dense_weights, weight_rules or ())
    vocab_size = model.config.vocab_size
    prompts = [inputs.encode(name, text, tokenizer, vocab_size)[:prompt_tokens] for name, part in texts.items() for text in part]
    formats = formats_of(model.config, kv_format, preset, kv_schedule)
    calibration = None
    if any(f.needs_calibration for f in formats):
        text = inputs.read_text("calibration_file", calibration_file)[:16384]
        calibration = inputs.encode(f"calibration_file={calibration_file}", text, tokenizer, vocab_size)
    engine = Engine(model, tokenizer, kv_format=formats, max_batch=max_batch, max_len=max_len, num_pages=num_pages,
                    steps_per_segment=steps_per_segment, calibration_tokens=calibration)
    make_jobs(prompts, sampling, num_samples, engine.limits)  # refuses what cannot be served
    longest = max(map(len, prompts)) + sampling.max_tokens
    beyond = inputs.beyond_training(checkpoint, "prompt and max_tokens", longest)
    load_s = time.perf_counter() - started

    def work() -> dict:
        print(f"loaded in {load_s:.1f} s; cache of {engine.num_pages} pages, {engine.cache_bytes:,} bytes", file=sys.stderr)
        first = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, 2), ignore_eos=True, stop_token_ids=())
        cold_ms = engine.generate(prompts, first, num_samples=num_samples)[0].ttft_ms
        for _ in range(repeats):
            engine.stats.step_ms.clear()
            began = time.perf_counter()
            completions = engine.generate(prompts, sampling, num_samples=num_samples)
            seconds = time.perf_counter() - began
        for c in completions:
            print(f"[{len(c.prompt_token_ids)} + {len(c.token_ids)} tokens, {c.finish_reason}] {c.text!r}")
        generated = sum(len(c.token_ids) for c in completions)
        steps = engine.stats.step_ms
        return {
            "checkpoint": checkpoint, "weight_rules": weights_of.described(rules),
            "effective_weight_bits": random_decode.effective_weight_bits(model),
            "kv_format": schedules.name(formats),
            "effective_bits": schedules.effective_bits(formats, model.config.head_dim),
            "load_s": load_s, "ttft_cold_ms": cold_ms, "ttft_ms": [c.ttft_ms for c in completions],
            "tpot_ms_p50": float(np.percentile(steps, 50)) if steps else None,
            "tpot_ms_p99": float(np.percentile(steps, 99)) if steps else None,
            "decode_steps": len(steps), "steps_per_segment": steps_per_segment,
            "generated_tokens": generated, "tok_per_s": generated / seconds,
            "cache_bytes": engine.cache_bytes, "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))),
            **load_peak, **random_decode.peak("peak"),
            "compilations": engine.num_compilations, "implementation": dispatch.last_implementation("paged_attention"),
            "expert_implementation": dispatch.last_implementation("grouped_matmul"),
            "device": jax.devices()[0].device_kind, "completions": [c.text for c in completions],
            "beyond_training": beyond,
        }

    return work


def texts_of(prompt: list[str] | None, prompt_file: str | None) -> dict[str, list[str]]:
    """The texts to continue, by the flag they come from."""
    texts = {"prompt": prompt or []}
    if prompt_file is not None:
        texts[f"prompt_file={prompt_file}"] = [inputs.read_text("prompt_file", prompt_file)]
    elif prompt is None:
        texts["prompt"] = PROMPTS
    return texts


def formats_of(config: ModelConfig, kv_format: KVFormat, preset: str | None, kv_schedule: str | None) -> tuple[KVFormat, ...]:
    """The format of each layer. Raises ValueError for more than one way to say it."""
    if preset is not None and kv_schedule is not None:
        raise ValueError(f"{preset=}, {kv_schedule=}: give one of them")
    if (whole := preset or kv_schedule) is not None and kv_format != KVFormat():
        raise ValueError(f"{whole}: its formats are whole, {kv_format.name} beside it has no effect; give one of the two")
    if preset is not None:
        return kv_presets.get(preset).formats(config.num_layers, config.head_dim)
    if kv_schedule is not None:
        return inputs.load_schedule(kv_schedule, config.num_layers)
    return schedules.per_layer(kv_format, config.num_layers)


if __name__ == "__main__":
    cli.main(decode)
