import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, close_page, open_page
from tests.pallas_kernels.close_page_cases import ClosePageCases, close


class TestReference(ClosePageCases):
    implementation = "reference"


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
