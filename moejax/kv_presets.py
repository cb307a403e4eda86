"""Published methods as points of `KVFormat`, what each of them shares with its paper and what not, and our own points.

    engine = Engine(model, tokenizer, kv_format=kv_presets.get("moejax-2.5").formats(num_layers, head_dim), ...)

A preset imitates: it is the point of this space that lies nearest to the method, evaluated in this project's paged cache. Numbers
measured with a preset are not the paper's numbers. All of them keep the open page of up to 128 tokens unquantised.
"""
from __future__ import annotations

import dataclasses

from moejax import kv_schedule
from pallas_kernels.kv_format import KVFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named format.

    Attributes:
      fields: of `KVFormat`.
      shares, differs: what it has in common with the method it is named after, and what not.
      outlier_fraction: promoted key channels as a share of head_dim, rounded to a multiple of 8, at least 8.
      sparse_fraction: sparse entries of keys and of values as a share of a page's elements.
      skip_first_layers, skip_last_layers: layers whose cache stays at 16 bits.
    """

    fields: dict
    shares: str
    differs: str
    outlier_fraction: float = 0.0
    sparse_fraction: float = 0.0
    skip_first_layers: int = 0
    skip_last_layers: int = 0

    def formats(self, num_layers: int, head_dim: int) -> tuple[KVFormat, ...]:
        """One format a layer."""
        fields = dict(self.fields)
        if self.outlier_fraction:
            fields["outlier_channels"] = max(8, round(head_dim * self.outlier_fraction / 8) * 8)
        if self.sparse_fraction:
            page_size = KVFormat(**self.fields).page_size
            fields["k_sparse"] = fields["v_sparse"] = round(page_size * head_dim * self.sparse_fraction)
        return kv_schedule.skip_layers(
            KVFormat(**fields), num_layers, first=self.skip_first_layers, last=self.skip_last_layers)


def _kivi(bits: int) -> Preset:
    return Preset(
        fields={"k_bits": bits, "v_bits": bits, "k_group": 32, "v_group": 32, "scale_dtype": "float16"},
        shares="asymmetric; keys per channel in groups of 32 tokens, values per token in groups of 32 channels; a residual of up "
               "to 128 tokens; keys after RoPE (arXiv 2402.02750)",
        differs="the residual is the open page, 0 to 127 tokens; float16 minimum in place of a zero point")


def _kvquant(bits: int) -> Preset:
    return Preset(
        fields={"k_bits": bits, "v_bits": bits, "k_codes": "gaussian", "v_codes": "gaussian", "sink_tokens": 1, "key_rope": "pre"},
        sparse_fraction=0.01,
        shares="keys per channel before RoPE, values per token, non-uniform codes, 1 % of the entries kept sparse in 16 bits, "
               "the first token unquantised (arXiv 2401.18079)",
        differs="codes are Lloyd-Max levels of a normal distribution, not fitted per layer with Fisher weights; sparse entries are "
                "bounded per page and head, not per vector; ranges come from the page, not from calibration")


def _turboquant(bits: int) -> Preset:
    return Preset(
        fields={"k_bits": bits, "v_bits": bits, "k_axis": "token", "k_rotation": "hadamard", "k_codes": "gaussian",
                "k_symmetric": True, "scale_dtype": "float16"},
        skip_first_layers=2, skip_last_layers=2,
        shares="rotated keys, Lloyd-Max codes with one norm a token, values uniform and asymmetric per token, the first and last "
               "two layers left alone, as vLLM ships it (arXiv 2504.19874)",
        differs="Hadamard without random signs; no norm correction; no 1-bit residual sketch")


def _naive(bits: int) -> Preset:
    return Preset(fields={"k_bits": bits, "v_bits": bits, "k_axis": "token"},
                  shares="per token and head, keys and values, asymmetric, nothing else",
                  differs="nothing: it is what the field calls naive")


def _ours(k_bits: int, v_bits: int, outlier_fraction: float, why: str, **more) -> Preset:
    return Preset(
        fields={"k_bits": k_bits, "v_bits": v_bits, "outlier_bits": 4, "k_rotation": "calibrated",
                "v_rotation": "hadamard", **more},
        outlier_fraction=outlier_fraction, shares=why, differs="it is ours: chosen from the sweep in experiments/results")


_WINDOWS = {"sink_tokens": 64, "open_pages": 2}
_LEAN = {"scale_dtype": "float8_e4m3", "v_symmetric": True, "v_range": "clipped", **_WINDOWS}

PRESETS: dict[str, Preset] = {
    "kivi-2": _kivi(2), "kivi-4": _kivi(4),
    "kvquant-2": _kvquant(2), "kvquant-3": _kvquant(3), "kvquant-4": _kvquant(4),
    "qserve-kv4": Preset(
        fields={"k_bits": 4, "v_bits": 4, "k_axis": "token", "scale_dtype": "float16"},
        shares="asymmetric 4 bits per token and head, float16 scale and zero (arXiv 2405.04532)",
        differs="no SmoothAttention scaling of the key channels, which is folded into weights there"),
    "saw-int4": Preset(
        fields={"k_bits": 4, "v_bits": 4, "k_axis": "token", "k_rotation": "block_hadamard", "rotation_block": 32},
        shares="4 bits per token and head, block-diagonal Hadamard on keys (and queries) only (arXiv 2604.19157)",
        differs="one block size, 32, of the 16 to 128 that the paper tries"),
    "turboquant-3": _turboquant(3), "turboquant-4": _turboquant(4),
    "turboquant-2": Preset(
        fields={"k_bits": 2, "v_bits": 2, "k_axis": "token", "k_rotation": "hadamard", "v_rotation": "hadamard",
                "k_codes": "gaussian", "v_codes": "gaussian", "k_symmetric": True, "v_symmetric": True, "scale_dtype": "float16"},
        shares="rotated keys and values, Lloyd-Max codes with one norm a token (arXiv 2504.19874)",
        differs="as turboquant-4; values are coded like keys and no layer is left alone"),
    "oscar-2": Preset(
        fields={"k_bits": 2, "v_bits": 2, "k_axis": "token", "k_rotation": "hadamard", "v_rotation": "hadamard",
                "k_range": "clipped", "v_range": "clipped", "sink_tokens": 64, "open_pages": 3},
        shares="2 bits asymmetric per token on rotated keys and values, clipped ranges, 64 sink tokens and at least 256 recent "
               "tokens unquantised (arXiv 2605.17757)",
        differs="the rotation is a plain Hadamard, not one aligned with second moments; the clip is searched per group, "
                "not .96/.92"),
    "kitty-2": Preset(
        fields={"k_bits": 2, "v_bits": 2, "outlier_bits": 4, "outlier_choice": "page", "sink_tokens": 32}, outlier_fraction=0.25,
        shares="keys 2 bits per channel with a quarter of the channels promoted to 4 bits page by page, values 2 bits per token, "
               "pages of 128, 32 sink tokens (arXiv 2511.18643)",
        differs="channels are promoted by their range; no separate window of recent values"),
    "naive-int4": _naive(4), "naive-int2": _naive(2),
    "int8": Preset(
        fields={"k_bits": 8, "v_bits": 8, "k_axis": "token"},
        shares="8 bits per token and head, asymmetric, as LMDeploy and others", differs="16-bit scales"),
    "fp8-e4m3": Preset(
        fields={"k_bits": 8, "v_bits": 8, "k_axis": "token", "k_codes": "float8_e4m3", "v_codes": "float8_e4m3",
                "k_symmetric": True, "v_symmetric": True},
        shares="float8 e4m3", differs="a scale per token and head, where most engines have one per tensor"),
    "moejax-2.5": _ours(2, 2, 3 / 8, "2-bit keys fail on their strongest directions: the calibrated rotation collects them in the "
                        "last channels, which get 4 bits; 8-bit scales and values without zero points pay for 3/8 of them; "
                        "64 sinks and one more page at 16 bits are worth more than any bits in the pages", **_LEAN),
    "moejax-2.75": _ours(2, 2, 3 / 8, "as moejax-2.5, with key ranges for every 32 tokens", k_group=32, **_LEAN),
    "moejax-2.5-fast": _ours(2, 2, 1 / 8, "what the Hopper kernel reads at 2.5 bits: bfloat16 scales, one key range a page",
                             **_WINDOWS),
    "moejax-2.75-fast": _ours(2, 2, 3 / 8, "what the Hopper kernel reads at 2.75 bits: the next bits buy most as 4-bit channels",
                              **_WINDOWS),
    "moejax-3.25": _ours(2, 3, 3 / 8, "with 3/8 of the key channels at 4 bits, values become the larger error: a third bit there",
                         **_WINDOWS),
    "moejax-4.25": _ours(4, 3, 1 / 8, "3-bit values cost less than 4-bit keys: their bits go to the strongest key directions, at 8",
                         outlier_bits=8, **_WINDOWS),
}


def get(name: str) -> Preset:
    """Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: accepted are {', '.join(PRESETS)}")
    return PRESETS[name]
