import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, close_page, fake_quantize, open_page
from tests.pallas_kernels.close_page_cases import FAST_COMPILE, FORMATS, WIDE, ClosePageCases, close, make_page, reopen


class TestReference(ClosePageCases):
    implementation = "reference"

    @pytest.mark.parametrize("fmt", WIDE, ids=lambda f: f.name)
    def test_bytes_of_the_whole_space(self, fmt):
        k, v = make_page(fmt)
        k_hat, v_hat = self.check_bytes(k, v, fmt, fmt.sink_tokens)
        s = fmt.sink_tokens
        # Far from exact at 2 bits, and near the input all the same: worth less than the spread of a page without its 50x channels.
        for x, y in ((k, k_hat), (v, v_hat)):
            x, y = x.astype(np.float64)[..., s:, :], np.asarray(y)[..., s:, :]
            assert np.linalg.norm(y - x) < 0.6 * np.linalg.norm(x - x.mean())


@pytest.mark.parametrize("fmt", FORMATS + WIDE, ids=lambda f: f.name)
def test_fake_quantised_is_packed_and_unpacked(fmt):
    """Bit for bit: quality is measured on the one, decoding runs on the other."""
    k, v = make_page(fmt)
    sinks = np.int32(fmt.sink_tokens)
    packed = reopen(close(k, v, kv_format=fmt, num_sinks=sinks), kv_format=fmt, head_dim=k.shape[-1])
    fake = jax.jit(fake_quantize, static_argnames="kv_format", compiler_options=FAST_COMPILE)(k, v, kv_format=fmt, num_sinks=sinks)
    for a, b in zip(packed, fake):
        np.testing.assert_array_equal(a, b)


def test_widest_channels_are_promoted_by_hand():
    """Channels 2 and 5 are wide in page 0, 0 and 7 in page 1 (and 6 fillers narrower than the rest in neither)."""
    fmt = KVFormat(k_bits=2, v_bits=2, page_size=32, outlier_channels=8, outlier_bits=8, outlier_choice="page")
    k = np.tile(np.linspace(0, 1, 32, dtype=np.float32)[:, None], (2, 1, 1, 24))
    k[0, ..., 8:16] *= 40
    k[1, ..., :4] *= 40
    k[1, ..., 20:] *= 40
    words = np.asarray(close(k, k, kv_format=fmt))
    first, size = fmt.page_layout(24).planes()["outlier_index"]
    chosen = words[:, 0, first:first + size].view(np.uint8)
    np.testing.assert_array_equal(chosen, [range(8, 16), [0, 1, 2, 3, 20, 21, 22, 23]])
    k_hat, _ = reopen(words, kv_format=fmt, head_dim=24)
    error = np.abs(np.asarray(k_hat) - k).max(axis=(1, 2)) / k.max(axis=(1, 2))
    assert (np.take_along_axis(error, chosen.astype(int), 1) < 0.003).all() and (np.sort(error, axis=1)[:, 8:] > 0.1).all()


def test_sparse_entries_are_exact_and_out_of_the_range_by_hand():
    fmt = KVFormat(k_bits=2, v_bits=2, page_size=32, k_sparse=2, v_sparse=1)
    k = np.tile(np.arange(32, dtype=np.float32)[:, None] % 4, (1, 1, 8))
    k[0, 5, 3], k[0, 30, 6] = 777, -1000  # 777 -> 776 in bfloat16
    v = np.tile(np.arange(8, dtype=np.float32) % 4, (1, 32, 1))
    v[0, 9, 0] = 64
    words = np.asarray(close(k, v, kv_format=fmt))
    first, size = fmt.page_layout(8).planes()["k_sparse"]
    assert set(words[0, first:first + size] & 0xFFFF) == {5 * 8 + 3, 30 * 8 + 6}
    k_hat, v_hat = reopen(words, kv_format=fmt, head_dim=8)
    k[0, 5, 3] = 776
    np.testing.assert_array_equal(k_hat, k)
    np.testing.assert_array_equal(v_hat, v)


def test_two_bit_page_by_hand():
    """Channel 0 of the keys counts 0 1 2 3 0 1 2 3 …; word i holds the rows i, i + 2, i + 4, … of a column."""
    fmt = KVFormat(k_bits=2, v_bits=2, page_size=32)
    k = np.zeros((1, 32, 8), np.float32)
    k[0, :, 0] = np.arange(32) % 4
    words = np.asarray(close(k, k * 0 + 5, kv_format=fmt))[0]
    assert words[0] == sum(((2 * j) % 4) << (2 * j) for j in range(16))
    assert words[8] == sum(((2 * j + 1) % 4) << (2 * j) for j in range(16))
    one, five = 0x3F80, 0x40A0  # bfloat16
    assert words[16] == one and not words[17:24].any()
    np.testing.assert_array_equal(words[40:72], five << 16)


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: close_page(x, x[:, :16], kv_format=KVFormat(page_size=32)), "open_k.shape"),
    (lambda x: close_page(x, x, kv_format=KVFormat(page_size=64)), "page_size=64"),
    (lambda x: close_page(x.astype(jnp.int32), x, kv_format=KVFormat(page_size=32)), "open_k.dtype=int32"),
    (lambda x: close_page(x, x, kv_format=KVFormat(page_size=32), num_sinks=32), "num_sinks=32"),
    (lambda x: close_page(x, x, kv_format=KVFormat(page_size=32), num_sinks=jnp.zeros(3, jnp.int32)), "num_sinks.shape"),
    (lambda x: open_page(jnp.zeros((2, 7), jnp.uint32), kv_format=KVFormat(page_size=32), head_dim=8), "words.shape"),
])
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((2, 32, 8)))
