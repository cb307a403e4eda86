"""Kernels for decoding Mixture-of-Experts models with a low-bit paged KV cache, and the formats they share."""
from pallas_kernels.close_page import close_page, fake_quantize, open_page
from pallas_kernels.fused_router import RouterRule, Routing, fused_router
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kv_format import GroupFormat, KVFormat
from pallas_kernels.packed_weights import PackedWeights, interleave, pack_weights, unpack_weights
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.qarray import QArray
from pallas_kernels.tpu_weights import TpuWeights, pack_tpu_weights, unpack_tpu_weights

__all__ = [
    "GroupFormat", "KVFormat", "PackedWeights", "PageLayout", "QArray", "RouterRule", "Routing", "TpuWeights", "close_page",
    "fake_quantize", "fused_router", "grouped_matmul", "interleave", "open_page", "pack_tpu_weights", "pack_weights",
    "paged_attention", "unpack_tpu_weights", "unpack_weights",
]
