"""Compiles the Hopper kernels for an H200 on a machine without a GPU, at every point that is advertised.

  make aot          (every point; part of `make test`)
  .venv-aot/bin/python -m tests.aot_hopper close_page k3v4  (points whose name contains one of these)

A point that does not compile fails the run, and so does one that is refused. Needs an environment of its own
(`requirements-aot.txt`): with the CUDA plugin installed, jax elsewhere complains that there is no GPU.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
import sys
import time

BITS = (2, 3, 4, 8, 16)
HEAD_DIMS = (64, 128, 256)

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


@dataclasses.dataclass(frozen=True)
class Point:
    """One advertised call of `paged_attention`."""

    fmt: tuple[tuple[str, object], ...]
    head_dim: int = 128
    group: int = 8
    num_queries: int = 1
    options: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        return " ".join(["paged_attention", self.kv_format().name, f"H={self.head_dim} G={self.group} T={self.num_queries}",
                         *(f"{k}={v}" for k, v in self.options)])

    def kv_format(self):
        from pallas_kernels import KVFormat

        return KVFormat(layout="mma_sm90", **dict(self.fmt))

    def lower(self, array):
        """`array(shape, dtype)` makes an argument."""
        return _lower_attention(self, array)


@dataclasses.dataclass(frozen=True)
class ClosePoint(Point):
    """One advertised call of `close_page`."""

    @property
    def name(self) -> str:
        return f"close_page {self.kv_format().name} H={self.head_dim}"

    def lower(self, array):
        return _lower_close_page(self, array)


@dataclasses.dataclass(frozen=True)
class MatmulPoint:
    """One advertised call of `grouped_matmul`: `weights` are fields of `WeightLayout`."""

    weights: tuple[tuple[str, object], ...]
    rows: int = 128
    num_experts: int = 128
    glu: bool = False
    bias: bool = False
    out_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        fields = " ".join(f"{k}={v}" for k, v in self.weights)
        extra = [name for name in ("glu", "bias") if getattr(self, name)]
        return " ".join(["grouped_matmul", fields, f"M={self.rows} E={self.num_experts}", *extra, self.out_dtype])

    def lower(self, array):
        """`array(shape, dtype)` makes an argument."""
        return _lower_grouped_matmul(self, array)


def points() -> list[Point | MatmulPoint]:
    return [*attention_points(), *close_page_points(), *grouped_matmul_points()]


def _fmt(k_bits: int, v_bits: int, **others) -> tuple[tuple[str, object], ...]:
    return tuple({"k_bits": k_bits, "v_bits": v_bits, **others}.items())


def attention_points() -> list[Point]:
    out = [Point(_fmt(k, v), head_dim) for head_dim, k, v in itertools.product(HEAD_DIMS, BITS, BITS)]
    out += [Point(_fmt(k, 2, outlier_channels=16, outlier_bits=bits), head_dim)
            for head_dim, k, bits in itertools.product(HEAD_DIMS, (2, 3), (4, 8, 16))]
    out += [Point(_fmt(4, 4), 128, group) for group in (1, 3, 7, 13, 16)]
    windows = {"sink_tokens": 64, "open_pages": 2}
    out += [Point(_fmt(2, 2, outlier_channels=16, outlier_bits=4, **windows), head_dim) for head_dim in HEAD_DIMS]
    everything = (("sliding_window", 4096), ("logit_softcap", 30.0), ("attention_sinks", True))
    out += [Point(_fmt(k, v, sink_tokens=sinks), head_dim, 4, 4, everything)
            for head_dim, (k, v, sinks) in itertools.product(HEAD_DIMS, ((2, 2, 4), (3, 4, 70), (16, 16, 4)))]
    return out


def close_page_points() -> list[Point]:
    """Keys, promoted channels and values share no code: every kind of each, but not every combination of them.

    Key planes are loops over channels, the same program for every head_dim; values are unrolled over them.
    """
    keys = [(k, 0, 16) for k in BITS]
    keys += [(2, 16, 4), (3, 16, 8), (4, 16, 16), (8, 16, 16), (2, 32, 8), (3, 32, 4), (4, 32, 16), (8, 32, 16)]
    few = [(2, 0, 16), (3, 16, 8), (16, 0, 16), (4, 32, 16), (16, 0, 16)]
    cases = [(128, k, v) for k, v in zip(keys, itertools.cycle(BITS))]
    cases += [(head_dim, k, v) for head_dim in (64, 256) for k, v in zip(few, BITS)]
    return [ClosePoint(_fmt(k, v, outlier_channels=count, outlier_bits=bits), head_dim) for head_dim, (k, count, bits), v in cases]


def grouped_matmul_points() -> list[MatmulPoint]:
    def weights(bits, k, n, group_size, scale_dtype="float32", has_zero=False):
        return tuple({"bits": bits, "k": k, "n": n, "group_size": group_size, "scale_dtype": scale_dtype,
                      "has_zero": has_zero}.items())

    out = [MatmulPoint(weights(bits, 2048, 1536, group, scale, zero), glu=not zero)
           for bits, group, (scale, zero) in itertools.product(
               (2, 3, 4, 8), (32, 64, 128, 2048), (("float32", False), ("bfloat16", True)))]
    out += [MatmulPoint(weights(16, k, 2048, k), bias=True, out_dtype="float32") for k in (768, 2880)]
    out += [MatmulPoint(weights(4, k, n, 32), 64, 32, bias=True)
            for k, n in ((704, 2880), (2880, 704), (1408, 2048), (768, 2048), (2880, 2880), (32, 32), (96, 64))]
    out += [MatmulPoint(weights(4, 2048, 1536, 128), rows, glu=True, bias=True) for rows in (1, 8, 9, 17, 64, 512)]
    return out


def compile_point(point: Point | MatmulPoint) -> tuple[str, float, str]:
    """(name, seconds, what went wrong or nothing)."""
    start, error = time.perf_counter(), ""
    try:
        _compile(point)
    except Exception as e:  # whatever it is, it is reported with the point's name
        error = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300]}"
    return point.name, time.perf_counter() - start, error


def _compile(point: Point | MatmulPoint) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc("", platform="cuda", target_config=TARGET, topology="1x1x1")
    replicated = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
    point.lower(lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)).compile()


def _lower_attention(point: Point, array):
    import jax
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import mosaic_gpu

    batch, kv_heads, columns, fmt = 3, 2, 40, point.kv_format()
    heads = kv_heads * point.group
    tokens = array((batch, kv_heads, fmt.open_tokens, point.head_dim), jnp.bfloat16)
    args = [
        array((batch, point.num_queries, heads, point.head_dim), jnp.bfloat16),
        array((batch * columns, kv_heads, fmt.page_layout(point.head_dim).words), jnp.uint32), tokens, tokens,
        array((batch, columns), jnp.int32), array((batch,), jnp.int32), array((batch,), jnp.int32)]
    arrays = {}
    if fmt.sink_tokens:
        arrays = {name: array((batch, kv_heads, fmt.sink_tokens, point.head_dim), jnp.bfloat16) for name in ("sink_k", "sink_v")}
    options = {"sliding_window": None, "logit_softcap": None, "attention_sinks": None, "sink_k": None, "sink_v": None}
    options |= dict(point.options)
    if options["attention_sinks"]:
        arrays["attention_sinks"] = array((heads,), jnp.float32)

    def step(*args, **arrays):
        return mosaic_gpu.paged_attention(*args, **{**options, **arrays}, kv_format=fmt, sm_scale=point.head_dim**-0.5)

    return jax.jit(step).lower(*args, **arrays)


def _lower_close_page(point: Point, array):
    import jax
    import jax.numpy as jnp

    from pallas_kernels.close_page import mosaic_gpu

    tokens = array((3, 2, 128, point.head_dim), jnp.bfloat16)
    return jax.jit(functools.partial(mosaic_gpu.close_page, kv_format=point.kv_format())).lower(
        tokens, tokens, num_sinks=array((3,), jnp.int32))


def _lower_grouped_matmul(point: MatmulPoint, array):
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import mosaic_gpu
    from pallas_kernels.packed_weights import PackedWeights, WeightLayout

    layout = WeightLayout(**dict(point.weights))
    w = PackedWeights(array((point.num_experts, layout.blocks, layout.chunks, layout.words), jnp.uint32), layout)
    biases = [array((point.num_experts, layout.n), jnp.float32)] if point.bias else []
    glu = (lambda gate, up: jax.nn.silu(gate) * up) if point.glu else None

    def step(x, w, sizes, *biases):
        return mosaic_gpu.grouped_matmul(
            x, w, sizes, bias=biases[0] if biases else None, glu=glu, preferred_element_type=jnp.dtype(point.out_dtype))

    return jax.jit(step).lower(
        array((point.rows, layout.k), jnp.bfloat16), w, array((point.num_experts,), jnp.int32), *biases)


def _use_packaged_assembler() -> None:
    """ptxas of the nvidia-cuda-nvcc wheel, unless one is on PATH first."""
    for path in sys.path:
        for folder in pathlib.Path(path).glob("nvidia/cu13/bin"):
            os.environ["PATH"] += os.pathsep + str(folder)


def main(names: list[str]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    _use_packaged_assembler()
    chosen = [p for p in points() if not names or any(name in p.name for name in names)]
    if not chosen:
        print(f"no point's name contains one of {names}; names look like {points()[0].name!r}", file=sys.stderr)
        return 2
    failed = 0
    with concurrent.futures.ProcessPoolExecutor(
            min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, seconds, error in pool.map(compile_point, chosen):
            failed += bool(error)
            print(f"{'FAILED ' + error if error else 'ok'}  {name}  {seconds:.1f} s", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} points compile for an H200")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
