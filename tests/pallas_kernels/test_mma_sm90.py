"""The layout "mma_sm90": a bijection, and the register order of the tensor-core instruction."""
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, mma_sm90
from tests.pallas_kernels.page_layout_cases import KernelLayoutCases


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("channels", [16, 32, 48, 112, 128])
def test_pack_is_a_bijection(bits, channels):
    codes = np.random.default_rng(0).integers(0, 1 << bits, (2, 128, channels), dtype=np.uint32)
    for pack, unpack in ((mma_sm90.pack_keys, mma_sm90.unpack_keys), (mma_sm90.pack_values, mma_sm90.unpack_values)):
        words = pack(jnp.asarray(codes), bits)
        assert words.shape == (2, mma_sm90.plane_words(channels, bits)) and words.dtype == jnp.uint32
        np.testing.assert_array_equal(unpack(words, bits, channels), codes)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_every_bit_of_the_words_is_used(bits):
    codes = jnp.full((128, 64), (1 << bits) - 1, jnp.uint32)
    assert (np.asarray(mma_sm90.pack_keys(codes, bits)) == 0xFFFFFFFF).all()
    assert mma_sm90.plane_words(64, bits) == 128 * 64 * bits // 32


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize(("bits", "row", "column"), [
    (2, 0, 0), (2, 77, 13), (4, 127, 63), (8, 9, 31), (16, 18, 20),
    *((3, row, column) for row in (0, 25, 40, 127) for column in (3, 58))])
def test_where_one_code_goes(operand, bits, row, column):
    """A single code of all ones, against the layout worked out from the register order of the instruction."""
    codes = np.zeros((128, 64), np.uint32)
    codes[row, column] = (1 << bits) - 1
    if operand == "key":
        words = mma_sm90.pack_keys(jnp.asarray(codes), bits)
        token_tile, g, u = row // 16, row % 8, row % 16 // 8
        r, rest = divmod(column, 32)
        i, tile, h, e = rest // 8, 2 * r + rest % 8 // 4, rest % 4 // 2, rest % 2
    else:
        words = mma_sm90.pack_values(jnp.asarray(codes), bits)
        tile, g, u = column // 16, column % 8, column % 16 // 8
        token_tile, h, i, e = row // 16, row % 16 // 8, row % 8 // 2, row % 2
    t, lane, a = 8 * tile + token_tile if operand == "key" else 4 * token_tile + tile, 4 * g + i, u + 2 * h
    expected = np.zeros(words.shape, np.uint32)

    def put(quad, bit, code):
        expected[(quad * 32 + lane) * 4 + a] |= np.uint32(code << (16 * e + bit))

    if bits != 3:
        put(t * bits // 16, t * bits % 16, codes[row, column])
    else:
        if operand == "key":
            octet, f = 2 * (tile // 2) + token_tile // 4, 4 * (tile % 2) + token_tile % 4
        else:
            octet, f = divmod(t, 8)
        x, y, byte = octet // 2 * 3 + octet % 2 * 2, octet // 2 * 3 + 1, octet % 2 * 8
        if f < 4 or f == 6:
            put(x, 12 if f == 6 else 3 * f, 7)
        elif f < 6:
            put(y, byte + 3 * (f - 4), 7)
        else:
            put(x, 15, 1)
            put(y, byte + 6, 3)
    np.testing.assert_array_equal(words, expected)


class TestLayout(KernelLayoutCases):
    layout = "mma_sm90"


def test_parts_start_on_rows_that_a_copy_can_take():
    layout = KVFormat(k_bits=2, v_bits=2, outlier_channels=16, outlier_bits=16, layout="mma_sm90").page_layout(128)
    assert layout.planes()["v_codes"][0] == layout.key_words == 2048  # 896 + 112 + 1024 = 2032, to a multiple of 64
    assert layout.value_words == 1024 + 128 and layout.words == 2048 + 1152
