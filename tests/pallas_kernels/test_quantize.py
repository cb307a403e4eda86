import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_format import GroupFormat
from pallas_kernels.quantize import CLIP_FRACTIONS, bits_to_float32, dequantize, float_bits, gaussian_levels, quantize
from tests.pallas_kernels.close_page_cases import FAST_COMPILE

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3": ml_dtypes.float8_e4m3fn}
encode = jax.jit(quantize, static_argnames="g", compiler_options=FAST_COMPILE)
decode = jax.jit(dequantize, static_argnames="g", compiler_options=FAST_COMPILE)


def by_token(bits: int = 2, **kwargs) -> GroupFormat:
    return GroupFormat(bits=bits, axis="token", **kwargs)


def dequantized(x, g: GroupFormat, where=None) -> np.ndarray:
    """Decoded by the formula of the format, in float64."""
    codes, scale, offset = (np.asarray(a).astype(np.float64) for a in encode(x, g=g, where=where))
    assert codes.max() <= 2**g.bits - 1
    return codes * scale + offset


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), dtype=st.sampled_from(list(DTYPES)), size=st.floats(-4, 3),
       bias=st.floats(-100, 100), seed=st.integers(0, 2**32 - 1))
def test_error_within_half_a_step_and_scales_representable(bits, dtype, size, bias, seed):
    """The range stays covered after rounding: no element may be off by more than half of the stored step."""
    size = min(size, 1.0) if dtype == "float8_e4m3" else size  # it saturates at 448
    x = (np.random.default_rng(seed).normal(size=(6, 32)) * 10**size + bias).astype(np.float32)
    codes, scale, offset = map(np.asarray, encode(x, g=by_token(bits, scale_dtype=dtype)))
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
    np.testing.assert_allclose(dequantized(x, by_token(range_rule=rule)), x, atol=2.0**-126, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_huge_tiny_and_one_sided_groups(bits):
    rng = np.random.default_rng(0)
    base = rng.normal(size=32)
    one_big = base.copy()
    one_big[5] *= 50
    x = np.stack([base * 1e30, base * 1e-30, np.abs(base), -np.abs(base), one_big, np.where(base > 0, 1e38, -1e38)])
    x = x.astype(np.float32)
    _, scale, _ = map(np.asarray, encode(x, g=by_token(bits)))
    y = dequantized(x, by_token(bits))
    assert np.isfinite(y).all()
    assert (np.abs(y - x) <= scale.astype(np.float64) * 0.5001).all()


def test_elements_out_of_the_range_do_not_widen_it():
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None]
    spoiled = x.copy()
    spoiled[0, :4] = [1e6, -1e6, 50, 0.5]
    where = np.arange(32) >= 4
    y = dequantized(spoiled, by_token(), where)
    _, scale, _ = encode(spoiled, g=by_token(), where=where)
    assert np.abs(y - x)[0, 4:].max() <= float(scale[0, 0]) * 0.5001
    assert np.abs(y).max() < 1.1


def test_clipped_never_loses_to_minmax_and_wins_with_an_outlier():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 128)).astype(np.float32)
    x[:10, 0] = 12

    def error(rule):
        return np.square(dequantized(x, by_token(range_rule=rule)) - x).sum(-1)

    assert (error("clipped") <= error("minmax") * (1 + 1e-5)).all()
    assert (error("clipped")[:10] < 0.6 * error("minmax")[:10]).all()
    assert CLIP_FRACTIONS[0] == 1 and min(CLIP_FRACTIONS) == 0.5


def test_axis_names_the_group():
    """A per-channel group must not feel another channel's size."""
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32) * [1, 1000]
    x = x.astype(np.float32)
    assert np.abs(dequantized(x, GroupFormat(bits=4, axis="channel")) - x)[:, 0].max() < 0.3
    assert np.abs(dequantized(x, by_token(4)) - x)[:, 0].max() > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_bits_round_trip(dtype):
    x = np.array([0, 1, -2.5, 448, 2.0**-9, 3.0**-2], np.float32).astype(DTYPES[dtype]).astype(np.float32)
    bits = float_bits(jnp.asarray(x), dtype)
    np.testing.assert_array_equal(bits, x.astype(DTYPES[dtype]).view(np.uint8 if dtype == "float8_e4m3" else np.uint16))
    np.testing.assert_array_equal(bits_to_float32(bits, dtype), x)


def test_groups_by_hand():
    """[4 tokens, 8 channels] at 2 bits; ranges of 3 make every step 1, so that all codes can be read off."""
    x = np.zeros((4, 8), np.float32)
    x[:, :4] = [[0, 1, 2, 3], [10, 11, 12, 13], [-3, -2, -1, 0], [3, 2, 1, 0]]
    x[:, 4:] = 2 * x[:, :4]
    q = encode(x, g=by_token(group=4))
    np.testing.assert_array_equal(q.codes, [[0, 1, 2, 3] * 2, [0, 1, 2, 3] * 2, [0, 1, 2, 3] * 2, [3, 2, 1, 0] * 2])
    np.testing.assert_array_equal(q.scale, [[1, 2]] * 4)
    np.testing.assert_array_equal(q.offset, [[0, 0], [10, 20], [-3, -6], [0, 0]])
    q = encode(x.T, g=GroupFormat(bits=2, axis="channel", group=4))
    np.testing.assert_array_equal(q.scale, [[1] * 4, [2] * 4])
    np.testing.assert_array_equal(decode(q, g=GroupFormat(bits=2, axis="channel", group=4)), x.T)


def test_symmetric_by_hand():
    """Largest magnitude 3: scale 2, levels -3, -1, 1, 3; one stored scalar."""
    q = encode(np.array([[3.0, -2.9, 0.4, -1.2]], np.float32), g=by_token(symmetric=True))
    assert q.offset is None and np.array_equal(q.scale, [[2]]) and np.array_equal(q.codes, [[3, 0, 2, 1]])
    np.testing.assert_array_equal(decode(q, g=by_token(symmetric=True)), [[3, -3, 1, -1]])


def test_gaussian_levels_are_those_of_lloyd_and_max():
    """Max (1960), table I: 4 levels, 0.4528 and 1.510, mean squared error 0.1175; 8 levels, error 0.03454."""
    np.testing.assert_allclose(gaussian_levels(2), [-1.510, -0.4528, 0.4528, 1.510], atol=5e-4)
    x = np.random.default_rng(0).normal(size=(50, 8000)).astype(np.float32)
    for bits, error in ((2, 0.1175), (3, 0.03454)):
        g = by_token(bits, codes="gaussian", symmetric=True)
        assert np.mean((np.asarray(decode(encode(x, g=g), g=g)) - x) ** 2) == pytest.approx(error, rel=0.02)


def test_gaussian_by_hand():
    """Mean 5, deviation 2: one deviation is nearer to 1.510 than to 0.4528."""
    x = np.array([[7, 3, 7, 3]], np.float32)
    g = by_token(codes="gaussian")
    q = encode(x, g=g)
    assert np.array_equal(q.scale, [[2]]) and np.array_equal(q.offset, [[5]]) and np.array_equal(q.codes, [[3, 0, 3, 0]])
    np.testing.assert_allclose(decode(q, g=g), 5 + 2 * 1.510 * np.array([[1, -1, 1, -1]]), atol=1e-3)


def test_float8_by_hand():
    """448 is the largest float8_e4m3; with it in the group the scale is 1, and 17 falls between 16 and 18."""
    g = GroupFormat(bits=8, axis="token", symmetric=True, codes="float8_e4m3")
    x = np.array([[448, -17.2, 0.5, 0]], np.float32)
    q = encode(x, g=g)
    assert np.array_equal(q.scale, [[1]])
    np.testing.assert_array_equal(decode(q, g=g), [[448, -18, 0.5, 0]])


@pytest.mark.parametrize(("kwargs", "message"), [({"bits": 5}, "bits=5"), ({"bits": 4, "scale_dtype": "float32"}, "'float32'")])
def test_bad_input_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones((2, 4)), by_token(**kwargs))
