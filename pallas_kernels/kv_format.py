"""`KVFormat`: the one value that describes a paged low-bit KV cache: a point in the space of the published methods.

A *page* holds `page_size` consecutive tokens of one sequence. While it is open its keys and values stay unquantised
(bfloat16; that is the residual window). When it fills, or `open_pages` - 1 pages later, it is *closed*: quantised and packed,
once, into one contiguous run of 32-bit words per (layer, page, KV head); `page_layout` says where everything lies.

By default keys are quantised **per channel** over the tokens of the page, values **per token** over the channels of the head,
both asymmetrically:  x = scale * code + offset,  code in [0, 2**bits - 1].

Why an `offset` (a real number, the group's minimum) and not an integer zero point: at 2 bits a zero point rounded to an integer
moves the grid by up to half a step, and a channel far from zero (a key bias) needs a zero point outside of the code's range.
The offset costs the same 16 bits, folds into attention in the same way, and makes constant groups exact. Why bfloat16 and not
float16 by default: keys and values are bfloat16, so the group minimum is representable exactly and nothing can overflow; the
scale is rounded up so that the range stays covered, which widens a step by less than 0.8 %.
"""
from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels import mma_sm90, tpu_tiles
from pallas_kernels.page_layout import PageLayout

QUANT_BITS = (2, 3, 4, 8)
ALL_BITS = (*QUANT_BITS, 16, 32)
OUTLIER_BITS = (4, 8, 16)
# "linear": see `packing`; "mma_sm90": see `mma_sm90`; "tpu": see `tpu_tiles`.
LAYOUTS = ("linear", "mma_sm90", "tpu")
# Tokens a page, and of how many the promoted channels are a multiple, in the layouts that fast kernels read.
_FAST_LAYOUTS = {"mma_sm90": (mma_sm90.TOKENS, mma_sm90.TILE), "tpu": (tpu_tiles.TOKENS, tpu_tiles.CHANNELS)}

Axis = Literal["channel", "token"]
Codes = Literal["uniform", "gaussian", "float8_e4m3"]
KeyRotation = Literal["none", "hadamard", "block_hadamard", "calibrated"]
Rotation = Literal["none", "hadamard", "block_hadamard"]
RangeRule = Literal["minmax", "clipped"]
ScaleDtype = Literal["bfloat16", "float16", "float8_e4m3"]

_CHOICES: dict[str, tuple] = {
    "k_bits": ALL_BITS, "v_bits": ALL_BITS, "outlier_bits": OUTLIER_BITS,
    "k_axis": ("channel", "token"), "v_axis": ("channel", "token"),
    "k_symmetric": (False, True), "v_symmetric": (False, True),
    "k_codes": ("uniform", "gaussian", "float8_e4m3"), "v_codes": ("uniform", "gaussian", "float8_e4m3"),
    "k_range": ("minmax", "clipped"), "v_range": ("minmax", "clipped"),
    "k_rotation": ("none", "hadamard", "block_hadamard", "calibrated"), "v_rotation": ("none", "hadamard", "block_hadamard"),
    "outlier_choice": ("calibrated", "page"), "key_rope": ("post", "pre"),
    "scale_dtype": ("bfloat16", "float16", "float8_e4m3"), "layout": LAYOUTS,
}
_INTEGERS = ("page_size", "k_group", "v_group", "outlier_channels", "k_sparse", "v_sparse", "rotation_block", "sink_tokens",
             "open_pages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFormat:
    """How one matrix of a page, [Z tokens, C channels], is quantised: the part of `KVFormat` that `quantize` needs.

    Attributes:
      bits, codes, range_rule, symmetric, scale_dtype: as in `KVFormat`.
      axis: "channel": a scale belongs to one channel and some tokens; "token": to one token and some channels.
      group: elements that share a scale; 0 for all tokens of the page, or all channels of the matrix.
    """

    bits: int
    axis: Axis
    group: int = 0
    symmetric: bool = False
    codes: Codes = "uniform"
    range_rule: RangeRule = "minmax"
    scale_dtype: ScaleDtype = "bfloat16"

    @property
    def is_quantized(self) -> bool:
        """False at 16 and 32 bits, which are plain floats without scales."""
        return self.bits in QUANT_BITS

    @property
    def scale_bits(self) -> int:
        """Bits that one scale, or one offset, takes."""
        return 8 if self.scale_dtype == "float8_e4m3" else 16

    def scale_shape(self, tokens: int, channels: int) -> tuple[int, int]:
        """Shape of the matrix of scales of a [tokens, channels] matrix."""
        if self.axis == "channel":
            return tokens // (self.group or tokens), channels
        return tokens, channels // (self.group or channels)

    def scale_words(self, tokens: int, channels: int) -> int:
        """32-bit words of all scales and offsets; the last word may be part empty."""
        if not self.is_quantized or not channels:
            return 0
        rows, columns = self.scale_shape(tokens, channels)
        return -(-rows * columns * (1 if self.symmetric else 2) * self.scale_bits // 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVFormat:
    """Storage format of a paged KV cache. Immutable and hashable, so it can be a static argument of a jitted function.

    `k_` fields are of the keys, `v_` fields of the values. At 16 and 32 bits there are no codes, and fields that say how codes are
    chosen mean nothing. What the fast kernels read is what `layout="mma_sm90"` or "tpu" accepts; every other point runs in the
    reference.

    Attributes:
      k_bits, v_bits: bits a stored element in closed pages: 2, 3, 4, 8 (codes), 16 (bfloat16), or 32 (float32: no loss at all,
        for conformance tests of float32 models; open pages and sinks are then float32 too).
      page_size: tokens a page. A multiple of 32.
      k_axis, v_axis: "channel" gives each channel scales of its own over the tokens, "token" each token over its channels.
      k_group, v_group: elements that share a scale: tokens (axis "channel") or channels (axis "token"); 0 for the whole page, or
        head. Otherwise a multiple of 8 that divides it.
      k_symmetric, v_symmetric: no offset is stored: x = scale * (code - (2**bits - 1) / 2), every code in use, no exact zero.
      k_codes, v_codes: "uniform" steps; "gaussian", the levels that are best for a normal distribution (Lloyd-Max; 2 to 4 bits),
        with the group's RMS as the scale and its mean as the offset; "float8_e4m3" (8 bits, symmetric).
      k_range, v_range: of uniform codes. "minmax" covers the group's whole range; "clipped" shrinks it to the fraction, out of a
        fixed grid, that gives the least squared error.
      outlier_channels: key channels per KV head that are stored at `outlier_bits` instead of `k_bits`. A multiple of 8.
      outlier_bits: 4, 8 or 16; more than `k_bits`.
      outlier_choice: which channels. "calibrated": per layer and head on a text; they are the *last* channels after the transform
        that the cache applies (see `moejax.kv_cache.KeyTransform`). "page": those of the widest range, page by page, with an
        index of 8 bits each.
      k_sparse, v_sparse: elements per page and head that are kept as bfloat16 with a 16-bit index, and stay out of the ranges:
        those farthest from their group's mean in deviations of the group.
      k_rotation, v_rotation: orthonormal Hadamard matrix that multiplies keys (and queries) / values before they are stored:
        "hadamard" of size head_dim, a power of two; "block_hadamard" of size `rotation_block` along the diagonal. Keys only:
        "calibrated", per layer and head the transform that concentrates what matters to the queries in the last channels.
      rotation_block: a power of two that divides head_dim.
      sink_tokens: the first tokens of each sequence, kept unquantised and out of the ranges of page 0.
      open_pages: last pages of a sequence that stay unquantised, the one being filled included.
      key_rope: "post" quantises keys after RoPE, "pre" before it ("pre" only in `moejax.scoring`).
      scale_dtype: dtype of scales and offsets, "bfloat16", "float16" (saturates at 65504) or "float8_e4m3" (at 448).
      layout: order of codes and scales inside a page: "linear" (every format), or what fast kernels read: "mma_sm90"
        (Mosaic GPU) or "tpu" (Mosaic TPU).

    Raises:
      ValueError: a field out of what is accepted; the message names field, value and accepted values.
    """

    k_bits: int = 16
    v_bits: int = 16
    page_size: int = 128
    k_axis: Axis = "channel"
    v_axis: Axis = "token"
    k_group: int = 0
    v_group: int = 0
    k_symmetric: bool = False
    v_symmetric: bool = False
    k_codes: Codes = "uniform"
    v_codes: Codes = "uniform"
    k_range: RangeRule = "minmax"
    v_range: RangeRule = "minmax"
    outlier_channels: int = 0
    outlier_bits: int = 8
    outlier_choice: Literal["calibrated", "page"] = "calibrated"
    k_sparse: int = 0
    v_sparse: int = 0
    k_rotation: KeyRotation = "none"
    v_rotation: Rotation = "none"
    rotation_block: int = 32
    sink_tokens: int = 0
    open_pages: int = 1
    key_rope: Literal["post", "pre"] = "post"
    scale_dtype: ScaleDtype = "bfloat16"
    layout: str = "linear"

    def __post_init__(self):
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if type(value) is not type(accepted[0]) or value not in accepted:
                raise ValueError(f"KVFormat.{name}={value!r}: accepted are {', '.join(map(str, accepted))}")
        for name in _INTEGERS:
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"KVFormat.{name}={getattr(self, name)!r}: must be an integer")
        Z = self.page_size
        self._require("page_size", Z >= 32 and Z % 32 == 0, "must be a positive multiple of 32 tokens")
        self._require("outlier_channels", self.outlier_channels >= 0 and self.outlier_channels % 8 == 0,
                      "must be a multiple of 8, 0 for none")
        self._require("outlier_bits", not self.outlier_channels or self.outlier_bits > self.k_bits,
                      f"must exceed k_bits={self.k_bits} when outlier_channels > 0")
        self._require("sink_tokens", 0 <= self.sink_tokens < Z, f"must be at least 0 and below page_size={Z}")
        self._require("open_pages", self.open_pages >= 1, "must be at least 1, the page that is being filled")
        block = self.rotation_block
        self._require("rotation_block", block > 1 and not block & (block - 1), "must be a power of two, at least 2")
        self._check_parts()
        if (self.k_bits == 32) != (self.v_bits == 32):
            raise ValueError(
                f"KVFormat.k_bits={self.k_bits}, v_bits={self.v_bits}: 32 (the exact float32 cache) goes with 32 only")
        if self.key_rope == "pre":
            self._require("k_rotation", self.k_rotation != "calibrated", "key_rope='pre' accepts none, hadamard, block_hadamard: "
                          "calibrated transforms are measured on keys after RoPE")
            self._require("outlier_choice", self.outlier_choice == "page" or not self.outlier_channels,
                          "key_rope='pre' accepts page: channels are calibrated on keys after RoPE")
        if self.layout in _FAST_LAYOUTS:
            self._check_fast_layout(*_FAST_LAYOUTS[self.layout])

    def _check_parts(self) -> None:
        """What keys and values have in common."""
        for part, g, sparse in (("k", self.keys, self.k_sparse), ("v", self.values, self.v_sparse)):
            self._require(f"{part}_group", g.group >= 0 and g.group % 8 == 0,
                          "must be a multiple of 8, 0 for the whole page or head")
            if g.axis == "channel" and g.group:
                self._require(f"{part}_group", self.page_size % g.group == 0, f"must divide page_size={self.page_size}")
            self._require(f"{part}_sparse", 0 <= sparse <= 4 * self.page_size, f"must be 0 … 4 * page_size={4 * self.page_size}")
            self._require(f"{part}_sparse", not sparse or g.is_quantized, f"needs {part}_bits of 2, 3, 4, 8, not {g.bits}")
            if g.codes == "gaussian":
                self._require(f"{part}_codes", g.bits in (2, 3, 4), f"accepts {part}_bits of 2, 3, 4, not {g.bits}")
            if g.codes == "float8_e4m3":
                self._require(f"{part}_codes", g.bits == 8 and g.symmetric,
                              f"needs {part}_bits=8 and {part}_symmetric=True, not {g.bits} and {g.symmetric}")
            if g.codes != "uniform":
                self._require(f"{part}_range", g.range_rule == "minmax",
                              f"{part}_codes={g.codes!r} has no range to clip, use minmax")
        if self.outlier_channels:
            self._require("k_codes", self.k_codes == "uniform", "outlier_channels > 0 accepts uniform")

    def _check_fast_layout(self, page_size: int, channels: int) -> None:
        plain = KVFormat()
        same = ("k_axis", "v_axis", "k_group", "v_group", "k_symmetric", "v_symmetric", "k_codes", "v_codes", "outlier_choice",
                "k_sparse", "v_sparse", "key_rope", "scale_dtype")
        for name, good, accepted in (
            ("page_size", self.page_size == page_size, str(page_size)),
            ("k_bits", self.k_bits <= 16, "2, 3, 4, 8, 16"),
            ("outlier_channels", self.outlier_channels % channels == 0, f"multiples of {channels}"),
            *((name, getattr(self, name) == getattr(plain, name), str(getattr(plain, name))) for name in same),
        ):
            self._require(name, good, f"layout {self.layout!r} accepts {accepted}")

    def _require(self, name: str, good: bool, what: str) -> None:
        if not good:
            raise ValueError(f"KVFormat.{name}={getattr(self, name)!r}: {what}")

    @property
    def keys(self) -> GroupFormat:
        """How key channels that are not promoted are quantised."""
        return self._part("k")

    @property
    def outliers(self) -> GroupFormat:
        """How promoted key channels are quantised: as the others, at `outlier_bits`; per token they are one group."""
        group = self.k_group if self.k_axis == "channel" else 0
        return dataclasses.replace(self.keys, bits=self.outlier_bits, group=group)

    @property
    def values(self) -> GroupFormat:
        """How values are quantised."""
        return self._part("v")

    def _part(self, part: Literal["k", "v"]) -> GroupFormat:
        names = ("bits", "axis", "group", "symmetric", "codes")
        return GroupFormat(**{name: getattr(self, f"{part}_{name}") for name in names},
                           range_rule=getattr(self, f"{part}_range"), scale_dtype=self.scale_dtype)

    @property
    def open_dtype(self) -> str:
        """Dtype of open pages and sinks: "bfloat16", or "float32" when the cache is exact."""
        return "float32" if self.k_bits == 32 else "bfloat16"

    @property
    def needs_calibration(self) -> bool:
        """Whether a text must be read to know how keys are stored: promoted channels or a calibrated rotation."""
        return self.k_rotation == "calibrated" or (self.outlier_channels > 0 and self.outlier_choice == "calibrated")

    @property
    def name(self) -> str:
        """Short label for tables, e.g. "k3v2", "k2v2+16ch@8+sink4"; what is as by default is left out."""
        parts = [f"k{self.k_bits}v{self.v_bits}"]

        def both(label: str, k: bool, v: bool) -> None:
            if k or v:
                parts.append(f"{label}-{'k' * k}{'v' * v}")

        if self.outlier_channels:
            parts.append(f"{self.outlier_channels}ch@{self.outlier_bits}" + "page" * (self.outlier_choice == "page"))
        both("bytoken", self.k_axis == "token", False)
        both("bychannel", False, self.v_axis == "channel")
        for part, group in (("k", self.k_group), ("v", self.v_group)):
            if group:
                parts.append(f"g{group}-{part}")
        both("sym", self.k_symmetric, self.v_symmetric)
        for codes in ("gaussian", "float8_e4m3"):
            both(codes, self.k_codes == codes, self.v_codes == codes)
        if self.k_sparse or self.v_sparse:
            parts.append(f"sparse{self.k_sparse},{self.v_sparse}")
        if self.sink_tokens:
            parts.append(f"sink{self.sink_tokens}")
        for label, rotation in (("rot", "hadamard"), (f"rot{self.rotation_block}", "block_hadamard"), ("calrot", "calibrated")):
            both(label, self.k_rotation == rotation, self.v_rotation == rotation)
        both("clip", self.k_range == "clipped", self.v_range == "clipped")
        if self.open_pages > 1:
            parts.append(f"open{self.open_pages}")
        if self.key_rope == "pre":
            parts.append("prerope")
        if self.scale_dtype != "bfloat16":
            parts.append(f"scale-{self.scale_dtype}")
        if self.page_size != 128:
            parts.append(f"page{self.page_size}")
        return "+".join(parts)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError when this format cannot store heads of `head_dim` channels."""
        if head_dim < 8 or head_dim % 8:
            raise ValueError(f"{head_dim=}: must be a positive multiple of 8")
        if self.layout in _FAST_LAYOUTS and head_dim % 32:
            raise ValueError(f"{head_dim=}: must be a multiple of 32 with layout {self.layout!r}")
        self._require("outlier_channels", self.outlier_channels < head_dim, f"must be below {head_dim=}")
        if self.outlier_channels and self.outlier_choice == "page" and head_dim > 256:
            raise ValueError(f"{head_dim=}: outlier_choice='page' has indices of 8 bits, at most 256 channels")
        if (self.k_sparse or self.v_sparse) and head_dim * self.page_size > 1 << 16:
            raise ValueError(f"{head_dim=}: sparse entries have indices of 16 bits, page_size * head_dim must not exceed 65536")
        for part, axis, group, channels in (("k", self.k_axis, self.k_group, head_dim - self.outlier_channels),
                                            ("v", self.v_axis, self.v_group, head_dim)):
            if axis == "token" and group and channels % group:
                raise ValueError(f"KVFormat.{part}_group={group}: must divide the {channels} channels that share a token's scales")
        if "hadamard" in (self.k_rotation, self.v_rotation) and head_dim & (head_dim - 1):
            raise ValueError(f"rotation 'hadamard' needs a head_dim that is a power of two, got {head_dim=}; block_hadamard takes "
                             "any multiple of rotation_block")
        if "block_hadamard" in (self.k_rotation, self.v_rotation) and head_dim % self.rotation_block:
            raise ValueError(f"KVFormat.rotation_block={self.rotation_block}: must divide {head_dim=}")

    def check_cacheable(self) -> None:
        """Raises NotImplementedError when this point runs in `moejax.scoring` only, and not in a cache that decodes."""
        if self.key_rope == "pre":
            raise NotImplementedError("key_rope='pre': the paged cache stores keys after RoPE; scoring (`experiments.quality`) "
                                      "runs this format")

    @property
    def open_tokens(self) -> int:
        """Tokens that the open pages of one sequence hold. Token s lies at s % open_tokens."""
        return self.open_pages * self.page_size

    def closed_pages(self, kv_len):
        """Closed pages of a sequence of `kv_len` tokens, the query's included, as that query sees it: int, or int array."""
        pages = (kv_len - 1) // self.page_size + 1 - self.open_pages
        return (pages + abs(pages)) // 2  # at least 0; of a Python int, a NumPy or a JAX array alike

    def page_layout(self, head_dim: int) -> PageLayout:
        """Where each plane of a closed page lies, for heads of `head_dim` channels. Raises ValueError as `check_head_dim`."""
        self.check_head_dim(head_dim)
        return PageLayout(fmt=self, head_dim=head_dim)
