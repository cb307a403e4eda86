"""Bits layer by layer: `python -m experiments.search_bits --budget=2.75 --k_bits=2,4 --v_bits=2,3 --schedule_file=FILE.json`.

The cost of a format in a layer is the KL divergence that it causes alone, all other layers at 16 bits (KVTuner, arXiv 2502.04420,
measures sensitivities layer by layer too, by attention errors). Costs are taken to add up over layers; the choice of one format a
layer that costs least within the budget is then exact (a knapsack over the words of a page). The result is scored once as a whole,
beside the cheapest single format within the budget, on text that the search has not seen, and written as a file that
`experiments.decode --kv_schedule` and `experiments.quality --kv_schedule` read.
"""
from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys

import jax
import numpy as np
from tqdm import tqdm

from experiments import cli, inputs, metrics, results
from experiments.quality import CacheOptions, read_windows
from moejax import calibration, compilation_cache, kv_schedule
from moejax.config import require_int
from moejax.kv_cache import KeyTransform
from moejax.scoring import Comparison, Scorer
from pallas_kernels.kv_format import KVFormat

COLUMNS = {"schedule": "", "effective_bits": ".3f", "kl": ".5f", "kl_low": ".5f", "kl_high": ".5f",
           "perplexity_increase_pct": ".2f", "perplexity_increase_pct_low": ".2f", "perplexity_increase_pct_high": ".2f"}


@cli.configurable
def search_bits(
    checkpoint: str = "checkpoints/moe_10m",
    text: str = "data/heldout_python_docs.txt",
    budget: float = 2.75,
    k_bits: list[int] = [2, 3, 4],  # noqa: B006 (never changed)
    v_bits: list[int] = [2, 3, 4],  # noqa: B006
    outlier_channels: list[int] = [0],  # noqa: B006
    options: CacheOptions = CacheOptions(),  # noqa: B008 (immutable)
    context: int = 512,
    windows: int = 2,
    check_windows: int = 4,
    schedule_file: str | None = None,
) -> cli.Work:
    """Finds K and V bits per layer for an average number of effective bits, from measured sensitivities.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer.
      text: a UTF-8 file; its first windows are searched on, the next are for the check, those after them calibrate.
      budget: mean effective bits an element over the layers, all overheads included.
      k_bits, v_bits, outlier_channels: every combination of them is a candidate in every layer.
      options: what the candidates share; its outlier_channels do not count.
      context: tokens a window; a multiple of the page size.
      windows, check_windows: windows to search on and to check on.
      schedule_file: where to write the schedule, JSON.
    """
    for name, value in (("context", context), ("windows", windows), ("check_windows", check_windows)):
        require_int(name, value)
    choices = sorted({dataclasses.replace(options, outlier_channels=n).at(k, v)
                      for k, v, n in itertools.product(k_bits, v_bits, outlier_channels)}, key=lambda f: f.name)
    if context % options.page_size:
        raise ValueError(f"{context=}: must be a multiple of page_size={options.page_size}")
    if schedule_file is not None:
        results.require_writable_file(f"{schedule_file=!s}", pathlib.Path(schedule_file))
    compilation_cache.enable()
    model, tokenizer = inputs.load_checkpoint(checkpoint)
    if context > (limit := model.config.max_position_embeddings):
        raise ValueError(f"{context=}: exceeds the model's max_position_embeddings={limit}")
    bits = [f.page_layout(model.config.head_dim).effective_bits() for f in choices]
    if budget < min(bits):
        raise ValueError(f"{budget=}: the smallest candidate, {choices[int(np.argmin(bits))].name}, takes {min(bits):.3f} bits")
    read, tail = read_windows(text, tokenizer, model.config.vocab_size, context, windows + check_windows)
    beyond = inputs.beyond_training(checkpoint, "context", context)
    search = Search(Scorer(model), choices, tail.tolist())
    return lambda: {**search.work(read[:windows], read[windows:], budget, schedule_file, checkpoint), "beyond_training": beyond}


class Search:
    """Candidates on one model, with the transforms of each, and what they cost."""

    def __init__(self, scorer: Scorer, choices: list[KVFormat], calibration_tokens: list[int]):
        self.scorer, self.choices, self.tokens = scorer, choices, calibration_tokens
        self.num_layers, self.head_dim = scorer.config.num_layers, scorer.config.head_dim
        self.plain = KVFormat(page_size=choices[0].page_size)

    def work(self, searched: np.ndarray, checked: np.ndarray, budget: float, schedule_file: str | None, checkpoint: str) -> dict:
        costs = self.sensitivities(searched)
        words = np.array([f.page_layout(self.head_dim).words for f in self.choices])
        chosen = cheapest(costs, words, int(budget * 2 * self.head_dim * self.plain.page_size / 32 * self.num_layers))
        schedule = tuple(self.choices[i] for i in chosen)
        fitting = [i for i, f in enumerate(self.choices) if f.page_layout(self.head_dim).effective_bits() <= budget]
        single = (self.choices[min(fitting, key=lambda i: costs[:, i].sum())],) * self.num_layers
        exact = self.exact(checked)
        rows = [self.check(label, formats, checked, exact)
                for label, formats in (("searched", schedule), (f"{single[0].name} in all layers", single))]
        print(results.markdown_table(rows, COLUMNS))
        if schedule_file is not None:
            about = f"experiments.search_bits, {checkpoint}, {budget} effective bits"
            pathlib.Path(schedule_file).parent.mkdir(parents=True, exist_ok=True)
            results.write_atomic(pathlib.Path(schedule_file), kv_schedule.dump(schedule, about))
        return {
            "checkpoint": checkpoint, "budget_bits": budget, "rows": rows, "schedule_file": schedule_file,
            "schedule": [f.name for f in schedule], "predicted_kl": float(sum(costs[i, c] for i, c in enumerate(chosen))),
            "candidates": [f.name for f in self.choices], "sensitivity_kl": costs.tolist(),
        }

    def sensitivities(self, windows: np.ndarray) -> np.ndarray:
        """KL in nats that each candidate causes when one layer alone has it: float64 [layers, candidates]."""
        transforms = [calibration.key_transforms(self.scorer, (f,) * self.num_layers, self.tokens) for f in self.choices]
        costs = np.zeros((self.num_layers, len(self.choices)))
        plain = KeyTransform()
        with tqdm(total=len(windows) * costs.size, unit="pass", file=sys.stderr, dynamic_ncols=True) as bar:
            for window in windows:
                inputs = [self.scorer.embed(window[:-1])]
                for layer in range(self.num_layers):
                    inputs.append(self.scorer.layer(layer, inputs[-1], self.plain, plain)[0])
                exact = self.scorer.normed(inputs[-1])
                for layer, (i, f) in itertools.product(range(self.num_layers), enumerate(self.choices)):
                    measured = transforms[i]
                    transform = plain if measured is None else measured[layer]
                    x = self.scorer.layer(layer, inputs[layer], f, transform)[0]
                    for later in range(layer + 1, self.num_layers):
                        x = self.scorer.layer(later, x, self.plain, plain)[0]
                    costs[layer, i] += self.scorer.compare(self.scorer.normed(x), exact, window[1:]).kl.mean() / len(windows)
                    bar.update()
        return costs

    def exact(self, windows: np.ndarray) -> list[tuple[jax.Array, Comparison]]:
        """Hidden state and scores of each window with the 16-bit cache."""
        hidden = [self.scorer.forward(window[:-1], self.plain).hidden for window in windows]
        return [(h, self.scorer.compare(h, h, window[1:])) for h, window in zip(hidden, windows)]

    def check(self, label: str, formats: tuple[KVFormat, ...], windows: np.ndarray,
              exact: list[tuple[jax.Array, Comparison]]) -> dict:
        """Scores the whole schedule beside `exact`."""
        transforms = calibration.key_transforms(self.scorer, formats, self.tokens)
        scores = [self.scorer.compare(self.scorer.forward(window[:-1], formats, transforms).hidden, hidden, window[1:])
                  for window, (hidden, _) in zip(windows, exact)]
        log_probs, reference = (np.stack([s.log_probs for s in of]) for of in (scores, [plain for _, plain in exact]))
        return {"schedule": label, "effective_bits": kv_schedule.effective_bits(formats, self.head_dim),
                **metrics.kl_metrics(np.stack([s.kl for s in scores])), **metrics.perplexity_increase_pct(log_probs, reference)}


def cheapest(costs: np.ndarray, words: np.ndarray, budget: int) -> list[int]:
    """One choice a row of costs [L, C] that minimises their sum, while the sum of words[choice] stays within the budget: exact.

    Raises:
      ValueError: not even the smallest choices fit.
    """
    if len(costs) * words.min() > budget:
        raise ValueError(f"{budget=}: {len(costs)} layers of at least {words.min()} words do not fit")
    best = np.zeros(budget + 1)  # over the layers so far: least cost within so many words
    taken = []
    for layer in costs:
        options = np.full((len(words), budget + 1), np.inf)
        for i, size in enumerate(words):
            options[i, size:] = best[:budget + 1 - size] + layer[i]
        taken.append(options.argmin(axis=0))
        best = options.min(axis=0)
    chosen, left = [], budget
    for choice in reversed(taken):
        chosen.append(int(choice[left]))
        left -= int(words[chosen[-1]])
    return chosen[::-1]


if __name__ == "__main__":
    cli.main(search_bits)
