"""`paged_attention` on NVIDIA Hopper, in Pallas Mosaic GPU.

The closed pages of a sequence are cut into splits of a fixed number of pages. One work item is one split of one row and KV head,
for up to eight query rows (queries times query heads of the KV head); a warpgroup takes items until none is left:

    for each step of the split:   copy pages' keys -> shared memory      (asynchronous, one step ahead)
                                  scores on tensor cores from the codes  (`fragments.key_scores`)
                                  online softmax, each warp for itself
                                  values likewise                        (`fragments.add_values`)
    the last split of a row goes on with the sinks and the open page, unquantised, in the same softmax
    sum of the four warps -> partial output, running maximum and denominator

and a second kernel merges the splits of each row, in the order of the splits. What an item computes depends on nothing but its
own row, so results do not depend, bit for bit, on the batch.

Shared memory holds one step's keys and one step's values a warpgroup: while one of the two is worked on, the other is on its way.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_format import KVFormat
from pallas_kernels.mma_sm90 import TOKENS
from pallas_kernels.paged_attention import fragments
from pallas_kernels.paged_attention.fragments import OPEN_TOKENS, PER_QUERY, QUERIES, QUERY_ROWS, ROWS, WARPS, Step
from pallas_kernels.pallas_utils import MASK_VALUE, align_to, cdiv

HEAD_DIMS = (64, 128, 256)
SPLIT_PAGES = 16
TABLE_COPY = 32  # page ids copied for a split: a copy is a multiple of 128 bytes
SMEM_BYTES = 227 * 1024
_LOG2E = math.log2(math.e)
# Score of a hidden token. A power of two, so that products with it are exact, and far enough from the float32 limit for sums.
_HIDDEN = -(2.0**100)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is laid out; results are the same bits for any `warpgroups` and `blocks`.

    Attributes:
      warps_per_page: 1, 2 or 4 warps share a page; a step is then 4, 2 or 1 pages.
      warpgroups: warpgroups of a block, each with work of its own.
      blocks: blocks of the grid.
    """

    warps_per_page: int
    warpgroups: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything the kernel knows at compile time."""

    step: Step
    tuning: Tuning
    num_kv_heads: int
    query_tiles: int  # tiles of 8 query rows a KV head
    num_queries: int  # T
    num_splits: int  # of a row, at most
    sm_scale: float
    sliding_window: int | None
    logit_softcap: float | None

    @property
    def fmt(self) -> KVFormat:
        return self.step.fmt

    @property
    def exponent_scale(self) -> float:
        """Scores times this are exponents of 2, unless there is a softcap (which is applied first)."""
        return _LOG2E * (1.0 if self.logit_softcap else self.sm_scale)

    @property
    def masks(self) -> bool:
        """Can some tokens of a closed page be hidden?"""
        return self.sliding_window is not None or self.fmt.sink_tokens > 0


def paged_attention(
    q, pages, open_k, open_v, block_table, kv_lens, q_lens, *, kv_format: KVFormat, sink_k, sink_v, attention_sinks,
    sm_scale: float, sliding_window: int | None, logit_softcap: float | None, tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.paged_attention`.

    Queries are multiplied as bfloat16, and so are queries times key scales and softmax weights times value scales; everything is
    added up in float32.

    Args:
      tuning: None for `default_tuning`.
      interpret: `plgpu.InterpretGPUParams()` to run on CPU, with the plain-JAX twins of the tensor-core steps.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    _refuse(q, kv_format, open_k)
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = open_k.shape[1]
    rows = num_heads // num_kv_heads * num_queries
    layout = kv_format.page_layout(head_dim)
    tuning = tuning or default_tuning(kv_format, head_dim)
    step = Step(layout, tuning.warps_per_page, use_twins=interpret is not None)
    columns = align_to(block_table.shape[1], SPLIT_PAGES)
    call = _Call(
        step=step, tuning=tuning, num_kv_heads=num_kv_heads, query_tiles=cdiv(rows, QUERY_ROWS), num_queries=num_queries,
        num_splits=columns // SPLIT_PAGES, sm_scale=sm_scale, sliding_window=sliding_window, logit_softcap=logit_softcap)
    width = head_dim // 2
    pages = pages.reshape(-1, layout.words // width, width)
    open_k, open_v = (x.astype(jnp.bfloat16).reshape(batch * num_kv_heads, TOKENS, head_dim) for x in (open_k, open_v))
    sinks = []
    if kv_format.sink_tokens:
        sinks = [x.astype(jnp.bfloat16).reshape(batch * num_kv_heads, -1, head_dim) for x in (sink_k, sink_v)]
    table = jnp.pad(block_table, [(0, 0), (0, columns - SPLIT_PAGES + TABLE_COPY - block_table.shape[1])])
    work, num_work = _work_list(call, kv_lens, q_lens)
    partial, stats = _partial_kernel(call, batch, interpret)(
        _query_tiles(call, q), pages, open_k, open_v, table, kv_lens, q_lens, work, num_work, *sinks)
    return _merge(call, partial, stats, kv_lens, q_lens, attention_sinks, q)


def default_tuning(kv_format: KVFormat, head_dim: int) -> Tuning:
    """The layout of the work that measured best, or the first that fits into shared memory."""
    most = max(kv_format.k_bits, kv_format.v_bits)
    for warps_per_page in (1, 2, 4) if most <= 4 else (2, 4) if most == 8 else (4,):
        for warpgroups in (4, 3, 2, 1):
            tuning = Tuning(warps_per_page, warpgroups, 132)
            if _smem_bytes(kv_format, head_dim, tuning) <= SMEM_BYTES:
                return tuning
    raise NotImplementedError(f"mosaic_gpu: a page of {kv_format.name}, {head_dim=} does not fit into shared memory")


def _refuse(q, kv_format: KVFormat, open_k) -> None:
    if kv_format.layout != "mma_sm90":
        raise NotImplementedError(f"mosaic_gpu: layout={kv_format.layout!r}: only 'mma_sm90' pages are read")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_gpu: head_dim={q.shape[-1]} of {q.shape=}: only {', '.join(map(str, HEAD_DIMS))}")
    for name, x in (("q", q), ("open_k", open_k)):
        if x.dtype != jnp.bfloat16:
            raise NotImplementedError(f"mosaic_gpu: {name}.dtype={x.dtype}: only bfloat16")


def _smem_bytes(kv_format: KVFormat, head_dim: int, tuning: Tuning) -> int:
    layout, pages = kv_format.page_layout(head_dim), WARPS // tuning.warps_per_page
    tile = OPEN_TOKENS * head_dim * 2
    keys = max(pages * layout.key_words * 4, tile, WARPS * head_dim * QUERY_ROWS * 4)
    values = max(pages * layout.value_words * 4, tile)
    return tuning.warpgroups * (keys + values + QUERY_ROWS * head_dim * 2 + 2048)


def _query_tiles(call: _Call, q: jax.Array) -> jax.Array:
    """[B, T, N, H] to [B * K * tiles, 8, H]: row g * T + t of a KV head is query head g, query t; zeros after the last."""
    batch, num_queries, num_heads, head_dim = q.shape
    group = num_heads // call.num_kv_heads
    x = q.reshape(batch, num_queries, call.num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    x = x.reshape(batch, call.num_kv_heads, group * num_queries, head_dim)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, call.query_tiles * QUERY_ROWS - x.shape[2]), (0, 0)])
    return x.reshape(-1, QUERY_ROWS, head_dim)


def _split_range(call: _Call, kv_lens, q_lens) -> tuple[jax.Array, jax.Array]:
    """First split that a row's queries see, and one past its last; none for a row that is not in use. int32 [B] each."""
    closed = jnp.maximum(kv_lens - 1, 0) // TOKENS
    end = jnp.maximum(cdiv(closed, SPLIT_PAGES), 1)
    first = jnp.zeros_like(end)
    if call.sliding_window is not None:
        lowest = jnp.maximum(kv_lens - q_lens - call.sliding_window + 1, 0)
        first = jnp.minimum(lowest // (TOKENS * SPLIT_PAGES), end - 1)
    return first, jnp.where((kv_lens > 0) & (q_lens > 0), end, first)


def _work_list(call: _Call, kv_lens, q_lens) -> tuple[jax.Array, jax.Array]:
    """(row * num_splits + split of every piece of work, int32 [B * num_splits], their number int32 [1]).

    Last splits come last: they go on with the open page, or are short.
    """
    batch = kv_lens.shape[0]
    first, end = _split_range(call, kv_lens, q_lens)
    split = jnp.arange(call.num_splits, dtype=jnp.int32)[:, None]
    wanted = (split >= first) & (split < end)  # [splits, B]
    last = split == end - 1
    key = jnp.where(wanted, jnp.where(last, 1, 0), 2).reshape(-1)
    index = jnp.arange(batch, dtype=jnp.int32) * call.num_splits + split
    order = jnp.argsort(key, stable=True)
    return index.reshape(-1)[order], jnp.sum(wanted, dtype=jnp.int32)[None]


def _partial_kernel(call: _Call, batch: int, interpret: Any):
    """The kernel over all work items: partial outputs float32 [B*K*tiles, splits, H, 8] and (m, l) float32 [.., 2, 8]."""
    step, tuning = call.step, call.tuning
    layout, head_dim, groups, width = step.layout, step.head_dim, tuning.warpgroups, step.head_dim // 2
    tiles = batch * call.num_kv_heads * call.query_tiles

    def union(words: int):
        members = [
            plgpu.SMEM((groups, step.pages, words // width, width), jnp.uint32),
            plgpu.SMEM((groups, OPEN_TOKENS, head_dim), jnp.bfloat16),
            plgpu.SMEM((groups, WARPS, head_dim, QUERY_ROWS), jnp.float32)]
        return plgpu.RefUnion(*members)

    return plgpu.kernel(
        functools.partial(_kernel_body, call),
        out_type=[
            jax.ShapeDtypeStruct((tiles, call.num_splits, head_dim, QUERY_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((tiles, call.num_splits, 2, QUERY_ROWS), jnp.float32)],
        grid=(tuning.blocks,), grid_names=("block",), num_threads=groups, thread_name="warpgroup",
        scratch_types=dict(
            q_smem=plgpu.SMEM((groups, QUERY_ROWS, head_dim), jnp.bfloat16),
            table_smem=plgpu.SMEM((groups, TABLE_COPY), jnp.int32),
            stats_smem=plgpu.SMEM((groups, 2, WARPS, QUERY_ROWS), jnp.float32),
            keys=union(layout.key_words), values=union(layout.value_words),
            # One barrier a warpgroup and kind of copy.
            start_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=groups),
            keys_barrier=plgpu.Barrier(num_arrivals=step.pages, num_barriers=groups),
            values_barrier=plgpu.Barrier(num_arrivals=step.pages, num_barriers=groups),
            tile_barrier=plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="paged_attention", interpret=interpret)


@dataclasses.dataclass
class _Softmax:
    """Carry of the online softmax of one item, each warp for its own tokens.

    m, l [4, 8]: running maximum of the scores and denominator; z [4, 8]: sum of weights times value offsets;
    acc [4, H, 8] and bias [4, 8, 8]: see `fragments.add_values`.
    """

    m: jax.Array
    l: jax.Array
    z: jax.Array
    acc: jax.Array
    bias: jax.Array


jax.tree_util.register_dataclass(_Softmax)


def _kernel_body(
    call: _Call, q_ref, pages_ref, open_k_ref, open_v_ref, table_ref, kv_lens_ref, q_lens_ref, work_ref, num_work_ref, *refs,
    **scratch,
):
    *sink_refs, out_ref, stats_ref = refs
    groups = call.tuning.warpgroups
    group = lax.axis_index("warpgroup")
    heads = call.num_kv_heads * call.query_tiles
    num_items = num_work_ref[0] * heads
    first = lax.axis_index("block") + call.tuning.blocks * group
    stride = call.tuning.blocks * groups
    inputs = (q_ref, pages_ref, open_k_ref, open_v_ref, table_ref, kv_lens_ref, q_lens_ref, sink_refs)

    def run(i, _):
        item = first + i * stride
        work = work_ref[item // heads]
        row, split, head = work // call.num_splits, lax.rem(work, call.num_splits), lax.rem(item, heads)
        _Item(call, inputs, scratch, group, row, split, head).run(out_ref, stats_ref)

    lax.fori_loop(0, lax.div(num_items - first + stride - 1, stride), run, None)


class _Item:
    """One split of one row, KV head and tile of query rows."""

    def __init__(self, call: _Call, inputs, scratch, group, row, split, head):
        (self.q_ref, self.pages_ref, self.open_k_ref, self.open_v_ref, self.table_ref, kv_lens_ref, q_lens_ref,
         self.sink_refs) = inputs
        self.call, self.step, self.group = call, call.step, group
        self.row, self.split, self.head = row, split, head
        self.kv_head = head // call.query_tiles
        self.cache_row = row * call.num_kv_heads + self.kv_head
        self.kv_len, self.q_len = kv_lens_ref[row], q_lens_ref[row]
        self.closed = lax.div(jnp.maximum(self.kv_len - 1, 0), TOKENS)
        self.end_page = jnp.minimum(self.closed, (split + 1) * SPLIT_PAGES)
        self.first_page = split * SPLIT_PAGES
        if call.sliding_window is not None:
            lowest = jnp.maximum(self.kv_len - self.q_len - call.sliding_window + 1, 0)
            self.first_page = jnp.clip(lax.div(lowest, TOKENS), self.first_page, self.end_page)
        self.num_steps = lax.div(self.end_page - self.first_page + self.step.pages - 1, self.step.pages)
        self.is_last = self.end_page == self.closed
        self.q_smem, self.table_smem, self.stats_smem = (scratch[n].at[group] for n in ("q_smem", "table_smem", "stats_smem"))
        keys, open_keys, self.sum_smem = scratch["keys"]
        values, open_values, _ = scratch["values"]
        self.keys, self.open_keys, self.values, self.open_values = (x.at[group] for x in (keys, open_keys, values, open_values))
        self.sum_smem = self.sum_smem.at[group]
        self.start_barrier, self.keys_barrier, self.values_barrier, self.tile_barrier = (
            scratch[f"{n}_barrier"].at[group] for n in ("start", "keys", "values", "tile"))

    def run(self, out_ref, stats_ref) -> None:
        tile = self.row * self.call.num_kv_heads * self.call.query_tiles + self.head
        plgpu.copy_gmem_to_smem(self.q_ref.at[tile], self.q_smem, self.start_barrier)
        plgpu.copy_gmem_to_smem(
            self.table_ref.at[self.row, pl.ds(self.split * SPLIT_PAGES, TABLE_COPY)], self.table_smem, self.start_barrier)
        plgpu.barrier_wait(self.start_barrier)
        key_rows = self.keys.shape[1]

        @pl.when(self.num_steps > 0)
        def _():
            self._fetch(0, self.keys, 0, self.keys_barrier)
            self._fetch(0, self.values, key_rows, self.values_barrier)

        state = lax.fori_loop(0, self.num_steps, self._closed_step, self._empty())
        state = lax.cond(self.is_last, self._unquantised, lambda s: s, state)
        self._write(state, out_ref.at[tile, self.split], stats_ref.at[tile, self.split])

    def _empty(self) -> _Softmax:
        def zeros(shape, layout, value=0.0):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        per_query = (WARPS, QUERY_ROWS)
        return _Softmax(
            m=zeros(per_query, PER_QUERY, _HIDDEN), l=zeros(per_query, PER_QUERY), z=zeros(per_query, PER_QUERY),
            acc=zeros((WARPS, self.step.head_dim, QUERY_ROWS), ROWS), bias=zeros((WARPS, 8, QUERY_ROWS), ROWS))

    def _fetch(self, step, destination, first_row: int, barrier) -> None:
        """Starts the copies of one part of each page of a step. Pages past the last one are the last one again."""
        for p in range(self.step.pages):
            page = jnp.minimum(self.first_page + step * self.step.pages + p, self.end_page - 1)
            page_id = self.table_smem[page - self.split * SPLIT_PAGES]
            source = self.pages_ref.at[
                page_id * self.call.num_kv_heads + self.kv_head, pl.ds(first_row, destination.shape[1])]
            plgpu.copy_gmem_to_smem(source, destination.at[p], barrier)

    def _closed_step(self, i, state: _Softmax) -> _Softmax:
        step = self.step
        warp = plgpu.broadcasted_iota(jnp.int32, (WARPS, QUERY_ROWS), 0, layout=PER_QUERY)
        page = self.first_page + i * step.pages + lax.div(warp, step.warps_per_page)
        plgpu.barrier_wait(self.keys_barrier)
        there = page < self.end_page
        # A softcap would bring a hidden score back: then it is hidden afterwards.
        start = jnp.where(there | (self.call.logit_softcap is not None), 0.0, _HIDDEN)
        scores = fragments.key_scores(step, self.keys, self.q_smem, start)
        plgpu.commit_smem()  # all warps are done with the keys

        @pl.when(i + 1 < self.num_steps)
        def _():
            self._fetch(i + 1, self.keys, 0, self.keys_barrier)

        if self.call.logit_softcap is not None:
            scores = jnp.where(_over_rows(there, scores.shape), self._softcap(scores), _HIDDEN)
        if self.call.masks:
            first_token = (self.first_page + i * step.pages) * TOKENS
            scores = lax.cond(first_token < self._highest_hidden(), lambda s: self._hide(s, first_token), lambda s: s, scores)
        p, state = self._weights(scores, state)
        plgpu.barrier_wait(self.values_barrier)
        if self.call.fmt.v_bits < 16:
            scale, offset = fragments.value_scales(step, self.values)
            z = state.z + jnp.sum(p * _over_queries(offset, p.shape), axis=1)
            state = dataclasses.replace(state, z=z)
            p = p * _over_queries(scale, p.shape)
        acc, bias = fragments.add_values(step, self.values, p, state.acc, state.bias)
        plgpu.commit_smem()

        @pl.when(i + 1 < self.num_steps)
        def _():
            self._fetch(i + 1, self.values, self.keys.shape[1], self.values_barrier)

        return dataclasses.replace(state, acc=acc, bias=bias)

    def _softcap(self, scores: jax.Array) -> jax.Array:
        cap = self.call.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores * (self.call.sm_scale / cap))

    def _weights(self, scores: jax.Array, state: _Softmax) -> tuple[jax.Array, _Softmax]:
        """Softmax weights relative to the new maximum, and the carry scaled to it with the weights in the denominator."""
        scale = self.call.exponent_scale
        m = jnp.maximum(state.m, jnp.max(scores, axis=1))
        # Not scores * scale - m * scale: fused into one rounding that is far from 0 for huge equal numbers.
        p = jnp.exp2((scores - _over_rows(m, scores.shape)) * scale)
        alpha = jnp.exp2((state.m - m) * scale)
        return p, _Softmax(
            m=m, l=state.l * alpha + jnp.sum(p, axis=1), z=state.z * alpha,
            acc=state.acc * _over_rows(alpha, state.acc.shape), bias=state.bias * _over_rows(alpha, state.bias.shape))

    def _query_positions(self, shape) -> jax.Array:
        """Position of the query of each row, int32 `shape` as `ROWS`."""
        row = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=ROWS)
        return self.kv_len - self.q_len + lax.rem(row + lax.rem(self.head, self.call.query_tiles) * QUERY_ROWS, self.call.num_queries)

    def _highest_hidden(self) -> jax.Array:
        """Closed pages that begin below this position may have hidden tokens."""
        bound = jnp.int32(self.call.fmt.sink_tokens)
        if self.call.sliding_window is not None:
            bound = jnp.maximum(bound, self.kv_len - self.call.sliding_window)
        return bound

    def _hide(self, scores: jax.Array, first_token) -> jax.Array:
        """Hides sinks and tokens below the window in a step's scores [4, M, 8]."""
        shape = scores.shape
        position = first_token + shape[1] * plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS)
        position += plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS)
        seen = position >= self.call.fmt.sink_tokens
        if self.call.sliding_window is not None:
            seen &= self._query_positions(shape) - position < self.call.sliding_window
        return jnp.where(seen, scores, _HIDDEN)

    def _unquantised(self, state: _Softmax) -> _Softmax:
        """Goes on with the sinks and the open page."""
        sinks = self.call.fmt.sink_tokens
        for first in range(0, sinks, OPEN_TOKENS):
            refs = [r.at[self.cache_row, pl.ds(first, min(OPEN_TOKENS, sinks - first))] for r in self.sink_refs]
            state = self._open_tile(state, refs, first, jnp.minimum(self.kv_len, min(sinks, first + OPEN_TOKENS)), 0)
        base = self.closed * TOKENS
        # Sinks of a row without closed pages stand in its open page too; there they are hidden.
        lowest = jnp.where(self.closed == 0, sinks, 0)

        def tile(i, state):
            refs = [r.at[self.cache_row, pl.ds(i * OPEN_TOKENS, OPEN_TOKENS)] for r in (self.open_k_ref, self.open_v_ref)]
            return self._open_tile(state, refs, base + i * OPEN_TOKENS, self.kv_len, lowest)

        return lax.fori_loop(0, lax.div(self.kv_len - base + OPEN_TOKENS - 1, OPEN_TOKENS), tile, state)

    def _open_tile(self, state: _Softmax, refs, first, end, lowest) -> _Softmax:
        """Attends to the tokens first … end - 1, those from `lowest` on, of up to 64 unquantised ones."""
        tokens = refs[0].shape[0]
        for ref, tile in zip(refs, (self.open_keys, self.open_values)):
            plgpu.copy_gmem_to_smem(ref, tile if tokens == OPEN_TOKENS else tile.at[pl.ds(0, tokens)], self.tile_barrier)
        plgpu.barrier_wait(self.tile_barrier)

        @pl.when(first + OPEN_TOKENS > end)
        def _():
            self._clear_values(end - first)

        scores = self._softcap(fragments.open_scores(self.step, self.open_keys, self.q_smem))
        shape = scores.shape
        position = first + shape[1] * plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS)
        position += plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS)
        distance = self._query_positions(shape) - position
        seen = (position < end) & (position >= lowest) & (distance >= 0)
        if self.call.sliding_window is not None:
            seen &= distance < self.call.sliding_window
        p, state = self._weights(jnp.where(seen, scores, _HIDDEN), state)
        acc = fragments.add_open_values(self.step, self.open_values, p, state.acc)
        plgpu.commit_smem()
        return dataclasses.replace(state, acc=acc)

    def _clear_values(self, count) -> None:
        """Zeros the rows of the value tile from `count` on: nobody owns them, and 0 times NaN is NaN."""
        layout = plgpu.Layout.WG_STRIDED((8, self.step.head_dim), vec_size=8 * self.step.head_dim // 128)
        zeros = plgpu.layout_cast(jnp.zeros((8, self.step.head_dim), jnp.bfloat16), layout)
        for block in range(OPEN_TOKENS // 8):
            rows = self.open_values.at[pl.ds(8 * block, 8)]

            @pl.when(count <= 8 * block)
            def _():
                rows[...] = zeros

            @pl.when((count > 8 * block) & (count < 8 * block + 8))
            def _():
                row = plgpu.broadcasted_iota(jnp.int32, zeros.shape, 0, layout=layout)
                rows[...] = jnp.where(row + 8 * block < count, plgpu.load(rows, layout=layout), zeros)

        plgpu.commit_smem()

    def _write(self, state: _Softmax, out_ref, stats_ref) -> None:
        """Sums the four warps and writes the partial result, relative to their common maximum."""
        scale = self.call.exponent_scale
        self.stats_smem.at[0][...] = state.m
        plgpu.commit_smem()
        m = functools.reduce(jnp.maximum, [plgpu.load(self.stats_smem.at[0, w], layout=QUERIES) for w in range(WARPS)])
        beta = jnp.exp2((state.m - plgpu.layout_cast(lax.broadcast_in_dim(m, state.m.shape, [1]), PER_QUERY)) * scale)
        self.stats_smem.at[1][...] = state.l * beta
        # All rows of the bias are equal.
        rest = (state.z - jnp.max(state.bias, axis=1)) * beta
        shape = state.acc.shape
        self.sum_smem[...] = state.acc * _over_rows(beta, shape) + _over_rows(rest, shape)
        plgpu.commit_smem()
        l = functools.reduce(jnp.add, [plgpu.load(self.stats_smem.at[1, w], layout=QUERIES) for w in range(WARPS)])
        stats_ref.at[0][...] = m * scale
        stats_ref.at[1][...] = l
        layout = plgpu.Layout.WG_STRIDED(shape[1:], vec_size=4)
        out_ref[...] = functools.reduce(jnp.add, [plgpu.load(self.sum_smem.at[w], layout=layout) for w in range(WARPS)])
        plgpu.commit_smem()


def _over_rows(x: jax.Array, shape) -> jax.Array:
    """[4, 8] to [4, rows, 8]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0, 2]), ROWS)


def _over_queries(x: jax.Array, shape) -> jax.Array:
    """[4, rows] to [4, rows, 8]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0, 1]), ROWS)


def _merge(call: _Call, partial, stats, kv_lens, q_lens, attention_sinks, q) -> jax.Array:
    """The splits of each row, and the learned sinks, to the output [B, T, N, H]."""
    batch, num_queries, num_heads, head_dim = q.shape
    group = num_heads // call.num_kv_heads
    first, end = _split_range(call, kv_lens, q_lens)
    split = jnp.arange(call.num_splits, dtype=jnp.int32)
    heads = call.num_kv_heads * call.query_tiles
    used = jnp.repeat((split >= first[:, None]) & (split < end[:, None]), heads, axis=0)[..., None]  # [tiles, splits, 1]
    m, l = (jnp.where(used, stats[:, :, i], neutral) for i, neutral in ((0, MASK_VALUE), (1, 0.0)))
    top = jnp.max(m, axis=1)
    if attention_sinks is not None:
        rows = jnp.repeat(attention_sinks.astype(jnp.float32).reshape(call.num_kv_heads, group), num_queries, axis=1)
        rows = jnp.pad(rows, [(0, 0), (0, call.query_tiles * QUERY_ROWS - rows.shape[1])])
        sinks = jnp.tile(rows.reshape(heads, QUERY_ROWS) * _LOG2E, (batch, 1))
        top = jnp.maximum(top, sinks)
    weight = jnp.exp2(m - top[:, None])
    denominator = jnp.sum(l * weight, axis=1)
    if attention_sinks is not None:
        denominator += jnp.exp2(sinks - top)
    values = jnp.where(used[..., None], partial, 0.0)
    out = jnp.sum(values * weight[:, :, None], axis=1) / jnp.where(denominator > 0, denominator, 1.0)[:, None]
    out = out.transpose(0, 2, 1).reshape(batch, call.num_kv_heads, -1, head_dim)[:, :, :group * num_queries]
    out = out.reshape(batch, call.num_kv_heads, group, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    valid = (jnp.arange(num_queries) < q_lens[:, None]) & (kv_lens > 0)[:, None]
    out = jnp.where(valid[..., None, None], out.reshape(q.shape), 0.0)
    return out.astype(q.dtype)
