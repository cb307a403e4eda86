import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qarray import quantize

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
