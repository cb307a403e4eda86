"""Compiles the Hopper kernels for an H200 on a machine without a GPU, at every point that is advertised.

  make aot          (every point; part of `make test`)
  .venv-aot/bin/python -m tests.aot_hopper close_page k3v4  (points whose name contains one of these)

A point that does not compile fails the run, and so does one that is refused. Needs an environment of its own
(`requirements-aot.txt`): with the CUDA plugin installed, jax elsewhere complains that there is no GPU.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import sys
import types
from unittest import mock

from tests import aot
from tests.aot import BITS, EVERYTHING, HEAD_DIMS, fmt, weights
from tests.aot_step import StepPoint

# What the compiler must know of the target. Sizes: NVIDIA H100/H200 data sheets and the CUDA programming guide, capability 9.0.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


class HopperPoint(aot.Point):
    layout, implementation = "mma_sm90", "mosaic_gpu"


class HopperClosePoint(aot.ClosePoint):
    layout, implementation = "mma_sm90", "mosaic_gpu"


class HopperMatmulPoint(aot.MatmulPoint):
    implementation = "mosaic_gpu"

    def packed(self, array):
        import jax.numpy as jnp

        from pallas_kernels.packed_weights import PackedWeights, WeightLayout

        layout = WeightLayout(**dict(self.weights))
        return PackedWeights(array((self.num_experts, layout.blocks, layout.chunks, layout.words), jnp.uint32), layout)


@dataclasses.dataclass(frozen=True)
class HopperStepPoint(StepPoint):
    """The decode loop of a model."""

    layout = "mma_sm90"
    kernels = ("paged_attention", "close_page", "grouped_matmul")

    def lower(self, array: aot.Array):
        with _on_hopper():
            return super().lower(array)

    def _abstract(self):
        with _on_hopper():
            return super()._abstract()


@contextlib.contextmanager
def _on_hopper():
    """What decides which kernels run, and how weights are packed, sees the target."""
    with (mock.patch("jax.default_backend", lambda: "gpu"),
          mock.patch("jax.devices", lambda *args: [types.SimpleNamespace(compute_capability="9.0")])):
        yield


def points() -> list[aot.Lowers]:
    """Of steps two layers: deeper models repeat them."""
    steps = [HopperStepPoint("qwen3_30b_a3b", fmt(3, 3), num_layers=2, dense_weights="int8"),
             HopperStepPoint("mixtral_8x7b", fmt(2, 2, sink_tokens=64, open_pages=2), num_layers=2),
             HopperStepPoint("olmoe_1b_7b", fmt(4, 4), num_layers=2, expert_weights="packed_bf16", dense_weights="packed_bf16")]
    return [*attention_points(), *close_page_points(), *grouped_matmul_points(), *steps]


def attention_points() -> list[aot.Lowers]:
    out = [HopperPoint(fmt(k, v), head_dim) for head_dim, k, v in itertools.product(HEAD_DIMS, BITS, BITS)]
    out += [HopperPoint(fmt(k, 2, outlier_channels=16, outlier_bits=bits), head_dim)
            for head_dim, k, bits in itertools.product(HEAD_DIMS, (2, 3), (4, 8, 16))]
    out += [HopperPoint(fmt(4, 4), 128, group) for group in (1, 3, 7, 13, 16)]
    windows = {"sink_tokens": 64, "open_pages": 2}
    out += [HopperPoint(fmt(2, 2, outlier_channels=16, outlier_bits=4, **windows), head_dim) for head_dim in HEAD_DIMS]
    out += [HopperPoint(fmt(k, v, sink_tokens=sinks), head_dim, 4, 4, EVERYTHING)
            for head_dim, (k, v, sinks) in itertools.product(HEAD_DIMS, ((2, 2, 4), (3, 4, 70), (16, 16, 4)))]
    return out


def close_page_points() -> list[aot.Lowers]:
    """Keys, promoted channels and values share no code: every kind of each, but not every combination of them.

    Key planes are loops over channels, the same program for every head_dim; values are unrolled over them.
    """
    keys = [(k, 0, 16) for k in BITS]
    keys += [(2, 16, 4), (3, 16, 8), (4, 16, 16), (8, 16, 16), (2, 32, 8), (3, 32, 4), (4, 32, 16), (8, 32, 16)]
    few = [(2, 0, 16), (3, 16, 8), (16, 0, 16), (4, 32, 16), (16, 0, 16)]
    cases = [(128, k, v) for k, v in zip(keys, itertools.cycle(BITS))]
    cases += [(head_dim, k, v) for head_dim in (64, 256) for k, v in zip(few, BITS)]
    return [HopperClosePoint(fmt(k, v, outlier_channels=count, outlier_bits=bits), head_dim)
            for head_dim, (k, count, bits), v in cases]


def grouped_matmul_points() -> list[aot.Lowers]:
    out = [HopperMatmulPoint(weights(bits, 2048, 1536, group, scale, zero), glu=not zero)
           for bits, group, (scale, zero) in itertools.product(
               (2, 3, 4, 8), (32, 64, 128, 2048), (("float32", False), ("bfloat16", True)))]
    out += [HopperMatmulPoint(weights(16, k, 2048, k), bias=True, out_dtype="float32") for k in (768, 2880)]
    out += [HopperMatmulPoint(weights(4, k, n, 32), 64, 32, bias=True)
            for k, n in ((704, 2880), (2880, 704), (1408, 2048), (768, 2048), (2880, 2880), (32, 32), (96, 64))]
    out += [HopperMatmulPoint(weights(4, 2048, 1536, 128), rows, glu=True, bias=True) for rows in (1, 8, 9, 17, 64, 512)]
    out += [HopperMatmulPoint(weights(bits, k, n, 128), rows, 1) for bits in (4, 8) for k, n in ((2048, 5120), (4096, 2048))
            for rows in (1, 16)]  # warpgroups share items
    return out


def compile_point(point: aot.Lowers) -> aot.Result:
    return aot.compile_point(point, topology_name="", platform="cuda", target_config=TARGET, topology="1x1x1")


def _use_packaged_assembler() -> None:
    """ptxas of the nvidia-cuda-nvcc wheel, unless one is on PATH first."""
    for path in sys.path:
        for folder in pathlib.Path(path).glob("nvidia/cu13/bin"):
            os.environ["PATH"] += os.pathsep + str(folder)


def main(names: list[str]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    _use_packaged_assembler()
    with concurrent.futures.ProcessPoolExecutor(
            min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        return aot.report(pool.map(compile_point, aot.chosen(points(), names)), "an H200")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
