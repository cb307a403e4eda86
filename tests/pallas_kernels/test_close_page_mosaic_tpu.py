"""The TPU kernel writes the bits that the reference writes, in the interpreter with NaN memory and race detection."""
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVFormat, close_page, dispatch
from pallas_kernels.close_page import mosaic_tpu
from tests.pallas_kernels.close_page_cases import FAST_COMPILE, close, make_page

INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)
interpreted = jax.jit(
    functools.partial(mosaic_tpu.close_page, interpret=INTERPRET), static_argnames="kv_format", compiler_options=FAST_COMPILE)


def check(k, v, fmt: KVFormat, num_sinks=0) -> None:
    sinks = np.asarray(num_sinks, np.int32)
    want = np.asarray(close(k, v, kv_format=fmt, num_sinks=sinks, implementation="reference"))
    out = np.asarray(interpreted(k, v, kv_format=fmt, num_sinks=sinks))
    assert not interpret_pallas_call.races.races_found
    assert out.dtype == want.dtype and out.shape == want.shape
    for name, (first, words) in fmt.page_layout(k.shape[-1]).planes().items():
        np.testing.assert_array_equal(out[..., first:first + words], want[..., first:first + words], err_msg=name)
    np.testing.assert_array_equal(out, want, err_msg="padding")


def format_of(k_bits: int, v_bits: int, outlier_channels: int = 0, outlier_bits: int = 16, **others) -> KVFormat:
    return KVFormat(
        k_bits=k_bits, v_bits=v_bits, outlier_channels=outlier_channels, outlier_bits=outlier_bits, layout="tpu", **others)


FEW = [(format_of(2, 3), 64), (format_of(3, 2, 16, 4), 128), (format_of(4, 8, 32, 8), 64), (format_of(8, 16, 16, 16), 64),
       (format_of(16, 4), 64), (format_of(2, 2, 32, 16), 256)]
MANY = [(format_of(k, v), head_dim) for head_dim in (64, 128, 256) for k in (2, 3, 4, 8, 16) for v in (2, 3, 4, 8, 16)]
MANY += [(format_of(k, 2, count, bits), head_dim) for head_dim in (64, 128, 256) for k in (2, 3) for count in (16, 48)
         for bits in (4, 8, 16)]


@pytest.mark.parametrize(("fmt", "head_dim"), [*FEW, *(pytest.param(*x, marks=pytest.mark.slow) for x in MANY)],
                         ids=lambda x: x.name if isinstance(x, KVFormat) else None)
def test_same_bits(fmt, head_dim):
    check(*make_page(fmt, lead=(), num_kv_heads=2, head_dim=head_dim), fmt)


def test_leading_axes_and_sinks_of_each_row():
    fmt = format_of(2, 2, sink_tokens=70)
    k, v = make_page(fmt, lead=(1, 3), num_kv_heads=2)
    k[:, :, :, :70] *= 1000
    check(k, v, fmt, [[0, 17, 70]])
    check(k[0, 0], v[0, 0], fmt, 127)


def test_zero_constant_and_huge_groups():
    fmt = format_of(3, 2, 16, 8)
    k, v = (x.astype(np.float32) for x in make_page(fmt, lead=(), num_kv_heads=1))
    k[0, :, :8] = np.array([0, 0, 3, -1e30, 1e30, 1e-38, -5e-39, 7])  # constant
    k[0, ::2, 8:16] = np.array([0, 1e30, -1e37, 2e-38, 1, -1, 1e-30, -3])  # two values
    v[0, :4] = np.array([0, -2, 1e30, 1e-38])[:, None]
    v[0, 4:8, :2] = np.array([[-1e37, 1e37], [-1e-37, 1e-38], [1e9, 1e9], [0, 0]])
    check(k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16), fmt)


def test_every_step_between_two_codes():
    """Numbers near the middle between two codes, where a code turns on the last bit of a quotient."""
    fmt = format_of(8, 4)
    grid = np.linspace(-1, 1, 128, dtype=np.float32)[None, :, None] * np.geomspace(1, 3, 64, dtype=np.float32)
    check(grid.astype(ml_dtypes.bfloat16), grid[:, :, ::-1].astype(ml_dtypes.bfloat16), fmt)


@pytest.mark.parametrize(("layout", "served_by"), [("tpu", "mosaic_tpu"), ("linear", "reference")])
def test_a_tpu_runs_it_on_pages_that_it_reads(layout, served_by, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "close_page", interpreted)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    fmt = KVFormat(k_bits=4, v_bits=3, layout=layout)
    k, v = make_page(fmt, lead=(), num_kv_heads=1)
    close_page(jnp.asarray(k), jnp.asarray(v), kv_format=fmt)
    assert dispatch.last_implementation("close_page") == served_by


@pytest.mark.parametrize(("change", "message"), [
    ({"layout": "linear"}, "layout='linear'"), ({"k_range": "clipped"}, "k_range='clipped'"),
    ({"v_range": "clipped"}, "v_range='clipped'"), ({"dtype": jnp.float32}, "open_k.dtype=float32"),
    ({"head_dim": 96}, "head_dim=96"), ({"kv_heads": 0}, "no page")])
def test_what_it_does_not_serve_is_named(change, message):
    options = {"dtype": jnp.bfloat16, "head_dim": 64, "kv_heads": 1} | change
    x = jnp.zeros((options.pop("kv_heads"), 128, options.pop("head_dim")), options.pop("dtype"))
    fmt = KVFormat(k_bits=2, v_bits=2, **{"layout": "tpu", **options})
    with pytest.raises(NotImplementedError, match=message):
        mosaic_tpu.close_page(x, x, kv_format=fmt, num_sinks=jnp.zeros((), jnp.int32))
    with pytest.raises(NotImplementedError, match="not on cpu"):
        close_page(x, x, kv_format=fmt, implementation="mosaic_tpu")
