"""What every implementation of `grouped_matmul` must do.

Subclass `GroupedMatmulCases` and set `implementation`; `PackedMatmulCases` holds what is asked of packed weights at decode sizes,
`MosaicMatmulCases` what is asked of a kernel.
"""
from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, interleave, pack_weights
from pallas_kernels.packed_weights import PackedWeights
from pallas_kernels.qarray import quantize, quantize_fp8, quantize_mxfp4
from tests.pallas_kernels.close_page_cases import FAST_COMPILE
from tests.tolerances import assert_close

K_SIZE, N_SIZE, EXPERTS = 48, 40, 5
GROUPS = {
    "uneven": [3, 0, 17, 1, 9], "first empty": [0, 0, 4, 20, 6], "one expert": [0, 30, 0, 0, 0],
    "rows left over": [2, 3, 0, 5, 1], "none": [0, 0, 0, 0, 0], "last only": [0, 0, 0, 0, 30],
}


def inputs(rows=30, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(rows, K_SIZE)), rng.normal(size=(EXPERTS, K_SIZE, N_SIZE))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def oracle(x, w, group_sizes) -> np.ndarray:
    x, w = np.asarray(x).astype(np.float64), np.asarray(w).astype(np.float64)
    out, row = np.zeros((len(x), w.shape[2])), 0
    for expert, size in enumerate(group_sizes):
        out[row:row + size] = x[row:row + size] @ w[expert]
        row += size
    return out


STATIC = ("implementation", "preferred_element_type", "glu")
matmul = jax.jit(grouped_matmul, static_argnames=STATIC, compiler_options=FAST_COMPILE)


def loss(x, w, group_sizes, target, implementation):
    return jnp.sum(grouped_matmul(x, w, group_sizes, implementation=implementation) * target)


gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnames="implementation", compiler_options=FAST_COMPILE)


class GroupedMatmulCases:
    implementation: str | None = None

    def run(self, x, w, group_sizes, **kwargs):
        return matmul(x, w, jnp.asarray(group_sizes, jnp.int32), implementation=self.implementation, **kwargs)

    @pytest.mark.parametrize("groups", GROUPS)
    def test_oracle(self, groups):
        x, w = inputs()
        assert_close(self.run(x, w, GROUPS[groups]), oracle(x, w, GROUPS[groups]), "matmul_f32")

    @pytest.mark.parametrize("rows", [1, 2, 7, 400])
    def test_row_counts(self, rows):
        x, w = inputs(rows)
        sizes = np.bincount(np.random.default_rng(rows).integers(0, EXPERTS, rows), minlength=EXPERTS)
        assert_close(self.run(x, w, sizes), oracle(x, w, sizes), "matmul_f32")

    def test_rows_left_over_are_zero_even_if_nan(self):
        x, w = inputs()
        x = x.at[11:].set(jnp.nan)
        out = np.asarray(self.run(x, w, GROUPS["rows left over"]))
        assert np.isfinite(out).all() and not out[11:].any() and out[10].any()

    def test_bfloat16(self):
        x, w = inputs(dtype="bfloat16")
        out = self.run(x, w, GROUPS["uneven"])
        assert out.dtype == jnp.bfloat16
        assert_close(out, oracle(x, w, GROUPS["uneven"]), "matmul_bf16_output")
        out = self.run(x, w, GROUPS["uneven"], preferred_element_type=jnp.float32)
        assert out.dtype == jnp.float32
        assert_close(out, oracle(x, w, GROUPS["uneven"]), "matmul_f32")

    @pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(8, 16, True), (4, 16, False), (4, None, True)])
    def test_quantised_weights(self, bits, group_size, symmetric):
        x, w = inputs()
        q = quantize(w + 0.5, bits=bits, group_size=group_size, symmetric=symmetric)
        expected = oracle(x, dequantized(q), GROUPS["uneven"])
        assert_close(self.run(x, q, GROUPS["uneven"]), expected, "matmul_f32")

    @pytest.mark.parametrize("groups", ["uneven", "rows left over"])
    def test_gradients(self, groups):
        x, w = inputs()
        target = np.random.default_rng(1).normal(size=(len(x), N_SIZE)).astype(np.float32)
        sizes = GROUPS[groups]
        dx, dw = gradients(x, w, np.asarray(sizes, np.int32), target, implementation=self.implementation)
        assert_close(dx, oracle(target, np.asarray(w).swapaxes(1, 2), sizes), "matmul_f32")
        starts = np.cumsum([0, *sizes])
        rows, out = np.asarray(x).astype(np.float64), target.astype(np.float64)
        expected = [rows[a:b].T @ out[a:b] for a, b in itertools.pairwise(starts)]
        assert_close(dw, np.stack(expected), "matmul_f32")

    def test_bias_and_glu(self):
        x, w = inputs()
        w = interleave(w[:, :, :16], w[:, :, 16:32])
        bias = np.random.default_rng(2).normal(size=(EXPERTS, 32)).astype(np.float32)
        for groups in ("uneven", "rows left over", "last only"):
            out = self.run(x, w, GROUPS[groups], bias=bias, glu=swiglu)
            assert_close(out, finished(oracle(x, w, GROUPS[groups]), bias, GROUPS[groups], swiglu), "matmul_f32")
        out = self.run(x, w, GROUPS["uneven"], bias=bias)
        assert_close(out, finished(oracle(x, w, GROUPS["uneven"]), bias, GROUPS["uneven"], None), "matmul_f32")


def swiglu(gate, up):
    return gate * (1 / (1 + jnp.exp(-gate))) * up


def finished(y: np.ndarray, bias, group_sizes, glu) -> np.ndarray:
    """Float64: the bias of each row's expert added, gate and up joined; rows without an expert are 0."""
    rows = sum(group_sizes)
    if bias is not None:
        y[:rows] += np.repeat(np.asarray(bias, np.float64), group_sizes, axis=0)
    if glu is not None:
        pairs = y.reshape(len(y), -1, 2, 16)
        gate, up = (pairs[:, :, i].reshape(len(y), -1) for i in range(2))
        y = gate / (1 + np.exp(-gate)) * up
        y[rows:] = 0
    return y


# Relative L2 error of a row. Codes times bfloat16 numbers are exact; the sum over a group is off by the code's offset, up to 136
# times sum |x|, in units of 2**-23 or so, and everything else is float32.
PACKED_ACCURACY = 1e-4
BFLOAT16_ACCURACY = 2**-8
ROW_COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A problem of packed weights."""

    k: int = 384
    n: int = 64
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    scale_dtype: str = "float32"
    sizes: tuple[int, ...] = (3, 0, 9, 1, 0, 5)
    rows: int = 18
    x_size: tuple[float, ...] = (1.0,)  # of each row in turn
    w_size: tuple[float, ...] = (1.0,)  # of each channel in turn
    seed: int = 0

    def make(self) -> tuple[jax.Array, np.ndarray, PackedWeights]:
        """x bfloat16 [M, k]; the weights float64 [E, k, n]; packed."""
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(self.rows, self.k)) * np.resize(self.x_size, self.rows)[:, None]
        x[sum(self.sizes):] = np.nan
        w = (rng.normal(size=(len(self.sizes), self.k, self.n)) + 0.3) * np.resize(self.w_size, self.k)[:, None]
        x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32)
        if self.bits == 16:
            w = w.astype(jnp.bfloat16)
            return x, np.asarray(w).astype(np.float64), pack_weights(w)
        q = quantize(w, bits=self.bits, group_size=self.group_size, symmetric=self.symmetric, scale_dtype=self.scale_dtype)
        return x, dequantized(q), pack_weights(q)


def dequantized(q) -> np.ndarray:
    """Float64 [E, k, n], from the definition."""
    experts, k, n = q.shape
    values = np.asarray(q.qvalue).astype(np.float64).reshape(experts, -1, q.group_size, n)
    if q.zero_point is not None:
        values = values - np.asarray(q.zero_point).astype(np.float64)[:, :, None]
    return (values * np.asarray(q.scale).astype(np.float64)[:, :, None]).reshape(experts, k, n)


class PackedMatmulCases:
    """Packed weights and rows of bfloat16, against float64."""

    implementation: str | None = None

    def run(self, x, w, group_sizes, **kwargs):
        return matmul(x, w, jnp.asarray(group_sizes, jnp.int32), implementation=self.implementation, **kwargs)

    def check(self, problem: Packed, *, bias: bool = False, glu=None, out_dtype="float32") -> np.ndarray:
        x, w, packed = problem.make()
        rng = np.random.default_rng(9)
        biases = rng.normal(size=(len(problem.sizes), problem.n)).astype(np.float32) if bias else None
        out = np.asarray(self.run(x, packed, problem.sizes, bias=biases, glu=glu, preferred_element_type=jnp.dtype(out_dtype)))
        rows = sum(problem.sizes)
        want = finished(oracle(np.asarray(x).astype(np.float64)[:rows], w, problem.sizes), biases, problem.sizes, glu)
        assert out.dtype == out_dtype and out.shape == (problem.rows, want.shape[1])
        assert not out[rows:].any() and np.isfinite(out.astype(np.float64)).all()
        errors = np.linalg.norm(out[:rows] - want, axis=1) / np.linalg.norm(want, axis=1)
        assert errors.max(initial=0) <= (BFLOAT16_ACCURACY if out_dtype == "bfloat16" else PACKED_ACCURACY), errors
        return out

    @pytest.mark.parametrize(("bits", "group_size", "symmetric", "scale_dtype"), [
        (4, 128, True, "float32"), (4, 32, False, "bfloat16"), (8, 64, True, "bfloat16"), (8, 384, False, "float32"),
        (3, 64, True, "float32"), (2, 128, False, "float32"), (16, 384, True, "float32")])
    def test_formats(self, bits, group_size, symmetric, scale_dtype):
        self.check(Packed(bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype))

    @pytest.mark.parametrize("rows", [1, 8, 9, 33])
    def test_all_rows_on_one_expert(self, rows):
        self.check(Packed(sizes=(0, 0, 0, rows, 0), rows=rows))

    @pytest.mark.parametrize("sizes", [(0, 0, 0), (18, 0, 0), (0, 0, 2), (1,) * 18], ids=str)
    def test_group_sizes(self, sizes):
        self.check(Packed(sizes=sizes))

    @pytest.mark.parametrize(("k", "n"), [(32, 32), (96, 32), (704, 32), (768, 64), (32, 128)])  # 1, 3, 11, 6 chunks; 1
    def test_tails_of_the_contraction(self, k, n):
        self.check(Packed(k=k, group_size=32, n=n))

    def test_bias_and_glu(self):
        self.check(Packed(), bias=True)
        self.check(Packed(k=256, n=128), bias=True, glu=swiglu)
        self.check(Packed(), bias=True, glu=swiglu)
        self.check(Packed(), glu=swiglu, out_dtype="bfloat16")

    def test_magnitudes_far_apart(self):
        """Rows of one tile, and groups of one column."""
        self.check(Packed(x_size=(1e-6, 1.0, 1e6)))
        self.check(Packed(w_size=(1e-3,) * 64 + (1e3,) * 64 + (1.0,) * 64))
        self.check(Packed(x_size=(1e6,), w_size=(1e-6,)))


class MosaicMatmulCases(PackedMatmulCases):
    """What a kernel must do besides. Subclass, set the attributes, and say how it is run on what `pack_weights` packed."""

    backend: types.ModuleType
    implementation: str
    pack: Callable  # to the weights that it reads
    reads: str  # their name

    def test_a_row_alone_and_among_others_is_the_same_bits(self):
        problem = Packed(sizes=(3, 0, 13, 1), rows=18)
        x, _, packed = problem.make()
        together = np.asarray(self.run(x, packed, problem.sizes, preferred_element_type=jnp.dtype("float32")))
        for row, sizes in ((2, (1, 0, 0, 0)), (3, (0, 0, 1, 0)), (15, (0, 0, 1, 0)), (16, (0, 0, 0, 1))):
            alone = np.asarray(self.run(x[row:row + 1], packed, sizes, preferred_element_type=jnp.dtype("float32")))
            np.testing.assert_array_equal(alone[0], together[row])

    @pytest.mark.parametrize(("quantized", "name"), [(quantize_fp8, "float8_e4m3fn"), (quantize_mxfp4, "float4_e2m1fn")])
    def test_float_codes_are_refused_by_name(self, quantized, name):
        with pytest.raises(NotImplementedError, match=f"{name} weights"):
            self.backend.grouped_matmul(
                jnp.zeros((4, 64), jnp.bfloat16), type(self).pack(quantized(jnp.ones((2, 64, 32)))), jnp.zeros(2, jnp.int32),
                preferred_element_type=jnp.bfloat16)

    @pytest.mark.parametrize(("change", "message"), [
        ({"w": quantize(jnp.ones((2, 64, 32)), bits=4)}, "QArray weights"), ({"w": jnp.ones((2, 64, 32))}, "only {}"),
        ({"x": jnp.zeros((4, 64))}, "x.dtype=float32"), ({"x": jnp.zeros((5000, 64), jnp.bfloat16)}, "5000"),
        ({"preferred_element_type": jnp.float16}, "float16")])
    def test_what_it_does_not_serve_is_named(self, change, message):
        arguments = {
            "x": jnp.zeros((4, 64), jnp.bfloat16), "w": type(self).pack(quantize(jnp.ones((2, 64, 32)), bits=4)),
            "group_sizes": jnp.zeros(2, jnp.int32), "preferred_element_type": jnp.bfloat16} | change
        with pytest.raises(NotImplementedError, match=message.format(self.reads)):
            self.backend.grouped_matmul(**arguments)
        if jax.default_backend() == "cpu":
            with pytest.raises(NotImplementedError, match="not on cpu"):
                grouped_matmul(**arguments, implementation=self.implementation)
