"""What there is without our kernels, timed in the same run (`experiments.kernels`)."""
from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from pallas_kernels import bench, bench_cases
from pallas_kernels.grouped_matmul.specs import GroupedMatmulSpec
from pallas_kernels.paged_attention.specs import PagedAttentionSpec


def measure(op: str, spec, working_set_bytes: int, timing: dict) -> dict:
    """`Samples.summary`, implementation and bytes_moved for one named shape of `op`; or the reason why there is nothing."""
    if op == "paged_attention":
        return sdpa_baseline(spec, working_set_bytes, timing)
    if op == "grouped_matmul":
        return ragged_dot_baseline(spec, working_set_bytes, timing)
    return {"reason": f"torch has no {op}"}


def ragged_dot_baseline(spec: GroupedMatmulSpec, working_set_bytes: int, timing: dict) -> dict:
    """Times `lax.ragged_dot` over bfloat16 experts of the same shape, with the same rows of each."""
    case = bench_cases.case("grouped_matmul", dataclasses.replace(spec, bits=None, group_size=None), None,
                            working_set_bytes=working_set_bytes)
    measured = bench.measure(case, "ragged_dot", **timing)
    if measured["status"] != "ok":
        return {"reason": f"lax.ragged_dot {measured['status']}"}
    return {"implementation": "lax.ragged_dot", **measured, "bytes_moved": case.bytes_moved}


def sdpa_baseline(spec: PagedAttentionSpec, working_set_bytes: int, timing: dict) -> dict:
    """Times torch's flash attention over a contiguous bfloat16 cache of the same shape, on the first CUDA device.

    The query heads of a KV head stand as queries, so that keys and values are read once; calls are replayed as a CUDA graph.
    """
    lens = spec.kv_lens()
    if spec.q_len != 1:
        return {"reason": "flash attention masks several queries from the start of the sequence"}
    if lens.min() != lens.max():
        return {"reason": "flash attention takes no length a row"}
    if importlib.util.find_spec("torch") is None:
        return {"reason": "torch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"reason": "torch sees no CUDA device"}
    try:
        return _time_sdpa(torch, spec, working_set_bytes, timing)
    except RuntimeError as error:  # out of memory, or flash cannot serve the shape
        return {"reason": str(error).splitlines()[0]}
    finally:
        torch.cuda.empty_cache()


def _time_sdpa(torch, spec: PagedAttentionSpec, working_set_bytes: int, timing: dict) -> dict:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = spec.num_heads // spec.num_kv_heads
    kv_shape = (spec.batch, spec.num_kv_heads, spec.kv_len, spec.head_dim)
    kv_bytes = 2 * 2 * spec.batch * spec.num_kv_heads * spec.kv_len * spec.head_dim
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(spec.batch, spec.num_kv_heads, group, spec.head_dim, **options)
    turns = [tuple(torch.randn(kv_shape, **options) for _ in "kv") for _ in range(max(1, -(-working_set_bytes // kv_bytes)))]
    graphs: dict[int, Any] = {}

    def attend(calls: int) -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.inference_mode():
            for i in range(calls):
                torch.nn.functional.scaled_dot_product_attention(q, *turns[i % len(turns)])

    def run(calls: int) -> None:
        if calls not in graphs:
            attend(2)
            torch.cuda.synchronize()
            graphs[calls] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[calls]):
                attend(calls)
        graphs[calls].replay()
        torch.cuda.synchronize()

    bytes_moved = kv_bytes + 2 * q.numel() * 2
    summary = bench.sample(run, **timing).summary(bytes_moved)
    return {"implementation": "torch SDPA flash", **summary, "bytes_moved": bytes_moved}
