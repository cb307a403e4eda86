"""What every implementation of `close_page` must do, and every kernel. Subclass `ClosePageCases`, `SameBitsCases`."""
from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import KVFormat, close_page, open_page
from tests.pallas_kernels import oracle
from tests.tolerances import assert_close

FORMATS = [
    KVFormat(k_bits=4, v_bits=2),
    KVFormat(k_bits=3, v_bits=3, page_size=64),
    KVFormat(k_bits=2, v_bits=3, page_size=32, outlier_channels=8, outlier_bits=8, sink_tokens=4),
    KVFormat(k_bits=2, v_bits=8, page_size=32, outlier_channels=16, outlier_bits=16, scale_dtype="float16"),
    KVFormat(k_bits=3, v_bits=2, page_size=32, outlier_channels=8, outlier_bits=4, k_range="clipped", v_range="clipped"),
    KVFormat(k_bits=16, v_bits=4, page_size=32),
    KVFormat(k_bits=32, v_bits=32, page_size=32),
    KVFormat(k_bits=2, v_bits=3, outlier_channels=16, outlier_bits=16, sink_tokens=4, layout="mma_sm90"),
    KVFormat(k_bits=3, v_bits=16, outlier_channels=16, outlier_bits=4, layout="mma_sm90"),
    KVFormat(k_bits=8, v_bits=4, k_range="clipped", v_range="clipped", layout="mma_sm90"),
    KVFormat(k_bits=2, v_bits=3, outlier_channels=16, outlier_bits=16, sink_tokens=4, layout="tpu"),
    KVFormat(k_bits=3, v_bits=16, outlier_channels=16, outlier_bits=4, layout="tpu"),
    KVFormat(k_bits=16, v_bits=4, k_range="clipped", v_range="clipped", layout="tpu"),
]
# Points of the space that only the linear layout stores.
WIDE = [
    KVFormat(k_bits=4, v_bits=4, page_size=32, k_axis="token", k_group=8, v_group=8, k_symmetric=True, v_symmetric=True),
    KVFormat(k_bits=2, v_bits=2, page_size=64, k_group=32, v_axis="channel", v_group=32, sink_tokens=4),
    KVFormat(k_bits=8, v_bits=8, page_size=32, k_axis="token", k_codes="float8_e4m3", v_codes="float8_e4m3", k_symmetric=True,
             v_symmetric=True, scale_dtype="float16"),
    KVFormat(k_bits=3, v_bits=2, page_size=32, k_axis="token", k_codes="gaussian", v_codes="gaussian", k_symmetric=True),
    KVFormat(k_bits=2, v_bits=4, page_size=32, outlier_channels=8, outlier_bits=4, outlier_choice="page",
             scale_dtype="float8_e4m3"),
    KVFormat(k_bits=2, v_bits=2, page_size=32, k_sparse=9, v_sparse=5, outlier_channels=8, outlier_bits=8, sink_tokens=4),
    KVFormat(k_bits=3, v_bits=3, page_size=32, v_range="clipped", v_symmetric=True, v_sparse=3, k_axis="token", v_axis="channel"),
]
# Compiled quickly: fully optimised, these tests take minutes.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
close = jax.jit(close_page, static_argnames=("kv_format", "implementation"), compiler_options=FAST_COMPILE)
reopen = jax.jit(open_page, static_argnames=("kv_format", "head_dim"), compiler_options=FAST_COMPILE)


def make_page(fmt: KVFormat, lead=(2,), num_kv_heads=3, head_dim=None, seed=0):
    rng = np.random.default_rng(seed)
    head_dim = head_dim or (24 if fmt.layout == "linear" else 64)
    shape = (*lead, num_kv_heads, fmt.page_size, head_dim)
    channel = np.ones(head_dim)
    channel[-3:] = 50
    dtype = np.float32 if fmt.open_dtype == "float32" else ml_dtypes.bfloat16
    return (rng.normal(size=shape) * channel - 2).astype(dtype), (rng.normal(size=shape) * 0.3 + 1).astype(dtype)


def group_step(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """A step of a grid of 2**bits levels over the range of each group."""
    return (x.max(axis, keepdims=True) - x.min(axis, keepdims=True)) / (2**bits - 1)


class ClosePageCases:
    implementation: str | None = None

    def close(self, k, v, fmt: KVFormat, num_sinks=0) -> np.ndarray:
        words = np.asarray(close(k, v, kv_format=fmt, num_sinks=np.int32(num_sinks), implementation=self.implementation))
        layout = fmt.page_layout(k.shape[-1])
        assert words.shape == (*k.shape[:-2], layout.words) and words.dtype == np.uint32
        padding = np.ones(layout.words, bool)
        for first, size in layout.planes().values():
            padding[first:first + size] = False
        assert words[0, 0].nbytes == layout.page_bytes and not words[..., padding].any()
        return words

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.name}-{f.layout}")
    def test_bytes_mean_what_the_format_says(self, fmt):
        """An independent decoder of the bytes gives what `open_page` gives, and that is near the input."""
        k, v = make_page(fmt)
        opened = self.check_bytes(k, v, fmt)
        k, v = k.astype(np.float64), v.astype(np.float64)
        base = k.shape[-1] - fmt.outlier_channels
        for x, y, bits, axis, rule in (
            (k[..., :base], opened[0][..., :base], fmt.k_bits, -2, fmt.k_range), (v, opened[1], fmt.v_bits, -1, fmt.v_range),
            (k[..., base:], opened[0][..., base:], fmt.outlier_bits, -2, fmt.k_range),
        ):
            if not x.size:
                continue
            error = np.abs(np.asarray(y).astype(np.float64) - x)
            if bits >= 16:
                assert not error.any()
            elif rule == "minmax":
                # Half a step; the stored step may be 2**-7 wider than needed.
                assert (error <= group_step(x, bits, axis) * 0.505 + 1e-6).all()

    def check_bytes(self, k, v, fmt, num_sinks=0):
        words = self.close(k, v, fmt, num_sinks)
        opened = reopen(words, kv_format=fmt, head_dim=k.shape[-1])
        for index in np.ndindex(words.shape[:2]):
            for ours, theirs in zip(opened, oracle.decode_page(words[index], fmt, k.shape[-1])):
                assert_close(ours[index], theirs, "gaussian_levels" if "gaussian" in fmt.name else "dequantize_f32")
        return opened

    @pytest.mark.parametrize("fmt", FORMATS[:2], ids=lambda f: f.name)
    def test_keys_are_grouped_per_channel_and_values_per_token(self, fmt):
        k, v = (x.astype(np.float32) for x in make_page(fmt))
        loud_k, loud_v = k.copy(), v.copy()
        loud_k[..., 5], loud_v[..., 7, :] = loud_k[..., 5] * 100, loud_v[..., 7, :] * 100
        quiet = reopen(self.close(k, v, fmt), kv_format=fmt, head_dim=24)
        loud = reopen(self.close(loud_k, loud_v, fmt), kv_format=fmt, head_dim=24)
        np.testing.assert_array_equal(np.delete(loud[0], 5, -1), np.delete(quiet[0], 5, -1))
        np.testing.assert_array_equal(np.delete(loud[1], 7, -2), np.delete(quiet[1], 7, -2))

    def test_sinks_stay_out_of_the_ranges_of_their_row_only(self):
        fmt = FORMATS[2]
        k, v = make_page(fmt)
        plain = self.close(k, v, fmt)
        k = k.copy()
        k[:, :, :4] *= 1000
        words = self.close(k, v, fmt, num_sinks=[4, 0])
        opened, _ = reopen(words, kv_format=fmt, head_dim=24)
        expected, _ = reopen(plain, kv_format=fmt, head_dim=24)
        x = k.astype(np.float64)[:, :, 4:]
        step = group_step(x[..., :16], 2, -2)
        assert (np.abs(np.asarray(opened) - k.astype(np.float64))[0, :, 4:, :16] <= step[0] * 0.505).all()
        assert np.abs(np.asarray(opened)[1, :, 4:] - np.asarray(expected)[1, :, 4:]).max() > 100

    def test_a_row_does_not_depend_on_the_batch(self):
        k, v = make_page(FORMATS[2], lead=(4,))
        together = self.close(k, v, FORMATS[2])
        for row in range(4):
            np.testing.assert_array_equal(self.close(k[row:row + 1], v[row:row + 1], FORMATS[2])[0], together[row])

    @pytest.mark.parametrize("value", [0.0, 3.0, -1e30])
    def test_constant_pages_are_exact(self, value):
        fmt = FORMATS[0]
        x = np.full((1, 3, fmt.page_size, 24), value, ml_dtypes.bfloat16)
        for y in reopen(self.close(x, x, fmt), kv_format=fmt, head_dim=24):
            np.testing.assert_array_equal(y, x.astype(np.float32))

    def test_a_biased_channel_needs_the_offset(self):
        """A channel far from zero, as key biases make them: its error is set by its spread, not by its distance."""
        fmt = FORMATS[0]
        k, v = (x.astype(np.float32) for x in make_page(fmt))
        k[..., 3] = k[..., 3] * 0.5 + 50
        opened, _ = reopen(self.close(k, v, fmt), kv_format=fmt, head_dim=24)
        assert np.abs(np.asarray(opened) - k)[..., 3].max() < 0.3


class SameBitsCases:
    """What a kernel of `close_page` must do besides: write the bits that the reference writes, padding included.

    Subclass, set the three attributes, and say how pages are closed with it.
    """

    backend: types.ModuleType
    implementation: str
    layout: str

    def run(self, k, v, fmt: KVFormat, num_sinks) -> np.ndarray:
        raise NotImplementedError

    def check(self, k, v, fmt: KVFormat, num_sinks=0) -> None:
        sinks = np.asarray(num_sinks, np.int32)
        want = np.asarray(close(k, v, kv_format=fmt, num_sinks=sinks, implementation="reference"))
        out = self.run(k, v, fmt, sinks)
        assert out.dtype == want.dtype and out.shape == want.shape
        for name, (first, words) in fmt.page_layout(k.shape[-1]).planes().items():
            np.testing.assert_array_equal(out[..., first:first + words], want[..., first:first + words], err_msg=name)
        np.testing.assert_array_equal(out, want, err_msg="padding")

    def format_of(self, k_bits: int, v_bits: int, outlier_channels: int = 0, outlier_bits: int = 16, **others) -> KVFormat:
        return KVFormat(k_bits=k_bits, v_bits=v_bits, outlier_channels=outlier_channels, outlier_bits=outlier_bits,
                        layout=self.layout, **others)

    @pytest.mark.parametrize(("widths", "head_dim"), [
        ((2, 3), 64), ((3, 2, 16, 4), 128), ((4, 8, 32, 8), 64), ((8, 16, 16, 16), 64), ((16, 4), 64), ((2, 2, 32, 16), 256)],
        ids=str)
    def test_same_bits(self, widths, head_dim):
        fmt = self.format_of(*widths)
        self.check(*make_page(fmt, lead=(), num_kv_heads=2, head_dim=head_dim), fmt)

    def test_leading_axes_and_sinks_of_each_row(self):
        fmt = self.format_of(2, 2, sink_tokens=70)
        k, v = make_page(fmt, lead=(1, 3), num_kv_heads=2)
        k[:, :, :, :70] *= 1000
        self.check(k, v, fmt, [[0, 17, 70]])
        self.check(k[0, 0], v[0, 0], fmt, 127)

    def test_zero_constant_and_huge_groups(self):
        fmt = self.format_of(3, 2, 16, 8)
        k, v = (x.astype(np.float32) for x in make_page(fmt, lead=(), num_kv_heads=1))
        k[0, :, :8] = np.array([0, 0, 3, -1e30, 1e30, 1e-38, -5e-39, 7])  # constant
        k[0, ::2, 8:16] = np.array([0, 1e30, -1e37, 2e-38, 1, -1, 1e-30, -3])  # two values
        v[0, :4] = np.array([0, -2, 1e30, 1e-38])[:, None]
        v[0, 4:8, :2] = np.array([[-1e37, 1e37], [-1e-37, 1e-38], [1e9, 1e9], [0, 0]])
        self.check(k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16), fmt)

    def test_every_step_between_two_codes(self):
        """Numbers near the middle between two codes, where a code turns on the last bit of a quotient."""
        fmt = self.format_of(8, 4)
        grid = np.linspace(-1, 1, 128, dtype=np.float32)[None, :, None] * np.geomspace(1, 3, 64, dtype=np.float32)
        self.check(grid.astype(ml_dtypes.bfloat16), grid[:, :, ::-1].astype(ml_dtypes.bfloat16), fmt)

    @pytest.mark.parametrize(("change", "message"), [
        ({"layout": "linear"}, "layout='linear'"), ({"k_range": "clipped"}, "k_range='clipped'"),
        ({"v_range": "clipped"}, "v_range='clipped'"), ({"dtype": jnp.float32}, "open_k.dtype=float32"),
        ({"head_dim": 96}, "head_dim=96"), ({"kv_heads": 0}, "no page")])
    def test_what_it_does_not_serve_is_named(self, change, message):
        options = {"dtype": jnp.bfloat16, "head_dim": 64, "kv_heads": 1} | change
        x = jnp.zeros((options.pop("kv_heads"), 128, options.pop("head_dim")), options.pop("dtype"))
        fmt = KVFormat(k_bits=2, v_bits=2, **{"layout": self.layout, **options})
        with pytest.raises(NotImplementedError, match=message):
            self.backend.close_page(x, x, kv_format=fmt, num_sinks=jnp.zeros((), jnp.int32))
        if jax.default_backend() == "cpu":
            with pytest.raises(NotImplementedError, match="not on cpu"):
                close_page(x, x, kv_format=fmt, implementation=self.implementation)
