"""`grouped_matmul`: rows sorted by expert, each group times its expert's matrix."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.packed_weights import BLOCK
from pallas_kernels.qarray import QArray
from pallas_kernels.stored_weights import StoredWeights

dispatch.register_mosaic("grouped_matmul")
dispatch.register("grouped_matmul", "reference", reference.grouped_matmul)
dispatch.register("grouped_matmul", "ragged_dot", reference.ragged_dot)


def grouped_matmul(
    x: jax.Array, w: jax.Array | QArray | StoredWeights, group_sizes: jax.Array, *, bias: jax.Array | None = None,
    glu: Callable[[jax.Array, jax.Array], jax.Array] | None = None, implementation: str | None = None,
    preferred_element_type=None,
) -> jax.Array:
    """Multiplies consecutive groups of rows with one matrix each.

    Differentiable in `x`, and in `w` where it is a plain array; then in `bias` too. Accumulates in float32.

    Args:
      x: float [M, k]. The first group_sizes[0] rows belong to expert 0, the next group_sizes[1] to expert 1, and so on.
      w: float [E, k, n], or a `QArray` of that shape with groups along k (axis -2), or `PackedWeights` or
        `TpuWeights` of it, which the kernels of Hopper and TPU read.
      group_sizes: int32 [E], not negative, sum at most M.
      bias: float [E, n], added to the rows of each expert.
      glu: joins two halves of the columns, elementwise: glu(gate, up), float32 [rows, columns] in any order of axes. Columns
        alternate in runs of 16, gate first (`packed_weights.interleave`); n is then a multiple of 32.
      implementation: None for the first of the platform's order that can serve the call, or a registered name.
      preferred_element_type: dtype of the result; None for the dtype of `x`.

    Returns:
      [M, n], or [M, n / 2] with `glu`. Rows beyond sum(group_sizes) are 0, whatever they hold in `x`.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: no implementation can serve the call.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{x.shape=}, {w.shape=}: must be [M, k] and [E, k, n]")
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(f"{group_sizes.shape=}, {group_sizes.dtype=}: must be int32 ({w.shape[0]},)")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{x.dtype=}: must be a float dtype")
    if isinstance(w, QArray):
        if w.axis != -2:
            raise ValueError(f"w.axis={w.axis}: quantisation groups must run along k, axis -2")
    elif not isinstance(w, StoredWeights) and not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"{w.dtype=}: must be a float dtype, a QArray, PackedWeights or TpuWeights")
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"{bias.shape=}: must be {(w.shape[0], w.shape[2])}, of {w.shape=}")
    if glu is not None and w.shape[2] % BLOCK:
        raise ValueError(f"{w.shape=}: with glu, the columns must be a multiple of {BLOCK}")
    out_dtype = jnp.dtype(x.dtype if preferred_element_type is None else preferred_element_type)
    return dispatch.call(
        "grouped_matmul", implementation, x, w, group_sizes, bias=bias, glu=glu, preferred_element_type=out_dtype)
