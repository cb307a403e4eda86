"""The layout of expert weights for TPU: a bijection, in which every code has the place that it is said to have."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QArray, interleave, pack_tpu_weights, unpack_tpu_weights
from pallas_kernels.qarray import quantize, quantize_fp8, quantize_mxfp4
from pallas_kernels.tpu_weights import TpuWeightLayout, join_runs, split_runs
from tests.pallas_kernels.close_page_cases import FAST_COMPILE

W = np.random.default_rng(0).normal(size=(2, 384, 96)).astype(np.float32)
pack = jax.jit(pack_tpu_weights, compiler_options=FAST_COMPILE)
unpack = jax.jit(unpack_tpu_weights, compiler_options=FAST_COMPILE)


def same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("k", "group", "scale", "symmetric"), [
    (384, 32, "bfloat16", True), (384, 64, "float32", False), (256, 128, "bfloat16", False), (384, 384, "float32", True),
    (192, 192, "float32", False), (32, 32, "bfloat16", False)])
def test_a_bijection(bits, k, group, scale, symmetric):
    q = quantize(W[:, :k], bits=bits, group_size=group, symmetric=symmetric, scale_dtype=scale)
    packed = pack(q)
    assert packed.shape == q.shape and packed.words.dtype == jnp.uint32
    assert packed.words.shape == (2, packed.layout.rows, 256) and packed.layout.rows % 8 == 0
    same(unpack(packed), q)
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())


@pytest.mark.parametrize("quantized", [quantize_fp8, quantize_mxfp4])
def test_float_codes_are_a_bijection(quantized):
    q = quantized(jax.random.normal(jax.random.key(1), (2, 128, 96)))
    packed = jax.jit(pack_tpu_weights)(q)
    assert packed.layout.float_codes and packed.layout.bits == q.bits
    same(unpack_tpu_weights(packed), q)
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())
    with pytest.raises(ValueError, match="float_codes=True: bits=3"):
        TpuWeightLayout(k=128, n=96, bits=3, group_size=32, float_codes=True)


@pytest.mark.parametrize("k", [384, 64, 16])
def test_bfloat16(k):
    w = jnp.asarray(W[:, :k], jnp.bfloat16)
    same(unpack(pack(w)), w)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_no_word_is_wasted_where_sizes_fit(bits):
    layout = TpuWeightLayout(k=2048, n=512, bits=bits, group_size=2048 if bits == 16 else 128)
    assert layout.rows == 2048 * bits // 32 + (0 if bits == 16 else 16) and layout.columns == 512


@pytest.mark.parametrize(("bits", "row", "column", "word", "lane", "bit"), [
    # Steps of 128 rows: 8, 16, 32, 64 rows of words at 2, 4, 8, 16 bits. Column 37 is in the third run of 16: even, its second.
    (2, 0, 0, 0, 0, 0), (2, 128 + 77, 37, 8 + 6, 16 + 5, 16 + 8), (4, 127, 16, 15, 128, 16 + 12), (8, 33, 255, 16, 255, 16),
    (16, 130, 48, 64 + 1, 128 + 16, 0)])
def test_where_one_code_goes(bits, row, column, word, lane, bit):
    low = 1 << bits - 1
    if bits == 16:
        w = jnp.zeros((1, 256, 256), jnp.bfloat16).at[0, row, column].set(1.0)
        code = 0x3F80
    else:
        w, code = quantize(jnp.zeros((1, 256, 256)), bits=bits, group_size=128), (1 << bits) - 1
        qvalue = np.full(w.shape, -low, np.int8)
        qvalue[0, row, column] = code - low
        w = QArray(jnp.asarray(qvalue).astype(w.qvalue.dtype), w.scale, None, -2, 128, bits)
    expected = np.zeros((256 * bits // 32, 256), np.uint32)
    expected[word, lane] = code << bit
    np.testing.assert_array_equal(pack_tpu_weights(w).words[0, :len(expected)], expected)


def test_gate_and_up_come_to_lie_in_lanes_of_their_own():
    gate, up = np.arange(160), np.arange(160) + 1000
    stored = join_runs(interleave(jnp.asarray(gate), jnp.asarray(up)))
    np.testing.assert_array_equal(stored.reshape(-1, 2, 128)[:2], np.stack([gate[:128], up[:128], [*gate[128:], *[0] * 96],
                                                                         [*up[128:], *[0] * 96]]).reshape(2, 2, 128))
    np.testing.assert_array_equal(split_runs(stored, 320), interleave(jnp.asarray(gate), jnp.asarray(up)))


@pytest.mark.parametrize(("change", "message"), [
    ({"w": jnp.zeros((1, 40, 32), jnp.bfloat16)}, "k=40"), ({"w": jnp.zeros((1, 64, 40), jnp.bfloat16)}, "n=40"),
    ({"w": jnp.zeros((64, 64), jnp.bfloat16)}, "w.shape"), ({"w": jnp.zeros((1, 64, 64))}, "w.dtype=float32"),
    ({"w": quantize(jnp.ones((1, 64, 64)), bits=4, axis=-1)}, "w.axis=-1"),
    ({"w": quantize(jnp.ones((1, 384, 32)), bits=4, group_size=192)}, "group_size=192")])
def test_what_cannot_be_packed_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        pack_tpu_weights(**change)
