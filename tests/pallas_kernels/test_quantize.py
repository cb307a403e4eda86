import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.quantize import CLIP_FRACTIONS, bits_to_float32, float16_bits, quantize_groups
from tests.pallas_kernels.close_page_cases import FAST_COMPILE

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
quantize = jax.jit(
    quantize_groups, static_argnames=("axis", "bits", "range_rule", "scale_dtype"), compiler_options=FAST_COMPILE)


def dequantized(x, axis=-1, bits=2, **kwargs) -> np.ndarray:
    codes, scale, offset = (np.asarray(a).astype(np.float64) for a in quantize(x, axis=axis, bits=bits, **kwargs))
    assert codes.max() <= 2**bits - 1
    return codes * scale + offset


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), dtype=st.sampled_from(list(DTYPES)), size=st.floats(-4, 3),
       bias=st.floats(-100, 100), seed=st.integers(0, 2**32 - 1))
def test_error_within_half_a_step_and_scales_representable(bits, dtype, size, bias, seed):
    """The range stays covered after rounding: no element may be off by more than half of the stored step."""
    x = (np.random.default_rng(seed).normal(size=(6, 32)) * 10**size + bias).astype(np.float32)
    codes, scale, offset = map(np.asarray, quantize(x, axis=-1, bits=bits, scale_dtype=dtype))
    for y in (scale, offset):
        np.testing.assert_array_equal(y.astype(DTYPES[dtype]).astype(np.float32), y)
    assert (offset <= x.min(-1, keepdims=True)).all()
    assert (offset.astype(np.float64) + scale * (2.0**bits - 1) >= x.max(-1, keepdims=True) - np.abs(x).max() * 1e-7).all()
    error = np.abs(codes * scale.astype(np.float64) + offset - x)
    assert (error <= scale / 2 * (1 + 1e-4) + np.abs(x) * 2**-22).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -7.5, 2.0**100, -(2.0**100), 2.0**-130])
@pytest.mark.parametrize("rule", ["minmax", "clipped"])
def test_constant_groups_are_exact(value, rule):
    x = np.full((3, 32), value, np.float32)
    np.testing.assert_allclose(dequantized(x, range_rule=rule), x, atol=2.0**-126, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_huge_tiny_and_one_sided_groups(bits):
    rng = np.random.default_rng(0)
    base = rng.normal(size=32)
    one_big = base.copy()
    one_big[5] *= 50
    x = np.stack([base * 1e30, base * 1e-30, np.abs(base), -np.abs(base), one_big, np.where(base > 0, 1e38, -1e38)])
    x = x.astype(np.float32)
    _, scale, _ = map(np.asarray, quantize(x, axis=-1, bits=bits))
    y = dequantized(x, bits=bits)
    assert np.isfinite(y).all()
    assert (np.abs(y - x) <= scale.astype(np.float64) * 0.5001).all()


def test_elements_out_of_the_range_do_not_widen_it():
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None]
    spoiled = x.copy()
    spoiled[0, :4] = [1e6, -1e6, 50, 0.5]
    where = np.arange(32) >= 4
    y = dequantized(spoiled, where=where)
    _, scale, _ = quantize(spoiled, axis=-1, bits=2, where=where)
    assert np.abs(y - x)[0, 4:].max() <= float(scale[0, 0]) * 0.5001
    assert np.abs(y).max() < 1.1


def test_clipped_never_loses_to_minmax_and_wins_with_an_outlier():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 128)).astype(np.float32)
    x[:10, 0] = 12

    def error(rule):
        return np.square(dequantized(x, bits=2, range_rule=rule) - x).sum(-1)

    assert (error("clipped") <= error("minmax") * (1 + 1e-5)).all()
    assert (error("clipped")[:10] < 0.6 * error("minmax")[:10]).all()
    assert CLIP_FRACTIONS[0] == 1 and min(CLIP_FRACTIONS) == 0.5


def test_axis_names_the_group():
    """A per-channel group must not feel another channel's size."""
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32) * [1, 1000]
    x = x.astype(np.float32)
    assert np.abs(dequantized(x, axis=0, bits=4) - x)[:, 0].max() < 0.3
    assert np.abs(dequantized(x, axis=1, bits=4) - x)[:, 0].max() > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_bits_round_trip(dtype):
    x = np.array([0, 1, -2.5, 65504, 2.0**-24, 3.0**-9], np.float32).astype(DTYPES[dtype]).astype(np.float32)
    bits = float16_bits(jnp.asarray(x), dtype)
    np.testing.assert_array_equal(bits, x.astype(DTYPES[dtype]).view(np.uint16))
    np.testing.assert_array_equal(bits_to_float32(bits, dtype), x)


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"bits": 5}, "bits=5"), ({"bits": 4, "range_rule": "max"}, "range_rule='max'"),
    ({"bits": 4, "scale_dtype": "float32"}, "scale_dtype='float32'")])
def test_bad_input_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize_groups(jnp.ones((2, 4)), -1, **kwargs)
