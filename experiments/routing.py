"""How often each expert is chosen on a text: `python -m experiments.routing --routing_file=FILE.json`.

The file is what `experiments.decode --weights=random --routing=recorded:FILE` reads: a model of the same layers with random weights
then wakes experts as often as this one does.
"""
from __future__ import annotations

import math
import pathlib
import sys

import numpy as np
from tqdm import tqdm

from experiments import cli, inputs, results
from experiments.quality import read_windows
from moejax import compilation_cache
from moejax import routing as routings
from moejax.config import ModelConfig, MoE, require_int
from moejax.scoring import Scorer
from pallas_kernels.kv_format import KVFormat

COLUMNS = {"batch": "", "hits": ".2f", "hits_if_independent": ".2f", "hits_if_uniform": ".2f"}
DRAWS = 200


@cli.configurable
def routing(
    checkpoint: str = "checkpoints/moe_10m",
    text: str = "data/heldout_python_docs.txt",
    context: int = 512,
    windows: int = 4,
    batch: list[int] = [1, 4, 16, 64],  # noqa: B006 (never changed)
    routing_file: str | None = None,
) -> cli.Work:
    """Records the share of tokens that choose each expert, by layer, and how many different experts a batch of tokens wakes.

    hits is the mean over the layers for batches of tokens drawn from anywhere in the text; hits_if_independent is what the
    frequencies alone would give (a model whose routing is drawn from the file has that), hits_if_uniform what equal ones would.

    Args:
      checkpoint: Hugging Face folder, hub id or .gguf file, with a tokenizer.
      text: a UTF-8 file.
      context: tokens a window; a multiple of 32.
      windows: windows of the text that are read.
      batch: tokens that are routed together.
      routing_file: where to write the frequencies, JSON.
    """
    for name, value in (("context", context), ("windows", windows), *(("batch", size) for size in batch)):
        require_int(name, value)
    if max(batch) > context * windows:
        raise ValueError(f"batch={max(batch)}: must be at most the {context * windows} tokens of {windows=} of {context=}")
    if context % 32:
        raise ValueError(f"{context=}: must be a multiple of 32")
    if routing_file is not None:
        results.require_writable_file(f"{routing_file=!s}", pathlib.Path(routing_file))
    compilation_cache.enable()
    model, tokenizer = inputs.load_checkpoint(checkpoint)
    config = model.config
    if not any(isinstance(layer.mlp, MoE) for layer in config.layers):
        raise ValueError(f"checkpoint={checkpoint}: has no experts")
    read, _ = read_windows(text, tokenizer, config.vocab_size, context, windows)
    scorer = Scorer(model)

    def work() -> dict:
        kv_format = KVFormat(page_size=math.gcd(context, 128))
        passes = [scorer.forward(w[:-1], kv_format).topk_idx for w in tqdm(read, unit="window", file=sys.stderr)]
        chosen = [None if c[0] is None else np.concatenate(c) for c in zip(*passes)]
        frequencies = tuple(None if c is None else _frequencies(c, config, i) for i, c in enumerate(chosen))
        rows = [_row(size, chosen, frequencies, config) for size in batch]
        print(results.markdown_table(rows, COLUMNS))
        tokens = context * windows
        if routing_file is not None:
            about = f"experiments.routing, {checkpoint}, {tokens} tokens of {text}"
            pathlib.Path(routing_file).parent.mkdir(parents=True, exist_ok=True)
            results.write_atomic(pathlib.Path(routing_file), routings.dump(frequencies, tokens, about))
        return {"checkpoint": checkpoint, "text": text, "tokens": tokens, "rows": rows, "routing_file": routing_file,
                "most_frequent_pct": [None if f is None else 100 * float(f.max()) for f in frequencies]}

    return work


def _frequencies(chosen: np.ndarray, config: ModelConfig, layer: int) -> np.ndarray:
    """float64 [E] of the choices [T, X]."""
    moe = config.layers[layer].mlp
    assert isinstance(moe, MoE)
    return np.bincount(chosen.reshape(-1), minlength=moe.num_experts) / len(chosen)


def _row(batch: int, chosen: list[np.ndarray | None], frequencies: routings.Frequencies, config: ModelConfig) -> dict:
    """Means over the layers for batches of so many tokens."""
    rng = np.random.default_rng(0)
    hits, independent, uniform = [], [], []
    for c, f, layer in zip(chosen, frequencies, config.layers):
        if c is None or f is None or not isinstance(layer.mlp, MoE):
            continue
        draws = [rng.choice(len(c), batch, replace=False) for _ in range(DRAWS)]
        hits.append(np.mean([len(np.unique(c[d])) for d in draws]))
        independent.append(routings.expected_hits(f, batch))
        uniform.append(routings.expected_hits(routings.uniform(layer.mlp), batch))
    return {"label": f"batch {batch}", "batch": batch, "hits": float(np.mean(hits)),
            "hits_if_independent": float(np.mean(independent)), "hits_if_uniform": float(np.mean(uniform))}


if __name__ == "__main__":
    cli.main(routing)
