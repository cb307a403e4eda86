"""Compiles the TPU kernels for real chips on a machine without one.

  make aot-tpu      (one point of each kind, every chip; part of `make test`)
  make test-aot     (every point that is advertised)
  .venv-aot-tpu/bin/python -m tests.aot_tpu --all v6e k3v4   (points whose name contains one of these)

A point that does not compile fails the run, and so does one that is refused; the compiler checks that what a kernel keeps in VMEM
fits. Needs an environment of its own (`requirements-aot-tpu.txt`): with libtpu installed, jax elsewhere looks for a TPU. One
process: libtpu allows no second one.
"""
from __future__ import annotations

import dataclasses
import itertools
import os
import sys

from tests import aot
from tests.aot import BITS, EVERYTHING, HEAD_DIMS, fmt

# The smallest slice that each generation comes in.
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclasses.dataclass(frozen=True)
class TpuPoint(aot.Point):
    """One advertised call of `paged_attention` on one chip."""

    chip: str = "v5e"

    layout, implementation = "tpu", "mosaic_tpu"
    batch = 300  # so many that the compiler does not put small operands into VMEM, where they would not count as the kernel's

    @property
    def name(self) -> str:
        return f"{self.chip} {super().name}"


@dataclasses.dataclass(frozen=True)
class TpuClosePoint(aot.ClosePoint):
    """One advertised call of `close_page` on one chip."""

    chip: str = "v5e"

    layout, implementation = "tpu", "mosaic_tpu"

    @property
    def name(self) -> str:
        return f"{self.chip} {super().name}"


def few_points() -> list[TpuPoint | TpuClosePoint]:
    """Every width of codes, every head_dim and every option once."""
    return [
        TpuPoint(fmt(2, 3)), TpuPoint(fmt(3, 16, sink_tokens=70), 64, 4, 4, EVERYTHING),
        TpuPoint(fmt(4, 8, outlier_channels=16, outlier_bits=8), 256, 7, kv_heads=1, q_dtype="float32"),
        TpuPoint(fmt(16, 2, open_pages=2), kv_heads=3, group=1),
        TpuClosePoint(fmt(3, 4, outlier_channels=16, outlier_bits=8), 64), TpuClosePoint(fmt(2, 16)),
        TpuClosePoint(fmt(16, 8), 256),
    ]


def all_points() -> list[TpuPoint | TpuClosePoint]:
    """Keys, promoted channels and values share no code: every kind of each, but not every combination at every head_dim."""
    out = [TpuPoint(fmt(k, v)) for k, v in itertools.product(BITS, BITS)]
    out += [TpuPoint(fmt(k, v), head_dim) for head_dim in (64, 256) for k, v in zip(BITS, (3, 4, 2, 16, 8))]
    out += [TpuPoint(fmt(k, 2, outlier_channels=count, outlier_bits=bits), head_dim)
            for head_dim, (k, count, bits) in itertools.product(HEAD_DIMS, ((2, 16, 4), (3, 16, 8), (4, 48, 16)))]
    out += [TpuPoint(fmt(4, 4), group=group) for group in (1, 3, 13, 16, 128)]
    out += [TpuPoint(fmt(4, 2), group=4, kv_heads=kv_heads) for kv_heads in (1, 3, 4, 8, 16)]
    out += [TpuPoint(fmt(2, 2, outlier_channels=16, outlier_bits=4, sink_tokens=64, open_pages=2), head_dim)
            for head_dim in HEAD_DIMS]
    # Nearly all the VMEM that there is.
    out += [TpuPoint(fmt(2, 2), 256, 1, kv_heads=32), TpuPoint(fmt(2, 2, sink_tokens=100), 256, 32, 4, EVERYTHING, kv_heads=8)]
    out += [TpuPoint(fmt(k, v, sink_tokens=sinks), head_dim, 4, 4, EVERYTHING, q_dtype=q_dtype)
            for head_dim, (k, v, sinks, q_dtype) in itertools.product(
                HEAD_DIMS, ((2, 2, 4, "bfloat16"), (3, 4, 70, "float32"), (16, 16, 4, "bfloat16")))]
    promoted = ((0, 16), (16, 16), (16, 16), (32, 16), (0, 16))
    out += [TpuClosePoint(fmt(k, v, outlier_channels=count, outlier_bits=bits), head_dim)
            for head_dim in HEAD_DIMS for k, v, (count, bits) in zip(BITS, (4, 8, 16, 2, 3), promoted)]
    out += [TpuClosePoint(fmt(2, 3, outlier_channels=16, outlier_bits=bits), head_dim) for head_dim in HEAD_DIMS for bits in (4, 8)]
    return out


def compile_point(point: TpuPoint | TpuClosePoint) -> aot.Result:
    return aot.compile_point(point, topology_name=CHIPS[point.chip], platform="tpu")


def main(names: list[str]) -> int:
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
    few = few_points() if "--all" not in names else [*few_points(), *all_points()]
    points = [dataclasses.replace(point, chip=chip) for chip in CHIPS for point in few]
    chosen = aot.chosen(points, [name for name in names if name != "--all"])
    return aot.report(map(compile_point, chosen), "TPU")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
