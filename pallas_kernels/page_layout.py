"""`PageLayout`: where everything lies in a closed page of a `KVFormat`, and every size that follows.

One contiguous run of 32-bit words per (layer, page, KV head), planes in this order; those that the format does not need are absent:

    K codes | K scale, offset | promoted channels: codes | scale, offset | index | K sparse entries
    | V codes | V scale, offset | V sparse entries

Everything that keys need comes first, everything that values need after it, so that a kernel can fetch the two as two contiguous
runs, each when there is room for it. Scales lie in the order of their matrix (`GroupFormat.scale_shape`), each followed by its
offset, from the low bits of a word on: two of 16 bits or four of 8 bits a word (layout "mma_sm90" has an order of its own). An
index is 8 bits; a sparse entry is one word, its position (token * head_dim + channel) in the low half and its bfloat16 in the high
half. In layout "tpu" the promoted channels' codes come before all scales, which then form one run.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pallas_kernels import mma_sm90, tpu_tiles
from pallas_kernels.pallas_utils import align_to

if TYPE_CHECKING:
    from pallas_kernels.kv_format import KVFormat

WORD_BITS = 32
ALIGN_WORDS = 32  # a closed page starts and ends on a 128-byte boundary


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Sizes, in 32-bit words, of one closed page of one KV head. All derived from the format and `head_dim`."""

    fmt: KVFormat
    head_dim: int

    @property
    def base_channels(self) -> int:
        """Key channels stored at `k_bits` (the rest are promoted)."""
        return self.head_dim - self.fmt.outlier_channels

    def planes(self) -> dict[str, tuple[int, int]]:
        """Plane name -> (first word, words), in storage order. Planes of no words are left out."""
        out, first = {}, 0
        for part in (self._key_planes(), self._value_planes()):
            for name, words in part.items():
                if words:
                    out[name] = (first, words)
                    first += words
            first = align_to(first, self.part_align)
        return out

    @property
    def part_align(self) -> int:
        """The keys' part and the values' part of a page each fill a multiple of this many words."""
        return {"linear": 1, "mma_sm90": self.head_dim // 2, "tpu": tpu_tiles.TOKENS}[self.fmt.layout]

    @property
    def key_words(self) -> int:
        """Words of the keys' part, with which a page begins."""
        return align_to(sum(self._key_planes().values()), self.part_align)

    @property
    def value_words(self) -> int:
        """Words of the values' part, which follows the keys'."""
        return align_to(sum(self._value_planes().values()), self.part_align)

    def _key_planes(self) -> dict[str, int]:
        f, Z, promoted = self.fmt, self.fmt.page_size, self.fmt.outlier_channels
        codes = {"outlier_codes": self._code_words(promoted, f.outlier_bits)}
        return {
            "k_codes": self._code_words(self.base_channels, f.k_bits),
            **(codes if f.layout == "tpu" else {}),
            "k_scales": f.keys.scale_words(Z, self.base_channels),
            **codes,
            "outlier_scales": f.outliers.scale_words(Z, promoted),
            "outlier_index": promoted // 4 if f.outlier_choice == "page" else 0,
            "k_sparse": f.k_sparse,
        }

    def _value_planes(self) -> dict[str, int]:
        f = self.fmt
        return {
            "v_codes": self._code_words(self.head_dim, f.v_bits),
            "v_scales": f.values.scale_words(f.page_size, self.head_dim),
            "v_sparse": f.v_sparse,
        }

    def _code_words(self, channels: int, bits: int) -> int:
        if self.fmt.layout == "mma_sm90":
            return mma_sm90.plane_words(channels, bits)
        if self.fmt.layout == "tpu":
            return tpu_tiles.plane_rows(channels, bits) * tpu_tiles.TOKENS
        return channels * self.fmt.page_size * bits // WORD_BITS

    @property
    def used_words(self) -> int:
        """Words of all planes, without the padding between and after them."""
        return sum(words for _, words in self.planes().values())

    @property
    def words(self) -> int:
        """Words a closed page takes, padding to a multiple of 32 words (128 bytes) included."""
        return align_to(self.key_words + self.value_words, ALIGN_WORDS)

    @property
    def page_bytes(self) -> int:
        """Bytes a closed page of one layer and KV head takes."""
        return self.words * WORD_BITS // 8

    def effective_bits(self) -> float:
        """Bits per stored key or value element in closed pages: codes, scales, offsets, promoted channels and padding."""
        return self.words * WORD_BITS / (2 * self.head_dim * self.fmt.page_size)

    def effective_bits_at(self, tokens: int) -> float:
        """The same at a sequence length of `tokens`, open pages and sinks included (they are kept beside the closed pages)."""
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: must be at least 1")
        return 8 * self.sequence_bytes(tokens) / (2 * self.head_dim * tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes one layer and KV head needs for a sequence of `tokens`: closed pages, whole open pages, sinks."""
        element = 4 if self.fmt.open_dtype == "float32" else 2
        unquantised = (self.fmt.open_tokens + self.fmt.sink_tokens) * 2 * self.head_dim * element
        closed = max(tokens // self.fmt.page_size + 1 - self.fmt.open_pages, 0)
        return closed * self.page_bytes + unquantised
