"""Named shapes of `paged_attention` that feed tests and benchmarks."""
from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionSpec:
    """`batch` sequences, `q_len` queries each; all of `kv_len` tokens, or, when `ragged`, spread evenly from 1 to `kv_len`."""

    batch: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int
    page_size: int = 128
    ragged: bool = False

    def kv_lens(self) -> np.ndarray:
        """Tokens of each row, int32 [batch], longest first."""
        shortest = 1 if self.ragged else self.kv_len
        return np.linspace(self.kv_len, shortest, self.batch).round().astype(np.int32)


def _qwen3_30b(batch: int, kv_len: int, *, ragged: bool = False) -> PagedAttentionSpec:
    return PagedAttentionSpec(
        batch=batch, q_len=1, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=kv_len, ragged=ragged)


SPECS = {
    "smollm2_135m_512": PagedAttentionSpec(
        batch=1, q_len=1, num_heads=9, num_kv_heads=3, head_dim=64, kv_len=512),
    "qwen3_30b_32k": _qwen3_30b(16, 32768),
    "qwen3_30b_32k_ragged": _qwen3_30b(16, 32768, ragged=True),
    "qwen3_30b_b64_32k": _qwen3_30b(64, 32768),
    "qwen3_30b_b64_32k_ragged": _qwen3_30b(64, 32768, ragged=True),
    "qwen3_30b_b1_128k": _qwen3_30b(1, 131072),
    # One row has one length: here one that fills neither its open page nor a whole split.
    "qwen3_30b_b1_128k_ragged": _qwen3_30b(1, 131072 - 1237),
    "gpt_oss_20b_8k": PagedAttentionSpec(
        batch=16, q_len=1, num_heads=64, num_kv_heads=8, head_dim=64, kv_len=8192),
    "prefill_piece_4k": PagedAttentionSpec(
        batch=1, q_len=128, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=4096),
}
