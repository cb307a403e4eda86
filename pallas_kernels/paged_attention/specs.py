"""Named shapes of `paged_attention` that feed tests and benchmarks."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionSpec:
    """`batch` sequences of `kv_len` tokens (`ragged`: spread evenly from 1 to `kv_len`), `q_len` queries each."""

    batch: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int
    page_size: int = 128
    ragged: bool = False

    @property
    def kv_lens(self) -> list[int]:
        """Tokens of each sequence, at least `q_len`."""
        if not self.ragged or self.batch == 1:
            return [self.kv_len] * self.batch
        step = (self.kv_len - 1) / (self.batch - 1)
        return [max(self.q_len, round(1 + i * step)) for i in range(self.batch)]


def _qwen3_30b(batch: int, kv_len: int, ragged: bool = False) -> PagedAttentionSpec:
    return PagedAttentionSpec(batch=batch, q_len=1, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=kv_len, ragged=ragged)


SPECS = {
    "smollm2_135m_512": PagedAttentionSpec(
        batch=1, q_len=1, num_heads=9, num_kv_heads=3, head_dim=64, kv_len=512),
    "qwen3_30b_32k": _qwen3_30b(16, 32768),
    "qwen3_30b_32k_ragged": _qwen3_30b(16, 32768, ragged=True),
    "qwen3_30b_b64_32k": _qwen3_30b(64, 32768),
    "qwen3_30b_b1_128k": _qwen3_30b(1, 131072),
    "gpt_oss_20b_8k": PagedAttentionSpec(
        batch=16, q_len=1, num_heads=64, num_kv_heads=8, head_dim=64, kv_len=8192),
    "prefill_piece_4k": PagedAttentionSpec(
        batch=1, q_len=128, num_heads=32, num_kv_heads=4, head_dim=128, kv_len=4096),
}
