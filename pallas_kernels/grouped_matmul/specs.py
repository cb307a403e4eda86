"""Named shapes of `grouped_matmul` that feed tests and benchmarks: m rows, E experts of [k, n]."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulSpec:
    """`bits` is None for plain weights, else 4 or 8 with groups of `group_size` along k."""

    m: int
    k: int
    n: int
    num_experts: int
    bits: int | None = None
    group_size: int | None = None


SPECS = {
    "tiny_decode": GroupedMatmulSpec(m=2, k=256, n=512, num_experts=8),
    "tiny_prefill": GroupedMatmulSpec(m=1024, k=256, n=512, num_experts=8),
    "qwen3_30b_decode": GroupedMatmulSpec(m=128, k=2048, n=768, num_experts=128, bits=4, group_size=128),
    "gpt_oss_20b_decode": GroupedMatmulSpec(m=64, k=2880, n=2880, num_experts=32, bits=4, group_size=32),
    "olmoe_decode": GroupedMatmulSpec(m=64, k=2048, n=1024, num_experts=64, bits=8, group_size=128),
    "mixtral_prefill": GroupedMatmulSpec(m=4096, k=4096, n=14336, num_experts=8),
}
