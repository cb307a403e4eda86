"""What every layout of a page that a kernel reads must do. Subclass `KernelLayoutCases` and set `layout`."""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat
from tests.pallas_kernels.close_page_cases import close, reopen


class KernelLayoutCases:
    layout: str

    @pytest.mark.parametrize("fmt", [
        KVFormat(k_bits=2, v_bits=3), KVFormat(k_bits=3, v_bits=4, sink_tokens=4), KVFormat(k_bits=16, v_bits=8),
        KVFormat(k_bits=2, v_bits=2, outlier_channels=16, outlier_bits=4),
        KVFormat(k_bits=3, v_bits=2, outlier_channels=32, outlier_bits=16)], ids=lambda f: f.name)
    def test_a_page_holds_the_same_numbers_as_a_linear_one(self, fmt):
        rng = np.random.default_rng(1)
        k, v = (jnp.asarray(rng.normal(size=(2, 128, 64)) * 3 + 1, jnp.bfloat16) for _ in "kv")
        pages = []
        for layout in ("linear", self.layout):
            f = dataclasses.replace(fmt, layout=layout)
            words = close(k, v, kv_format=f, num_sinks=jnp.int32(fmt.sink_tokens))
            assert words.shape[-1] == f.page_layout(64).words and words.shape[-1] % 32 == 0
            pages.append(reopen(words, kv_format=f, head_dim=64))
        for linear, other in zip(*pages):
            np.testing.assert_array_equal(linear, other)

    @pytest.mark.parametrize(("kwargs", "message"), [
        ({"page_size": 64}, "page_size=64: layout '{}' accepts 128"), ({"k_bits": 32, "v_bits": 32}, "k_bits=32"),
        ({"scale_dtype": "float16"}, "scale_dtype='float16'"), ({"k_bits": 2, "outlier_channels": 8}, "outlier_channels=8")])
    def test_what_the_layout_does_not_hold_is_named(self, kwargs, message):
        with pytest.raises(ValueError, match=message.format(self.layout)):
            KVFormat(layout=self.layout, **kwargs)
        with pytest.raises(ValueError, match="head_dim=24"):
            KVFormat(layout=self.layout).page_layout(24)
