"""The TPU kernel in the interpreter: memory that nobody wrote is NaN, reads out of bounds raise, races are found."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, grouped_matmul, pack_tpu_weights, pack_weights, unpack_weights
from pallas_kernels.grouped_matmul import mosaic_tpu
from pallas_kernels.qarray import quantize
from tests.pallas_kernels.close_page_cases import FAST_COMPILE
from tests.pallas_kernels.grouped_matmul_cases import ROW_COUNTS, MosaicMatmulCases, Packed, swiglu

INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)
interpreted = jax.jit(
    functools.partial(mosaic_tpu.grouped_matmul, interpret=INTERPRET), static_argnames=("preferred_element_type", "glu"),
    compiler_options=FAST_COMPILE)
repacked = jax.jit(lambda w: pack_tpu_weights(unpack_weights(w)), compiler_options=FAST_COMPILE)


class _Mosaic(MosaicMatmulCases):
    backend, implementation, pack, reads = mosaic_tpu, "mosaic_tpu", pack_tpu_weights, "TpuWeights"

    def run(self, x, w, group_sizes, **kwargs):
        out = interpreted(x, repacked(w), jnp.asarray(group_sizes, jnp.int32), **kwargs)
        assert not interpret_pallas_call.races.races_found
        return out


class TestMosaicTpu(_Mosaic):
    def test_blocks_of_columns(self, monkeypatch):
        """A matrix wider than a block: with gate and up, and with padding."""
        monkeypatch.setattr(mosaic_tpu, "BLOCK_BYTES", 1)
        self.check(Packed(k=128, n=544, group_size=128, sizes=(20, 0, 3), rows=25), bias=True, glu=swiglu)
        self.check(Packed(k=128, n=544, group_size=32, sizes=(20, 0, 3), rows=25), bias=True)


@pytest.mark.slow
class TestMosaicTpuWide(_Mosaic):
    """Every combination of what a call can be."""

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("group_size", [32, 64, 128, 704])
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_every_format(self, bits, group_size, symmetric):
        k = 704 if 704 % group_size == 0 else 768
        scale_dtype = "float32" if symmetric else "bfloat16"
        self.check(Packed(k=k, n=96, bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype))

    @pytest.mark.parametrize("rows", ROW_COUNTS)
    def test_every_number_of_rows(self, rows):
        rng = np.random.default_rng(rows)
        for experts in (1, 5, 128):  # from all rows on one expert to one expert a row
            sizes = tuple(np.bincount(rng.integers(0, experts, rows), minlength=experts).tolist())
            self.check(Packed(k=256, n=64, group_size=128, sizes=sizes, rows=rows + 3), bias=True, glu=swiglu)


@pytest.mark.parametrize(("pack", "served_by"), [(pack_tpu_weights, "mosaic_tpu"), (pack_weights, "ragged_dot")])
def test_a_tpu_runs_it_on_weights_that_it_reads(pack, served_by, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "grouped_matmul", interpreted.__wrapped__)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    w = pack(quantize(jnp.ones((2, 64, 32)), bits=4))
    out = grouped_matmul(jnp.ones((4, 64), jnp.bfloat16), w, jnp.asarray([1, 2], jnp.int32))
    np.testing.assert_allclose(np.asarray(out, np.float32)[:, 0], [64, 64, 64, 0], rtol=0.01)
    assert dispatch.last_implementation("grouped_matmul") == served_by


def test_a_matrix_too_large_for_vmem_is_named():
    w = pack_tpu_weights(jnp.ones((2, 10240, 32), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="k=10240"):
        mosaic_tpu.grouped_matmul(jnp.zeros((4, 10240), jnp.bfloat16), w, jnp.zeros(2, jnp.int32),
                                  preferred_element_type=jnp.bfloat16)
