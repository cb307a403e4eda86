"""What experiments read: paths that hold from any folder, texts, checkpoints with their tokenizers, what those were trained on.

A relative path is looked up in the current folder first, then under the repository's root, which the run files and the default
paths are relative to.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Iterator, Sequence

from moejax import checkpoint as checkpoints
from moejax import kv_schedule as kv_schedules
from moejax.accounting import DoesNotFitError
from moejax.config import require_int
from moejax.hf_tensors import read_json
from moejax.model import Transformer
from moejax.requests import vocabulary_ids
from moejax.tokenizer import Tokenizer
from pallas_kernels.kv_format import KVFormat

log = logging.getLogger(__name__)

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAIN_RECORD = "train_record.json"


def locate(path: str) -> str:
    """`path`, or the same under the repository's root where only that exists."""
    return str(ROOT / path) if not pathlib.Path(path).exists() and (ROOT / path).exists() else path


def looked_for(path: str) -> str:
    """Where `locate` looks, for messages."""
    if pathlib.Path(path).is_absolute():
        return ""
    return f" (looked in {' and '.join(dict.fromkeys(map(str, (pathlib.Path.cwd(), ROOT))))})"


@contextlib.contextmanager
def naming(name: str, path: str) -> Iterator[None]:
    """Puts the parameter and its value before the message of what is raised on reading it, as a ValueError."""
    if not path:
        raise ValueError(f"{name}=: must not be empty")
    found = locate(path)
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.filename and str(e.filename) == found else str(e)
        where = "" if pathlib.Path(found).exists() else looked_for(path)
        kind = DoesNotFitError if isinstance(e, DoesNotFitError) else ValueError
        raise kind(f"{name}={path}: {str(reason).removeprefix(f'{found}: ')}{where}") from None


def read_text(name: str, path: str) -> str:
    """Text of the UTF-8 file that the parameter `name` is. Raises ValueError that names both."""
    with naming(name, path):
        try:
            return pathlib.Path(locate(path)).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None


def load_checkpoint(
    checkpoint: str, expert_weights: str = "bf16", dense_weights: str = "bf16", weight_rules: Sequence[str] = (),
) -> tuple[Transformer, Tokenizer]:
    """`moejax.load` of what must have a tokenizer. Raises ValueError that names the checkpoint."""
    with naming("checkpoint", checkpoint):
        model, tokenizer = checkpoints.load(
            locate(checkpoint), expert_weights=expert_weights, dense_weights=dense_weights, weight_rules=weight_rules)
        if tokenizer is None:
            raise ValueError("has no tokenizer, which text needs")
    return model, tokenizer


def load_schedule(kv_schedule: str, num_layers: int) -> tuple[KVFormat, ...]:
    """`moejax.kv_schedule.load`. Raises ValueError that names the file."""
    with naming("kv_schedule", kv_schedule):
        return kv_schedules.load(locate(kv_schedule), num_layers)


def encode(name: str, text: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of a text. Raises ValueError that names it when the model has no row for one: a tokenizer of another model."""
    return list(vocabulary_ids(name, tokenizer.encode(text), vocab_size))


def trained_tokens(checkpoint: str) -> int | None:
    """Tokens of the sequences that the checkpoint was trained on, from the record `experiments.train` leaves; None: unknown."""
    path = pathlib.Path(locate(checkpoint)) / TRAIN_RECORD
    if not path.is_file():
        return None
    exported = read_json(path).get("exported")
    seq_len = exported.get("seq_len") if isinstance(exported, dict) else None
    require_int(f"{path}: exported.seq_len", seq_len)
    return seq_len


@functools.cache  # the points of a sweep need not all say it
def beyond_training(checkpoint: str, name: str, tokens: int) -> str | None:
    """A sentence on `tokens`, the parameter `name`, where they exceed what the checkpoint was trained at; also logged."""
    trained = trained_tokens(checkpoint)
    if trained is None or tokens <= trained:
        return None
    note = (f"{name}={tokens}: {checkpoint} was trained on sequences of {trained} tokens ({TRAIN_RECORD}); its perplexity and text "
            "beyond them are worse, whatever the cache")
    log.warning("%s", note)
    return note
