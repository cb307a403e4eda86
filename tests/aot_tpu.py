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
from unittest import mock

from tests import aot
from tests.aot import BITS, EVERYTHING, HEAD_DIMS, fmt, weights
from tests.aot_step import StepPoint

# The smallest slice that each generation comes in.
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclasses.dataclass(frozen=True)
class _OnChip:
    """A point on one chip."""

    chip: str = "v5e"

    @property
    def name(self) -> str:
        return f"{self.chip} {super().name}"  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class TpuPoint(_OnChip, aot.Point):
    """One advertised call of `paged_attention`."""

    layout, implementation = "tpu", "mosaic_tpu"
    batch = 300  # so many that the compiler does not put small operands into VMEM, where they would not count as the kernel's


@dataclasses.dataclass(frozen=True)
class TpuClosePoint(_OnChip, aot.ClosePoint):
    """One advertised call of `close_page`."""

    layout, implementation = "tpu", "mosaic_tpu"


@dataclasses.dataclass(frozen=True)
class TpuMatmulPoint(_OnChip, aot.MatmulPoint):
    """One advertised call of `grouped_matmul`."""

    implementation = "mosaic_tpu"

    def packed(self, array):
        import jax.numpy as jnp

        from pallas_kernels.tpu_weights import TpuWeightLayout, TpuWeights

        layout = TpuWeightLayout(**dict(self.weights))
        return TpuWeights(array((self.num_experts, layout.rows, layout.columns), jnp.uint32), layout)


@dataclasses.dataclass(frozen=True)
class TpuRouterPoint(_OnChip, aot.RouterPoint):
    """One advertised call of `fused_router`."""

    implementation = "mosaic_tpu"


@dataclasses.dataclass(frozen=True)
class TpuStepPoint(_OnChip, StepPoint):
    """The decode loop of a model on one chip."""

    layout = "tpu"

    def lower(self, array: aot.Array):
        with mock.patch("jax.default_backend", lambda: "tpu"):  # what decides which kernels run, and how experts are packed
            return super().lower(array)

    def _abstract(self):
        with mock.patch("jax.default_backend", lambda: "tpu"):
            return super()._abstract()


LEAN = fmt(3, 2, sink_tokens=64, open_pages=2)

AnyPoint = TpuPoint | TpuClosePoint | TpuMatmulPoint | TpuRouterPoint | TpuStepPoint


def few_points() -> list[AnyPoint]:
    """Every width of codes, every head_dim and every option once."""
    return [
        TpuPoint(fmt(2, 3)), TpuPoint(fmt(3, 16, sink_tokens=70), 64, 4, 4, EVERYTHING),
        TpuPoint(fmt(4, 8, outlier_channels=16, outlier_bits=8), 256, 7, kv_heads=1, q_dtype="float32"),
        TpuPoint(fmt(16, 2, open_pages=2), kv_heads=3, group=1),
        TpuClosePoint(fmt(3, 4, outlier_channels=16, outlier_bits=8), 64), TpuClosePoint(fmt(2, 16)),
        TpuClosePoint(fmt(16, 8), 256),
        TpuMatmulPoint(weights(4, 2048, 1536, 128), glu=True), TpuMatmulPoint(weights(3, 704, 2880, 32, has_zero=True), 64, 32),
        TpuMatmulPoint(weights(8, 768, 2048, 64, "bfloat16", True), bias=True),
        TpuMatmulPoint(weights(16, 2880, 2880, 2880), 8, 32, out_dtype="float32"),
        TpuRouterPoint("qwen3_30b_decode", biases=True), TpuRouterPoint("deepseek_v3_decode", 1, "float32"),
        TpuStepPoint("qwen3_30b_a3b", LEAN, num_layers=1),
    ]


def all_points() -> list[AnyPoint]:
    return [*_attention_points(), *_close_page_points(), *_matmul_points(), *_router_points(), *_step_points()]


def _attention_points() -> list[TpuPoint]:
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
    return out


def _close_page_points() -> list[TpuClosePoint]:
    promoted = ((0, 16), (16, 16), (16, 16), (32, 16), (0, 16))
    out = [TpuClosePoint(fmt(k, v, outlier_channels=count, outlier_bits=bits), head_dim)
           for head_dim in HEAD_DIMS for k, v, (count, bits) in zip(BITS, (4, 8, 16, 2, 3), promoted)]
    out += [TpuClosePoint(fmt(2, 3, outlier_channels=16, outlier_bits=bits), head_dim) for head_dim in HEAD_DIMS for bits in (4, 8)]
    return out


def _matmul_points() -> list[TpuMatmulPoint]:
    out = [TpuMatmulPoint(weights(bits, 2048, 1536, group, scale, zero), glu=not zero)
           for bits, group, (scale, zero) in itertools.product(
               (2, 3, 4, 8), (32, 64, 128, 2048), (("float32", False), ("bfloat16", True)))]
    out += [TpuMatmulPoint(weights(16, k, 2048, k), bias=True, out_dtype="float32") for k in (768, 2880)]
    out += [TpuMatmulPoint(weights(4, k, n, 32, has_zero=True), 64, 32, bias=True)
            for k, n in ((704, 2880), (2880, 704), (1408, 2048), (768, 2048), (2880, 2880), (32, 32), (96, 64))]
    out += [TpuMatmulPoint(weights(4, 2048, 1536, 128), rows, glu=True, bias=True) for rows in (1, 8, 9, 17, 64, 512, 4096)]
    return out


def _step_points() -> list[TpuStepPoint]:
    """Two layers: deeper models repeat them."""
    return [TpuStepPoint(model, LEAN, num_layers=2) for model in ("qwen3_30b_a3b", "mixtral_8x7b", "olmoe_1b_7b")]


def _router_points() -> list[TpuRouterPoint]:
    shapes = ("mixtral_decode", "olmoe_decode", "qwen3_30b_decode", "gpt_oss_20b_decode", "deepseek_v3_decode")
    return [TpuRouterPoint(shape, tokens, dtype, dtype == "float32")
            for shape in shapes for tokens, dtype in ((1, "bfloat16"), (64, "float32"), (4096, "bfloat16"))]


def compile_point(point: AnyPoint) -> aot.Result:
    return aot.compile_point(point, topology_name=CHIPS[point.chip], platform="tpu")


def main(names: list[str]) -> int:
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
    few = few_points() if "--all" not in names else [*few_points(), *all_points()]
    points = [dataclasses.replace(point, chip=chip) for chip in CHIPS for point in few]
    chosen = aot.chosen(points, [name for name in names if name != "--all"])
    return aot.report(map(compile_point, chosen), "TPU")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
