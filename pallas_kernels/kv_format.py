"""`KVFormat`: the one value that describes a paged low-bit KV cache, and every size that follows from it.

A *page* holds `page_size` consecutive tokens of one sequence. While it is open its keys and values stay unquantised
(bfloat16; that is the residual window). When it fills it is *closed*: quantised and packed, once, into one contiguous run of
32-bit words per (layer, page, KV head), made of planes in this order:

    K codes | K scale, offset | promoted key channels: codes | their scale, offset | V codes | V scale, offset

Everything that keys need comes first, everything that values need after it, so that a kernel can fetch the two as two
contiguous runs, each when there is room for it.

Keys are quantised **per channel** over the tokens of the page, values **per token** over the channels of the head, both
asymmetrically:  x = scale * code + offset,  code in [0, 2**bits - 1].

Why an `offset` (a real number, the group's minimum) and not an integer zero point: at 2 bits a zero point rounded to an integer
moves the grid by up to half a step, and a channel far from zero (a key bias) needs a zero point outside of the code's range.
The offset costs the same 16 bits, folds into attention in the same way, and makes constant groups exact. Why bfloat16 and not
float16 by default: keys and values are bfloat16, so the group minimum is representable exactly and nothing can overflow; the
scale is rounded up so that the range stays covered, which widens a step by less than 0.8 %.
"""
from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels import mma_sm90
from pallas_kernels.pallas_utils import align_to

WORD_BITS = 32
ALIGN_WORDS = 32  # a closed page starts and ends on a 128-byte boundary
QUANT_BITS = (2, 3, 4, 8)
ALL_BITS = (*QUANT_BITS, 16, 32)
OUTLIER_BITS = (4, 8, 16)
# "linear": see `packing`; "mma_sm90": see `mma_sm90`. `tpu` joins with its kernels.
LAYOUTS = ("linear", "mma_sm90")

Rotation = Literal["none", "hadamard"]
RangeRule = Literal["minmax", "clipped"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVFormat:
    """Storage format of a paged KV cache. Immutable and hashable, so it can be a static argument of a jitted function.

    Attributes:
      k_bits, v_bits: bits a stored key / value element in closed pages: 2, 3, 4, 8 (asymmetric integer codes), 16 (bfloat16),
        or 32 (float32: no loss at all, for conformance tests of float32 models; open pages and sinks are then float32 too).
      page_size: tokens a page; also the quantisation group of the keys. A multiple of 32.
      outlier_channels: key channels per KV head that are stored at `outlier_bits` instead of `k_bits`. A multiple of 8. They
        are the *last* channels after the permutation that the cache applies (see `moejax.kv_cache.KeyTransform`).
      outlier_bits: 4, 8 or 16; more than `k_bits`.
      k_range, v_range: "minmax" covers the group's whole range; "clipped" shrinks it to the fraction, out of a fixed grid,
        that gives the least squared error.
      k_rotation, v_rotation: "hadamard" multiplies keys (and queries) / values by an orthonormal Hadamard matrix of size
        head_dim before they are stored; head_dim must be a power of two.
      sink_tokens: the first tokens of each sequence, kept unquantised and out of the ranges of page 0.
      scale_dtype: dtype of scales and offsets, "bfloat16" or "float16" (overflows above 65504).
      layout: order of codes and scales inside a page: "linear" (bits of 32 too, any head_dim), or "mma_sm90", which the Mosaic
        GPU kernel reads (page_size 128, bits up to 16, bfloat16 scales, head_dim and outlier_channels multiples of 32 and 16).

    Raises:
      ValueError: a field out of what is accepted; the message names field, value and accepted values.
    """

    k_bits: int = 16
    v_bits: int = 16
    page_size: int = 128
    outlier_channels: int = 0
    outlier_bits: int = 8
    k_range: RangeRule = "minmax"
    v_range: RangeRule = "minmax"
    k_rotation: Rotation = "none"
    v_rotation: Rotation = "none"
    sink_tokens: int = 0
    scale_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    layout: str = "linear"

    def __post_init__(self):
        _require_in("k_bits", self.k_bits, ALL_BITS)
        _require_in("v_bits", self.v_bits, ALL_BITS)
        _require_in("outlier_bits", self.outlier_bits, OUTLIER_BITS)
        _require_in("k_range", self.k_range, ("minmax", "clipped"))
        _require_in("v_range", self.v_range, ("minmax", "clipped"))
        _require_in("k_rotation", self.k_rotation, ("none", "hadamard"))
        _require_in("v_rotation", self.v_rotation, ("none", "hadamard"))
        _require_in("scale_dtype", self.scale_dtype, ("bfloat16", "float16"))
        _require_in("layout", self.layout, LAYOUTS)
        for name in ("page_size", "outlier_channels", "sink_tokens"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"KVFormat.{name}={getattr(self, name)!r}: must be an integer")
        if self.page_size < 32 or self.page_size % 32:
            raise ValueError(f"KVFormat.page_size={self.page_size}: must be a positive multiple of 32 tokens")
        if self.outlier_channels < 0 or self.outlier_channels % 8:
            raise ValueError(f"KVFormat.outlier_channels={self.outlier_channels}: must be a multiple of 8, 0 for none")
        if self.outlier_channels and self.outlier_bits <= self.k_bits:
            raise ValueError(
                f"KVFormat.outlier_bits={self.outlier_bits}: must exceed k_bits={self.k_bits} when outlier_channels > 0")
        if not 0 <= self.sink_tokens < self.page_size:
            raise ValueError(
                f"KVFormat.sink_tokens={self.sink_tokens}: must be at least 0 and below page_size={self.page_size}")
        if (self.k_bits == 32) != (self.v_bits == 32):
            raise ValueError(
                f"KVFormat.k_bits={self.k_bits}, v_bits={self.v_bits}: 32 (the exact float32 cache) goes with 32 only")
        if self.layout == "mma_sm90":
            self._check_mma_sm90()

    def _check_mma_sm90(self) -> None:
        for name, good, accepted in (
            ("page_size", self.page_size == mma_sm90.TOKENS, str(mma_sm90.TOKENS)),
            ("k_bits", self.k_bits <= 16, "2, 3, 4, 8, 16"),
            ("scale_dtype", self.scale_dtype == "bfloat16", "bfloat16"),
            ("outlier_channels", self.outlier_channels % mma_sm90.TILE == 0, f"multiples of {mma_sm90.TILE}"),
        ):
            if not good:
                raise ValueError(f"KVFormat.{name}={getattr(self, name)!r}: layout 'mma_sm90' accepts {accepted}")

    @property
    def open_dtype(self) -> str:
        """Dtype of open pages and sinks: "bfloat16", or "float32" when the cache is exact."""
        return "float32" if self.k_bits == 32 else "bfloat16"

    @property
    def name(self) -> str:
        """Short label for tables, e.g. "k3v2", "k2v2+16ch@8+sink4"."""
        parts = [f"k{self.k_bits}v{self.v_bits}"]
        if self.outlier_channels:
            parts.append(f"{self.outlier_channels}ch@{self.outlier_bits}")
        if self.sink_tokens:
            parts.append(f"sink{self.sink_tokens}")
        rotated = "k" * (self.k_rotation != "none") + "v" * (self.v_rotation != "none")
        if rotated:
            parts.append(f"rot-{rotated}")
        clipped = "k" * (self.k_range == "clipped") + "v" * (self.v_range == "clipped")
        if clipped:
            parts.append(f"clip-{clipped}")
        return "+".join(parts)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError when this format cannot store heads of `head_dim` channels."""
        if head_dim < 8 or head_dim % 8:
            raise ValueError(f"head_dim={head_dim}: must be a positive multiple of 8")
        if self.layout == "mma_sm90" and head_dim % 32:
            raise ValueError(f"head_dim={head_dim}: must be a multiple of 32 with layout 'mma_sm90'")
        if self.outlier_channels >= head_dim:
            raise ValueError(
                f"KVFormat.outlier_channels={self.outlier_channels}: must be below head_dim={head_dim}")
        rotated = "hadamard" in (self.k_rotation, self.v_rotation)
        if rotated and head_dim & (head_dim - 1):
            raise ValueError(f"rotation 'hadamard' needs a head_dim that is a power of two, got head_dim={head_dim}")

    def page_layout(self, head_dim: int) -> PageLayout:
        """Where each plane of a closed page lies, for heads of `head_dim` channels. Raises ValueError as `check_head_dim`."""
        self.check_head_dim(head_dim)
        return PageLayout(fmt=self, head_dim=head_dim)


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
        return self.head_dim // 2 if self.fmt.layout == "mma_sm90" else 1

    @property
    def key_words(self) -> int:
        """Words of the keys' part, with which a page begins."""
        return align_to(sum(self._key_planes().values()), self.part_align)

    @property
    def value_words(self) -> int:
        """Words of the values' part, which follows the keys'."""
        return align_to(sum(self._value_planes().values()), self.part_align)

    def _key_planes(self) -> dict[str, int]:
        f = self.fmt
        return {
            "k_codes": self._code_words(self.base_channels, f.k_bits),
            "k_scales": self.base_channels if f.k_bits in QUANT_BITS else 0,
            "outlier_codes": self._code_words(f.outlier_channels, f.outlier_bits),
            "outlier_scales": f.outlier_channels if f.outlier_bits in QUANT_BITS else 0,
        }

    def _value_planes(self) -> dict[str, int]:
        f = self.fmt
        return {
            "v_codes": self._code_words(self.head_dim, f.v_bits),
            "v_scales": f.page_size if f.v_bits in QUANT_BITS else 0,
        }

    def _code_words(self, channels: int, bits: int) -> int:
        if self.fmt.layout == "mma_sm90":
            return mma_sm90.plane_words(channels, bits)
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
        """The same at a sequence length of `tokens`, open page and sinks included (they are kept beside the closed pages)."""
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: must be at least 1")
        return 8 * self.sequence_bytes(tokens) / (2 * self.head_dim * tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes one layer and KV head needs for a sequence of `tokens`: closed pages, one whole open page, sinks."""
        element = 4 if self.fmt.open_dtype == "float32" else 2
        unquantised = (self.fmt.page_size + self.fmt.sink_tokens) * 2 * self.head_dim * element
        return tokens // self.fmt.page_size * self.page_bytes + unquantised


def _require_in(name: str, value, accepted: tuple) -> None:
    if isinstance(value, bool) or value not in accepted:
        raise ValueError(f"KVFormat.{name}={value!r}: accepted are {', '.join(map(str, accepted))}")
