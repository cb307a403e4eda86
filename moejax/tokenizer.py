"""Text <-> ids: a thin class over `tokenizers`, with the ids that end a sequence and those that may be sampled."""
from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

from moejax.config import token_ids
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
        settings = {name: read_json(folder / name) if (folder / name).is_file() else {}
                    for name in ("generation_config.json", "config.json", "tokenizer_config.json")}
        options = settings.pop("tokenizer_config.json")
        bos_ids = _first(folder, settings, "bos_token_id")
        if len(bos_ids) > 1:
            raise ValueError(f"{folder}: bos_token_id={list(bos_ids)}: must be one id")
        bos_id = bos_ids[0] if bos_ids else None
        if bos_id is None and options.get("bos_token"):
            token = options["bos_token"]
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise ValueError(f"{folder / 'tokenizer_config.json'}: bos_token={token!r}: must be text, or hold it as content")
            bos_id = backend.token_to_id(text)
        add_bos = options.get("add_bos_token")
        if add_bos is None:  # the post-processor decides
            add_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
        if not isinstance(add_bos, bool):
            raise ValueError(f"{folder / 'tokenizer_config.json'}: add_bos_token={add_bos!r}: must be true or false")
        return cls(backend, bos_id=bos_id, eos_ids=_first(folder, settings, "eos_token_id"), add_bos=add_bos)

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


def _first(folder: pathlib.Path, settings: dict[str, dict], key: str) -> tuple[int, ...]:
    """The ids under `key` of the first file that has them."""
    for name, values in settings.items():
        if values.get(key) is not None:
            return token_ids(f"{folder / name}: {key}", values[key])
    return ()
