"""Named shapes of `close_page` that feed tests and benchmarks."""
from __future__ import annotations

import dataclasses

from pallas_kernels.kv_format import KVFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosePageSpec:
    """`batch` pages of `num_kv_heads` heads of `head_dim` channels are closed at once."""

    batch: int
    num_kv_heads: int
    head_dim: int
    kv_format: KVFormat


SPECS = {
    "one_slot_k2v2": ClosePageSpec(batch=1, num_kv_heads=3, head_dim=64, kv_format=KVFormat(k_bits=2, v_bits=2)),
    "batch_k4v2": ClosePageSpec(batch=8, num_kv_heads=4, head_dim=128, kv_format=KVFormat(k_bits=4, v_bits=2)),
    # What the 16 rows of a batch close when they fill their pages in the same step.
    "qwen3_30b_b16_k2v2": ClosePageSpec(batch=16, num_kv_heads=4, head_dim=128, kv_format=KVFormat(k_bits=2, v_bits=2)),
    "outliers_k2v3": ClosePageSpec(
        batch=2, num_kv_heads=2, head_dim=64,
        kv_format=KVFormat(k_bits=2, v_bits=3, outlier_channels=16, sink_tokens=4, k_range="clipped")),
    # All pages of a burst of prompts: inputs far larger than a GPU's L2.
    "burst_k2v2": ClosePageSpec(batch=1024, num_kv_heads=4, head_dim=128, kv_format=KVFormat(k_bits=2, v_bits=2)),
}
