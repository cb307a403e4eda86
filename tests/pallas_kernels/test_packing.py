import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.packing import PACKED_BITS, pack_codes, packed_rows, unpack_codes
from tests.pallas_kernels import oracle
from tests.pallas_kernels.close_page_cases import FAST_COMPILE

pack = jax.jit(pack_codes, static_argnums=1, compiler_options=FAST_COMPILE)
# Every new shape is compiled: few shapes, odd ones among them, and many values.
SHAPES = [(1, 1, 1), (2, 33, 7), (3, 64, 2)]
unpack = jax.jit(unpack_codes, static_argnums=(1, 2), compiler_options=FAST_COMPILE)


@settings(max_examples=80, deadline=None)
@given(bits=st.sampled_from(PACKED_BITS), shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(bits, shape, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, shape, dtype=np.uint64).astype(np.uint32)
    words = pack(codes, bits)
    assert words.shape == (shape[0], packed_rows(shape[1], bits), shape[2]) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack(words, bits, shape[1]), codes)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_every_code_lies_where_the_format_says(bits):
    rows, columns = 64, 3
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (rows, columns), dtype=np.uint64).astype(np.uint32)
    words = np.asarray(pack(codes, bits)).reshape(-1)
    np.testing.assert_array_equal(oracle.decode_codes(words, bits, rows, columns), codes)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_words_hold_nothing_but_the_codes(bits):
    """Any words, unpacked and packed again, come back: the mapping is a bijection, no bit is lost or used twice."""
    words = np.random.default_rng(bits).integers(0, 1 << 32, (bits, 5), dtype=np.uint64).astype(np.uint32)
    np.testing.assert_array_equal(pack(unpack(words, bits, 32), bits), words)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_too_wide_do_not_spill(bits):
    codes = jnp.full((32, 2), 0xFFFFFFFF, jnp.uint32)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, 32), (1 << bits) - 1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: pack_codes(jnp.zeros((32, 2), jnp.uint32), 5), "bits=5"),
    (lambda: pack_codes(jnp.zeros((32, 2), jnp.int32), 4), "codes.dtype=int32"),
    (lambda: pack_codes(jnp.zeros((32,), jnp.uint32), 4), "codes.shape"),
    (lambda: unpack_codes(jnp.zeros((3, 2), jnp.uint32), 4, 32), "take 4 word rows"),
])
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
