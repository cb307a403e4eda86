"""Do checkpoints give the logits and tokens that they must? `python -m experiments.conformance --checkpoint=DIR DIR …`"""
from __future__ import annotations

import dataclasses
import pathlib
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import cli, inputs
from moejax import checkpoint as checkpoints
from moejax.engine import Engine
from moejax.model import Transformer, num_params
from moejax.sampling import SamplingParams
from pallas_kernels.kv_format import KVFormat

GOLDEN = "golden.npz"
EXACT_CACHE = KVFormat(k_bits=32, v_bits=32, page_size=32)


@dataclasses.dataclass(frozen=True)
class Golden:
    """What a checkpoint must give: input_ids int32 [B, T], logits float32 [B, T, V], greedy_ids int32 [B, N]."""

    input_ids: np.ndarray
    logits: np.ndarray
    greedy_ids: np.ndarray

    @classmethod
    def read(cls, path: pathlib.Path, vocab_size: int) -> Golden:
        """Reads a golden.npz. Raises FileNotFoundError, or ValueError naming the array that is missing or has a wrong shape."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                found = {name: arrays[name] for name in ("input_ids", "logits", "greedy_ids")}
        except (KeyError, ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
            raise ValueError(f"{path}: must hold the arrays input_ids, logits and greedy_ids ({e})") from None
        ids, logits, greedy = found["input_ids"], found["logits"], found["greedy_ids"]
        if ids.ndim != 2 or logits.shape != (*ids.shape, vocab_size) or greedy.ndim != 2 or greedy.shape[0] != ids.shape[0]:
            raise ValueError(f"{path}: {ids.shape=}, {logits.shape=}, {greedy.shape=}: "
                             f"must be [B, T], [B, T, {vocab_size}], [B, N]")
        if not ids.size or not greedy.size:
            raise ValueError(f"{path}: {ids.shape=}, {greedy.shape=}: must hold at least one token of one sequence")
        for name, array in (("input_ids", ids), ("greedy_ids", greedy)):
            if not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"{path}: {name} is of {array.dtype}, must be integers")
            if array.size and (array.min() < 0 or array.max() >= vocab_size):
                raise ValueError(f"{path}: {name} has ids outside of the vocabulary of {vocab_size}")
        return cls(ids.astype(np.int32), logits.astype(np.float32), greedy.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint, opened and checked but not loaded, and what it must give."""

    folder: str
    source: checkpoints.HFSource | checkpoints.GGUFSource
    golden: Golden

    @classmethod
    def open(cls, folder: str) -> Case:
        """Raises ValueError that names the folder and says what `checkpoint.load` and `Golden.read` say."""
        found = inputs.locate(folder)
        with inputs.naming("checkpoint", folder):
            if not pathlib.Path(found).is_dir():
                raise ValueError("no such folder")
            source = checkpoints.open_source(found)
            return cls(folder, source, Golden.read(pathlib.Path(found) / GOLDEN, source.config.vocab_size))

    def check_cacheable(self) -> None:
        """Raises ValueError when a KV cache cannot serve the case."""
        EXACT_CACHE.check_head_dim(self.source.config.head_dim)
        length, limit = self.golden.input_ids.shape[1] + self.golden.greedy_ids.shape[1], self.source.config.max_cached_positions
        if limit is not None and length > limit:
            raise ValueError(f"checkpoint={self.folder}: dynamic RoPE is cached up to {limit} tokens, the case has {length}; "
                             "leave out --paged_cache")


@cli.configurable
def conformance(checkpoint: list[str], tolerance: float = 2e-4, paged_cache: bool = False) -> cli.Work:
    """Compares checkpoints with the golden.npz beside them, in float32.

    Prints for each the largest logit error, the share of positions with the same top-1 token, and whether greedy decoding
    appends the same tokens. Exit code 1 when an error exceeds the tolerance or greedy tokens differ.

    Args:
      checkpoint: folders with a checkpoint and its golden.npz; arguments without a flag name are more of them.
      tolerance: largest accepted |logit error|.
      paged_cache: decode through the engine with an exact (32-bit) paged KV cache too; its tokens must be the same.
    """
    if not checkpoint:
        raise ValueError("checkpoint=[]: name at least one folder")
    if not tolerance > 0:
        raise ValueError(f"{tolerance=}: must be above 0")
    cases = [Case.open(folder) for folder in checkpoint]
    if paged_cache:
        for case in cases:
            case.check_cacheable()

    def work() -> dict:
        results = [run_case(case, tolerance, paged_cache) for case in cases]
        passed = all(r["passed"] for r in results)
        return {"tolerance": tolerance, "cases": results, "passed": passed, "exit_code": 0 if passed else 1}

    return work


def run_case(case: Case, tolerance: float, paged_cache: bool) -> dict:
    """Loads one checkpoint, compares it with its golden arrays and prints one line."""
    golden = case.golden
    with jax.default_matmul_precision("highest"):
        model, _ = checkpoints.load_source(case.source, dtype=jnp.float32)
        case.source.close()
        logits, greedy_ids = forward_and_greedy(model, golden.input_ids, golden.greedy_ids.shape[1])
        matches = {"greedy_match": bool(np.array_equal(greedy_ids, golden.greedy_ids))}
        if paged_cache:
            cached_ids = paged_greedy(model, golden.input_ids, golden.greedy_ids.shape[1])
            matches["paged_greedy_match"] = bool(np.array_equal(cached_ids, golden.greedy_ids))
    error = np.abs(logits - golden.logits)
    worst = float("inf") if np.isnan(error).any() else float(error.max())
    top1 = float((logits.argmax(-1) == golden.logits.argmax(-1)).mean())
    passed = worst <= tolerance and all(matches.values())
    parameters = num_params(nnx.state(model))
    print(f"{case.folder}: {parameters:,} parameters, max |logit error| {worst:.2e}, top-1 {top1:.4f}, "
          + "".join(f"{name} {value}, " for name, value in matches.items()) + ("pass" if passed else "FAIL"))
    return {"checkpoint": case.folder, "parameters": parameters, "max_abs_logit_error": worst, "top1_agreement": top1, **matches,
            "passed": passed}


def paged_greedy(model: Transformer, input_ids: np.ndarray, steps: int) -> np.ndarray:
    """The `steps` greedy tokens, int32 [B, steps], that the engine appends through an exact paged cache."""
    length = input_ids.shape[1] + steps
    pages = -(-length // EXACT_CACHE.page_size)
    engine = Engine(model, kv_format=EXACT_CACHE, max_batch=len(input_ids), max_len=pages * EXACT_CACHE.page_size)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    return np.array([done.token_ids for done in engine.generate(input_ids.tolist(), params)], np.int32)


def forward_and_greedy(model: Transformer, input_ids: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits float32 [B, T, V] of the input, and the `steps` greedy tokens int32 [B, steps] after it.

    Every pass is over the whole sequence so far, padded to one shape so that it compiles once; `valid` tells the true length,
    which "dynamic" RoPE depends on.
    """
    graphdef, params = nnx.split(model)
    T = input_ids.shape[1]

    @jax.jit
    def forward(params, tokens, length):
        valid = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] < length, tokens.shape)
        return nnx.merge(graphdef, params)(tokens, valid=valid).logits

    tokens = np.pad(input_ids, ((0, 0), (0, steps)))
    logits = np.asarray(forward(params, jnp.asarray(tokens), T))[:, :T]
    following = logits[:, -1]
    for length in range(T, T + steps):
        tokens[:, length] = following.argmax(-1)
        following = np.asarray(forward(params, jnp.asarray(tokens), length + 1))[:, length]
    return logits, tokens[:, T:]


if __name__ == "__main__":
    cli.main(conformance, positional="checkpoint")
