"""The layout "tpu": a bijection, in which every code has the place that it is said to have."""
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, tpu_tiles
from tests.pallas_kernels.page_layout_cases import KernelLayoutCases


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("channels", [16, 48, 64, 112, 128])
def test_pack_is_a_bijection(bits, channels):
    codes = np.random.default_rng(0).integers(0, 1 << bits, (2, 128, channels), dtype=np.uint32)
    words = tpu_tiles.pack(jnp.asarray(codes), bits)
    assert words.shape == (2, tpu_tiles.plane_rows(channels, bits) * 128) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(tpu_tiles.unpack(words, bits, channels), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_every_bit_of_the_words_is_used(bits):
    """No lane and no sublane is wasted, heads of 64 channels included."""
    words = tpu_tiles.pack(jnp.full((128, 64), (1 << bits) - 1, jnp.uint32), bits)
    assert (np.asarray(words) == 0xFFFFFFFF).all() and words.size == 128 * 64 * bits // 32


@pytest.mark.parametrize(("bits", "token", "channel", "word", "bit"), [
    (2, 0, 0, 0, 0), (2, 77, 13, 2 * 128 + 77, 16 + 2), (4, 127, 63, 7 * 128 + 127, 16 + 12), (8, 9, 31, 15 * 128 + 9, 16),
    (16, 18, 20, 10 * 128 + 18, 0)])
def test_where_one_code_goes(bits, token, channel, word, bit):
    """64 channels at 2 bits are 4 rows of 8 channels: channel 13 is field 1, and there row 2, half 1."""
    codes = np.zeros((128, 64), np.uint32)
    codes[token, channel] = (1 << bits) - 1
    expected = np.zeros(128 * 64 * bits // 32, np.uint32)
    expected[word] = codes[token, channel] << np.uint32(bit)
    np.testing.assert_array_equal(tpu_tiles.pack(jnp.asarray(codes), bits), expected)


class TestLayout(KernelLayoutCases):
    layout = "tpu"


def test_planes_start_on_rows_of_128_words_and_key_scales_are_one_run():
    layout = KVFormat(k_bits=2, v_bits=3, outlier_channels=16, outlier_bits=8, layout="tpu").page_layout(128)
    assert layout.planes() == {
        "k_codes": (0, 7 * 128), "outlier_codes": (7 * 128, 4 * 128), "k_scales": (11 * 128, 112),
        "outlier_scales": (11 * 128 + 112, 16), "v_codes": (12 * 128, 12 * 128), "v_scales": (24 * 128, 128)}
    assert layout.words == 25 * 128
    assert KVFormat(k_bits=2, v_bits=2, layout="tpu").page_layout(128).effective_bits() == 2.25
