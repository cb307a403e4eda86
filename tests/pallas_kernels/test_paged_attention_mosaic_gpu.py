"""The Hopper kernel: on a GPU itself, on CPU in the interpreter with the twins of its tensor-core steps and race detection.

Tests marked `gpu` hold every combination and run on a GPU only: `python -m pytest -m gpu tests/pallas_kernels`.
"""
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KVFormat, paged_attention
from pallas_kernels.paged_attention import merge, mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import Tuning
from pallas_kernels.paged_attention.work_list import SPLIT_PAGES, Work
from tests.pallas_kernels import oracle
from tests.pallas_kernels.paged_attention_cases import Cache, make_cache

pytestmark = pytest.mark.usefixtures("no_races")

ON_GPU = jax.default_backend() == "gpu"
NONE = dict.fromkeys(("sink_k", "sink_v", "sliding_window", "logit_softcap", "attention_sinks"))
# One warpgroup: the interpreter takes the parts of a union that belong to different warpgroups for one buffer, and refuses to read
# what another part was written as; test_buffers_of_warpgroups_are_disjoint and the tests on a GPU look at several.
ONE = Tuning(1, 1, 2)
LENGTHS = [1, 127, 128, 129, 3 * 128 - 1, 2500]
# Relative L2 error of a row: queries x key scales, and weights x value scales, are rounded to bfloat16 (2**-9 each).
ACCURACY = 1e-2


def run(cache: Cache, tuning: Tuning | None = None) -> np.ndarray:
    interpret = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=tuning is None or tuning.warpgroups == 1)
    attend = functools.partial(
        mosaic_gpu.paged_attention, **{**NONE, **cache.options}, tuning=tuning if tuning or ON_GPU else ONE, interpret=interpret)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = (jax.jit(attend) if ON_GPU else attend)(*map(jnp.asarray, cache.arrays()))
    assert out.shape == cache.q.shape and out.dtype == cache.q.dtype
    return np.asarray(out)


def cache_of(fmt: dict, lengths=tuple(LENGTHS), **options) -> Cache:
    return make_cache(
        KVFormat(layout="mma_sm90", **fmt), list(lengths), **{"head_dim": 64, "num_queries": 1, "q_dtype": "bfloat16", **options})


def row_errors(out: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 error of every row that is in use."""
    pairs = [(o.astype(np.float64), w) for o, w in zip(out, want) if w.any()]
    assert pairs and not np.isnan(out.astype(np.float32)).any()
    return np.array([np.linalg.norm(o - w) / np.linalg.norm(w) for o, w in pairs])


def check(cache: Cache, tuning: Tuning | None = None) -> np.ndarray:
    out = run(cache, tuning)
    errors = row_errors(out, oracle.attention(*cache.arrays(), **cache.options))
    assert errors.max() <= ACCURACY, errors
    return out


@pytest.mark.parametrize(("fmt", "options", "tuning"), [
    ({"k_bits": 2, "v_bits": 3, "sink_tokens": 4}, {}, None),
    ({"k_bits": 3, "v_bits": 2, "outlier_channels": 16, "outlier_bits": 8}, {"group": 8, "head_dim": 128}, None),
    ({"k_bits": 4, "v_bits": 4, "outlier_channels": 16, "outlier_bits": 16}, {"group": 1}, Tuning(2, 1, 1)),
    ({"k_bits": 8, "v_bits": 4}, {"group": 16, "lengths": (1, 130, 700)}, Tuning(2, 2, 1)),
    ({"k_bits": 16, "v_bits": 16}, {"group": 5, "num_queries": 4}, Tuning(4, 1, 3)),
], ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else None)
def test_against_float64(fmt, options, tuning):
    check(cache_of(fmt, **options), tuning)


@pytest.mark.parametrize("sinks", [None, 3.0])
def test_merge_of_more_splits_than_warps(sinks):
    """Rows of 5, 39, 1 and 0 splits, whose maxima differ; NaN where no split was made."""
    splits, heads, head_dim = (5, 39, 1, 0), 2, 64
    kv_lens = np.array([SPLIT_PAGES * 128 * n + 1 for n in splits], np.int32)
    rng = np.random.default_rng(0)
    partial = rng.normal(size=(len(splits) * heads, merge.padded_splits(39), head_dim, 8)).astype(np.float32)
    stats = rng.uniform(1, 4, (*partial.shape[:2], 2, 8)).astype(np.float32)
    stats[:, :, 0] = rng.normal(size=stats[:, :, 0].shape) * 5
    want = np.zeros((len(partial), 8, head_dim))
    for tile in range(len(partial)):
        n = splits[tile // heads]
        partial[tile, n:], stats[tile, n:] = np.nan, np.nan
        weight = np.exp2(stats[tile, :n, 0].astype(np.float64))  # [n, 8]
        bottom = (weight * stats[tile, :n, 1]).sum(0) + (0 if sinks is None else 2.0**sinks)
        if n:
            want[tile] = ((weight[:, None] * partial[tile, :n]).sum(0) / bottom).T
    work = Work(len(splits), heads, sliding_window=None, open_pages=1, use_twins=not ON_GPU)
    merged = functools.partial(
        merge.merge, work, num_queries=8, query_tiles=1, dtype=jnp.float32,
        interpret=None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = (jax.jit(merged) if ON_GPU else merged)(
            *map(jnp.asarray, (partial, stats, kv_lens, np.array([8, 8, 8, 0], np.int32))),
            sinks=None if sinks is None else jnp.full((heads, 8, 1), sinks, jnp.float32))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fmt", "options"), [
    ({"open_pages": 3}, {}), ({"open_pages": 2, "sink_tokens": 70}, {"sliding_window": 200, "num_queries": 2}),
    ({"open_pages": 5, "sink_tokens": 4}, {"group": 8})], ids=lambda x: "-".join(map(str, x.values())))
def test_several_open_pages(fmt, options):
    check(cache_of({"k_bits": 2, "v_bits": 3, **fmt}, (1, 129, 256, 257, 3 * 128, 3 * 128 + 1, 2500), **options))


@pytest.mark.parametrize(("window", "softcap"), [(200, None), (70, 5.0), (None, 5.0)])
def test_sinks_window_softcap_and_learned_sinks_together(window, softcap):
    check(cache_of(
        {"k_bits": 2, "v_bits": 2, "sink_tokens": 70}, (3, 71, 129, 130, 2500), num_queries=2, sliding_window=window,
        logit_softcap=softcap, attention_sinks=np.linspace(-3, 4, 6).astype(np.float32)))


def test_a_row_alone_and_in_any_batch_is_the_same_bits():
    cache = cache_of({"k_bits": 2, "v_bits": 2}, (130, 2500, 1, 400))
    together = run(cache, Tuning(1, 2, 3))
    for row in range(4):
        alone = dataclasses.replace(cache, kv_lens=np.where(np.arange(4) == row, cache.kv_lens, 0))
        np.testing.assert_array_equal(run(alone)[row], together[row])


def test_zero_constant_and_huge_groups():
    cache = cache_of({"k_bits": 2, "v_bits": 2}, (400,), k_size=0.0)
    check(cache)
    cache = cache_of({"k_bits": 2, "v_bits": 2}, (400,), v_size=1e6)
    check(cache)
    assert np.isfinite(run(cache_of({"k_bits": 2, "v_bits": 2}, (400,), k_size=1e15)).astype(np.float32)).all()


def test_shared_pages():
    cache = cache_of({"k_bits": 3, "v_bits": 4}, (300, 300))
    cache.block_table[1] = cache.block_table[0]
    check(cache)


def test_wrong_kernels_would_be_seen():
    """The error measure is far above the tolerance for a uniform softmax, swapped scales and the wrong page."""
    cache = cache_of({"k_bits": 4, "v_bits": 2}, (300, 700))
    want = oracle.attention(*cache.arrays(), **cache.options)

    def error(**changes):
        wrong = dataclasses.replace(cache, **changes)
        return row_errors(want, oracle.attention(*wrong.arrays(), **wrong.options))[:2].min()

    layout = cache.options["kv_format"].page_layout(64)
    (k, _), (v, _) = layout.planes()["k_scales"], layout.planes()["v_scales"]
    swapped = cache.pages.copy()
    swapped[..., k:k + 64], swapped[..., v:v + 64] = cache.pages[..., v:v + 64], cache.pages[..., k:k + 64]
    turned = cache.block_table.copy()
    turned[0, 0], turned[1, 0] = turned[1, 0], turned[0, 0]
    assert error(q=np.zeros_like(cache.q)) > 5 * ACCURACY
    assert error(pages=np.where(swapped == 0xFFFFFFFF, 0, swapped)) > 5 * ACCURACY
    assert error(block_table=turned) > 5 * ACCURACY


@pytest.mark.parametrize(("change", "message"), [
    ({"kv_format": KVFormat(page_size=128)}, "layout='linear'"), ({"dtype": jnp.float32}, "q.dtype=float32"),
    ({"head_dim": 96}, "head_dim=96")])
def test_what_it_does_not_serve_is_named(change, message):
    fmt, head_dim = change.get("kv_format", KVFormat(layout="mma_sm90")), change.get("head_dim", 64)
    q = jnp.zeros((1, 1, 2, head_dim), change.get("dtype", jnp.bfloat16))
    pages = jnp.zeros((1, 1, fmt.page_layout(head_dim).words), jnp.uint32)
    open_k, lens = jnp.zeros((1, 1, 128, head_dim), jnp.bfloat16), jnp.ones(1, jnp.int32)
    args = (q, pages, open_k, open_k, jnp.zeros((1, 1), jnp.int32), lens)
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.paged_attention(*args, lens, kv_format=fmt, sm_scale=1.0, **NONE)
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="not on cpu"):
            paged_attention(*args, kv_format=fmt, sm_scale=1.0, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("v_bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("k_bits", [2, 3, 4, 8, 16])
def test_every_pair_of_bits(k_bits, v_bits, head_dim):
    check(cache_of({"k_bits": k_bits, "v_bits": v_bits}, head_dim=head_dim, group=8, k_size=2.0, v_size=2.0 / 7))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group):
    check(cache_of({"k_bits": 3, "v_bits": 2, "outlier_channels": 16, "outlier_bits": 4}, head_dim=128, group=group, num_queries=2))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_buffers_of_warpgroups_are_disjoint(bits, head_dim):
    """Parts of a union that differ in size would put one warpgroup's open tile over another's pages."""
    layout = KVFormat(k_bits=bits, v_bits=bits, layout="mma_sm90").page_layout(head_dim)
    for warps_per_page in (1, 2, 4):
        step = mosaic_gpu.Step(layout, warps_per_page, use_twins=True)
        for words in (layout.key_words, layout.value_words):
            sizes = {math.prod(r.shape[1:]) * r.dtype.itemsize for r in mosaic_gpu._buffers(step, 4, words).refs}
            assert len(sizes) == 1 and sizes.pop() >= 4 * step.pages * words


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("fmt", [{"k_bits": 2, "v_bits": 2}, {"k_bits": 3, "v_bits": 3}, {"k_bits": 4, "v_bits": 4},
                                 {"k_bits": 4, "v_bits": 4, "sink_tokens": 4}, {"k_bits": 8, "v_bits": 8},
                                 {"k_bits": 2, "v_bits": 2, "sink_tokens": 64, "open_pages": 2}])
def test_every_warpgroup_has_items(fmt):
    """More items than blocks x warpgroups: several warpgroups of a block work side by side, and more than once."""
    check(cache_of(fmt, lengths=[2100] * 140, group=1))  # two splits of two KV heads: 560 items
