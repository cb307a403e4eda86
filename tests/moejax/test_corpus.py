"""Text extraction and the held-out split, on small inputs made by hand."""
import struct
import zlib

from moejax import corpus

INFO = """This is x.info, produced by makeinfo.
\x1f
File: x.info,  Node: Top,  Next: First

* Menu:

* First::

\x1f
File: x.info,  Node: First,  Up: Top

1 First
*******

* Menu:

* Inner:: about it

See *note open: 1a2. for more, or *note the docs: 3b.

     >>> 1 + 1
     2

   ---------- Footnotes ----------

   (1) https://example.org/x
\x1f
File: x.info,  Node: Index

* open: 12
"""


def test_info_markup_is_taken_out_and_code_stays():
    assert corpus.info_to_text(INFO) == (
        "1 First\n\nSee open for more, or the docs.\n\n     >>> 1 + 1\n     2")


def r_string(text: str, flags: bytes = b"\x00\x04\x00\x09") -> bytes:
    data = text.encode()
    return flags + struct.pack(">i", len(data)) + data


def rdb_of(*objects: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(o)) + zlib.compress(o) for o in objects)


def test_rdb_strings_of_every_object_in_order():
    rdb = rdb_of(b"\x10junk" + r_string("one") + r_string("", b"\x00\x00\x00\x09") + r_string("trois é"), r_string("next"))
    assert list(corpus.rdb_strings(rdb)) == [["one", "", "trois é"], ["next"]]


def test_novels_are_unwrapped_and_small_objects_left_out():
    novel = ["It is a", "truth", "", "so  said", "she"] + [""] * 1000
    assert corpus.novels_to_text([novel, ["not a novel"]]) == "It is a truth\n\nso said she"


def test_a_paragraph_occurs_once_over_all_texts():
    out = corpus.unique_paragraphs({"a": "x y\n\nz\n\nx  y", "b": "z\n\nw"})
    assert out == {"a": ["x y", "z"], "b": ["w"]}


def test_split_loses_nothing_and_shares_no_paragraph():
    paragraphs = [f"paragraph {i} " + "x" * 500 for i in range(3000)]
    training, held_out = corpus.split(paragraphs)
    assert sorted(p for block in training + held_out for p in block.strip("\n").split("\n\n")) == sorted(paragraphs)
    assert 0.01 < len(held_out) / (len(training) + len(held_out)) < 0.03
    assert all(len(block) >= corpus.BLOCK_CHARS for block in held_out)
    # spread over the text, not its end
    firsts = [int(block.split()[1]) for block in held_out]
    assert min(firsts) < 1000 and max(firsts) > 1500
