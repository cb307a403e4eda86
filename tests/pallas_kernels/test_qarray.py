import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qarray import quantize, quantize_fp8, quantize_mxfp4

W = np.random.default_rng(0).normal(size=(3, 32, 6)).astype(np.float32) + 0.5


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "axis", "group_size"), [
    (4, -2, 8), (8, -2, None), (4, 1, 16), (8, -1, 3), (3, -2, 8), (2, -2, 8)])
def test_error_within_half_a_step(bits, axis, group_size, symmetric):
    q = quantize(jnp.asarray(W), bits=bits, axis=axis, group_size=group_size, symmetric=symmetric)
    assert q.shape == W.shape and q.qvalue.dtype == f"int{max(4, bits)}" and (q.zero_point is None) == symmetric
    error = np.abs(np.asarray(q.dequantize()) - W)
    step = np.repeat(np.asarray(q.scale), q.group_size, q.axis)
    # The rounded zero point moves the grid by up to half a step, and ends of the range may then clip.
    assert (error <= step * (0.5001 if symmetric else 1.0001)).all()
    assert np.asarray(q.scale).size * q.group_size == W.size


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zero_and_extremes_are_kept(symmetric):
    w = jnp.zeros((1, 8, 4)).at[0, 3, 2].set(-5.0)
    back = np.asarray(quantize(w, bits=4, symmetric=symmetric).dequantize())
    np.testing.assert_allclose(back, w, rtol=1e-6)


def test_bytes_count_half_a_byte_for_four_bits():
    assert quantize(jnp.asarray(W), bits=4, group_size=8).nbytes == 3 * 32 * 6 // 2 + 3 * 4 * 6 * 4
    assert quantize(jnp.asarray(W), bits=8, group_size=8).nbytes == 3 * 32 * 6 + 3 * 4 * 6 * 4


def test_is_a_pytree_that_can_be_indexed_and_jitted():
    q = quantize(jnp.asarray(W), bits=4, group_size=8, symmetric=False)
    one = jax.jit(lambda q: jax.tree.map(lambda leaf: leaf[1], q).dequantize())(q)
    np.testing.assert_array_equal(one, q.dequantize()[1])


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"bits": 5}, "bits=5"), ({"bits": 4, "axis": 3}, "axis=3"),
    ({"bits": 4, "scale_dtype": "float16"}, "scale_dtype"), ({"bits": 4, "group_size": 5}, "group_size=5")])
def test_bad_input_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.asarray(W), **kwargs)


def test_mxfp4_by_hand():
    first, second = jnp.asarray([7.9, -5.1, 2.4, 1.25, 0.3, 0.2]), jnp.asarray([0.75, 0.1])
    w = jnp.zeros((1, 64, 1)).at[0, :6, 0].set(first).at[0, 32:34, 0].set(second)
    q = quantize_mxfp4(w)  # largest 7.9: exponent 2, power 2**0; 0.75: exponent -1, power 2**-3
    np.testing.assert_array_equal(q.scale[0, :, 0].astype(jnp.float32), [1.0, 0.125])
    values = np.asarray(q.dequantize())[0, :, 0]
    np.testing.assert_array_equal(values[:6], [6, -6, 2, 1, 0.5, 0])  # 7.9 is beyond the codes; ties to even: 1.25 to 1
    np.testing.assert_array_equal(values[32:34], [0.75, 0.125])
    assert q.nbytes == 64 // 2 + 2 * 2 and (q.bits, q.group_size) == (4, 32)
    assert not np.asarray(quantize_mxfp4(jnp.zeros((1, 32, 2))).dequantize()).any()


def test_mxfp4_rounds_to_the_nearest_code_within_its_range():
    w = np.random.default_rng(1).normal(size=(2, 96, 5)).astype(np.float32) * np.logspace(-20, 20, 5, dtype=np.float32)
    q = quantize_mxfp4(jnp.asarray(w))
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ratio = np.abs(w) / np.repeat(np.asarray(q.scale.astype(jnp.float32)), 32, 1)
    assert (ratio.reshape(2, 3, 32, 5).max(2) >= 4).all() and (ratio < 8).all()
    nearest = np.abs(ratio[..., None] - codes).min(-1)
    np.testing.assert_allclose(np.abs(np.abs(np.asarray(q.qvalue.astype(jnp.float32))) - ratio), nearest, atol=1e-6)


@pytest.mark.parametrize("group_size", [8, None])
def test_fp8_has_a_relative_error_of_a_sixteenth(group_size):
    w = jnp.asarray(W) * jnp.asarray([1e-6, 1, 1e6, 1, 1, 0])
    q = quantize_fp8(w, group_size=group_size)
    assert q.qvalue.dtype == jnp.float8_e4m3fn and q.nbytes == W.size + 4 * q.scale.size
    error = np.abs(np.asarray(q.dequantize()) - np.asarray(w))
    largest = np.repeat(np.asarray(q.scale), q.group_size, 1) * 448
    assert (error <= np.maximum(np.abs(w) / 16, largest * 2.0**-10 / 448) * 1.001).all()
    assert np.isfinite(np.asarray(q.dequantize())).all() and not np.asarray(q.dequantize())[..., 5].any()


@pytest.mark.parametrize(("call", "words"), [
    (lambda w: quantize_mxfp4(w[:, :16]), "group_size=32"), (lambda w: quantize_fp8(w, group_size=5), "group_size=5"),
    (lambda w: quantize_fp8(w, axis=3), "axis=3")])
def test_float_codes_of_what_does_not_fit(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.asarray(W))
