"""What a KV cache format costs in quality: `python -m experiments.quality --k_bits=16,4,2 --v_bits=16,4,2 --output_dir=DIR`.

Scoring is teacher-forced and sees exactly what decoding would see: pages are quantised as they close, each token attends to the
quantised pages before its own, and a layer hands on what it would hand on then, so errors compound (`moejax.scoring`). Beside
perplexity it reports the KL divergence to the 16-bit cache and its drift along the window, top-1 agreement, the attention's output
error, and how many experts the router chooses differently.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from typing import Literal

import numpy as np
from tqdm import tqdm

from experiments import cli, inputs, metrics, plots, results
from moejax import accounting, calibration, compilation_cache
from moejax import kv_presets as presets
from moejax import kv_schedule as schedules
from moejax.config import ModelConfig, require_int
from moejax.engine import Engine
from moejax.sampling import SamplingParams
from moejax.scoring import Comparison, Pass, Scorer
from moejax.tokenizer import Tokenizer
from pallas_kernels import dispatch
from pallas_kernels.kv_format import ALL_BITS, Axis, Codes, KeyRotation, KVFormat, RangeRule, Rotation, ScaleDtype

CALIBRATION_TOKENS = 2048
COLUMNS = {"format": "", "effective_bits": ".3f", "effective_bits_at_4k": ".3f", "effective_bits_at_32k": ".3f",
           "perplexity": ".3f", "perplexity_increase_pct": ".2f", "perplexity_increase_pct_low": ".2f",
           "perplexity_increase_pct_high": ".2f", "kl": ".5f", "top1_agreement_pct": ".2f", "routing_flip_pct": ".2f",
           "tpot_ms_p50": ".2f", "tpot_ms_p99": ".2f"}

cli.register(KVFormat)  # for quality.formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What the compared formats have in common: the fields of `KVFormat` other than the bits. Checked there, at each width."""

    page_size: int = 128
    k_axis: Axis = "channel"
    v_axis: Axis = "token"
    k_group: int = 0
    v_group: int = 0
    k_symmetric: bool = False
    v_symmetric: bool = False
    k_codes: Codes = "uniform"
    v_codes: Codes = "uniform"
    k_range: RangeRule = "minmax"
    v_range: RangeRule = "minmax"
    outlier_channels: int = 0
    outlier_bits: int = 8
    outlier_choice: Literal["calibrated", "page"] = "calibrated"
    k_sparse: int = 0
    v_sparse: int = 0
    k_rotation: KeyRotation = "none"
    v_rotation: Rotation = "none"
    rotation_block: int = 32
    sink_tokens: int = 0
    open_pages: int = 1
    key_rope: Literal["post", "pre"] = "post"
    scale_dtype: ScaleDtype = "bfloat16"

    def at(self, k_bits: int, v_bits: int) -> KVFormat:
        """The format of these widths; channels are only promoted where `outlier_bits` exceeds `k_bits`, and sparse entries only
        kept where there are codes."""
        fields = dataclasses.asdict(self)
        if self.outlier_bits <= k_bits:
            fields["outlier_channels"] = 0
        fields["k_sparse"] *= k_bits < 16
        fields["v_sparse"] *= v_bits < 16
        return KVFormat(k_bits=k_bits, v_bits=v_bits, **fields)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table: a label and a format for each layer."""

    label: str
    formats: tuple[KVFormat, ...]


@cli.configurable
def quality(
    checkpoint: str = "checkpoints/moe_10m",
    text: list[str] = ["data/heldout_python_docs.txt", "data/heldout_austen.txt"],  # noqa: B006 (never changed)
    k_bits: list[int] | None = None,
    v_bits: list[int] | None = None,
    options: CacheOptions = CacheOptions(),
    formats: list[KVFormat] | None = None,
    preset: list[str] | None = None,
    kv_schedule: list[str] | None = None,
    skip_first_layers: int = 0,
    skip_last_layers: int = 0,
    context: int = 1024,
    windows: int = 4,
    sample_tokens: int = 48,
) -> cli.Work:
    """Scores text with several cache formats, beside the 16-bit cache: perplexity, KL, top-1 agreement, bits, time a token.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer.
      text: UTF-8 files; each is read from its start.
      k_bits, v_bits: one format a pair; k_bits None means 16, 4, 3, 2, v_bits None means as k_bits.
      options: the fields that all of these formats share (--page_size, --sink_tokens, --outlier_channels, ...).
      formats: whole formats, in place of the pairs (gin only).
      preset: named formats (`moejax.kv_presets`), in place of the pairs.
      kv_schedule: JSON files with a format a layer (`moejax.kv_schedule`), in place of the pairs.
      skip_first_layers, skip_last_layers: layers whose cache stays at 16 bits; of pairs and formats.
      context: tokens a window, scored from an empty cache; a multiple of the page size.
      windows: windows of each text.
      sample_tokens: tokens generated, greedily, after the first half window of the first text, and timed one by one; 0 for none.
    """
    for name, value, least in (("context", context, 1), ("windows", windows, 1), ("sample_tokens", sample_tokens, 0)):
        require_int(name, value, least=least)
    for name in preset or []:
        presets.get(name)
    if formats is None and preset is None and kv_schedule is None:
        formats = pairs([16, 4, 3, 2] if k_bits is None else k_bits, v_bits, options)
    else:
        refuse_beside({"formats": formats, "preset": preset, "kv_schedule": kv_schedule}, options, k_bits=k_bits, v_bits=v_bits)
    if formats is None:
        refuse_beside({"preset": preset, "kv_schedule": kv_schedule}, skip_first_layers=skip_first_layers or None,
                      skip_last_layers=skip_last_layers or None)
    compilation_cache.enable()
    bench = Bench.of(checkpoint, tuple(text), context, windows)
    config = bench.model.config
    skipping = [schedules.skip_layers(f, config.num_layers, first=skip_first_layers, last=skip_last_layers) for f in formats or []]
    chosen = candidates(config, [context], skipping, preset or [], kv_schedule or [])
    limit = config.max_position_embeddings
    if context + sample_tokens > limit:
        raise ValueError(f"{context=}: with {sample_tokens=} it exceeds the model's max_position_embeddings={limit}")
    if any(f.needs_calibration for c in chosen for f in c.formats) and len(bench.tail) < CALIBRATION_TOKENS // 2:
        raise ValueError(f"outlier_channels, k_rotation: need {CALIBRATION_TOKENS // 2} tokens of text after the scored windows to "
                         f"calibrate on, there are {len(bench.tail)}; lower windows={windows} or context={context}")
    beyond = inputs.beyond_training(checkpoint, "context", context)
    return lambda: {**bench.work(chosen, sample_tokens), "beyond_training": beyond}


def candidates(
    config: ModelConfig, contexts: list[int], formats: list[tuple[KVFormat, ...]], preset: list[str], kv_schedule: list[str],
) -> list[Candidate]:
    """Everything that is to be compared, without repeats. Raises ValueError where there is nothing or it does not fit the model."""
    num_layers, head_dim = config.num_layers, config.head_dim
    chosen = [Candidate(schedules.name(layers), layers) for layers in formats]
    chosen += [Candidate(name, presets.get(name).formats(num_layers, head_dim)) for name in preset]
    chosen += [Candidate(path, inputs.load_schedule(path, num_layers)) for path in kv_schedule]
    if not chosen:
        raise ValueError("no formats: give k_bits, formats, preset or kv_schedule")
    for f in {f for c in chosen for f in c.formats}:
        for context in contexts:
            if context % f.page_size:
                raise ValueError(f"{context=}: must be a multiple of page_size={f.page_size}")
        f.check_head_dim(head_dim)
    return list(dict.fromkeys(chosen))


def pairs(k_bits: list[int], v_bits: list[int] | None, options: CacheOptions) -> list[KVFormat]:
    """The formats of the pairs, without repeats. Raises ValueError for lists that do not pair up, and for options that none of the
    pairs can have."""
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits or [])):
        if wrong := [b for b in bits if b not in ALL_BITS]:
            raise ValueError(f"{name}={wrong[0]}: accepted are {', '.join(map(str, ALL_BITS))}")
    v_bits = k_bits if v_bits is None else v_bits
    if len(k_bits) != len(v_bits):
        raise ValueError(f"{k_bits=}, {v_bits=}: must be of one length")
    formats = list(dict.fromkeys(options.at(k, v) for k, v in zip(k_bits, v_bits)))
    for name, why in (("outlier_channels", f"outlier_bits={options.outlier_bits} exceeds none of {k_bits=}"),
                      ("k_sparse", f"needs one of {k_bits=} below 16"), ("v_sparse", f"needs one of {v_bits=} below 16")):
        if getattr(options, name) and not any(getattr(f, name) for f in formats):
            raise ValueError(f"{name}={getattr(options, name)}: {why}")
    return formats


def refuse_beside(whole: dict[str, object], options: CacheOptions | None = None, **given) -> None:
    """Raises ValueError for parts of formats that are given beside whole formats, which would ignore them."""
    beside = ", ".join(name for name, value in whole.items() if value is not None)
    if options is not None:
        given |= {name: value for name, value in vars(options).items() if value != getattr(CacheOptions(), name)}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value}: has no effect beside {beside}, whose formats are whole; give one or the other")


def read_windows(path: str, tokenizer: Tokenizer, vocab_size: int, context: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [windows, context + 1] consecutive windows, the tokens after them up to CALIBRATION_TOKENS).

    Raises:
      ValueError: the text cannot be read, is not UTF-8 or too short, or the model has no row for a token.
    """
    needed = windows * context + 1
    text = inputs.read_text("text", path)[:16 * (needed + CALIBRATION_TOKENS)]
    ids = np.asarray(inputs.encode(f"text={path}", text, tokenizer, vocab_size), np.int32)
    if len(ids) < needed:
        raise ValueError(f"text={path}: has {len(ids)} tokens, {windows=} of {context=} need {needed}")
    scored = np.stack([ids[i * context:(i + 1) * context + 1] for i in range(windows)])
    return scored, ids[needed:needed + CALIBRATION_TOKENS]


class Bench:
    """Scores and times formats on one model and a set of texts (name -> int32 [W, context + 1])."""

    def __init__(self, checkpoint: str, text: tuple[str, ...], context: int, windows: int):
        self.model, self.tokenizer = inputs.load_checkpoint(checkpoint)
        read = {path: read_windows(path, self.tokenizer, self.model.config.vocab_size, context, windows) for path in text}
        self.checkpoint, self.context = checkpoint, context
        self.texts = {path: scored for path, (scored, _) in read.items()}
        self.windows = np.concatenate(list(self.texts.values()))
        self.starts = np.cumsum([0, *map(len, self.texts.values())])[:-1]  # the first window of each text
        self.tail = np.concatenate([rest for _, rest in read.values()])
        self.scorer = Scorer(self.model)

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def of(checkpoint: str, text: tuple[str, ...], context: int, windows: int) -> Bench:
        """The last one is kept: the points of a sweep share the model, the text and the scores of the 16-bit cache."""
        return Bench(checkpoint, text, context, windows)

    @functools.cached_property
    def reference(self) -> list[tuple[Pass, Comparison]]:
        """Pass and scores of every window with the 16-bit cache."""
        f = KVFormat(page_size=math.gcd(self.context, 128))  # of any size: a window is made of whole pages, and few are fast
        passes = [self.scorer.forward(w[:-1], f) for w in self.windows]
        return [(p, self.scorer.compare(p.hidden, p.hidden, w[1:])) for p, w in zip(passes, self.windows)]

    def work(self, candidates: list[Candidate], sample_tokens: int) -> dict:
        rows = []
        with tqdm(total=len(self.windows) * len(candidates), unit="window", file=sys.stderr, dynamic_ncols=True) as bar:
            for candidate in candidates:
                bar.set_description(candidate.label)
                rows.append({**self.row(candidate, bar), **self.sample(candidate, sample_tokens)})
        shown = {key: spec for key, spec in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
        print(results.markdown_table(rows, shown))
        for row in rows:
            if row["sample"] is not None:
                print(f"{row['format']}: {row['sample']!r}")
        weights = "4-bit (GGUF Q4)" if self.checkpoint.lower().endswith(".gguf") and "Q4" in self.checkpoint else None
        return {
            "checkpoint": self.checkpoint, "checkpoint_weights": weights, "texts": list(self.texts), "context_tokens": self.context,
            "scored_tokens": len(self.windows) * self.context, "perplexity_16bit": perplexity(self.reference_log_probs),
            "rows": rows, "implementation": dispatch.last_implementation("paged_attention") if sample_tokens else "scoring",
            "plot": plots.Quality(rows, "effective_bits", "perplexity"), "plot_by_position": plots.KLByPosition(rows, self.context),
        }

    @functools.cached_property
    def reference_log_probs(self) -> np.ndarray:
        """float32 [W, context], nats."""
        return np.stack([scores.log_probs for _, scores in self.reference])

    def row(self, candidate: Candidate, bar: tqdm) -> dict:
        """One line of the table."""
        started, formats, head_dim = time.perf_counter(), candidate.formats, self.model.config.head_dim
        transforms = calibration.key_transforms(self.scorer, formats, self.tail.tolist())
        scores, flips, errors = [], [], []
        plain = all(f == KVFormat(page_size=f.page_size) for f in formats)  # the reference itself, scored already
        for i, (window, (exact, exact_scores)) in enumerate(zip(self.windows, self.reference)):
            measure = i in self.starts
            this = exact if plain else self.scorer.forward(window[:-1], formats, transforms, measure_attention=measure)
            scores.append(exact_scores if plain else self.scorer.compare(this.hidden, exact.hidden, window[1:]))
            flips.append(metrics.routing_flips_pct(this.topk_idx, exact.topk_idx))
            if measure:
                errors.append(np.zeros(len(formats)) if this.attention_error is None else this.attention_error)
            bar.update()
        log_probs, top1, kl = (np.stack([getattr(s, name) for s in scores]) for name in ("log_probs", "top1", "kl"))
        reference_top1 = np.stack([s.top1 for _, s in self.reference])
        error_by_layer = np.mean(errors, axis=0)
        flips_by_layer = [None if layer[0] is None else float(np.mean(layer)) for layer in zip(*flips)]
        routed = [f for f in flips_by_layer if f is not None]
        return {
            "format": candidate.label, "kv_formats": schedules.name(formats),
            "effective_bits": schedules.effective_bits(formats, head_dim),
            **{f"effective_bits_at_{k}k": schedules.effective_bits_at(formats, head_dim, k * 1024) for k in (4, 32)},
            "effective_bits_at_context": schedules.effective_bits_at(formats, head_dim, self.context),
            "cache_bytes_per_token": accounting.cache_bytes_per_token(self.model.config, formats),
            "perplexity": perplexity(log_probs), **metrics.perplexity_increase_pct(log_probs, self.reference_log_probs),
            **metrics.kl_metrics(kl), "top1_agreement_pct": 100 * float(np.mean(top1 == reference_top1)),
            "attention_error": float(np.mean(error_by_layer)), "attention_error_by_layer": error_by_layer.tolist(),
            "routing_flip_pct": float(np.mean(routed)) if routed else None, "routing_flip_pct_by_layer": flips_by_layer,
            "perplexity_by_text": {name: perplexity(part) for name, part in self.by_text(log_probs)},
            "score_s": time.perf_counter() - started,
        }

    def by_text(self, per_window: np.ndarray):
        """(text, its part of [W, ...]) in order."""
        return zip(self.texts, np.split(per_window, self.starts[1:]))

    def sample(self, candidate: Candidate, tokens: int) -> dict:
        """Generates greedily after half a window, and times each token. "sample" is None where nothing was generated."""
        nothing = {"sample": None, "tpot_ms_p50": None, "tpot_ms_p99": None}
        if not tokens:
            return nothing
        for f in candidate.formats:
            try:
                f.check_cacheable()
            except NotImplementedError as e:
                return {**nothing, "not_sampled_because": str(e)}
        prompt = next(iter(self.texts.values()))[0, :self.context // 2]
        engine = Engine(self.model, self.tokenizer, kv_format=candidate.formats, max_batch=1, steps_per_segment=1,
                        max_len=self.context // 2 + tokens, calibration_tokens=self.tail.tolist())
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.generate([prompt.tolist()], dataclasses.replace(params, max_tokens=3))  # compiles
        engine.stats.step_ms.clear()
        (completion,) = engine.generate([prompt.tolist()], params)
        p50, p99 = np.percentile(engine.stats.step_ms, (50, 99)) if engine.stats.step_ms else (math.nan, math.nan)
        return {"sample": completion.text, "tpot_ms_p50": float(p50), "tpot_ms_p99": float(p99),
                "timed_steps": len(engine.stats.step_ms), "ttft_ms": completion.ttft_ms}


def perplexity(log_probs: np.ndarray) -> float:
    """exp of the mean negative log-probability, nats."""
    return math.exp(-float(np.mean(log_probs)))


if __name__ == "__main__":
    cli.main(quality)
