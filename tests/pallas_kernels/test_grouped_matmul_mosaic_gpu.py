"""The Hopper kernel: on a GPU itself, on CPU in the interpreter with the twins of its tensor-core steps and race detection.

Tests marked `gpu` hold every combination and run on a GPU only: `python -m pytest -m gpu tests/pallas_kernels`.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the only way to forbid copies out of bounds
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_matmul, pack_weights
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu import Tuning
from pallas_kernels.packed_weights import WeightLayout
from pallas_kernels.qarray import quantize
from tests.pallas_kernels.grouped_matmul_cases import ROW_COUNTS, MosaicMatmulCases, Packed, PackedMatmulCases, swiglu

ON_GPU = jax.default_backend() == "gpu"
gpu = pytest.mark.gpu
on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
SMALL = Tuning(token_tiles=2, warpgroups=2, stages=2, blocks=2)


class _Mosaic(MosaicMatmulCases):
    backend, implementation, pack, reads = mosaic_gpu, "mosaic_gpu", pack_weights, "PackedWeights"
    tuning: Tuning | None = None

    def run(self, x, w, group_sizes, **kwargs):
        if ON_GPU and self.tuning is None:
            return super().run(x, w, group_sizes, **kwargs)
        interpret = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return mosaic_gpu.grouped_matmul(
                x, w, jnp.asarray(group_sizes, jnp.int32), tuning=self.tuning or SMALL, interpret=interpret, **kwargs)


@pytest.mark.usefixtures("no_races")
class TestMosaicGpu(_Mosaic):
    @pytest.fixture(autouse=True)
    def copies_stay_inside(self, monkeypatch):
        """A copy from past the end gives zeros in the interpreter. On a GPU it need not: what stands there may be anything."""
        monkeypatch.setattr(gpu_callbacks.AsyncCopyGmemToSmemTask, "out_of_bounds_source_fill", None)

    @pytest.mark.parametrize("tunings", [
        (SMALL, Tuning(1, 1, 1, 1)), (SMALL, Tuning(4, 1, 3, 1)), (SMALL, Tuning(1, 2, 2, 3)),
        (dataclasses.replace(SMALL, shared=True), Tuning(1, 2, 1, 3, shared=True))], ids=str)
    def test_results_do_not_depend_on_the_tuning(self, tunings):
        results = []
        for self.tuning in tunings:
            results.append(self.check(Packed(sizes=(3, 0, 13, 1), rows=18)))
        np.testing.assert_array_equal(*results)

    @pytest.mark.parametrize("k", [384, 1408])  # 3 and 11 chunks of 128 for 8 warps: some have none, others more than one
    def test_warpgroups_that_share_items(self, k):
        self.tuning = Tuning(2, 2, 2, 2, shared=True)
        self.check(Packed(k=k, sizes=(3, 0, 13, 1), rows=20), bias=True, glu=swiglu)
        self.check(Packed(k=k, bits=8, group_size=128, sizes=(9,), rows=9))


@gpu
@on_gpu_only
class TestMosaicGpuWide(_Mosaic):
    """Every combination of what a call can be."""

    @pytest.mark.parametrize("k", [704, 768, 1408])  # 11 chunks of 64, 6 and 11 of 128
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_every_format(self, bits, group_size, symmetric, k):
        if k % group_size == 0:
            scale_dtype = "float32" if symmetric else "bfloat16"
            self.check(Packed(k=k, n=96, bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype))

    @pytest.mark.parametrize("k", [32, 704, 2048, 2880])
    @pytest.mark.parametrize("bits", [4, 16])
    def test_every_length_of_the_contraction(self, bits, k):
        self.check(Packed(k=k, n=96, bits=bits, group_size=32))

    @pytest.mark.parametrize("rows", ROW_COUNTS)
    def test_every_number_of_rows(self, rows):
        rng = np.random.default_rng(rows)
        for experts in (1, 5, 128):  # from all rows on one expert to one expert a row
            sizes = tuple(np.bincount(rng.integers(0, experts, rows), minlength=experts).tolist())
            self.check(Packed(k=256, n=64, bits=8, group_size=128, sizes=sizes, rows=rows))
            self.check(Packed(k=256, n=64, group_size=128, sizes=sizes, rows=rows + 3), bias=True, glu=swiglu)

    @pytest.mark.parametrize("experts", [1, 31, 33, 60, 128, 256, 257])
    def test_every_number_of_experts(self, experts):
        sizes = np.bincount(np.random.default_rng(experts).integers(0, experts, 128), minlength=experts)
        for shifted in (sizes, np.sort(sizes), np.sort(sizes)[::-1]):
            self.check(Packed(k=128, n=32, group_size=32, sizes=tuple(shifted.tolist()), rows=128))

    @pytest.mark.parametrize("rows", [128, 512, 1000])
    def test_qwen3_30b_shapes(self, rows):
        sizes = tuple(np.bincount(np.random.default_rng(rows).integers(0, 16, rows), minlength=16).tolist())
        self.check(Packed(k=2048, n=1536, group_size=128, sizes=sizes, rows=rows), glu=swiglu, out_dtype="bfloat16")
        self.check(Packed(k=768, n=2048, group_size=128, sizes=sizes, rows=rows), out_dtype="float32")

    def test_again_and_again_the_same_bits(self):
        problem = Packed(k=2048, n=768, group_size=128, sizes=(3, 0, 13, 1) * 8, rows=136)
        x, _, packed = problem.make()
        results = [np.asarray(self.run(x, packed, problem.sizes)) for _ in range(20)]
        assert all((r.view(np.uint16) == results[0].view(np.uint16)).all() for r in results)


def test_wrong_kernels_would_be_seen():
    """The error measure is far above the tolerance for a neighbour's scales, a code off by one and the wrong expert."""
    case, problem = PackedMatmulCases(), Packed(rows=18)
    for change in ("scales", "codes", "expert"):
        case.run = lambda x, w, sizes, change=change, **kwargs: _wrong(change, x, problem, sizes, **kwargs)
        with pytest.raises(AssertionError):
            case.check(problem)


def _wrong(change, x, problem, sizes, *, bias, glu, preferred_element_type):
    q = quantize(jnp.asarray(problem.make()[1], jnp.float32), bits=4, group_size=problem.group_size)
    if change == "scales":
        q = dataclasses.replace(q, scale=q.scale.at[:, :, 3].set(q.scale[:, :, 4]))
    elif change == "codes":
        q = dataclasses.replace(q, qvalue=q.qvalue.at[:, 5, :].set(-q.qvalue[:, 5, :]))
    else:
        sizes = (*sizes[1:], sizes[0])
    return grouped_matmul(x, q, jnp.asarray(sizes, jnp.int32), preferred_element_type=preferred_element_type)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_shared_memory_holds_what_the_default_asks_for(bits, group_size):
    for k in (32, 704, 2048):
        layout = WeightLayout(k=k, n=64, bits=bits, group_size=k if k % group_size else group_size)
        for num_experts in (1, 1000):
            tuning = mosaic_gpu.default_tuning(layout, 64, num_experts)
            assert tuning.shared == (num_experts == 1)
            sums = 4 * 32 * 8 * 4 * (tuning.token_tiles if tuning.shared else 1)
            assert tuning.warpgroups * (tuning.stages * (4 * layout.words * 4 + 8) + sums) + 8 <= mosaic_gpu.SMEM_BYTES
            assert tuning.warpgroups * tuning.stages + 1 <= 32 and tuning.stages >= 2


def test_sharing_does_not_depend_on_the_rows():
    """Which would change the order of sums, and with it the bits of a row alone and in a batch."""
    layout = WeightLayout(k=4096, n=2048, bits=8, group_size=128)
    few, many = (mosaic_gpu.default_tuning(layout, rows, 1) for rows in (1, 64))
    assert few.shared and few == dataclasses.replace(many, token_tiles=1)
