"""`Engine`: prompts in, completions out. Continuous batching over the slots of one `DecodeState`.

Between segments of `steps_per_segment` steps the host admits waiting requests into free slots, allocates the pages that the
next segment will close, and reads one array back. A request is admitted when the free pages, less what running requests may
still need, cover its longest possible length: so a running request never runs out of pages and is never evicted half-way.
"""
from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax import accounting, calibration, decode, kv_schedule, page_table
from moejax.config import require_int
from moejax.model import Transformer
from moejax.requests import Completion, Job, Limits, Prompt, completion, make_jobs, vocabulary_ids
from moejax.sampling import SamplingParams
from moejax.scoring import Scorer
from moejax.tokenizer import Tokenizer
from pallas_kernels.kv_format import KVFormat

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Stats:
    """Counters of an engine since it was made, or since `Engine.warm_up`.

    Attributes:
      step_ms: milliseconds of each decode step; the steps of one segment share its time equally.
      prefill_tokens, prefill_ms: prompt tokens run through the model, and the time of it with the first token's choice.
      generated_tokens: all tokens chosen.
      forks: prompts that were not run because another sample's pages could be shared.
      peak_running: most requests that generated at the same time.
    """

    step_ms: list[float] = dataclasses.field(default_factory=list)
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    generated_tokens: int = 0
    forks: int = 0
    peak_running: int = 0


class Engine:
    """Generates with one model and one cache format.

    Args:
      model: a `Transformer`.
      tokenizer: needed for text prompts; also says which ids end a sequence and which may be sampled.
      kv_format: storage format of the cache, or one a layer (`moejax.kv_schedule`).
      max_batch: slots; requests that generate at the same time.
      max_len: tokens a sequence may have in the cache, prompt included.
      num_pages: pages of the pool, shared by all slots; None for enough to fill every slot.
      steps_per_segment: decode steps between two looks of the host.
      calibration_tokens: a text on which promoted key channels and calibrated rotations are measured; needed when the format has
        them (`KVFormat.needs_calibration`).
      implementation: of the attention ops; None picks by platform.

    Attributes:
      stats: `Stats`.

    Raises:
      ValueError: sizes below 1, a format that the model's heads do not fit, `max_len` beyond what the model's cached positions
        allow, promoted channels without a calibration text.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None, *, kv_format: KVFormat | Sequence[KVFormat] = KVFormat(),
        max_batch: int = 8, max_len: int = 2048, num_pages: int | None = None, steps_per_segment: int = 16,
        calibration_tokens: Sequence[int] | None = None, implementation: str | None = None,
    ):
        for name, value in (("max_batch", max_batch), ("max_len", max_len), ("steps_per_segment", steps_per_segment)):
            require_int(name, value)
        if num_pages is not None:
            require_int("num_pages", num_pages, least=0)
        config, limit = model.config, model.config.max_cached_positions
        if limit is not None and max_len > limit:
            raise ValueError(f"{max_len=}: this model's {config.rope.kind!r} RoPE can be cached up to "
                             f"max_position_embeddings={limit} tokens")
        if max_len > config.max_position_embeddings:
            log.warning("max_len=%d: exceeds max_position_embeddings=%d, the longest sequence that the model was made for",
                        max_len, config.max_position_embeddings)
        self.formats = kv_schedule.per_layer(kv_format, config.num_layers)
        calibrated = any(f.needs_calibration for f in self.formats)
        if calibrated and calibration_tokens is None:
            raise ValueError(f"kv_format={kv_schedule.name(self.formats)}: its promoted channels or rotation are measured on a "
                             "text, pass calibration_tokens")
        self.config, self.tokenizer = config, tokenizer
        self.max_batch, self.max_len, self.steps_per_segment = max_batch, max_len, steps_per_segment
        self.spec, self.params = decode.split(model, self.formats, implementation=implementation)
        self.formats = self.spec.formats
        self.num_pages = max_batch * self.spec.closed_pages(max_len) if num_pages is None else num_pages
        self.limits = Limits(config, tokenizer, self.spec, max_len, self.num_pages)
        self._require_memory()
        self._decodable = jnp.asarray(self.limits.decodable)
        self._transforms = None
        if calibrated and calibration_tokens is not None:
            tokens = vocabulary_ids("calibration_tokens", calibration_tokens, config.vocab_size)
            self._transforms = calibration.key_transforms(Scorer(model), self.formats, tokens)
        self.stats = Stats()
        self._compiled_before = decode.compilations.total()
        self._reset()

    def _require_memory(self) -> None:
        """Refuses sizes that cannot be held, before anything is allocated."""
        table = 4 * self.max_batch * (self.max_len // self.spec.page_size + 1)
        chosen = 4 * self.max_batch * (self.steps_per_segment + 1)
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in ("max_batch", "max_len", "num_pages", "steps_per_segment"))
        accounting.require_memory(f"{sizes}: the cache with the model's weights", weights + self.cache_bytes + table + chosen)

    @property
    def num_compilations(self) -> int:
        """Shapes traced and compiled (or read from the persistent cache) since the engine was made."""
        return decode.compilations.total() - self._compiled_before

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache's arrays."""
        return sum(accounting.cache_bytes(
            self.config, self.formats, max_batch=self.max_batch, num_pages=self.num_pages).values())

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *, num_samples: int = 1,
    ) -> list[Completion]:
        """Continues every prompt.

        Args:
          prompts: texts, or lists of token ids.
          params: for all prompts, or one for each.
          num_samples: completions of each prompt, with the seeds seed, seed + 1, ...; they share the prompt's closed pages.

        Returns:
          Completions in the order of the prompts, the samples of a prompt one after the other.

        Raises:
          ValueError: before any work, when a prompt is empty, holds ids out of the vocabulary, or together with its max_tokens
            exceeds max_len or the pool.
        """
        start = time.perf_counter()
        jobs = make_jobs(prompts, params, num_samples, self.limits)
        waiting, running = collections.deque(jobs), dict[int, Job]()
        try:
            while waiting or running:
                self._admit(waiting, running, start)
                self._run_segment(running)
        except BaseException:
            self._reset()  # the state may have been donated to a call that did not return
            raise
        return [completion(job, self.tokenizer) for job in jobs]

    def warm_up(self) -> None:
        """Compiles everything that `generate` will need, then sets `stats` back."""
        for length in decode.piece_lengths(self.spec.page_size):
            length = min(length, self.max_len - 1)
            if length and self.spec.closed_pages(length + 1) <= self.num_pages:
                self.generate([[0] * length], SamplingParams(max_tokens=2, ignore_eos=True))
        self.stats = Stats()

    def _reset(self) -> None:
        self._state = decode.init_state(self.spec, max_batch=self.max_batch, num_pages=self.num_pages, max_len=self.max_len,
                                        transforms=self._transforms)
        self._table = page_table.create(max_batch=self.max_batch, num_pages=self.num_pages, max_len=self.max_len,
                                        page_size=self.spec.page_size, open_pages=self.spec.open_pages)

    def _admit(self, waiting: collections.deque[Job], running: dict[int, Job], start: float) -> None:
        """Prefills and inserts waiting jobs, in order, while there are slots and pages for them."""
        while waiting and self._has_room(running, waiting[0].max_pages):
            job, slot = waiting.popleft(), self._free_slot(running)
            began = time.perf_counter()
            logits = self._prefill(slot, job)
            self._insert(slot, job, logits, running, start)
            self.stats.prefill_ms += 1e3 * (time.perf_counter() - began)
            self.stats.prefill_tokens += len(job.prompt)
            shared = self.spec.closed_pages(len(job.prompt))
            while (waiting and slot in running and waiting[0].prompt_index == job.prompt_index
                   and self._has_room(running, job.max_pages - shared)):
                self._fork(slot, waiting.popleft(), logits, running, start)

    def _has_room(self, running: dict[int, Job], pages: int) -> bool:
        promised = sum(job.max_pages - self._table.num_owned(slot) for slot, job in running.items())
        return len(running) < self.max_batch and self._table.num_free - promised >= pages

    def _free_slot(self, running: dict[int, Job]) -> int:
        return next(slot for slot in range(self.max_batch) if slot not in running)

    def _prefill(self, slot: int, job: Job) -> jax.Array:
        self._table = page_table.allocate(self._table, slot, len(job.prompt))
        self._state = decode.with_table(self._state, self._table)
        logits = None
        for tokens, q_len in decode.pieces(job.prompt, 0, self.spec.page_size):
            self._state, logits = decode.prefill_piece(
                self.spec, self.params, self._state, np.int32(slot), tokens, np.int32(q_len))
        self._table = page_table.append(self._table, slot, len(job.prompt))
        assert logits is not None  # prompts are not empty
        return logits

    def _fork(self, source: int, job: Job, logits: jax.Array, running: dict[int, Job], start: float) -> None:
        slot = self._free_slot(running)
        self._table = page_table.fork(self._table, source, slot)
        self._state = decode.copy_slot(self._state, np.int32(source), np.int32(slot))
        self.stats.forks += 1
        self._insert(slot, job, logits, running, start)

    def _insert(self, slot: int, job: Job, logits: jax.Array, running: dict[int, Job], start: float) -> None:
        self._state, first = decode.insert(self._state, np.int32(slot), logits, job.request, self._decodable)
        token, goes_on = np.asarray(first)
        job.ttft_ms = 1e3 * (time.perf_counter() - start)
        running[slot] = job
        self._extend(slot, [int(token)], bool(goes_on), running)

    def _run_segment(self, running: dict[int, Job]) -> None:
        if not running:
            return
        self.stats.peak_running = max(self.stats.peak_running, len(running))
        for slot, job in running.items():
            ahead = int(self._table.kv_lens[slot]) + self.steps_per_segment
            self._table = page_table.allocate(self._table, slot, min(ahead, job.max_tokens_cached))
        began = time.perf_counter()
        self._state, packed = decode.generate(
            self.spec, self.params, decode.with_table(self._state, self._table), self._decodable,
            num_steps=self.steps_per_segment)
        rows = np.asarray(packed)
        elapsed_ms = 1e3 * (time.perf_counter() - began)
        counts = (rows[:, :-1] != decode.NO_TOKEN).sum(axis=1)
        self.stats.step_ms += [elapsed_ms / int(counts.max())] * int(counts.max())
        for slot in list(running):
            self._table = page_table.append(self._table, slot, int(counts[slot]))
            self._extend(slot, rows[slot, :counts[slot]].tolist(), bool(rows[slot, -1]), running)

    def _extend(self, slot: int, tokens: list[int], goes_on: bool, running: dict[int, Job]) -> None:
        running[slot].tokens += tokens
        self.stats.generated_tokens += len(tokens)
        if not goes_on:
            del running[slot]
            self._table = page_table.free(self._table, slot)
