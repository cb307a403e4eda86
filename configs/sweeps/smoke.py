"""Smoke test of the sweep: five cache formats of the shipped MoE on a little text.

One window of 512 tokens of each text says nothing reliable about quality. It shows that points, tables, plots and the report come
out. Commonly overridden: --checkpoint, --text, --context, --windows. Expected: some minutes on 2 CPU cores.
"""
from experiments.grid import Point, chain, param, prod, zipped

EXPERIMENT = "quality"


def points() -> list[Point]:
    common = [{"quality.context": 512, "quality.windows": 1, "quality.sample_tokens": 4}]
    plain = zipped(param("quality.k_bits", [[4], [3], [2]]), param("quality.v_bits", [[4], [2], [2]]))
    sinks = prod(param("quality.k_bits", [[3], [2]]), param("quality.v_bits", [[2]]), param("CacheOptions.sink_tokens", [4]))
    return prod(common, chain(plain, sinks))
