"""`grouped_matmul` for few rows an expert on NVIDIA Hopper, in Pallas Mosaic GPU.

The rows of each expert are cut into tiles; one work item is a tile and one or two blocks of 32 output columns, over the whole
contraction. A warpgroup works through a run of neighbouring items:

    for each step of the item:   copy four chunks of packed weights -> shared memory, one a warp   (asynchronous, stages ahead)
                                 products on tensor cores from the codes                           (`fragments.add_products`)
    sum of the warps -> bias, activation -> output

Where there are fewer items than SMs, all warpgroups of a block share each item (`Tuning.shared`). Copies run ahead over the
ends of items: all of a warpgroup's steps are one sequence. The first ones start before the kernel before this one has ended
(`sm90.after_previous_kernel`). Tokens are few and read by everyone: they come from the caches straight into registers. An expert's
weights are read once for each tile of its rows, and not at all without rows. What a row gives depends on nothing but the row and
its expert, bit for bit.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sm90
from pallas_kernels.grouped_matmul import fragments
from pallas_kernels.grouped_matmul.fragments import SUMS, TOKENS
from pallas_kernels.grouped_matmul.served import refuse_others
from pallas_kernels.packed_weights import BLOCK, PackedWeights, WeightLayout
from pallas_kernels.pallas_utils import cdiv
from pallas_kernels.sm90 import WARPS

SMEM_BYTES = 227 * 1024
MAX_BARRIERS = 32
MOST_TILES = 2  # of tokens, unless a tuning says otherwise: more do not fit into registers beside four warpgroups
SHARED_BELOW = 132  # items of all experts together: one an SM; above, items of their own measured better (qkv: 9.2 us against 9.5)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is laid out; results are the same bits unless `shared`, and then for equal `warpgroups`.

    Attributes:
      token_tiles: tiles of eight rows that one reading of the weights serves.
      warpgroups: of a block.
      stages: steps that are on their way or being worked on.
      blocks: of the grid.
      shared: the warpgroups of a block work on the same item, each on chunks of its own; else each has items of its own.
    """

    token_tiles: int
    warpgroups: int
    stages: int
    blocks: int = 132
    shared: bool = False

    @property
    def workers(self) -> int:
        """That have items of their own."""
        return self.blocks if self.shared else self.blocks * self.warpgroups


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything the kernel knows at compile time."""

    layout: WeightLayout
    tuning: Tuning
    glu: Callable[..., jax.Array] | None
    use_twins: bool

    @property
    def tile_rows(self) -> int:
        return TOKENS * self.tuning.token_tiles

    @property
    def split(self) -> int:
        """Warps of a warpgroup that share a block of columns: four, or two if fewer then wait for others at the end of an item."""
        chunks = self.layout.chunks
        fewer_wait = self.layout.blocks % 2 == 0 and cdiv(chunks, 2) * 2 < cdiv(chunks, WARPS) * WARPS
        return 2 if fewer_wait and not self.tuning.shared else WARPS

    @property
    def step_chunks(self) -> int:
        """Chunks of a block of columns that a step works on."""
        return self.split * self.sharers

    @property
    def sharers(self) -> int:
        """Warpgroups that share an item."""
        return self.tuning.warpgroups if self.tuning.shared else 1

    @property
    def kept_sums(self) -> int:
        """Tiles of sums that a warpgroup has in shared memory at once."""
        return self.tuning.token_tiles if self.tuning.shared else 1

    @property
    def item_blocks(self) -> int:
        """Blocks of columns of an item."""
        return WARPS // self.split

    @property
    def tile_items(self) -> int:
        """Items of a tile of rows."""
        return self.layout.blocks // self.item_blocks

    @property
    def steps(self) -> int:
        """Steps an item."""
        return cdiv(self.layout.chunks, self.step_chunks)

    @property
    def columns(self) -> int:
        """Output columns of a block."""
        return BLOCK if self.glu is None else BLOCK // 2


def grouped_matmul(
    x, w, group_sizes, *, bias=None, glu: Callable[..., jax.Array] | None = None, preferred_element_type: jnp.dtype,
    tuning: Tuning | None = None, interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`. Codes times bfloat16 x are exact; everything is added up in float32.

    Args:
      tuning: None for `default_tuning`.
      interpret: `plgpu.InterpretGPUParams()` to run on CPU, with the plain-JAX twins of the tensor-core steps.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    refuse_others("mosaic_gpu", PackedWeights, x, w, preferred_element_type)
    tuning = tuning or default_tuning(w.layout, x.shape[0], w.shape[0])
    call = _Call(w.layout, tuning, glu, use_twins=interpret is not None)
    width = w.layout.n if glu is None else w.layout.n // 2
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    words = w.words.reshape(-1, *w.words.shape[2:])  # [E * blocks, chunks, words]
    name = f"grouped_matmul_{w.layout.bits}bit_{w.layout.k}x{w.layout.n}"  # what profiles show
    return plgpu.kernel(
        functools.partial(_kernel_body, call), out_type=jax.ShapeDtypeStruct((x.shape[0], width), preferred_element_type),
        grid=(tuning.blocks,), grid_names=("block",), num_threads=tuning.warpgroups, thread_name="warpgroup",
        scratch_types={
            "ring": plgpu.SMEM((tuning.warpgroups, tuning.stages, WARPS, w.layout.words), jnp.uint32),
            "sums_smem": plgpu.SMEM((tuning.warpgroups, call.kept_sums, WARPS, BLOCK, TOKENS), jnp.float32),
            # One a stage of each warpgroup; each warp copies its own chunk.
            "barriers": plgpu.Barrier(num_arrivals=WARPS, num_barriers=tuning.warpgroups * tuning.stages),
            "all_here": plgpu.Barrier(num_arrivals=tuning.warpgroups),
        },
        # Barriers of the warpgroup are where this file says `warpgroup_done`, and nowhere else.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name=name, interpret=interpret)(x, words, group_sizes, *biases)


def default_tuning(layout: WeightLayout, rows: int, num_experts: int) -> Tuning:
    """Four steps ahead, or as many as fit into shared memory: what is left of it caches tokens.

    Whether items are shared depends on the weights alone: what a row gives must not depend on how many rows there are.
    """
    token_tiles = min(MOST_TILES, 1 << (cdiv(rows, TOKENS) - 1).bit_length())
    shared = num_experts * layout.blocks <= SHARED_BELOW
    for warpgroups in (4, 3, 2, 1):
        room = (SMEM_BYTES - 1024) // warpgroups - WARPS * BLOCK * TOKENS * 4 * (MOST_TILES if shared else 1)
        stages = min(room // (WARPS * layout.words * 4 + 8), (MAX_BARRIERS - 1) // warpgroups, 4)
        if stages >= (2 if shared else 3):  # shared items are few: a worker has few steps
            return Tuning(token_tiles, warpgroups, stages, shared=shared)
    raise NotImplementedError(f"mosaic_gpu: chunks of {layout} do not fit into shared memory")


def _kernel_body(call: _Call, x_ref, words_ref, sizes_ref, *refs, ring, sums_smem, barriers, all_here):
    *bias_refs, out_ref = refs
    group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    worker = _Worker(
        call, x_ref, words_ref, sizes_ref, bias_refs, out_ref, ring.at[group], sums_smem, barriers, all_here,
        group=group, number=block if call.tuning.shared else block * call.tuning.warpgroups + group)
    worker.run()


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tile", "expert", "first_row", "end_row", "part"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Item:
    """A tile of rows of one expert, and a part of its columns: `item_blocks` blocks. All int32 scalars."""

    tile: Any
    expert: Any
    first_row: Any
    end_row: Any
    part: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["item", "number", "first_chunk"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the copies have got to: the item, the how-manieth of the warpgroup, and which chunks of it; int32 scalars."""

    item: _Item
    number: Any
    first_chunk: Any


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A warpgroup: its refs, its number in its block, and its number as a worker. A worker, one warpgroup or all of a block, has a
    run of neighbouring items: most are of one expert."""

    call: _Call
    x: Any
    words: Any
    sizes: Any
    biases: list
    out: Any
    ring: Any
    sums_smem: Any
    barriers: Any
    all_here: Any
    group: Any
    number: Any

    @property
    def first_barrier(self):
        """Of the warpgroup's stages."""
        return self.group * self.call.tuning.stages

    @property
    def first_chunk(self):
        """The first of a step's chunks that this warpgroup works on."""
        return self.group * self.call.split if self.call.tuning.shared else jnp.int32(0)

    def run(self) -> None:
        call = self.call
        *_, tiles, rows = self._find_tile(jnp.int32(0))
        first, end = (self._share(tiles * call.tile_items, self.number + i) for i in range(2))
        item = self._item(lax.div(first, call.tile_items), lax.rem(first, call.tile_items))
        place = _Place(item, jnp.int32(0), jnp.int32(0))
        items = end - first
        place = lax.fori_loop(0, call.tuning.stages, lambda stage, place: self._copy(items, stage, place), place)
        sm90.after_previous_kernel(use_twins=call.use_twins)  # weights and sizes are not its work
        lax.fori_loop(0, items, lambda _, state: self._run_item(items, *state), (item, place, jnp.int32(0)))
        self._clear(rows)

    def _share(self, items, number):
        """items * number // workers, without a product that large: where a worker's items begin."""
        workers = self.call.tuning.workers
        return lax.div(items, workers) * number + lax.div(lax.rem(items, workers) * number, workers)

    def _find_tile(self, index) -> tuple[jax.Array, ...]:
        return fragments.find_tile(self.sizes, index, self.call.tile_rows, use_twins=self.call.use_twins)

    def _item(self, tile, part) -> _Item:
        expert, first_row, expert_end, *_ = self._find_tile(tile)
        return _Item(tile, expert, first_row, jnp.minimum(first_row + self.call.tile_rows, expert_end), part)

    def _after(self, item: _Item) -> _Item:
        return lax.cond(
            item.part + 1 == self.call.tile_items, lambda: self._item(item.tile + 1, jnp.int32(0)),
            lambda: dataclasses.replace(item, part=item.part + 1))

    def _copy(self, items, stage, place: _Place) -> _Place:
        """Starts the copies of one step, a chunk a warp. A warp without a chunk copies the last one. Returns the step after it."""
        layout, split = self.call.layout, self.call.split

        @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
        def copy():
            warp = lax.axis_index("warp")

            @pl.when(place.number < items)
            def _():
                block = place.item.part * self.call.item_blocks + lax.div(warp, split)
                chunk = jnp.minimum(place.first_chunk + self.first_chunk + lax.rem(warp, split), layout.chunks - 1)
                plgpu.copy_gmem_to_smem(
                    self.words.at[place.item.expert * layout.blocks + block, pl.ds(chunk, 1)], self.ring.at[stage, pl.ds(warp, 1)],
                    self.barriers.at[self.first_barrier + stage], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        copy()
        return lax.cond(
            place.first_chunk + self.call.step_chunks >= layout.chunks,
            lambda: _Place(self._after(place.item), place.number + 1, jnp.int32(0)),
            lambda: dataclasses.replace(place, first_chunk=place.first_chunk + self.call.step_chunks))

    def _run_item(self, items, item: _Item, place: _Place, stage):
        call = self.call

        def add_step(i, state):
            place, stage, sums = state
            plgpu.barrier_wait(self.barriers.at[self.first_barrier + stage])
            sums = fragments.add_products(
                call.layout, call.split, self.ring.at[stage], self.x, item.first_row, item.end_row,
                i * call.step_chunks + self.first_chunk, sums, use_twins=call.use_twins)
            sm90.warp_done(use_twins=call.use_twins)  # the chunk that one warp reads is copied by that warp
            place = self._copy(items, stage, place)
            return place, jnp.where(stage + 1 == call.tuning.stages, 0, stage + 1), sums

        empty = plgpu.layout_cast(jnp.zeros((WARPS, BLOCK, TOKENS), jnp.float32), SUMS)
        place, stage, all_sums = lax.fori_loop(0, call.steps, add_step, (place, stage, (empty,) * call.tuning.token_tiles))
        (self._write_together if call.tuning.shared else self._write_alone)(item, all_sums)
        return self._after(item), place, stage

    def _write_alone(self, item: _Item, all_sums) -> None:
        """Writes a tile of eight rows after the other from the sums of this warpgroup."""
        call = self.call
        for t, sums in enumerate(all_sums):
            @pl.when(item.first_row + TOKENS * t < item.end_row)
            def _(t=t, sums=sums):
                self.sums_smem[self.group, 0] = sums
                sm90.warpgroup_done(use_twins=call.use_twins)
                for i in range(call.item_blocks):
                    parts = [self.sums_smem.at[self.group, 0, w] for w in range(i * call.split, (i + 1) * call.split)]
                    self._write(item, item.part * call.item_blocks + i, t, parts)
                sm90.warpgroup_done(use_twins=call.use_twins)

    def _write_together(self, item: _Item, all_sums) -> None:
        """Writes the tiles of eight rows, in turn a warpgroup, from the sums of all warpgroups of the block."""
        call = self.call
        for t, sums in enumerate(all_sums):
            self.sums_smem[self.group, t] = sums
        self._block_done()
        for t in range(len(all_sums)):
            @pl.when((self.group == t % call.sharers) & (item.first_row + TOKENS * t < item.end_row))
            def _(t=t):
                self._write(item, item.part, t, [self.sums_smem.at[g, t, w] for g in range(call.sharers) for w in range(WARPS)])
        self._block_done()

    def _block_done(self) -> None:
        """Waits until all warpgroups of the block are here, and sees what they have stored."""
        sm90.warpgroup_done(use_twins=self.call.use_twins)
        plgpu.barrier_arrive(self.all_here)
        plgpu.barrier_wait(self.all_here)

    def _write(self, item: _Item, block, tile: int, parts: list) -> None:
        """Writes eight rows of a block of columns from `parts`, which are refs of [32, 8] float32 SMEM that it is the sum of."""
        call = self.call
        sums = [self._sum(parts, first, item.expert, block * BLOCK + first) for first in range(0, BLOCK, call.columns)]
        values = sums[0] if call.glu is None else call.glu(*sums)
        fragments.store_rows(
            self.out, values.astype(self.out.dtype), item.first_row + TOKENS * tile, item.end_row, block * call.columns,
            use_twins=call.use_twins)

    def _sum(self, parts: list, first: int, expert, column) -> jax.Array:
        """[columns, 8] of a block from its column `first` on, with the bias from `column` on."""
        columns = self.call.columns
        layout = fragments.output_layout(columns)
        total = functools.reduce(jnp.add, [
            plgpu.load(part.at[pl.ds(first, columns)], layout=layout, optimized=False) for part in parts])
        if not self.biases:
            return total
        bias = plgpu.load(self.biases[0].at[expert, pl.ds(column, columns)], layout=layout.reduce(1), optimized=False)
        return total + plgpu.layout_cast(lax.broadcast_in_dim(bias, total.shape, [0]), layout)

    def _clear(self, first_row) -> None:
        """Writes zeros to the rows that no expert has."""
        call, (rows, _) = self.call, self.out.shape
        zeros = plgpu.layout_cast(
            jnp.zeros((call.columns, TOKENS), self.out.dtype), fragments.output_layout(call.columns))

        tiles = lax.div(rows - first_row + (TOKENS - 1), TOKENS)

        # The warpgroups of a block that share items would all write the same zeros.
        first = self.number if not call.tuning.shared else jnp.where(self.group == 0, self.number, tiles * call.layout.blocks)

        @pl.loop(first, tiles * call.layout.blocks, step=call.tuning.workers)
        def clear(index):
            tile, block = lax.div(index, call.layout.blocks), lax.rem(index, call.layout.blocks)
            fragments.store_rows(
                self.out, zeros, first_row + TOKENS * tile, rows, block * call.columns, use_twins=call.use_twins)
