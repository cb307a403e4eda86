"""Does a quantised cache still find a needle? `python -m experiments.needle --preset=moejax-2.5 --context=2048,4096`.

A passkey of five digits stands in a sentence somewhere in real text; the window ends with the question and the key. The key is
found when the model, teacher-forced through the cache as decoding would see it, gives every one of its tokens the highest
probability. Chance is about 1e-5. The 16-bit cache comes first: what it cannot find tells nothing about a format.
"""
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from experiments import cli, inputs, metrics, results
from experiments.quality import CALIBRATION_TOKENS, CacheOptions, Candidate, candidates, pairs, refuse_beside
from moejax import calibration, compilation_cache
from moejax import kv_schedule as schedules
from moejax.config import require_int
from moejax.scoring import Scorer
from moejax.tokenizer import Tokenizer
from pallas_kernels.kv_format import KVFormat

NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "\n\nWhat is the pass key? The pass key is {key}"
COLUMNS = {"format": "", "effective_bits": ".3f", "context_tokens": ",.0f", "depth": ".2f", "found_pct": ".1f", "log_prob": ".3f",
           "log_prob_low": ".3f", "log_prob_high": ".3f"}


@cli.configurable
def needle(
    checkpoint: str = "checkpoints/moe_10m",
    text: str = "data/heldout_austen.txt",
    k_bits: list[int] | None = None,
    v_bits: list[int] | None = None,
    options: CacheOptions = CacheOptions(),  # noqa: B008 (immutable)
    preset: list[str] | None = None,
    kv_schedule: list[str] | None = None,
    context: list[int] = [2048],  # noqa: B006
    depth: list[float] = [0.0, 0.25, 0.5, 0.75, 1.0],  # noqa: B006
    trials: int = 4,
    calibration_file: str = "data/heldout_python_docs.txt",
) -> cli.Work:
    """Passkey retrieval by depth and context, with several cache formats beside the 16-bit cache.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer.
      text: a UTF-8 file, the hay; each trial starts somewhere else in it.
      k_bits, v_bits, options, preset, kv_schedule: the formats, as of experiments.quality; k_bits None means 4, 2.
      context: tokens a window; multiples of the page size.
      depth: where the needle stands, from 0 (the beginning) to 1 (right before the question).
      trials: passkeys for each context and depth.
      calibration_file: text on which promoted key channels and calibrated rotations are measured.
    """
    require_int("trials", trials)
    for d in depth:
        if not 0 <= d <= 1:
            raise ValueError(f"depth={d}: must be from 0 to 1")
    if preset or kv_schedule:
        refuse_beside({"preset": preset, "kv_schedule": kv_schedule}, options, k_bits=k_bits, v_bits=v_bits)
    formats = [] if preset or kv_schedule else pairs([4, 2] if k_bits is None else k_bits, v_bits, options)
    compilation_cache.enable()
    model, tokenizer = inputs.load_checkpoint(checkpoint)
    config = model.config
    layers = [schedules.per_layer(f, config.num_layers) for f in formats]
    for tokens in context:
        require_int("context", tokens)
        if tokens > config.max_position_embeddings:
            raise ValueError(f"context={tokens}: exceeds the model's max_position_embeddings={config.max_position_embeddings}")
    chosen = candidates(config, context, layers, preset or [], kv_schedule or [])
    hay = inputs.encode(f"text={text}", inputs.read_text("text", text), tokenizer, config.vocab_size)
    if len(hay) < max(context):
        raise ValueError(f"{text=}: has {len(hay)} tokens, a context of {max(context)} needs as many")
    stack = Haystack(tokenizer, hay, trials)
    if min(context) < (least := stack.least_context()):
        raise ValueError(f"context={min(context)}: needle and question alone take {least} tokens")
    beginning = inputs.read_text("calibration_file", calibration_file)[:8 * CALIBRATION_TOKENS]
    sample = inputs.encode(f"calibration_file={calibration_file}", beginning, tokenizer, config.vocab_size)[:CALIBRATION_TOKENS]
    plain = Candidate("16-bit cache", schedules.per_layer(KVFormat(), config.num_layers))
    beyond = inputs.beyond_training(checkpoint, "context", max(context))
    return lambda: {**search(Scorer(model), [plain, *chosen], stack, context, depth, sample, checkpoint), "beyond_training": beyond}


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Windows of hay with a needle in each; the same seed gives every format the same windows."""

    tokenizer: Tokenizer
    hay: list[int]
    trials: int

    def least_context(self) -> int:
        """Tokens that needle and question take, whatever the key: a digit is at most a token."""
        return sum(len(self.tokenizer.encode(t.format(key="00000"))) for t in (NEEDLE, QUESTION)) + 10

    def windows(self, context: int, depth: float) -> Iterator[tuple[np.ndarray, int]]:
        """(int32 [context + 1], number of key tokens at its end) for each trial."""
        for trial in range(self.trials):
            rng = np.random.default_rng([context, round(1000 * depth), trial])
            key = str(rng.integers(10_000, 100_000))
            sentence, question = (self.tokenizer.encode(t.format(key=key)) for t in (NEEDLE, QUESTION))
            key_tokens = len(question) - len(self.tokenizer.encode(QUESTION.format(key="").rstrip()))
            room = context + 1 - len(sentence) - len(question)
            start = int(rng.integers(max(len(self.hay) - room, 1)))
            hay = self.hay[start:start + room]
            at = round(depth * len(hay))
            yield np.asarray([*hay[:at], *sentence, *hay[at:], *question], np.int32), key_tokens


def search(scorer: Scorer, chosen: list[Candidate], stack: Haystack, contexts: list[int], depths: list[float], sample: list[int],
           checkpoint: str) -> dict:
    """Scores every format at every context and depth."""
    rows = []
    places = [(context, depth) for context in contexts for depth in depths]
    with tqdm(total=len(chosen) * len(places) * stack.trials, unit="window", file=sys.stderr, dynamic_ncols=True) as bar:
        for candidate in chosen:
            transforms = calibration.key_transforms(scorer, candidate.formats, sample)
            bits = schedules.effective_bits(candidate.formats, scorer.config.head_dim)
            for context, depth in places:
                found, log_probs = [], []
                for window, key_tokens in stack.windows(context, depth):
                    bar.set_description(f"{candidate.label} {context} {depth}")
                    this = scorer.forward(window[:-1], candidate.formats, transforms)
                    tail = slice(-key_tokens, None)
                    scores = scorer.compare(this.hidden[tail], this.hidden[tail], window[1:][tail])
                    found.append(bool(np.all(scores.top1 == window[tail])))
                    log_probs.append(float(scores.log_probs.sum()))
                    bar.update()
                mean, low, high = metrics.bootstrap(np.asarray(log_probs)[:, None])
                rows.append({
                    "format": candidate.label, "effective_bits": bits, "context_tokens": context, "depth": depth,
                    "found_pct": 100 * float(np.mean(found)), "log_prob": mean, "log_prob_low": low, "log_prob_high": high})
    print(results.markdown_table(rows, COLUMNS))
    return {"checkpoint": checkpoint, "trials": stack.trials, "rows": rows}


if __name__ == "__main__":
    cli.main(needle)
