"""The packed layout of expert weights: a bijection, and the register order of the tensor-core instruction."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_weights import (
    PackedWeights,
    WeightLayout,
    deinterleave,
    interleave,
    pack_weights,
    unpack_weights,
)
from pallas_kernels.qarray import quantize, quantize_fp8, quantize_mxfp4

W = np.random.default_rng(0).normal(size=(3, 384, 96)).astype(np.float32)
FORMATS = [(bits, group, scale, symmetric) for bits in (2, 3, 4, 8) for group, scale, symmetric in (
    (32, "bfloat16", True), (64, "float32", False), (128, "bfloat16", False), (384, "float32", True))]


def same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize(("bits", "group", "scale", "symmetric"), FORMATS)
@pytest.mark.parametrize("k", [384, 192])  # chunks of 128 and of 64
def test_a_bijection(bits, group, scale, symmetric, k):
    if k % group:
        group = k
    q = quantize(W[:, :k], bits=bits, group_size=group, symmetric=symmetric, scale_dtype=scale)
    packed = jax.jit(pack_weights)(q)
    assert packed.shape == q.shape and packed.words.dtype == jnp.uint32 and packed.words.shape[-1] % 32 == 0
    same(unpack_weights(packed), q)
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())


@pytest.mark.parametrize("quantized", [quantize_fp8, quantize_mxfp4])
def test_float_codes_are_a_bijection(quantized):
    q = quantized(jax.random.normal(jax.random.key(1), (2, 128, 96)))
    packed = jax.jit(pack_weights)(q)
    assert packed.layout.float_codes and packed.layout.bits == q.bits
    same(unpack_weights(packed), q)
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())
    with pytest.raises(ValueError, match="float_codes=True: bits=3"):
        WeightLayout(k=128, n=96, bits=3, group_size=32, float_codes=True)


@pytest.mark.parametrize("k", [384, 64, 32])
def test_bfloat16(k):
    w = jnp.asarray(W[:, :k], jnp.bfloat16)
    packed = pack_weights(w)
    assert packed.nbytes == w.nbytes
    same(unpack_weights(packed), w)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_bit_of_the_words_is_used(bits):
    layout = WeightLayout(k=256, n=64, bits=bits, group_size=128)
    assert layout.words == 128 * 32 * bits // 32 + 32
    words = jnp.full((2, 2, layout.words), 0x3F803F80, jnp.uint32)
    words = words.at[..., :layout.scale_word].set(jnp.uint32(0xFFFFFFFF))
    q = unpack_weights(PackedWeights(words, layout))
    assert (np.asarray(q.qvalue) == (1 << bits - 1) - 1).all()
    np.testing.assert_array_equal(pack_weights(jax.tree.map(lambda x: x[None], q)).words[0], words)


@pytest.mark.parametrize(("bits", "row", "column"), [
    (4, 0, 0), (4, 255, 63), (2, 77, 13), (8, 130, 41), (16, 201, 31), (3, 40, 58), (16, 18, 20)])
def test_where_one_code_goes(bits, row, column):
    """A single code that is not all zeros, against the layout worked out from the register order of the instruction."""
    if bits == 16:
        w = jnp.zeros((1, 256, 64), jnp.bfloat16).at[0, row, column].set(1.0)
        code, words = 0x3F80, pack_weights(w).words[0]
    else:
        q = quantize(jnp.ones((1, 256, 64)), bits=bits, group_size=128)
        low = -(1 << bits - 1)
        qvalue = jnp.full(q.shape, low, jnp.int8).at[0, row, column].set(-1).astype(q.qvalue.dtype)
        code = -1 - low
        words = pack_weights(type(q)(qvalue, jnp.zeros_like(q.scale), None, -2, 128, bits)).words[0]
    block, n = divmod(column, 32)
    r, u, g = n // 16, n % 16 // 8, n % 8
    chunk, k = divmod(row, 128)
    unit, k = divmod(k, 32)
    i, j, h, e = k // 8, k % 8 // 4, k % 4 // 2, k % 2
    lane, slot = 4 * g + i, 4 * (u + 2 * h) + 2 * r + j
    expected = np.zeros(words.shape, np.uint32)

    def put(plane, plane_bits, value):
        word, field = divmod(slot, 16 // plane_bits)
        load = min(4, plane_bits)
        at = ((unit * (plane_bits // load) + word // load) * 32 + lane) * load + word % load
        expected[block, chunk, plane + at] = value << (16 * e + plane_bits * field)

    if bits == 3:
        put(0, 2, code & 3)
        put(4 * 32 * 2, 1, code >> 2)
    else:
        put(0, bits, code)
    np.testing.assert_array_equal(words, expected)


def test_interleaved_columns():
    gate, up = W[:, :, :48], W[:, :, 48:]
    both = interleave(gate, up)
    np.testing.assert_array_equal(both[..., 16:32], up[..., :16])
    for x, y in zip(deinterleave(both), (gate, up)):
        np.testing.assert_array_equal(x, y)
    a, b = (quantize(x, bits=4, group_size=32) for x in (gate, up))
    np.testing.assert_array_equal(interleave(a, b).dequantize(), interleave(a.dequantize(), b.dequantize()))


def test_one_expert_can_be_taken_out():
    packed = pack_weights(quantize(W, bits=4, group_size=64))
    one = jax.tree.map(lambda x: x[1], packed)
    assert one.shape == (384, 96)
    np.testing.assert_array_equal(one.dequantize(), packed.dequantize()[1])


@pytest.mark.parametrize(("change", "message"), [
    ({"w": jnp.zeros((1, 48, 32), jnp.bfloat16)}, "k=48"), ({"w": jnp.zeros((1, 64, 40), jnp.bfloat16)}, "n=40"),
    ({"w": jnp.zeros((64, 64), jnp.bfloat16)}, "w.shape"), ({"w": jnp.zeros((1, 64, 64))}, "w.dtype=float32"),
    ({"w": quantize(jnp.ones((1, 64, 64)), bits=4, axis=-1)}, "w.axis=-1"),
    ({"w": quantize(jnp.ones((1, 64, 64)), bits=4, group_size=16)}, "group_size=16"),
    ({"w": quantize(jnp.ones((1, 384, 32)), bits=4, group_size=192)}, "group_size=192")])
def test_what_cannot_be_packed_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        pack_weights(**change)
