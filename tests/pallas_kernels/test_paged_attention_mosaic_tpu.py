"""The TPU kernel in the interpreter: memory that nobody wrote is NaN, reads out of bounds raise, races are found."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVFormat, dispatch, paged_attention
from pallas_kernels.paged_attention import mosaic_tpu
from tests.pallas_kernels.close_page_cases import FAST_COMPILE
from tests.pallas_kernels.paged_attention_cases import STATIC, Cache, PagedAttentionCases, check, make_cache

NONE = dict.fromkeys(("sink_k", "sink_v", "sliding_window", "logit_softcap", "attention_sinks"))
attend = jax.jit(
    mosaic_tpu.paged_attention, static_argnames=[*(name for name in STATIC if name != "implementation"), "interpret"],
    compiler_options=FAST_COMPILE)
INTERPRET = pltpu.InterpretParams(
    uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True, dma_execution_mode="on_wait")


def run(cache: Cache, dma_execution_mode="on_wait") -> np.ndarray:
    interpret = dataclasses.replace(INTERPRET, dma_execution_mode=dma_execution_mode)
    out = np.asarray(attend(*cache.arrays(), **{**NONE, **cache.options}, interpret=interpret))
    assert not interpret_pallas_call.races.races_found
    assert out.shape == cache.q.shape and out.dtype == cache.q.dtype
    return out


def stored(fmt: KVFormat) -> KVFormat:
    """The nearest format that the layout holds."""
    promoted = -(-fmt.outlier_channels // 16) * 16
    return dataclasses.replace(fmt, layout="tpu", page_size=128, outlier_channels=promoted)


def stretched(tokens: int, page_size: int) -> int:
    """A length in pages of 128 tokens that ends as near to a page's end as `tokens` does in pages of `page_size`."""
    pages, rest = divmod(tokens, page_size)
    return pages * 128 + (rest if rest < page_size // 2 else rest + 128 - page_size)


@pytest.mark.slow
class TestMosaicTpu(PagedAttentionCases):
    """Copies end when they are waited for."""

    dma_execution_mode = "on_wait"
    exact = KVFormat(k_bits=16, v_bits=16, page_size=32)

    def make_cache(self, fmt: KVFormat, kv_lens, *, sliding_window=None, **options) -> Cache:
        if fmt.k_bits == 32 or fmt.scale_dtype != "bfloat16":
            pytest.skip("layout 'tpu' holds bfloat16 scales, and at most 16 bits")
        window = None if sliding_window is None else stretched(sliding_window, fmt.page_size)
        lengths = [stretched(n, fmt.page_size) for n in kv_lens]
        return make_cache(stored(fmt), lengths, **{**options, "head_dim": 64, "sliding_window": window})

    def run(self, cache: Cache, optimised=False) -> np.ndarray:
        return run(cache, self.dma_execution_mode)


@pytest.mark.slow
class TestCopiesThatEndAtOnce(TestMosaicTpu):
    dma_execution_mode = "eager"


@pytest.mark.parametrize("dma_execution_mode", ["on_wait", "eager"])
@pytest.mark.parametrize(("fmt", "options"), [
    ({"k_bits": 2, "v_bits": 4, "sink_tokens": 70, "open_pages": 2}, {"sliding_window": 200, "group": 5}),
    ({"k_bits": 3, "v_bits": 2, "outlier_channels": 16, "outlier_bits": 8}, {"head_dim": 128, "group": 16, "num_kv_heads": 1}),
    ({"k_bits": 4, "v_bits": 16, "outlier_channels": 32, "outlier_bits": 16}, {"head_dim": 256, "q_dtype": "bfloat16"}),
    ({"k_bits": 8, "v_bits": 3}, {"num_queries": 4, "logit_softcap": 5.0, "attention_sinks": np.arange(-2, 4, dtype=np.float32)}),
    ({"k_bits": 16, "v_bits": 8, "sink_tokens": 4}, {"num_kv_heads": 3, "group": 1, "sliding_window": 129}),
], ids=lambda x: "-".join(map(str, x.values())) if "k_bits" in x else "")
def test_every_kind_of_page(fmt, options, dma_execution_mode):
    cache = make_cache(KVFormat(layout="tpu", **fmt), [1, 127, 128, 129, 0, 1000], **{"head_dim": 64, "num_queries": 1, **options})
    check(cache, run(cache, dma_execution_mode), "attention_bf16_output" if cache.q.dtype == jnp.bfloat16 else "attention_f32")


def test_the_ring_goes_round():
    """More pages than slots, in one row and over many."""
    cache = make_cache(KVFormat(k_bits=2, v_bits=2, layout="tpu"), [2500, 700, 1, 2000], num_queries=1, num_kv_heads=1, head_dim=64)
    check(cache, run(cache))


@pytest.mark.parametrize(("layout", "served_by"), [("tpu", "mosaic_tpu"), ("linear", "reference")])
def test_a_tpu_runs_it_on_pages_that_it_reads(layout, served_by, monkeypatch):
    interpreted = functools.partial(mosaic_tpu.paged_attention, interpret=INTERPRET)
    cache = make_cache(KVFormat(k_bits=4, v_bits=3, layout=layout), [300, 5], head_dim=64, num_queries=1)
    monkeypatch.setattr(mosaic_tpu, "paged_attention", interpreted)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    check(cache, np.asarray(paged_attention(*map(jnp.asarray, cache.arrays()), **cache.options)))
    assert dispatch.last_implementation("paged_attention") == served_by


@pytest.mark.parametrize(("change", "message"), [
    ({"kv_format": KVFormat(page_size=128)}, "layout='linear'"), ({"q_dtype": jnp.float16}, "q.dtype=float16"),
    ({"head_dim": 96}, "head_dim=96"), ({"open_dtype": jnp.float32}, "open_k.dtype=float32"), ({"heads": 129}, "129 query rows"),
    ({"kv_heads": 64, "heads": 64, "head_dim": 256}, r"\[1, 64, 8, 256\]: 34.2 MiB of VMEM")])
def test_what_it_does_not_serve_is_named(change, message):
    fmt, head_dim = change.get("kv_format", KVFormat(layout="tpu")), change.get("head_dim", 64)
    q = jnp.zeros((1, 1, change.get("heads", 2), head_dim), change.get("q_dtype", jnp.bfloat16))
    kv_heads = change.get("kv_heads", 1)
    pages = jnp.zeros((1, kv_heads, fmt.page_layout(head_dim).words), jnp.uint32)
    open_k, lens = jnp.zeros((1, kv_heads, 128, head_dim), change.get("open_dtype", jnp.bfloat16)), jnp.ones(1, jnp.int32)
    args = (q, pages, open_k, open_k, jnp.zeros((1, 1), jnp.int32), lens)
    with pytest.raises(NotImplementedError, match=message):
        mosaic_tpu.paged_attention(*args, lens, kv_format=fmt, sm_scale=1.0, **NONE)
    with pytest.raises(NotImplementedError, match="not on cpu"):
        paged_attention(*args, kv_format=fmt, sm_scale=1.0, implementation="mosaic_tpu")
