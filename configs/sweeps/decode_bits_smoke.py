"""Smoke test of the sweep of decode steps by bits: the shipped model's config with random weights, and a point that does not fit.

Times of so small a model on a CPU say nothing. Expected: about a minute on 2 CPU cores.
"""
from experiments.grid import Point, chain, prod

EXPERIMENT = "decode"
PROCESS_PER_POINT = True
REPORT_X = "peak_process_gb"
REPORT_Y = ["tpot_ms_p50", "effective_bits", "read_weights_gb"]


def points() -> list[Point]:
    common = [{"decode.weights": "random", "decode.checkpoint": "checkpoints/moe_10m", "SamplingParams.max_tokens": 4,
               "decode.steps_per_segment": 2, "decode.routing_steps": 2, "decode.max_batch": 2}]
    kept = [{"decode.expert_weights": "packed_bf16", "KVFormat.k_bits": 16, "KVFormat.v_bits": 16},
            {"decode.expert_weights": "int4", "KVFormat.k_bits": 3, "KVFormat.v_bits": 3}]
    sizes = [{"decode.context": 200}]
    too_large = [kept[0] | {"decode.context": 2**30}]
    return prod(common, chain(prod(kept, sizes), too_large))
