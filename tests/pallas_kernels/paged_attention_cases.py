"""What every implementation of `paged_attention` must do. Subclass `PagedAttentionCases` and set `implementation`."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, paged_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.close_page_cases import FAST_COMPILE, close
from tests.tolerances import assert_close

GARBAGE = 0xFFFFFFFF  # NaN as bfloat16 and float16 scale, as bfloat16 and float32 code

# Compiled once per shape and options, quickly: op by op or fully optimised, these tests take minutes.
STATIC = ("kv_format", "sm_scale", "sliding_window", "logit_softcap", "implementation")
attend = jax.jit(paged_attention, static_argnames=STATIC, compiler_options=FAST_COMPILE)
attend_optimised = jax.jit(
    paged_attention, static_argnames=STATIC, compiler_options={"xla_backend_optimization_level": 3})

FORMATS = [
    KVFormat(k_bits=16, v_bits=16, page_size=32),
    KVFormat(k_bits=8, v_bits=4, page_size=32),
    KVFormat(k_bits=4, v_bits=2, page_size=32),
    KVFormat(k_bits=3, v_bits=3, page_size=64),
    KVFormat(k_bits=2, v_bits=3, page_size=32, scale_dtype="float16"),
    KVFormat(k_bits=2, v_bits=16, page_size=32, outlier_channels=8, outlier_bits=8, sink_tokens=4),
    KVFormat(k_bits=3, v_bits=2, page_size=32, outlier_channels=16, outlier_bits=16, k_range="clipped", v_range="clipped"),
    KVFormat(k_bits=2, v_bits=2, page_size=32, outlier_channels=8, outlier_bits=4),
    KVFormat(k_bits=32, v_bits=32, page_size=32, sink_tokens=3),
    KVFormat(k_bits=3, v_bits=4, page_size=32, sink_tokens=5, open_pages=3),
]


@dataclasses.dataclass
class Cache:
    """Arguments of one call. Everything a row does not own is NaN or garbage."""

    q: np.ndarray
    pages: np.ndarray
    open_k: np.ndarray
    open_v: np.ndarray
    block_table: np.ndarray
    kv_lens: np.ndarray
    q_lens: np.ndarray
    options: dict

    def arrays(self):
        return self.q, self.pages, self.open_k, self.open_v, self.block_table, self.kv_lens, self.q_lens


def make_cache(
    fmt: KVFormat, kv_lens, *, num_queries=2, q_lens=None, num_kv_heads=2, group=3, head_dim=32, seed=0, q_dtype="float32",
    k_size=2.0, v_size=1.0, **options,
) -> Cache:
    """Sequences of random tokens with a 50x key channel and a key bias, cut into shuffled pages of a pool.

    Rows not in use are added up to a multiple of 4, and columns up to 10, so that tests share compiled code.
    """
    rng = np.random.default_rng(seed)
    kv_lens = [*kv_lens, *[0] * (-len(kv_lens) % 4)]
    batch, z, columns = len(kv_lens), fmt.page_size, max(10, -(-max(kv_lens) // fmt.page_size))
    if q_lens is None:
        q_lens = [min(num_queries, (n - 1) % z + 1) if n else 0 for n in kv_lens]
    q_lens = [*q_lens, *[0] * (batch - len(q_lens))]
    pool = batch * columns + 3
    pages = np.full((pool, num_kv_heads, fmt.page_layout(head_dim).words), GARBAGE, np.uint32)
    free = list(rng.permutation(pool))
    block_table = np.full((batch, columns), -1, np.int32)
    dtype = jnp.dtype(fmt.open_dtype)
    ring = fmt.open_pages * z
    open_k, open_v = (np.full((batch, num_kv_heads, ring, head_dim), np.nan, dtype) for _ in "kv")
    sinks = [np.full((batch, num_kv_heads, fmt.sink_tokens, head_dim), np.nan, dtype) for _ in "kv"]
    channel = np.ones(head_dim)
    channel[-1] = 50
    for b, length in enumerate(kv_lens):
        k = (k_size * (rng.normal(size=(num_kv_heads, length, head_dim)) * channel + 1)).astype(dtype)
        v = (v_size * rng.normal(size=k.shape) + 0.5).astype(dtype)
        closed = max((length - 1) // z + 1 - fmt.open_pages, 0)
        for page in range(closed):
            block_table[b, page] = free.pop()
            tokens = slice(page * z, (page + 1) * z)
            num_sinks = fmt.sink_tokens if page == 0 else 0
            pages[block_table[b, page]] = close(k[:, tokens], v[:, tokens], kv_format=fmt, num_sinks=jnp.int32(num_sinks))
        for x, open_x, sink_x in ((k, open_k, sinks[0]), (v, open_v, sinks[1])):
            for s in range(closed * z, length):
                open_x[b, :, s % ring] = x[:, s]
            sink_x[b, :, :length] = x[:, :fmt.sink_tokens]
    # Small enough on the 50x channel that logits stay of size 10.
    q = (rng.normal(size=(batch, num_queries, num_kv_heads * group, head_dim)) / channel).astype(jnp.dtype(q_dtype))
    options = {"kv_format": fmt, "sm_scale": head_dim**-0.5, **options}
    if fmt.sink_tokens:
        options |= {"sink_k": sinks[0], "sink_v": sinks[1]}
    return Cache(
        q, pages, open_k, open_v, block_table, np.asarray(kv_lens, np.int32), np.asarray(q_lens, np.int32), options)


def run(cache: Cache, implementation: str | None, *, optimised: bool = False) -> np.ndarray:
    out = (attend_optimised if optimised else attend)(*cache.arrays(), **cache.options, implementation=implementation)
    assert out.shape == cache.q.shape and out.dtype == cache.q.dtype
    return np.asarray(out)


def check(cache: Cache, out: np.ndarray, tolerance="attention_f32") -> None:
    assert_close(out, oracle.attention(*cache.arrays(), **cache.options), tolerance)


def without_nan(x: np.ndarray) -> np.ndarray:
    """0 for NaN. `np.nan_to_num` leaves bfloat16 as it is."""
    return np.where(np.isnan(x), np.zeros((), x.dtype), x)


class PagedAttentionCases:
    """Tests give formats, and lengths that go with them; a subclass may store them otherwise (`make_cache`)."""

    implementation: str | None = None
    exact = KVFormat(k_bits=32, v_bits=32, page_size=32)  # the most accurate format

    def make_cache(self, fmt: KVFormat, kv_lens, **options) -> Cache:
        return make_cache(fmt, kv_lens, **options)

    def run(self, cache: Cache, **kwargs) -> np.ndarray:
        return run(cache, self.implementation, **kwargs)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_oracle_on_mixed_lengths(self, fmt):
        z = fmt.page_size
        cache = self.make_cache(fmt, [1, z - 1, 0, z, z + 1, 3 * z - 1, 5 * z + 2])
        check(cache, self.run(cache))

    @pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
    def test_query_heads_per_kv_head(self, group):
        cache = self.make_cache(FORMATS[2], [40, 33], num_kv_heads=3, group=group, head_dim=24)
        check(cache, self.run(cache))

    @pytest.mark.parametrize("q_dtype", ["bfloat16", "float32"])
    def test_output_dtype_follows_q(self, q_dtype):
        cache = self.make_cache(FORMATS[3], [70, 130], q_dtype=q_dtype)
        check(cache, self.run(cache), "attention_bf16_output" if q_dtype == "bfloat16" else "attention_f32")

    def test_key_scales_far_from_value_scales(self):
        cache = self.make_cache(FORMATS[2], [97, 35], k_size=2.0, v_size=2.0 / 7)
        check(cache, self.run(cache))

    def test_bits_of_keys_and_of_values_each_count(self):
        """Every pair gives its own bytes and output, and more bits come nearer to the exact cache."""
        def output(k_bits, v_bits):
            fmt = dataclasses.replace(self.exact, k_bits=k_bits, v_bits=v_bits)
            cache = self.make_cache(fmt, [200], num_kv_heads=1, seed=3)
            layout = cache.options["kv_format"].page_layout(cache.q.shape[-1])
            assert cache.pages.nbytes == cache.pages.shape[0] * layout.page_bytes
            return cache.pages[cache.block_table[0, 0]].tobytes(), self.run(cache)[0]

        _, exact = output(self.exact.k_bits, self.exact.v_bits)
        error, words = {}, set()
        for pair in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (4, 4), (8, 8)):
            page, out = output(*pair)
            words.add(page)
            error[pair] = np.abs(out - exact).mean()
        assert len(words) == len(set(error.values())) == len(error)
        assert error[2, 2] > 1.5 * error[3, 3] > 2 * error[4, 4] > 10 * error[8, 8]
        assert error[2, 2] > error[4, 2] and error[2, 2] > error[2, 4]

    @pytest.mark.parametrize("fmt", [FORMATS[2], FORMATS[5]], ids=lambda f: f.name)
    def test_memory_a_row_does_not_own_is_never_read(self, fmt):
        """The cache is full of NaN where nothing is owned; zeros in its place must change no bit."""
        cache = self.make_cache(fmt, [1, 37, 70])
        clean = dataclasses.replace(
            cache, pages=np.where(cache.pages == GARBAGE, 0, cache.pages),
            open_k=without_nan(cache.open_k), open_v=without_nan(cache.open_v),
            options={k: without_nan(v) if k in ("sink_k", "sink_v") else v for k, v in cache.options.items()})
        unused = clean.block_table < 0
        clean.block_table[unused] = np.arange(unused.sum()) + 1000
        out = self.run(cache)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, self.run(clean))

    def test_page_ids_do_not_matter(self):
        cache = self.make_cache(FORMATS[2], [97, 150, 33])
        order = np.random.default_rng(1).permutation(len(cache.pages))
        moved = np.empty_like(cache.pages)
        moved[order] = cache.pages
        table = np.where(cache.block_table < 0, -1, order[cache.block_table]).astype(np.int32)
        np.testing.assert_array_equal(
            self.run(cache), self.run(dataclasses.replace(cache, pages=moved, block_table=table)))

    def test_rows_may_share_pages(self):
        cache = self.make_cache(FORMATS[2], [97, 97, 97], seed=2)
        cache.block_table[1], cache.block_table[2, :2] = cache.block_table[0], cache.block_table[0, :2]
        check(cache, self.run(cache))

    def test_padded_block_table_columns_do_not_matter(self):
        cache = self.make_cache(FORMATS[2], [97, 40])
        table = np.pad(cache.block_table, [(0, 0), (0, 9)], constant_values=-1)
        np.testing.assert_array_equal(self.run(cache), self.run(dataclasses.replace(cache, block_table=table)))

    @pytest.mark.parametrize("window", [None, 40])
    def test_a_row_is_the_same_bits_whatever_the_others_hold(self, window):
        """Alone among empty rows, in another slot, beside far longer rows: the same bits."""
        cache = self.make_cache(FORMATS[2], [33, 300, 97, 160], sliding_window=window)
        together = self.run(cache, optimised=True)
        for row in range(4):
            alone = dataclasses.replace(cache, kv_lens=np.where(np.arange(4) == row, cache.kv_lens, 0))
            np.testing.assert_array_equal(self.run(alone, optimised=True)[row], together[row])
        turn = [2, 3, 0, 1]
        turned = dataclasses.replace(cache, **{
            name: getattr(cache, name)[turn] for name in ("q", "open_k", "open_v", "block_table", "kv_lens", "q_lens")})
        np.testing.assert_array_equal(self.run(turned, optimised=True), together[turn])

    @pytest.mark.parametrize(("fmt", "window"), [(FORMATS[2], None), (FORMATS[5], 7)])
    def test_four_queries_at_once_are_four_single_ones(self, fmt, window):
        """The same open page, one token longer each time; tokens after the query must not be seen."""
        cache = self.make_cache(fmt, [68, 9, 36], num_queries=4, sliding_window=window)
        at_once = self.run(cache)
        for i in range(4):
            single = dataclasses.replace(
                cache, q=cache.q[:, i:i + 1], kv_lens=np.maximum(cache.kv_lens - 3 + i, 0), q_lens=np.ones(4, np.int32))
            assert_close(at_once[:, i:i + 1], self.run(single), "attention_order_f32")

    def test_queries_beyond_q_lens_are_zero_and_change_nothing(self):
        cache = self.make_cache(FORMATS[2], [70, 36, 0], num_queries=4, q_lens=[2, 4, 4])
        out = self.run(cache)
        assert not out[0, 2:].any() and out[0, :2].any() and out[1].any() and not out[2].any()
        check(cache, out)
        cache.q[0, 2:] = np.nan
        np.testing.assert_array_equal(self.run(cache), out)

    @pytest.mark.parametrize("window", [1, 31, 32, 70])
    def test_window(self, window):
        cache = self.make_cache(FORMATS[2], [1, 31, 32, 33, 95, 200], sliding_window=window)
        check(cache, self.run(cache))

    @pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (50, 5.0)])
    def test_sinks_window_softcap_and_learned_sinks_together(self, window, softcap):
        fmt = KVFormat(k_bits=2, v_bits=3, page_size=32, sink_tokens=4)
        learned = np.linspace(-3, 4, 6).astype(np.float32)
        cache = self.make_cache(
            fmt, [1, 3, 5, 32, 33, 95, 160], sliding_window=window, logit_softcap=softcap, attention_sinks=learned)
        check(cache, self.run(cache))

    def test_learned_sink_far_above_the_logits(self):
        cache = self.make_cache(FORMATS[2], [40], attention_sinks=np.full(6, 50, np.float32))
        cache.q[:] = -np.abs(cache.q) * 20
        check(cache, self.run(cache))

    def test_huge_keys_stay_finite(self):
        cache = self.make_cache(FORMATS[2], [70], k_size=1e15)
        out = self.run(cache)
        assert np.isfinite(out).all()

    def test_hand_computed(self):
        """Two tokens, logits 0 and ln 3: weights 1/4 and 3/4."""
        fmt = KVFormat(page_size=32)
        cache = self.make_cache(fmt, [2], num_queries=1, num_kv_heads=1, group=1, head_dim=8)
        cache.q[:], cache.open_k[:, :, :2], cache.open_v[:, :, :2] = 0, 0, 0
        cache.q[..., 0], cache.open_k[:, :, 1, 0] = np.log(3) / cache.options["sm_scale"], 1
        cache.open_v[:, :, 0, 0], cache.open_v[:, :, 1, 1] = 4, 8
        np.testing.assert_allclose(self.run(cache)[0, 0, 0, :3], [1, 6, 0], rtol=1e-6)
