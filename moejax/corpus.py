"""Plain text out of the two permissive texts that the shipped model is trained on, and its split into training and held-out.

Everything here is a pure function of its input bytes: the same packages give the same text, paragraphs and split.
"""
from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator

HELD_OUT_EVERY = 50
BLOCK_CHARS = 12_000  # about 3,500 tokens: a held-out block is long enough to score at contexts of 2k tokens

_UNDERLINE = re.compile(r"^\s*([=\-.*~^_])\1{2,}\s*$")
# "*note label: node." in running text; the full stop that ends the node's name is not one of the sentence.
_NOTE = re.compile(r"\*note\s+([^:]+?)\s*:+\s*[^\s.,;)]*(?:\.(?=\s+[a-z]))?", re.IGNORECASE)
_FOOTNOTE = re.compile(r"^\s*(\(\d+\)\s+https?://\S+|-+ Footnotes -+)\s*$")
_CHARSXP = (b"\x00\x04\x00\x09", b"\x00\x00\x00\x09")  # R serialisation: flags of an ASCII / other string


def info_to_text(info: str) -> str:
    """Text of a GNU info file: node headers, menus, index nodes, underlines and cross-reference marks are taken out."""
    nodes = info.split("\x1f")[1:]  # the first part is the file's own header
    return "\n\n".join(text for text in map(_node_text, nodes) if text)


def _node_text(node: str) -> str:
    header, _, body = node.lstrip("\n").partition("\n")
    if not header.startswith("File:") or re.search(r"Node: (Index|Python Module Index|Top)\b", header):
        return ""
    lines, in_menu = [], False
    for line in body.splitlines():
        if line.startswith("* Menu:"):
            in_menu = True
        elif in_menu and (line.startswith("*") or not line.strip() or line.startswith(" ")):
            continue
        elif not (_UNDERLINE.match(line) or _FOOTNOTE.match(line)):
            in_menu = False
            lines.append(line.rstrip())
    return _NOTE.sub(r"\1", "\n".join(lines)).strip("\n")


def rdb_strings(rdb: bytes) -> Iterator[list[str]]:
    """The strings of each object of an R lazy-load database (`.rdb`), in order: one list an object.

    The file is a run of zlib streams, each after its inflated length (4 bytes, big endian); a string is a CHARSXP: 4 flag
    bytes, a 4-byte big-endian length, the bytes.
    """
    position = 0
    while position + 4 < len(rdb):
        inflater = zlib.decompressobj()
        inflated = inflater.decompress(rdb[position + 4:])
        yield list(_charsxp(inflated))
        position = len(rdb) - len(inflater.unused_data)


def _charsxp(data: bytes) -> Iterator[str]:
    position = 0
    while True:
        starts = [i for i in (data.find(flag, position) for flag in _CHARSXP) if i >= 0]
        if not starts:
            return
        start = min(starts)
        (length,) = struct.unpack(">i", data[start + 4:start + 8])
        if not 0 <= length <= len(data) - start - 8:
            position = start + 1
            continue
        yield data[start + 8:start + 8 + length].decode("utf-8", "replace")
        position = start + 8 + length


def novels_to_text(objects: Iterable[list[str]]) -> str:
    """Novels whose lines are wrapped strings, an empty string between paragraphs -> one paragraph a line group."""
    novels = []
    for lines in objects:
        if len(lines) > 1000:  # the database also holds tables of names
            paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
            novels.append("\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip()))
    return "\n\n".join(novels)


def unique_paragraphs(texts: dict[str, str]) -> dict[str, list[str]]:
    """Paragraphs (runs of lines between empty lines) of each text; one that occurred before, in any text, is dropped."""
    seen: set[str] = set()
    out: dict[str, list[str]] = {}
    for name, text in texts.items():
        out[name] = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                out[name].append(paragraph.strip("\n"))
    return out


def split(paragraphs: list[str]) -> tuple[list[str], list[str]]:
    """(training, held-out) blocks of consecutive paragraphs, about `BLOCK_CHARS` characters each.

    Every `HELD_OUT_EVERY`-th block is held out, so that both parts are spread over the whole text.
    """
    blocks, current, size = [], [], 0
    for paragraph in paragraphs:
        current.append(paragraph)
        size += len(paragraph) + 2
        if size >= BLOCK_CHARS:
            blocks.append("\n\n".join(current) + "\n")
            current, size = [], 0
    if current:
        blocks.append("\n\n".join(current) + "\n")
    held_out = [b for i, b in enumerate(blocks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    return [b for i, b in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2], held_out
