"""What every implementation of `grouped_matmul` must do. Subclass `GroupedMatmulCases` and set `implementation`."""
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.qarray import quantize
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


STATIC = ("implementation", "preferred_element_type")
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
        exact = (np.asarray(q.qvalue).astype(np.float64).reshape(EXPERTS, -1, q.group_size, N_SIZE)
                 - (0 if q.zero_point is None else np.asarray(q.zero_point).astype(np.float64)[:, :, None])
                 ) * np.asarray(q.scale).astype(np.float64)[:, :, None]
        expected = oracle(x, exact.reshape(w.shape), GROUPS["uneven"])
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
