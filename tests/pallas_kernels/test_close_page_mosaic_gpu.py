"""The Hopper kernel writes the bits that the reference writes: on a GPU itself, on CPU in the interpreter with race detection.

Tests marked `gpu` hold every combination and run on a GPU only: `python -m pytest -m gpu tests/pallas_kernels`.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.close_page import mosaic_gpu
from tests.pallas_kernels.close_page_cases import SameBitsCases, close, make_page

ON_GPU = jax.default_backend() == "gpu"
gpu = pytest.mark.gpu
on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")


@pytest.mark.usefixtures("no_races")
class TestMosaicGpu(SameBitsCases):
    backend, implementation, layout = mosaic_gpu, "mosaic_gpu", "mma_sm90"

    def run(self, k, v, fmt, num_sinks):
        if ON_GPU:
            return np.asarray(close(k, v, kv_format=fmt, num_sinks=num_sinks, implementation="mosaic_gpu"))
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return np.asarray(mosaic_gpu.close_page(
                jnp.asarray(k), jnp.asarray(v), kv_format=fmt, num_sinks=jnp.asarray(num_sinks), interpret=interpret))

    @gpu
    @on_gpu_only
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("v_bits", [2, 3, 4, 8, 16])
    @pytest.mark.parametrize("k_bits", [2, 3, 4, 8, 16])
    def test_every_pair_of_bits(self, k_bits, v_bits, head_dim):
        fmt = self.format_of(k_bits, v_bits)
        self.check(*make_page(fmt, lead=(5,), head_dim=head_dim), fmt, [0, 1, 4, 64, 127])

    @gpu
    @on_gpu_only
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("outlier_bits", [4, 8, 16])
    @pytest.mark.parametrize("outlier_channels", [16, 32])
    @pytest.mark.parametrize("k_bits", [2, 3, 4, 8])
    def test_every_kind_of_promoted_channels(self, k_bits, outlier_channels, outlier_bits, head_dim):
        if outlier_bits > k_bits:
            fmt = self.format_of(k_bits, 2, outlier_channels, outlier_bits)
            self.check(*make_page(fmt, lead=(5,), head_dim=head_dim), fmt, 4)

    @gpu
    @on_gpu_only
    @pytest.mark.parametrize("lead", [(), (1,), (3, 7), (300,)])
    def test_any_number_of_pages(self, lead):
        fmt = self.format_of(2, 3, 16, 8)
        self.check(*make_page(fmt, lead=lead, num_kv_heads=4, head_dim=128), fmt)
