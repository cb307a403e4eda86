"""Named shapes of `paged_attention` that feed tests and benchmarks."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionSpec:
    """`batch` sequences of `kv_len` tokens, `q_len` queries each."""

    batch: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int
    page_size: int = 128


SPECS = {
    "smollm2_135m_512": PagedAttentionSpec(
        batch=1, q_len=1, num_heads=9, num_kv_heads=3, head_dim=64, kv_len=512),
    "qwen3_30b_32k": PagedAttentionSpec(
        batch=16, q_len=1, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=32768),
    "gpt_oss_20b_8k": PagedAttentionSpec(
        batch=16, q_len=1, num_heads=64, num_kv_heads=8, head_dim=64, kv_len=8192),
    "prefill_piece_4k": PagedAttentionSpec(
        batch=1, q_len=128, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=4096),
}
