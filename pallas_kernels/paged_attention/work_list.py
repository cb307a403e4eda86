"""How the Hopper kernel cuts a call into work items, and which item comes next.

The closed pages of a row are cut into splits of `SPLIT_PAGES`. An item is one split of one row and one tile of query rows. Items
are numbered: first all splits but the last of each row, row by row, then the last split of every row. Last splits go on with the
open pages or are short, and so fill gaps. Every warp finds an item's row by itself, from the lengths of all rows: the sums over the
rows before each row are a scan over its lanes.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from pallas_kernels import sm90
from pallas_kernels.mma_sm90 import TOKENS
from pallas_kernels.pallas_utils import cdiv

SPLIT_PAGES = 16
_SPLIT_TOKENS = TOKENS * SPLIT_PAGES


@dataclasses.dataclass(frozen=True)
class Work:
    """What is known of a call's work at compile time.

    Attributes:
      rows: rows of the batch, in use or not.
      heads: tiles of query rows of all KV heads.
      sliding_window: see `paged_attention`.
      open_pages: see `KVFormat`.
      use_twins: for the interpreter, which cannot run inlined instructions.
    """

    rows: int
    heads: int
    sliding_window: int | None
    open_pages: int
    use_twins: bool


@dataclasses.dataclass(frozen=True)
class Item:
    """One split of one row, KV head and tile of query rows. All int32 scalars; `used` and `is_last` bool."""

    used: Any
    row: Any
    head: Any  # tile of query rows, of all KV heads
    split: Any
    is_last: Any
    kv_len: Any
    q_len: Any
    first_page: Any
    end_page: Any


jax.tree_util.register_dataclass(Item)


def split_range(work: Work, kv_len, q_len) -> tuple[jax.Array, jax.Array]:
    """First split that a row's queries see, and one past its last; none for a row that is not in use."""
    first, end = _seen_splits(work, kv_len, q_len)
    return first, jnp.where((kv_len > 0) & (q_len > 0), end, first)


def _seen_splits(work: Work, kv_len, q_len):
    """The same, for a row that is in use."""
    end = jnp.maximum(lax.div(closed_pages(work, kv_len) + SPLIT_PAGES - 1, SPLIT_PAGES), 1)
    return jnp.minimum(lax.div(lowest_token(work, kv_len, q_len), _SPLIT_TOKENS), end - 1), end


def closed_pages(work: Work, kv_len):
    """`KVFormat.closed_pages`, of an array or of a scalar in a kernel."""
    newest = lax.div(jnp.maximum(kv_len - 1, 0), np.int32(TOKENS))
    return jnp.maximum(newest + 1 - work.open_pages, 0)


def lowest_token(work: Work, kv_len, q_len):
    """The first token that a query of the row sees."""
    return np.int32(0) if work.sliding_window is None else jnp.maximum(kv_len - q_len - work.sliding_window + 1, 0)


def find(work: Work, index, kv_lens_ref, q_lens_ref) -> tuple[Item, Any]:
    """Item `index`, not used when there is none of that number, and how many items there are."""
    place = lax.div(index, work.heads)
    num_full, row, start = _locate(work, place, kv_lens_ref, q_lens_ref)
    is_last = place >= num_full
    row = jnp.where(is_last, jnp.minimum(place - num_full, work.rows - 1), row)
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    closed = closed_pages(work, kv_len)
    lowest = lowest_token(work, kv_len, q_len)
    first_split, end_split = _seen_splits(work, kv_len, q_len)
    split = jnp.where(is_last, end_split - 1, first_split + place - start)
    end_page = jnp.minimum(closed, (split + 1) * SPLIT_PAGES)
    num_items = (num_full + work.rows) * work.heads
    return Item(
        used=(index < num_items) & (kv_len > 0) & (q_len > 0), row=row, head=lax.rem(index, work.heads), split=split,
        is_last=is_last, kv_len=kv_len, q_len=q_len,
        first_page=jnp.clip(lax.div(lowest, TOKENS), split * SPLIT_PAGES, end_page), end_page=end_page), num_items


def _locate(work: Work, place, kv_lens_ref, q_lens_ref):
    """Splits other than last ones: how many of all rows; the row that number `place` belongs to, and the number of its first.

    If `place` is beyond them all, row and first mean nothing.
    """
    if work.use_twins:
        return _locate_twin(work, place, kv_lens_ref, q_lens_ref)
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    body = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=(scalar, scalar, scalar))
    return body(lambda ctx, *args: _locate_body(work, *args))(kv_lens_ref, q_lens_ref, place)


def _locate_twin(work: Work, place, kv_lens_ref, q_lens_ref):
    total: Any = np.int32(0)
    row, start = total, total
    for r in range(work.rows):
        first, end = split_range(work, kv_lens_ref[r], q_lens_ref[r])
        row, start = jnp.where(total <= place, r, row), jnp.where(total <= place, total, start)
        total += jnp.maximum(end - first - 1, 0)
    return total, row, start


def _locate_body(work: Work, kv_lens, q_lens, place: fa.FragmentedArray):
    zero, size = sm90.i32(0), sm90.i32(sm90.LANES)
    lane, wanted = sm90.lane_and_warp()[0], place.registers.item()
    loop = scf.ForOp(zero, sm90.i32(cdiv(work.rows, sm90.LANES) * sm90.LANES), size, [zero] * 3)  # type: ignore[call-arg, arg-type]
    with ir.InsertionPoint(loop.body):
        total, row, start = loop.inner_iter_args
        r = arith.addi(loop.induction_variable, lane)
        inside = _less(r, sm90.i32(work.rows))
        at = [arith.index_cast(ir.IndexType.get(), arith.select(inside, r, zero))]
        splits = arith.select(inside, _full_splits(work, memref.load(kv_lens, at), memref.load(q_lens, at)), zero)
        through = sm90.prefix_sum(splits)  # of this row and those before it among the 32
        rest = arith.subi(wanted, total)
        # The lane of the row: as many lanes are before it as end at or before `wanted`.
        before = sm90.asm(
            "{.reg .b32 x; .reg .pred p; setp.le.s32 p, $1, $2; vote.sync.ballot.b32 x, p, 0xffffffff; popc.b32 $0, x;}",
            "=r,r,r", [through, rest], in_step=True)
        first = _from_lane(arith.subi(through, splits), before)
        count = _from_lane(through, sm90.i32(sm90.LANES - 1))
        here = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, rest, zero), _less(rest, count))
        scf.yield_([
            arith.addi(total, count), arith.select(here, arith.addi(loop.induction_variable, before), row),
            arith.select(here, arith.addi(total, first), start)])
    return tuple(map(sm90.int_array, loop.results))


def _full_splits(work: Work, kv_len: ir.Value, q_len: ir.Value) -> ir.Value:
    """Splits of a row that its queries see, without the last."""
    zero, one = sm90.i32(0), sm90.i32(1)
    # Splits begin every _SPLIT_TOKENS tokens, and the last holds at least one closed page, if there is one.
    last = arith.divui(arith.maxsi(arith.subi(kv_len, sm90.i32(TOKENS * work.open_pages + 1)), zero), sm90.i32(_SPLIT_TOKENS))
    full = last
    if work.sliding_window is not None:
        lowest = arith.maxsi(arith.addi(arith.subi(kv_len, q_len), sm90.i32(1 - work.sliding_window)), zero)
        full = arith.subi(last, arith.minsi(arith.divui(lowest, sm90.i32(_SPLIT_TOKENS)), last))
    used = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, kv_len, one), arith.cmpi(arith.CmpIPredicate.sge, q_len, one))
    return arith.select(used, full, zero)


def _less(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def _from_lane(x: ir.Value, lane: ir.Value) -> ir.Value:
    return sm90.asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], in_step=True)
