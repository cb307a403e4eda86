"""What a KV cache format costs in quality: `python -m experiments.quality --k_bits=16,4,2 --v_bits=16,4,2 --output_dir=DIR`.

Scoring is teacher-forced and sees exactly what decoding would see: the text goes through the paged cache in pieces, pages are
quantised as they close, and each token attends to the quantised pages before its own (`moejax.kv_cache`).
"""
from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import Literal

import numpy as np
from tqdm import tqdm

from experiments import cli, plots, results
from experiments.decode import read_text
from moejax import accounting, calibration, compilation_cache, decode, page_table
from moejax import checkpoint as checkpoints
from moejax.config import require_int
from moejax.engine import Engine
from moejax.model import Transformer
from moejax.sampling import SamplingParams
from moejax.tokenizer import Tokenizer
from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat, RangeRule, Rotation

CALIBRATION_TOKENS = 2048
COLUMNS = {"format": "", "effective_bits": ".3f", "effective_bits_at_context": ".3f", "cache_bytes_per_token": ",.0f",
           "perplexity": ".3f", "top1_agreement_pct": ".2f", "tpot_ms_p50": ".2f", "tpot_ms_p99": ".2f"}

cli.register(KVFormat)  # for quality.formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What the compared formats have in common: the fields of `KVFormat` other than the bits. Checked there, at each width."""

    page_size: int = 128
    sink_tokens: int = 0
    outlier_channels: int = 0
    outlier_bits: int = 8
    k_range: RangeRule = "minmax"
    v_range: RangeRule = "minmax"
    k_rotation: Rotation = "none"
    v_rotation: Rotation = "none"
    scale_dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def at(self, k_bits: int, v_bits: int) -> KVFormat:
        """The format of these widths; channels are only promoted where `outlier_bits` exceeds `k_bits`."""
        promoted = self.outlier_channels if self.outlier_bits > k_bits else 0
        return KVFormat(k_bits=k_bits, v_bits=v_bits, **{**dataclasses.asdict(self), "outlier_channels": promoted})


@cli.configurable
def quality(
    checkpoint: str = "checkpoints/moe_10m",
    text: list[str] = ["data/heldout_python_docs.txt", "data/heldout_austen.txt"],  # noqa: B006 (never changed)
    k_bits: list[int] = [16, 4, 3, 2],  # noqa: B006
    v_bits: list[int] | None = None,
    options: CacheOptions = CacheOptions(),
    formats: list[KVFormat] | None = None,
    context: int = 1024,
    windows: int = 4,
    sample_tokens: int = 48,
) -> cli.Work:
    """Scores text with several cache formats, beside the 16-bit cache: perplexity, top-1 agreement, bits, bytes, time a token.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer.
      text: UTF-8 files; each is read from its start.
      k_bits, v_bits: one format a pair; v_bits None means as k_bits.
      options: the fields that all of these formats share (--page_size, --sink_tokens, --outlier_channels, ...).
      formats: whole formats, in place of the pairs (gin only).
      context: tokens a window, scored from an empty cache; a multiple of the page size.
      windows: windows of each text.
      sample_tokens: tokens generated, greedily, after the first half window of the first text, and timed one by one.
    """
    for name, value in (("context", context), ("windows", windows), ("sample_tokens", sample_tokens)):
        require_int(name, value)
    chosen = formats_of(k_bits, v_bits, options, formats)
    for f in chosen:
        if context % f.page_size:
            raise ValueError(f"{context=}: must be a multiple of page_size={f.page_size}")
    compilation_cache.enable()
    model, tokenizer = checkpoints.load(checkpoint)
    if tokenizer is None:
        raise ValueError(f"{checkpoint=}: has no tokenizer, text cannot be scored with it")
    for f in chosen:
        f.check_head_dim(model.config.head_dim)
    limit = model.config.max_position_embeddings
    if context + sample_tokens > limit:
        raise ValueError(f"{context=}: with {sample_tokens=} it exceeds the model's max_position_embeddings={limit}")
    tokens = {path: read_windows(path, tokenizer, context, windows) for path in text}
    tail = np.concatenate([rest for _, rest in tokens.values()])
    if any(f.outlier_channels for f in chosen) and len(tail) < CALIBRATION_TOKENS // 2:
        raise ValueError(f"outlier_channels: need {CALIBRATION_TOKENS // 2} tokens of text after the scored windows to choose "
                         f"the channels on, there are {len(tail)}; lower windows={windows} or context={context}")
    bench = Bench(model, tokenizer, {path: scored for path, (scored, _) in tokens.items()}, tail, sample_tokens)
    return lambda: bench.work(chosen, checkpoint)


def formats_of(k_bits, v_bits, options: CacheOptions, formats: list[KVFormat] | None) -> list[KVFormat]:
    """The formats to compare, without repeats. Raises ValueError for lists that do not pair up."""
    if formats is None:
        v_bits = k_bits if v_bits is None else v_bits
        if len(k_bits) != len(v_bits):
            raise ValueError(f"{k_bits=}, {v_bits=}: must be of one length")
        formats = [options.at(k, v) for k, v in zip(k_bits, v_bits)]
    if not formats:
        raise ValueError("no formats: give k_bits or formats")
    return list(dict.fromkeys(formats))


def read_windows(path: str, tokenizer: Tokenizer, context: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [windows, context + 1] consecutive windows, the tokens after them up to CALIBRATION_TOKENS).

    Raises:
      ValueError: the text is not UTF-8 or too short.  OSError: it cannot be read.
    """
    text = read_text(path)
    needed = windows * context + 1
    ids = np.asarray(tokenizer.encode(text[:16 * (needed + CALIBRATION_TOKENS)]), np.int32)
    if len(ids) < needed:
        raise ValueError(f"text={path}: has {len(ids)} tokens, {windows=} of {context=} need {needed}")
    scored = np.stack([ids[i * context:(i + 1) * context + 1] for i in range(windows)])
    return scored, ids[needed:needed + CALIBRATION_TOKENS]


class Bench:
    """Scores and times formats on one model and a set of texts (name -> int32 [W, context + 1])."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, texts: dict[str, np.ndarray], tail: np.ndarray,
                 sample_tokens: int):
        self.model, self.tokenizer, self.texts, self.tail, self.sample_tokens = model, tokenizer, texts, tail, sample_tokens
        self.context = next(iter(texts.values())).shape[1] - 1

    def work(self, formats: list[KVFormat], checkpoint: str) -> dict:
        baseline = KVFormat(page_size=formats[0].page_size)
        total = sum(map(len, self.texts.values()))
        with tqdm(total=total * len({baseline, *formats}), unit="window", file=sys.stderr, dynamic_ncols=True) as bar:
            reference = self.score(baseline, bar)
            rows = [self.row(f, reference if f == baseline else self.score(f, bar), reference) for f in formats]
        print(results.markdown_table(rows, COLUMNS))
        for row in rows:
            print(f"{row['format']}: {row['sample']!r}")
        return {
            "checkpoint": checkpoint, "texts": list(self.texts), "context_tokens": self.context, "scored_tokens":
            total * self.context, "page_size": baseline.page_size, "rows": rows,
            "implementation": dispatch.last_implementation("paged_attention"),
            "compilations": decode.compilations.total(), "plot": plots.Quality(rows, "effective_bits", "perplexity"),
        }

    def row(self, kv_format: KVFormat, scores: Scores, reference: Scores) -> dict:
        """One line of the table."""
        config = self.model.config
        layout = kv_format.page_layout(config.head_dim)
        return {
            "format": kv_format.name,
            "kv_format": dataclasses.asdict(kv_format),
            "effective_bits": layout.effective_bits(),
            "effective_bits_at_context": layout.effective_bits_at(self.context),
            "cache_bytes_per_token": accounting.cache_bytes_per_token(config, kv_format),
            "perplexity": math.exp(-float(np.mean(scores.log_probs))),
            "perplexity_by_text": {name: math.exp(-float(np.mean(part))) for name, part in scores.split_by_text(self.texts)},
            "top1_agreement_pct": 100 * float(np.mean(scores.top1 == reference.top1)),
            **self.sample(kv_format),
        }

    def score(self, kv_format: KVFormat, bar: tqdm) -> Scores:
        """Teacher-forced scores of every window, each from an empty cache."""
        spec, params = decode.split(self.model, kv_format)
        transforms = calibration.key_transforms(spec, params, self.tail.tolist())
        log_probs, top1 = [], []
        for window in np.concatenate(list(self.texts.values())):
            bar.set_description(kv_format.name)
            part = score_window(spec, params, window, transforms)
            log_probs.append(part[0])
            top1.append(part[1])
            bar.update()
        return Scores(np.stack(log_probs), np.stack(top1))

    def sample(self, kv_format: KVFormat) -> dict:
        """Generates greedily after half a window, and times each token."""
        prompt = next(iter(self.texts.values()))[0, :self.context // 2]
        engine = Engine(self.model, self.tokenizer, kv_format=kv_format, max_batch=1, steps_per_segment=1,
                        max_len=self.context // 2 + self.sample_tokens, calibration_tokens=self.tail.tolist())
        params = SamplingParams(max_tokens=self.sample_tokens, ignore_eos=True)
        engine.generate([prompt.tolist()], dataclasses.replace(params, max_tokens=3))  # compiles
        engine.stats.step_ms.clear()
        start = time.perf_counter()
        (completion,) = engine.generate([prompt.tolist()], params)
        p50, p99 = np.percentile(engine.stats.step_ms, (50, 99)) if engine.stats.step_ms else (math.nan, math.nan)
        return {"sample": completion.text, "tpot_ms_p50": float(p50), "tpot_ms_p99": float(p99), "timed_steps":
                len(engine.stats.step_ms), "ttft_ms": completion.ttft_ms, "sample_s": time.perf_counter() - start}


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of all windows W of a context of T tokens: log_probs float [W, T], nats, of the true next token; top1 int [W, T]."""

    log_probs: np.ndarray
    top1: np.ndarray

    def split_by_text(self, texts: dict[str, np.ndarray]):
        """(text, its part of log_probs) in order."""
        counts = [len(windows) for windows in texts.values()]
        return zip(texts, np.split(self.log_probs, np.cumsum(counts)[:-1]))


def score_window(spec, params, window: np.ndarray, transforms=None) -> tuple[np.ndarray, np.ndarray]:
    """Scores one sequence from an empty cache, as decoding would see it.

    Args:
      spec, params: of `moejax.decode.split`.
      window: int32 [T + 1].
      transforms: key channel orders, of `moejax.calibration`.

    Returns:
      (log-probability of window[1:], nats float32 [T]; most probable next token int32 [T]).
    """
    page_size, length = spec.kv_format.page_size, len(window) - 1
    pages = length // page_size
    table = page_table.allocate(
        page_table.create(max_batch=1, num_pages=pages, max_len=length, page_size=page_size), 0, length)
    state = decode.with_table(
        decode.init_state(spec, max_batch=1, num_pages=pages, max_len=length, transforms=transforms), table)
    log_probs, top1, done = [], [], 0
    for tokens, q_len in decode.pieces(window[:-1].tolist(), 0, page_size):
        targets = np.zeros(len(tokens), np.int32)
        targets[:q_len] = window[done + 1:done + 1 + q_len]
        state, piece_log_probs, piece_top1 = decode.score_piece(
            spec, params, state, np.int32(0), tokens, np.int32(q_len), targets)
        log_probs.append(np.asarray(piece_log_probs)[:q_len])
        top1.append(np.asarray(piece_top1)[:q_len])
        done += q_len
    return np.concatenate(log_probs), np.concatenate(top1)


if __name__ == "__main__":
    cli.main(quality)
