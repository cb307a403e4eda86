"""Text <-> ids: a thin class over `tokenizers`, with the ids that end a sequence and those that may be sampled."""
from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

from moejax.hf_tensors import read_json


class Tokenizer:
    """Encoder and decoder of one vocabulary.

    Attributes:
      bos_id: id put before a prompt, None when the vocabulary has none.
      eos_ids: ids that end a sequence.
      add_bos: whether `encode` puts `bos_id` first unless told otherwise.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Iterable[int] = (),
                 add_bos: bool = False, undecodable: Iterable[int] = ()):
        """`undecodable`: ids of the backend's vocabulary that stand for no text (entries that only pad it)."""
        if add_bos and bos_id is None:
            raise ValueError("add_bos=True: the tokenizer has no beginning-of-sequence token")
        self.backend = backend
        self.bos_id, self.eos_ids, self.add_bos = bos_id, tuple(eos_ids), add_bos
        self._ids = frozenset(backend.get_vocab(with_added_tokens=True).values()) - frozenset(undecodable)

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path) -> Tokenizer:
        """Reads tokenizer.json, and eos ids, bos id and add_bos from generation_config.json, config.json, tokenizer_config.json.

        Raises:
          FileNotFoundError: no tokenizer.json.  ValueError: it cannot be read.
        """
        folder = pathlib.Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer ({e})") from None
        settings = [read_json(folder / name) if (folder / name).is_file() else {}
                    for name in ("generation_config.json", "config.json")]
        options = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        bos_id = _first(s.get("bos_token_id") for s in settings)
        if bos_id is None and options.get("bos_token"):
            token = options["bos_token"]
            bos_id = backend.token_to_id(token["content"] if isinstance(token, dict) else token)
        add_bos = options.get("add_bos_token")
        if add_bos is None:  # the post-processor decides
            add_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
        return cls(backend, bos_id=bos_id, eos_ids=as_ids(_first(s.get("eos_token_id") for s in settings)), add_bos=add_bos)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._ids) + 1

    @property
    def num_decodable(self) -> int:
        """Ids from here on stand for no text; below it there may be gaps, see `decodable_mask`."""
        return self.vocab_size

    def decodable_mask(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]: the ids that stand for text or a special token, so may be sampled."""
        mask = np.zeros(vocab_size, bool)
        mask[[i for i in self._ids if i < vocab_size]] = True
        return mask

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`; special tokens written out in it are recognised. `add_bos=None` follows `self.add_bos`."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos=True: the tokenizer has no beginning-of-sequence token")
        return [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`.

        Raises:
          ValueError: an id that stands for no text.
        """
        ids = [int(i) for i in ids]
        unknown = next((i for i in ids if i not in self._ids), None)
        if unknown is not None:
            raise ValueError(f"token id {unknown}: the tokenizer has ids below {self.vocab_size} and none for this one")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes tokenizer.json into an existing folder."""
        self.backend.save(str(pathlib.Path(folder) / "tokenizer.json"))


def as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids of an `eos_token_id` entry: one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _first(values):
    return next((value for value in values if value is not None), None)
