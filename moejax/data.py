"""Token files and batches out of them. What a step sees is a pure function of (seed, step): a resumed run sees the same."""
from __future__ import annotations

import pathlib

import numpy as np

TOKEN_DTYPE = np.dtype("<u2")


def read_tokens(path: str | pathlib.Path, vocab_size: int) -> np.ndarray:
    """Token ids of a file of little-endian uint16, mapped and not read, [num_tokens].

    Raises:
      FileNotFoundError: no such file.  ValueError: odd size, empty, or an id not below `vocab_size`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such token file (make data writes it)")
    if path.stat().st_size == 0 or path.stat().st_size % TOKEN_DTYPE.itemsize:
        raise ValueError(f"{path}: {path.stat().st_size} bytes is not a file of uint16 token ids")
    tokens = np.memmap(path, TOKEN_DTYPE, mode="r")
    highest = int(tokens.max())
    if highest >= vocab_size:
        raise ValueError(f"{path}: holds token id {highest}, the model's vocab_size is {vocab_size}")
    return tokens


def training_batch(tokens: np.ndarray, *, seed: int, step: int, batch_size: int, seq_len: int) -> np.ndarray:
    """`batch_size` windows at random places, uint16 [batch_size, seq_len + 1]: inputs and, one later, targets."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, size=batch_size)
    return np.stack([tokens[s:s + seq_len + 1] for s in starts])


def evaluation_windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """Consecutive windows that together predict each token once, uint16 [W, seq_len + 1]; a last short one is left out.

    Raises:
      ValueError: there is not one whole window.
    """
    count = (len(tokens) - 1) // seq_len
    if count < 1:
        raise ValueError(f"{len(tokens)} held-out tokens: need more than {seq_len=}")
    return np.stack([tokens[i * seq_len:(i + 1) * seq_len + 1] for i in range(count)])
