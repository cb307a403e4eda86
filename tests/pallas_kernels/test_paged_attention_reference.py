import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, dispatch, paged_attention
from tests.pallas_kernels.paged_attention_cases import FORMATS, PagedAttentionCases, check, make_cache, run


class TestReference(PagedAttentionCases):
    implementation = "reference"


FAULTS = {
    "zeros": lambda c: np.zeros_like(run(c, None)),
    "mean of the values": lambda c: np.broadcast_to(run(c, None).mean((0, 1, 2)), c.q.shape),
    "uniform attention": lambda c: run(dataclasses.replace(c, q=c.q * 0), None),
    "keys and values swapped": lambda c: run(dataclasses.replace(c, open_k=c.open_v, open_v=c.open_k), None),
    "open page dropped": lambda c: run(dataclasses.replace(c, open_k=c.open_k * 0 - 1e4), None),
    "wrong page": lambda c: run(dataclasses.replace(c, block_table=np.roll(c.block_table, 1, 1)), None),
    "one token short": lambda c: run(dataclasses.replace(c, kv_lens=np.maximum(c.kv_lens - 1, 0)), None),
    "scale and offset swapped": lambda c: run(dataclasses.replace(c, pages=(c.pages >> 16) | (c.pages << 16)), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_comparison_catches(fault):
    """A check that cannot fail is no check."""
    cache = make_cache(KVFormat(k_bits=4, v_bits=4, page_size=32), [80, 112])
    check(cache, run(cache, None))
    with pytest.raises(AssertionError):
        check(cache, FAULTS[fault](cache))


def test_works_under_jit_with_the_format_static():
    cache = make_cache(FORMATS[2], [40, 70])
    jitted = jax.jit(paged_attention, static_argnames=("kv_format", "sm_scale"))
    out = jitted(*map(jnp.asarray, cache.arrays()), **cache.options)
    check(cache, np.asarray(out))
    assert dispatch.last_implementation("paged_attention") == "reference"


@pytest.mark.parametrize(("change", "message"), [
    ({"open_k": jnp.zeros((4, 2, 64, 32))}, "open_k.shape"),
    ({"pages": jnp.zeros((3, 2, 5), jnp.uint32)}, "pages.shape"),
    ({"pages": jnp.zeros((3, 2, 5), jnp.int32)}, "pages.dtype=dtype.'int32'"),
    ({"block_table": jnp.zeros((2, 3), jnp.int32)}, "block_table.shape"),
    ({"kv_lens": jnp.zeros((4,), jnp.float32)}, "kv_lens.dtype"),
    ({"q": jnp.zeros((4, 2, 5, 32))}, "multiple of K=2"),
    ({"q": jnp.zeros((4, 2, 4, 32), jnp.int32)}, "q.dtype"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
    ({"attention_sinks": jnp.zeros(3)}, "attention_sinks.shape"),
    ({"sink_k": jnp.zeros((4, 2, 4, 32))}, "sink_k is given"),
    ({"kv_format": KVFormat(page_size=32, sink_tokens=4)}, "sink_k is missing"),
    ({"implementation": "cuda"}, "implementation='cuda'"),
])
def test_bad_input_is_named(change, message):
    cache = make_cache(KVFormat(page_size=32), [40])
    names = ("q", "pages", "open_k", "open_v", "block_table", "kv_lens", "q_lens")
    arguments = dict(zip(names, map(jnp.asarray, cache.arrays()))) | cache.options | change
    if "open_k" in change:
        arguments["open_v"] = change["open_k"]
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)
