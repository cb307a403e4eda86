"""Plain JAX `grouped_matmul`: a loop over tiles of rows of one expert.

On CPU `jax.lax.ragged_dot` and a masked product per expert both multiply every row with every expert: 4 to 9 times this
loop's time from 512 rows on, and they read all the weights for two rows. The loop runs over the tiles that hold rows, so decode
reads only the woken experts.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.packed_weights import deinterleave
from pallas_kernels.pallas_utils import compute_dtype
from pallas_kernels.qarray import QArray
from pallas_kernels.stored_weights import StoredWeights

MAX_TILE_ROWS = 128
QUANTISED = (QArray, StoredWeights)


def grouped_matmul(
    x: jax.Array, w: jax.Array | QArray | StoredWeights, group_sizes: jax.Array, *, bias: jax.Array | None = None,
    glu: Callable | None = None, preferred_element_type: jnp.dtype,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    multiply = _forward if isinstance(w, QUANTISED) else _differentiable
    if bias is None and glu is None:
        return multiply(x, w, group_sizes, preferred_element_type)
    y = multiply(x, w, group_sizes, jnp.dtype(jnp.float32))
    return _finish(y, group_sizes, bias, glu).astype(preferred_element_type)


def ragged_dot(
    x: jax.Array, w: jax.Array | QArray | StoredWeights, group_sizes: jax.Array, *, bias: jax.Array | None = None,
    glu: Callable | None = None, preferred_element_type: jnp.dtype,
) -> jax.Array:
    """The same through `jax.lax.ragged_dot`, which has a grouped kernel on TPU; quantised weights are dequantised first."""
    w = w.dequantize(x.dtype) if isinstance(w, QUANTISED) else w.astype(x.dtype)
    plain = bias is None and glu is None
    y = lax.ragged_dot(x, w, group_sizes, preferred_element_type=preferred_element_type if plain else jnp.float32)
    return _finish(y, group_sizes, bias, glu).astype(preferred_element_type)


def _finish(y: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, glu: Callable | None) -> jax.Array:
    """Adds each expert's bias to its rows, joins gate and up, and zeroes the rows that no expert has."""
    row = jnp.arange(y.shape[0], dtype=jnp.int32)
    if bias is not None:
        expert = jnp.sum(row[:, None] >= jnp.cumsum(group_sizes), axis=1, dtype=jnp.int32)
        y = y + bias.astype(y.dtype)[jnp.minimum(expert, bias.shape[0] - 1)]
    if glu is not None:
        y = glu(*deinterleave(y))
    return jnp.where((row < jnp.sum(group_sizes))[:, None], y, jnp.zeros((), y.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable(x, w, group_sizes, out_dtype):
    return _forward(x, w, group_sizes, out_dtype)


def _fwd(x, w, group_sizes, out_dtype):
    return _forward(x, w, group_sizes, out_dtype), (x, w, group_sizes)


def _bwd(out_dtype, residuals, dy):
    x, w, group_sizes = residuals
    dx = _forward(dy, w, group_sizes, x.dtype, transpose_w=True)
    return dx, _weight_gradient(x, dy, w, group_sizes), None


_differentiable.defvjp(_fwd, _bwd)


def _forward(x, w, group_sizes, out_dtype, transpose_w: bool = False) -> jax.Array:
    """[M, n]: rows of expert e times w[e] ([k, n], or [n, k] when `transpose_w`)."""
    rows, columns = x.shape[0], w.shape[1 if transpose_w else 2]
    tile = _tile_rows(rows, w.shape[0])
    num_tiles, locate = _tiles(group_sizes, tile)
    dtype = compute_dtype(x.dtype)
    padded = jnp.pad(x.astype(dtype), ((0, tile), (0, 0)))

    def body(t, y):
        expert, row, inside = locate(t)
        weights = _expert_weights(w, expert, dtype)
        contract = (((1,), (1 if transpose_w else 0,)), ((), ()))
        product = lax.dot_general(
            lax.dynamic_slice_in_dim(padded, row, tile), weights, contract, preferred_element_type=jnp.float32)
        # Rows past this expert's belong to the next tiles.
        product = jnp.where(inside, product, lax.dynamic_slice_in_dim(y, row, tile))
        return lax.dynamic_update_slice_in_dim(y, product, row, 0)

    y = lax.fori_loop(0, num_tiles, body, jnp.zeros((rows + tile, columns), jnp.float32))
    return y[:rows].astype(out_dtype)


def _weight_gradient(x, dy, w, group_sizes) -> jax.Array:
    """[E, k, n]: x.T @ dy over the rows of each expert."""
    tile = _tile_rows(x.shape[0], w.shape[0])
    num_tiles, locate = _tiles(group_sizes, tile)
    dtype = compute_dtype(x.dtype)
    x, dy = (jnp.pad(a.astype(dtype), ((0, tile), (0, 0))) for a in (x, dy))

    def body(t, dw):
        expert, row, inside = locate(t)
        x_tile = jnp.where(inside, lax.dynamic_slice_in_dim(x, row, tile), jnp.zeros((), dtype))
        dy_tile = jnp.where(inside, lax.dynamic_slice_in_dim(dy, row, tile), jnp.zeros((), dtype))
        product = lax.dot_general(x_tile, dy_tile, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        old = lax.dynamic_index_in_dim(dw, expert, keepdims=False)
        return lax.dynamic_update_index_in_dim(dw, old + product, expert, 0)

    return lax.fori_loop(0, num_tiles, body, jnp.zeros(w.shape, jnp.float32)).astype(w.dtype)


def _tile_rows(rows: int, num_experts: int) -> int:
    """Rows a tile: about what an expert gets, a power of two."""
    average = max(1, rows // num_experts)
    return min(MAX_TILE_ROWS, 1 << (average - 1).bit_length())


def _tiles(group_sizes: jax.Array, tile: int):
    """Number of tiles, and tile number -> (expert, first row, bool [tile, 1]: the row belongs to that expert)."""
    row_ends = jnp.cumsum(group_sizes)
    tile_ends = jnp.cumsum((group_sizes + (tile - 1)) // tile)

    def locate(t):
        expert = jnp.sum(tile_ends <= t, dtype=jnp.int32)
        first_tile = jnp.where(expert > 0, tile_ends[expert - 1], 0)
        row = row_ends[expert] - group_sizes[expert] + (t - first_tile) * tile
        inside = row + jnp.arange(tile, dtype=jnp.int32) < row_ends[expert]
        return expert, row, inside[:, None]

    return tile_ends[-1], locate


def _expert_weights(w: jax.Array | QArray | StoredWeights, expert: jax.Array, dtype) -> jax.Array:
    """Weights of one expert in `dtype`."""
    one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert, keepdims=False), w)
    return one.dequantize(dtype) if isinstance(one, QUANTISED) else one.astype(dtype)
