"""The decode step of Qwen3-30B-A3B by bits: KV cache of 16, 8, 4, 3 and 2 bits, weights of 16, 8 and 4, at three sizes.

Random weights and a cache full of random pages; greedy, 512 steps in segments of 16. "int4" has experts in 4 bits and everything
else in 8; "int8" has all in 8; "bf16" all in bfloat16, packed for the same kernels. The embedding stays in bfloat16, the router in
float32. Keys and values have the same number of bits. Every point has a process of its own, so that peak_device_gb is its own; a
point that does not fit is recorded as refused, with what it would need.

Commonly overridden: --checkpoint (configs/models), --routing=zipf:1.0 (a random router chooses nearly evenly), --max_tokens.
Expected on one H200: one to two minutes a point, 45 points.
"""
from experiments.grid import Point, prod

EXPERIMENT = "decode"
PROCESS_PER_POINT = True
REPORT_X = "peak_device_gb"
REPORT_Y = ["tpot_ms_p50", "tpot_ms_p99", "effective_bits", "read_weights_gb", "read_kv_gb"]


def weights(experts: str, dense: str) -> Point:
    return {"decode.expert_weights": experts, "decode.dense_weights": dense}


def points() -> list[Point]:
    common = [{"decode.weights": "random", "decode.checkpoint": "configs/models/qwen3_30b_a3b.json",
               "SamplingParams.max_tokens": 512}]
    sizes = [{"decode.max_batch": batch, "decode.context": context} for batch, context in ((1, 4096), (16, 32768), (32, 32768))]
    cache = [{"KVFormat.k_bits": bits, "KVFormat.v_bits": bits} for bits in (16, 8, 4, 3, 2)]
    kept = [weights("packed_bf16", "packed_bf16"), weights("int8", "int8"), weights("int4", "int8")]
    return prod(common, sizes, kept, cache)
