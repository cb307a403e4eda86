"""The TPU kernel writes the bits that the reference writes, in the interpreter with NaN memory and race detection."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVFormat, close_page, dispatch
from pallas_kernels.close_page import mosaic_tpu
from tests.pallas_kernels.close_page_cases import FAST_COMPILE, SameBitsCases, make_page

INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)
interpreted = jax.jit(
    functools.partial(mosaic_tpu.close_page, interpret=INTERPRET), static_argnames="kv_format", compiler_options=FAST_COMPILE)
BITS = (2, 3, 4, 8, 16)


class TestMosaicTpu(SameBitsCases):
    backend, implementation, layout = mosaic_tpu, "mosaic_tpu", "tpu"

    def run(self, k, v, fmt, num_sinks):
        out = np.asarray(interpreted(k, v, kv_format=fmt, num_sinks=num_sinks))
        assert not interpret_pallas_call.races.races_found
        return out

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("widths", [
        *((k, v) for k in BITS for v in BITS),
        *((k, 2, count, bits) for k in (2, 3) for count in (16, 48) for bits in (4, 8, 16))], ids=str)
    def test_every_kind_of_page(self, widths, head_dim):
        fmt = self.format_of(*widths)
        self.check(*make_page(fmt, lead=(), num_kv_heads=2, head_dim=head_dim), fmt)


@pytest.mark.parametrize(("layout", "served_by"), [("tpu", "mosaic_tpu"), ("linear", "reference")])
def test_a_tpu_runs_it_on_pages_that_it_reads(layout, served_by, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "close_page", interpreted.__wrapped__)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    fmt = KVFormat(k_bits=4, v_bits=3, layout=layout)
    k, v = make_page(fmt, lead=(), num_kv_heads=1)
    close_page(jnp.asarray(k), jnp.asarray(v), kv_format=fmt)
    assert dispatch.last_implementation("close_page") == served_by
