"""What a user asks of an `Engine` and gets back, and the checks in between: what is refused is refused here, before any work."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from moejax import decode, sampling
from moejax.config import INT32_MAX, ModelConfig, require_int
from moejax.sampling import SamplingParams
from moejax.tokenizer import Tokenizer

Prompt = str | Sequence[int]
MAX_SAMPLES = 1 << 16  # of a prompt: all are queued, and returned together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of one request.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: what was generated, the stop token included when one ended it.
      text: of `token_ids` without the stop token and special tokens; None when the engine has no tokenizer.
      finish_reason: "stop" (a stop or end-of-sequence id) or "length" (max_tokens).
      seed: the seed of this sample.
      ttft_ms: milliseconds from the call of `generate` to the first token: waiting for a slot, prefill, any compilation.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: Literal["stop", "length"]
    seed: int
    ttft_ms: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    spec: decode.DecodeSpec
    max_len: int
    num_pages: int

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the tokenizer's, without one the configuration's."""
        return self.config.eos_token_ids if self.tokenizer is None else tuple(self.tokenizer.eos_ids)

    @property
    def decodable(self) -> np.ndarray:
        """bool [V]: ids that stand for something; the others only pad the vocabulary."""
        mask = np.arange(self.config.vocab_size) < self.config.num_decodable
        return mask if self.tokenizer is None else mask & self.tokenizer.decodable_mask(self.config.vocab_size)


@dataclasses.dataclass(eq=False)
class Job:
    """One sample of one prompt.

    Attributes:
      prompt_index: common to the samples of a prompt.
      max_tokens_cached: most tokens it puts into the cache.
      max_pages: most pages it closes.
      tokens, ttft_ms: results, as they come.
    """

    prompt_index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    max_tokens_cached: int
    max_pages: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    ttft_ms: float = 0.0

    @property
    def request(self) -> decode.Request:
        """For `moejax.decode.insert`."""
        padded = np.full(decode.MAX_STOP_IDS, decode.NO_TOKEN, np.int32)
        padded[:len(self.stop_ids)] = self.stop_ids
        return decode.Request(sampling.row_of(self.params), jnp.int32(self.params.max_tokens), jnp.asarray(padded))


def make_jobs(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], num_samples: int, limits: Limits,
) -> list[Job]:
    """One job a sample, in order. Raises ValueError, with the index of the prompt, for what cannot be served."""
    require_int("num_samples", num_samples, most=MAX_SAMPLES)
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts={prompts!r}: must be a list of prompts")
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not isinstance(each, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in each):
        raise ValueError(f"params={params!r}: must be a SamplingParams, or a list of one for each prompt")
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one a prompt")
    jobs = []
    for i, (prompt, p) in enumerate(zip(prompts, each)):
        ids, stop_ids = _encode(i, prompt, limits), _stop_ids(p, limits)
        if p.seed + num_samples - 1 > INT32_MAX:
            raise ValueError(f"prompt {i}: seed={p.seed} and {num_samples=}: the last sample's seed must be at most {INT32_MAX}")
        cached = len(ids) + p.max_tokens - 1  # the last token is never put into the cache
        samples = [Job(i, ids, dataclasses.replace(p, seed=p.seed + n), stop_ids, cached, limits.spec.closed_pages(cached))
                   for n in range(num_samples)]
        _check_fits(samples[0], limits)
        jobs += samples
    return jobs


def completion(job: Job, tokenizer: Tokenizer | None) -> Completion:
    """The result of a finished job."""
    stopped = job.tokens[-1] in job.stop_ids
    text = None if tokenizer is None else tokenizer.decode(job.tokens[:-1] if stopped else job.tokens)
    return Completion(prompt_token_ids=job.prompt, token_ids=tuple(job.tokens), text=text, seed=job.params.seed,
                      finish_reason="stop" if stopped else "length", ttft_ms=job.ttft_ms)


def _encode(index: int, prompt: Prompt, limits: Limits) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if limits.tokenizer is None:
            raise ValueError(f"prompt {index}: is text, but the engine has no tokenizer; pass token ids")
        prompt = limits.tokenizer.encode(prompt)
    if len(ids := vocabulary_ids(f"prompt {index}", prompt, limits.config.vocab_size)) == 0:
        raise ValueError(f"prompt {index}: is empty, at least one token is needed")
    return ids


def vocabulary_ids(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple. Raises ValueError naming what is no list, no integer, or outside of the vocabulary."""
    items = ids.tolist() if hasattr(ids, "tolist") else ids  # an array
    if isinstance(items, (str, bytes, bytearray)) or not isinstance(items, Sequence):
        raise ValueError(f"{name}: {ids!r}: must be a list of token ids")
    if wrong := [t for t in items if isinstance(t, bool) or not isinstance(t, (int, np.integer))]:
        raise ValueError(f"{name}: token id {wrong[0]!r}: must be an integer")
    if wrong := [t for t in items if not 0 <= t < vocab_size]:
        raise ValueError(f"{name}: token id {wrong[0]}: must be at least 0 and below {vocab_size=}")
    return tuple(map(int, items))


def _stop_ids(params: SamplingParams, limits: Limits) -> tuple[int, ...]:
    vocabulary_ids("SamplingParams.stop_token_ids", params.stop_token_ids, limits.config.vocab_size)
    ids = tuple(dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else limits.eos_ids)))
    if len(ids) > decode.MAX_STOP_IDS:
        raise ValueError(f"{len(ids)} stop ids, end-of-sequence ids included: at most {decode.MAX_STOP_IDS} are accepted")
    return ids


def _check_fits(job: Job, limits: Limits) -> None:
    if job.max_tokens_cached > limits.max_len:
        raise ValueError(f"prompt {job.prompt_index}: {len(job.prompt)} tokens and max_tokens={job.params.max_tokens} need "
                         f"{job.max_tokens_cached} places in the cache, max_len={limits.max_len}")
    if job.max_pages > limits.num_pages:
        raise ValueError(f"prompt {job.prompt_index}: {len(job.prompt)} tokens and max_tokens={job.params.max_tokens} need up "
                         f"to {job.max_pages} pages, num_pages={limits.num_pages}")
