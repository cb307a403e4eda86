"""`experiments.prepare_data` on small packages made by hand: what it writes, no leakage, and what it refuses."""
import gzip
import json
import re

import numpy as np
import pytest
import tokenizers

from experiments import cli, prepare_data
from moejax import data
from tests.moejax.test_corpus import r_string, rdb_of

VOCAB = 512
NOVEL_PARAGRAPHS = 6000  # enough blocks that one of them is held out


def info(num_paragraphs: int) -> str:
    """A GNU info file, every seventh paragraph of which repeats an earlier one."""
    rng = np.random.default_rng(0)
    words = np.array(["print", "the", "list", "of", "open", "files", "and", "return", "a", "new", "object", "when", "called"])
    paragraphs = [" ".join(rng.choice(words, 120)) for _ in range(num_paragraphs)]
    paragraphs = [paragraphs[i // 7] if i % 7 == 6 else p for i, p in enumerate(paragraphs)]
    return "x.info\n\x1f\nFile: x.info,  Node: First,  Up: Top\n\n" + "\n\n".join(paragraphs) + "\n"


def novel() -> bytes:
    return b"".join(r_string(line) for i in range(NOVEL_PARAGRAPHS)
                    for line in (f"It is a truth, number {i}, that a man", "must be in want of a wife.", ""))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data_dir with both texts unpacked."""
    unpacked = tmp_path / "raw" / "unpacked"
    (unpacked / "info").mkdir(parents=True)
    (unpacked / "info" / "python3.99.info.gz").write_bytes(gzip.compress(info(900).encode()))
    (unpacked / "janeaustenr" / "data").mkdir(parents=True)
    (unpacked / "janeaustenr" / "data" / "Rdata.rdb").write_bytes(rdb_of(novel()))
    monkeypatch.setattr(prepare_data, "MINIMUM_CHARS", {"python_docs": 100_000, "austen": 50_000})
    return tmp_path


def paragraphs(blocks: list[str]) -> set[str]:
    return {" ".join(p.split()) for block in blocks for p in re.split(r"\n\s*\n", block) if p.strip()}


def refused(folder, capsys, *flags) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main(prepare_data.prepare_data, argv=[f"--data_dir={folder}", *flags])
    out = capsys.readouterr()
    assert exit_.value.code == 2 and out.out == ""
    assert len(out.err.strip().splitlines()) == 1
    return out.err


def test_files_hold_the_texts_and_share_no_paragraph(folder):
    record = prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()
    prepared = folder / "prepared"
    tokenizer = tokenizers.Tokenizer.from_file(str(prepared / "tokenizer.json"))

    def decode(name: str) -> list[str]:
        """Blocks of a token file: the text after each separator, id 0, the first of which begins the file."""
        tokens = np.asarray(data.read_tokens(prepared / f"{name}.bin", VOCAB))
        assert len(tokens) == record[f"{name}_tokens"] and tokens[0] == 0
        return [tokenizer.decode(block[1:].tolist()) for block in np.split(tokens, np.flatnonzero(tokens == 0)[1:])]

    training = paragraphs(decode("train"))
    for name in ("heldout_python_docs", "heldout_austen"):
        text, held_out = (prepared / f"{name}.txt").read_text(), decode(name)
        assert "".join(held_out) == text and len(text.encode()) == record[f"{name}_bytes"]
        assert paragraphs(held_out) and not paragraphs(held_out) & training
    novel_paragraphs = {f"It is a truth, number {i}, that a man must be in want of a wife." for i in range(NOVEL_PARAGRAPHS)}
    assert novel_paragraphs <= training | paragraphs(decode("heldout_austen"))
    assert json.loads((prepared / "data.json").read_text()) == record


def test_preparing_again_gives_the_same_bytes(folder):
    def files() -> dict[str, bytes]:
        prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()
        return {path.name: path.read_bytes() for path in (folder / "prepared").iterdir()}

    assert files() == files()


@pytest.mark.parametrize("size", [100, 70000])
def test_a_vocabulary_that_cannot_be_is_refused(folder, capsys, size):
    assert f"vocab_size={size}: must be between 512 and 65536" in refused(folder, capsys, f"--vocab_size={size}")


def test_without_apt_get_a_missing_text_is_named(folder, capsys, monkeypatch):
    (folder / "raw" / "unpacked" / "janeaustenr" / "data" / "Rdata.rdb").unlink()
    monkeypatch.setattr(prepare_data.shutil, "which", lambda name: None)
    message = refused(folder, capsys)
    assert "austen" in message and "apt-get" in message and "python_docs" not in message
    assert "austen" in refused(folder, capsys, "--nofetch")
    assert not (folder / "prepared").exists()


def test_a_data_dir_that_is_no_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert f"data_dir={tmp_path / 'file'}: {tmp_path / 'file'} exists and is not a folder" in refused(tmp_path / "file", capsys)
    assert "prepare_data.data_dir='': must not be empty" in refused("", capsys)


@pytest.mark.parametrize("file", ["info/python3.99.info.gz", "janeaustenr/data/Rdata.rdb"])
def test_a_damaged_text_is_named_and_the_old_files_stay(folder, capsys, file):
    prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()
    path = folder / "raw" / "unpacked" / file
    path.write_bytes(path.read_bytes()[:100] + bytes(1000))
    with pytest.raises(SystemExit) as exited:
        cli.main(prepare_data.prepare_data, argv=[f"--data_dir={folder}", "--nofetch", f"--vocab_size={VOCAB}"])
    out = capsys.readouterr()
    assert exited.value.code == 1 and out.out == "" and out.err.startswith(f"error: {path}: damaged")
    assert (folder / "prepared" / "data.json").exists()


def test_files_that_are_only_half_new_have_no_record(folder, monkeypatch):
    prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(prepare_data, "write_tokens", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()
    assert not (folder / "prepared" / "data.json").exists()


def test_a_text_that_shrank_is_refused(folder, monkeypatch):
    monkeypatch.setattr(prepare_data, "MINIMUM_CHARS", {"python_docs": 10_000_000, "austen": 50_000})
    with pytest.raises(OSError, match=r"python3\.99\.info\.gz: .* characters of text, expected at least 10000000"):
        prepare_data.prepare_data(str(folder), vocab_size=VOCAB, fetch=False)()
