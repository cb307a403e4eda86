"""`grouped_matmul` for few rows an expert on TPU, in Pallas Mosaic TPU, over weights packed for it (`tpu_weights`).

The rows of each expert are cut into tiles of 16 or more, each tile padded; one grid step multiplies a tile by a block of columns of
its expert's matrix, over the whole contraction:

    for each 128 channels:   codes out of words;   product with the tile, a group of channels in its own rows
                             (product - sum(x) * zero point) * scale, added up in float32

The grid's pipeline brings the words of the next step while this one is worked on, and does not bring them again when the next tile
is of the same expert: columns are the outer axis of the grid. An expert without rows is not read. The grid has as many steps as any
group sizes could need; those without a tile repeat the last tile's blocks, so that nothing is copied for them.

Codes are whole numbers up to 255, exact in bfloat16; they count from the lowest code, which the zero point sets right.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.served import refuse_others
from pallas_kernels.pallas_utils import cdiv
from pallas_kernels.tpu_tiles import unpack_pairs
from pallas_kernels.tpu_weights import COLUMNS, LANES, TpuWeightLayout, TpuWeights, join_runs, split_runs

TILE_ROWS = (16, 32, 64)
BLOCK_BYTES = 2 << 20  # of words, where a matrix can be cut so
MAX_BLOCK_BYTES = 4 << 20  # two such blocks and a tile of rows fit VMEM


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything the kernel knows at compile time."""

    layout: TpuWeightLayout
    tile: int
    block: int  # columns
    has_bias: bool
    glu: Callable | None


def grouped_matmul(
    x: jax.Array, w: TpuWeights, group_sizes: jax.Array, *, bias: jax.Array | None = None, glu: Callable | None = None,
    preferred_element_type: jnp.dtype, interpret: Any = False,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`.

    Args:
      x: bfloat16 [M, k], M at most `served.MAX_ROWS`.
      w: `TpuWeights`.
      interpret: `pltpu.InterpretParams()` to run on CPU.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    refuse_others("mosaic_tpu", TpuWeights, x, w, preferred_element_type)
    if 4 * w.layout.rows * COLUMNS > MAX_BLOCK_BYTES:
        raise NotImplementedError(
            f"mosaic_tpu: k={w.layout.k} at {w.layout.bits} bits: {w.layout.rows} rows of {COLUMNS} words do not fit VMEM")
    layout, (rows, _), num_experts = w.layout, x.shape, w.shape[0]
    call = _Call(layout, _tile_rows(rows, num_experts), _block_columns(layout), bias is not None, glu)
    tiles = min(rows, min(rows, num_experts) + rows // call.tile)
    expert, source, place = _plan(group_sizes, rows, call.tile, tiles)
    padded = jnp.pad(jnp.take(x, source, axis=0, mode="clip"), [(0, 0), (0, layout.padded_k - layout.k)])
    inputs = [padded, w.words]
    if bias is not None:
        inputs.append(join_runs(bias.astype(jnp.float32))[:, None])
    used = cdiv(group_sizes, call.tile).sum(dtype=jnp.int32).reshape(1)
    out = _kernel(call, tiles, jnp.dtype(preferred_element_type), interpret)(expert, used, *inputs)
    n = layout.n // 2 if glu is not None else layout.n
    out = out[:, :n] if glu is not None else split_runs(out, n)
    inside = jnp.arange(rows, dtype=jnp.int32) < group_sizes.sum(dtype=jnp.int32)
    return jnp.where(inside[:, None], jnp.take(out, place, axis=0, mode="clip"), jnp.zeros((), out.dtype))


def _tile_rows(rows: int, num_experts: int) -> int:
    """About what an expert gets."""
    return next((tile for tile in TILE_ROWS if tile * num_experts >= rows), TILE_ROWS[-1])


def _block_columns(layout: TpuWeightLayout) -> int:
    """The most columns that divide the matrix and fit."""
    count = layout.columns // COLUMNS
    fitting = [c for c in range(1, count + 1) if count % c == 0 and 4 * layout.rows * COLUMNS * c <= BLOCK_BYTES]
    return COLUMNS * max(fitting, default=1)


def _plan(group_sizes, rows: int, tile: int, tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert of each tile, int32 [tiles]; row of x of each padded row [tiles * tile]; padded row of each row of x [rows].

    Tiles that are not used repeat the last one.
    """
    ends, tile_ends = jnp.cumsum(group_sizes), jnp.cumsum(cdiv(group_sizes, tile))
    starts, first_tiles = ends - group_sizes, tile_ends - cdiv(group_sizes, tile)

    def of(index, limits):
        """The expert that `index` belongs to."""
        expert = jnp.sum(index[:, None] >= limits, axis=1, dtype=jnp.int32)
        return jnp.minimum(expert, limits.shape[0] - 1)

    number = jnp.minimum(jnp.arange(tiles, dtype=jnp.int32), jnp.maximum(tile_ends[-1] - 1, 0))
    expert = of(number, tile_ends)
    first = starts[expert] + (number - first_tiles[expert]) * tile
    source = (first[:, None] + jnp.arange(tile, dtype=jnp.int32)).reshape(-1)
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = of(row, ends)
    return expert, source, first_tiles[owner] * tile + row - starts[owner]


def _kernel(call: _Call, tiles: int, out_dtype, interpret: Any):
    """The kernel over all tiles; takes the expert of each tile, the number of tiles that are used, and the inputs."""
    layout = call.layout

    def at(i, used):
        return jnp.minimum(i, jnp.maximum(used[0] - 1, 0))

    specs = [pl.BlockSpec((call.tile, layout.padded_k), lambda j, i, expert, used: (at(i, used), 0)),
             pl.BlockSpec((1, layout.rows, call.block), lambda j, i, expert, used: (expert[i], 0, j))]
    if call.has_bias:
        specs.append(pl.BlockSpec((1, 1, call.block), lambda j, i, expert, used: (expert[i], 0, j)))
    halves = 2 if call.glu is not None else 1
    return pl.pallas_call(
        functools.partial(_kernel_body, call),
        out_shape=jax.ShapeDtypeStruct((tiles * call.tile, layout.columns // halves), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(layout.columns // call.block, tiles), in_specs=specs,
            out_specs=pl.BlockSpec((call.tile, call.block // halves), lambda j, i, expert, used: (at(i, used), j)),
            scratch_shapes=[pltpu.VMEM((call.tile, call.block), jnp.float32)]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="grouped_matmul", interpret=interpret)


def _kernel_body(call: _Call, expert_ref, used_ref, x_ref, w_ref, *refs):
    """x_ref [tile, k] bfloat16; w_ref [1, rows, block]; refs: bias [1, 1, block] if any, out [tile, block], scratch as out."""
    *bias_refs, out_ref, acc_ref = refs

    @pl.when(pl.program_id(1) < used_ref[0])
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        lax.fori_loop(0, call.layout.steps, lambda step, _: _add_step(call, step, x_ref, w_ref, acc_ref), None)
        y = acc_ref[...]
        if bias_refs:
            y = y + bias_refs[0][0]
        if call.glu is None:
            out_ref[...] = y.astype(out_ref.dtype)
            return
        for i in range(call.block // COLUMNS):
            gate, up = y[:, i * COLUMNS:i * COLUMNS + LANES], y[:, i * COLUMNS + LANES:(i + 1) * COLUMNS]
            out_ref[:, i * LANES:(i + 1) * LANES] = call.glu(gate, up).astype(out_ref.dtype)


def _add_step(call: _Call, step, x_ref, w_ref, acc_ref) -> None:
    """Adds the products of one step's channels."""
    layout = call.layout
    words = w_ref[0, pl.ds(pl.multiple_of(step * layout.step_rows, 8), layout.step_rows)]
    pairs = unpack_pairs(words, layout.bits, layout.step)
    weights = pltpu.bitcast(pairs, jnp.bfloat16) if layout.bits == 16 else pltpu.bitcast(pairs, jnp.uint16).astype(jnp.bfloat16)
    for part in range(layout.step // LANES):
        number = step * (layout.step // LANES) + part
        x = x_ref[:, pl.ds(pl.multiple_of(number * LANES, LANES), LANES)]
        x_groups = _grouped(x, layout.groups)
        products = lax.dot_general(
            x_groups, weights[part * LANES:(part + 1) * LANES], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        if layout.bits == 16:
            acc_ref[...] += products
            continue
        sums = jnp.sum(x_groups.astype(jnp.float32), axis=1, keepdims=True)
        for group in range(layout.groups):
            rows = slice(group * call.tile, (group + 1) * call.tile)
            scale, zero = _numbers(layout, w_ref, number * layout.groups + group)
            acc_ref[...] += (products[rows] - sums[rows] * zero) * scale


def _grouped(x, groups: int):
    """bfloat16 [tile, 128] to [groups * tile, 128]: tile g holds group g's channels, and zeros."""
    if groups == 1:
        return x
    x, channel = x.astype(jnp.float32), lax.broadcasted_iota(jnp.int32, x.shape, 1)
    size = LANES // groups
    parts = [jnp.where((channel >= g * size) & (channel < (g + 1) * size), x, 0.0) for g in range(groups)]
    return jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)


def _numbers(layout: TpuWeightLayout, w_ref, row) -> tuple[jax.Array, jax.Array | float]:
    """Scale and zero point of a group, counted from the lowest code: float32 [1, block] each, or a number."""
    words = w_ref[0, pl.ds(layout.scale_row + row, 1)]
    if layout.scale_dtype == "bfloat16":
        scale, zero = words << 16, words & jnp.uint32(0xFFFF0000)
    else:
        scale, zero = words, words
        if layout.has_zero:
            zero = w_ref[0, pl.ds(layout.scale_row + layout.scale_rows + row, 1)]
    middle = float(1 << layout.bits - 1)
    return lax.bitcast_convert_type(scale, jnp.float32), lax.bitcast_convert_type(zero, jnp.float32) if layout.has_zero else middle
