"""Named shapes of `grouped_matmul` that feed tests and benchmarks: m rows, E experts of [k, n]."""
from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.packed_weights import BLOCK, WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulSpec:
    """m rows are m / top_k tokens, each with top_k different experts, drawn evenly.

    `bits` is None for bfloat16 weights, else what codes have, packed, with groups of `group_size` along k and scales of
    `scale_dtype`. With `glu`, columns are gate and up in turn (`packed_weights.interleave`) and n / 2 come out.
    """

    m: int
    k: int
    n: int
    num_experts: int
    top_k: int
    bits: int | None = None
    group_size: int | None = None
    scale_dtype: str = "float32"
    glu: bool = False

    @property
    def format_name(self) -> str:
        """Of the weights."""
        return "bfloat16" if self.bits is None else f"int{self.bits} in groups of {self.group_size}"

    def effective_bits(self) -> float:
        """Bits stored a weight: scales and padding counted."""
        if self.bits is None or self.group_size is None:
            return 16.0
        layout = WeightLayout(
            k=self.k, n=self.n, bits=self.bits, group_size=self.group_size, scale_dtype=self.scale_dtype)
        return 32 * layout.words / (BLOCK * layout.chunk)

    def topk_idx(self, seed: int) -> np.ndarray:
        """int [m / top_k, top_k], the experts of each token."""
        rng = np.random.default_rng(seed)
        return np.stack([rng.choice(self.num_experts, self.top_k, replace=False) for _ in range(self.m // self.top_k)])

    def group_sizes(self, seed: int) -> np.ndarray:
        """Rows of each expert, int32 [E]."""
        return np.bincount(self.topk_idx(seed).reshape(-1), minlength=self.num_experts).astype(np.int32)


def _qwen3_30b(batch: int, bits: int | None, *, down: bool = False) -> GroupedMatmulSpec:
    k, n = (768, 2048) if down else (2048, 2 * 768)
    return GroupedMatmulSpec(
        m=8 * batch, k=k, n=n, num_experts=128, top_k=8, bits=bits, group_size=None if bits is None else 128, glu=not down)


def _dense(batch: int, k: int, n: int, bits: int) -> GroupedMatmulSpec:
    return GroupedMatmulSpec(m=batch, k=k, n=n, num_experts=1, top_k=1, bits=bits, group_size=128)


SPECS = {
    "tiny_int4": GroupedMatmulSpec(m=4, k=256, n=64, num_experts=8, top_k=2, bits=4, group_size=64, glu=True),
    "tiny_bf16": GroupedMatmulSpec(m=4, k=256, n=64, num_experts=8, top_k=2),
    **{f"qwen3_30b_b{batch}_{name}_{f'int{bits}' if bits else 'bf16'}": _qwen3_30b(batch, bits, down=name == "down")
       for batch in (1, 4, 16, 64) for name in ("gate_up", "down") for bits in (4, 8, None)},
    **{f"qwen3_30b_b{batch}_{name}_int8": _dense(batch, k, n, 8)
       for batch in (1, 16, 64) for name, k, n in (("qkv", 2048, 5120), ("o", 4096, 2048), ("lm_head", 2048, 151936))},
    "gpt_oss_20b_b16_down_int4": GroupedMatmulSpec(
        m=64, k=2880, n=2880, num_experts=32, top_k=4, bits=4, group_size=32, scale_dtype="bfloat16"),
    "olmoe_b8_gate_up_int8": GroupedMatmulSpec(
        m=64, k=2048, n=2048, num_experts=64, top_k=8, bits=8, group_size=128, glu=True),
}
