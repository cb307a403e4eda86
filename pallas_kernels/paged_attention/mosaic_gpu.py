"""`paged_attention` on NVIDIA Hopper, in Pallas Mosaic GPU.

The closed pages of a sequence are cut into splits of a fixed number of pages. One work item is one split of one row and KV head,
for up to eight query rows (queries times query heads of the KV head); a warpgroup takes items until none is left:

    for each step of the split:   copy pages' keys -> shared memory      (asynchronous, one step ahead)
                                  scores on tensor cores from the codes  (`fragments.key_scores`)
                                  online softmax, each warp for itself
                                  values likewise                        (`fragments.add_values`)
    the last split of a row goes on with the sinks and the open pages, unquantised, in the same softmax
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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sm90
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.mma_sm90 import TOKENS
from pallas_kernels.paged_attention import fragments, merge, work_list
from pallas_kernels.paged_attention.fragments import OPEN_TOKENS, PER_QUERY, QUERIES, QUERY_ROWS, ROWS, WARPS, Step
from pallas_kernels.paged_attention.work_list import SPLIT_PAGES, Item, Work
from pallas_kernels.pallas_utils import cdiv

HEAD_DIMS = (64, 128, 256)
MAX_QUERY_ROWS = 64  # queries times query heads of a KV head
SMEM_BYTES = 227 * 1024
_LOG2E = math.log2(math.e)
_LOG2_BOOST = math.log2(fragments.BOOST)
_SUM_ROWS = 2 * QUERY_ROWS  # rows of 2 H bytes that the sum [H, 8] of one warp takes, in float32
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
    num_splits: int  # that partial results have room for
    sm_scale: float
    sliding_window: int | None
    logit_softcap: float | None
    work: Work

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
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = open_k.shape[1]
    rows = num_heads // num_kv_heads * num_queries
    _refuse(q, kv_format, open_k, rows)
    layout = kv_format.page_layout(head_dim)
    tuning = tuning or default_tuning(kv_format, head_dim)
    if kv_format.k_bits == 3 and tuning.warps_per_page == 4:
        raise NotImplementedError(f"mosaic_gpu: {tuning=}: four warps do not share a page of 3-bit keys")
    step = Step(layout, tuning.warps_per_page, use_twins=interpret is not None)
    call = _Call(
        step=step, tuning=tuning, num_kv_heads=num_kv_heads, query_tiles=cdiv(rows, QUERY_ROWS), num_queries=num_queries,
        num_splits=merge.padded_splits(cdiv(block_table.shape[1], SPLIT_PAGES)), sm_scale=sm_scale, sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        work=Work(batch, num_kv_heads * cdiv(rows, QUERY_ROWS), sliding_window, kv_format.open_pages,
                  use_twins=interpret is not None))
    width = head_dim // 2
    pages = pages.reshape(-1, layout.words // width, width)
    open_k, open_v = (x.astype(jnp.bfloat16).reshape(batch * num_kv_heads, -1, head_dim) for x in (open_k, open_v))
    sinks = []
    if kv_format.sink_tokens:
        sinks = [x.astype(jnp.bfloat16).reshape(batch * num_kv_heads, -1, head_dim) for x in (sink_k, sink_v)]
    partial, stats = _partial_kernel(call, batch, interpret)(
        _query_tiles(call, q), pages, open_k, open_v, block_table, kv_lens, q_lens, *sinks)
    return _merge(call, partial, stats, kv_lens, q_lens, attention_sinks, q, interpret)


def default_tuning(kv_format: KVFormat, head_dim: int) -> Tuning:
    """The layout of the work that measured best, or the first that fits into shared memory."""
    most = max(kv_format.k_bits, kv_format.v_bits)
    # Codes of 2 and 3 bits are unpacked fastest by a warp that has a page of its own; wider ones need more room for each page.
    first = {2: 1, 3: 1, 4: 2, 8: 2, 16: 2 if kv_format.k_bits == 3 else 4}[most]
    choices = [(first, 4)] + [(w, g) for w in (1, 2, 4) if w >= first or most == 4 for g in (4, 3, 2, 1)]
    for warps_per_page, warpgroups in choices:
        tuning = Tuning(warps_per_page, warpgroups, 132)
        if _smem_bytes(kv_format, head_dim, tuning) <= SMEM_BYTES:
            return tuning
    raise NotImplementedError(f"mosaic_gpu: a page of {kv_format.name}, {head_dim=} does not fit into shared memory")


def _refuse(q, kv_format: KVFormat, open_k, rows: int) -> None:
    if rows > MAX_QUERY_ROWS:
        raise NotImplementedError(
            f"mosaic_gpu: {rows} query rows a KV head of {q.shape=}: at most {MAX_QUERY_ROWS}; every 8 read the cache again")
    if kv_format.layout != "mma_sm90":
        raise NotImplementedError(f"mosaic_gpu: layout={kv_format.layout!r}: only 'mma_sm90' pages are read")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_gpu: head_dim={q.shape[-1]} of {q.shape=}: only {', '.join(map(str, HEAD_DIMS))}")
    for name, x in (("q", q), ("open_k", open_k)):
        if x.dtype != jnp.bfloat16:
            raise NotImplementedError(f"mosaic_gpu: {name}.dtype={x.dtype}: only bfloat16")


def _buffer_rows(step: Step, words: int) -> int:
    """Rows of 2 H bytes that one warpgroup needs for its pages' `words` each, or for an open tile, or for the warps' sums."""
    rows = max(step.pages * words // (step.head_dim // 2), OPEN_TOKENS, WARPS * _SUM_ROWS)
    return cdiv(rows, _SUM_ROWS) * _SUM_ROWS


def _smem_bytes(kv_format: KVFormat, head_dim: int, tuning: Tuning) -> int:
    layout = kv_format.page_layout(head_dim)
    step = Step(layout, tuning.warps_per_page, use_twins=False)
    rows = _buffer_rows(step, layout.key_words) + _buffer_rows(step, layout.value_words) + QUERY_ROWS
    return tuning.warpgroups * (rows * 2 * head_dim + 2 * WARPS * QUERY_ROWS * 4 + 64) + 1024


def _query_tiles(call: _Call, q: jax.Array) -> jax.Array:
    """[B, T, N, H] to [B * K * tiles, 8, H]: row g * T + t of a KV head is query head g, query t; zeros after the last."""
    batch, num_queries, num_heads, head_dim = q.shape
    group = num_heads // call.num_kv_heads
    x = q.reshape(batch, num_queries, call.num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    x = x.reshape(batch, call.num_kv_heads, group * num_queries, head_dim)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, call.query_tiles * QUERY_ROWS - x.shape[2]), (0, 0)])
    return x.reshape(-1, QUERY_ROWS, head_dim)


def _partial_kernel(call: _Call, batch: int, interpret: Any):
    """The kernel over all work items: partial outputs float32 [B*K*tiles, splits, H, 8] and (m, l) float32 [.., 2, 8]."""
    step, tuning = call.step, call.tuning
    layout, head_dim, groups = step.layout, step.head_dim, tuning.warpgroups
    tiles = batch * call.num_kv_heads * call.query_tiles

    return plgpu.kernel(
        functools.partial(_kernel_body, call),
        out_type=[
            jax.ShapeDtypeStruct((tiles, call.num_splits, head_dim, QUERY_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((tiles, call.num_splits, 2, QUERY_ROWS), jnp.float32)],
        grid=(tuning.blocks,), grid_names=("block",), num_threads=groups, thread_name="warpgroup",
        scratch_types={
            "q_smem": plgpu.SMEM((groups, QUERY_ROWS, head_dim), jnp.bfloat16),
            "stats_smem": plgpu.SMEM((groups, 2, WARPS, QUERY_ROWS), jnp.float32),
            "keys": _buffers(step, groups, layout.key_words),
            "values": _buffers(step, groups, layout.value_words),
            # One barrier a warpgroup and kind of copy.
            "q_barrier": plgpu.Barrier(num_barriers=groups),
            "keys_barrier": plgpu.Barrier(num_arrivals=step.pages, num_barriers=groups),
            "values_barrier": plgpu.Barrier(num_arrivals=step.pages, num_barriers=groups),
            "tile_barrier": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        },
        # Barriers of the warpgroup are where this file says `commit_smem`, and nowhere else.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="paged_attention", interpret=interpret)


def _buffers(step: Step, groups: int, words: int) -> plgpu.RefUnion:
    """A buffer for each warpgroup: as pages' words, as an open tile, and as the sums of the warps.

    The three are padded to one size, so that what a warpgroup reaches through any of them is its own.
    """
    rows, head_dim = _buffer_rows(step, words), step.head_dim
    return plgpu.RefUnion(
        plgpu.SMEM((groups, rows, head_dim // 2), jnp.uint32), plgpu.SMEM((groups, rows, head_dim), jnp.bfloat16),
        plgpu.SMEM((groups, rows // _SUM_ROWS, head_dim, QUERY_ROWS), jnp.float32))


@dataclasses.dataclass
class _Softmax:
    """Carry of the online softmax of one item, each warp for its own tokens.

    m, l [4, 8]: running maximum of the scores and denominator; z [4, 8]: sum of weights times value offsets; acc [4, H, 8]: see
    `fragments.add_values`. All weights are `BOOST` times what they are relative to m.
    """

    m: jax.Array
    l: jax.Array
    z: jax.Array
    acc: jax.Array


jax.tree_util.register_dataclass(_Softmax)


def _kernel_body(
    call: _Call, q_ref, pages_ref, open_k_ref, open_v_ref, table_ref, kv_lens_ref, q_lens_ref, *refs, **scratch,
):
    *sink_refs, out_ref, stats_ref = refs
    sm90.next_kernel_may_start(use_twins=call.step.use_twins)
    groups = call.tuning.warpgroups
    group = lax.axis_index("warpgroup")
    inputs = _Inputs(q_ref, pages_ref, open_k_ref, open_v_ref, table_ref, sink_refs)
    first = lax.axis_index("block") + call.tuning.blocks * group
    stride = call.tuning.blocks * groups
    first_item, num_items = work_list.find(call.work, first, kv_lens_ref, q_lens_ref)

    def run(i, state):
        item, fetched = state
        following, _ = work_list.find(call.work, first + (i + 1) * stride, kv_lens_ref, q_lens_ref)
        fetched = lax.cond(
            item.used, lambda: _Worker(call, inputs, scratch, group, item, following).run(fetched, out_ref, stats_ref),
            lambda: np.bool_(False))
        return following, fetched

    lax.fori_loop(0, lax.div(num_items - first + stride - 1, stride), run, (first_item, np.bool_(False)))


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Refs in device memory."""

    q: Any
    pages: Any
    open_k: Any
    open_v: Any
    table: Any
    sinks: list


class _Worker:
    """A warpgroup at work on one item."""

    def __init__(self, call: _Call, inputs: _Inputs, scratch, group, item: Item, following: Item):
        self.call, self.step, self.inputs, self.item, self.following = call, call.step, inputs, item, following
        self.num_steps = lax.div(item.end_page - item.first_page + self.step.pages - 1, self.step.pages)
        self.key_rows = self.step.layout.key_words // (self.step.head_dim // 2)  # rows of a page before its values
        self.q_smem, self.stats_smem = scratch["q_smem"].at[group], scratch["stats_smem"].at[group]
        head_dim, layout = self.step.head_dim, self.step.layout
        (self.keys, self.open_keys, _), (self.values, self.open_values, self.sum_smem) = (
            (words.at[group, pl.ds(0, self.step.pages * count // (head_dim // 2))], tile.at[group, pl.ds(0, OPEN_TOKENS)],
             sums.at[group, pl.ds(0, WARPS)])
            for (words, tile, sums), count in ((scratch["keys"], layout.key_words), (scratch["values"], layout.value_words)))
        self.q_barrier, self.keys_barrier, self.values_barrier, self.tile_barrier = (
            scratch[f"{n}_barrier"].at[group] for n in ("q", "keys", "values", "tile"))

    def run(self, fetched, out_ref, stats_ref) -> jax.Array:
        """Does the item. `fetched`: its queries and first pages are on their way. Returns whether those of the next one are."""
        item = self.item

        @pl.when(~fetched)
        def _():
            self._fetch_q(item)

            @pl.when(self.num_steps > 0)
            def _():
                page_ids = self._page_ids(item, item.first_page)
                self._fetch(item, page_ids, self.keys, 0, self.keys_barrier)
                self._fetch(item, page_ids, self.values, self.key_rows, self.values_barrier)

        plgpu.barrier_wait(self.q_barrier)
        layout = plgpu.Layout.WG_STRIDED(self.q_smem.shape, vec_size=math.prod(self.q_smem.shape) // 128)
        self.q_smem[...] = plgpu.load(self.q_smem, layout=layout) * jnp.asarray(fragments.BOOST, jnp.bfloat16)
        plgpu.commit_smem()
        following_ids = self._page_ids(self.following, self.following.first_page)
        # The open pages pass through the buffers that the next item's pages would arrive in.
        ahead = self.following.used & ~item.is_last & (self.following.end_page > self.following.first_page)
        state = lax.fori_loop(0, self.num_steps, functools.partial(self._closed_step, ahead), self._empty())
        state = dataclasses.replace(state, acc=fragments.finished_values(self.step, state.acc))
        state = lax.cond(item.is_last, self._unquantised, lambda s: s, state)
        tile = item.row * self.call.num_kv_heads * self.call.query_tiles + item.head
        self._write(state, out_ref.at[tile, item.split], stats_ref.at[tile, item.split])

        @pl.when(ahead)
        def _():  # only now: the sum of the warps went through the values' buffer
            self._fetch(self.following, following_ids, self.values, self.key_rows, self.values_barrier)

        return ahead

    def _empty(self) -> _Softmax:
        def zeros(shape, layout, value=0.0):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        per_query = (WARPS, QUERY_ROWS)
        return _Softmax(
            m=zeros(per_query, PER_QUERY, _HIDDEN), l=zeros(per_query, PER_QUERY), z=zeros(per_query, PER_QUERY),
            acc=zeros((WARPS, self.step.head_dim, QUERY_ROWS), ROWS))

    def _fetch_q(self, item: Item) -> None:
        tile = item.row * self.call.num_kv_heads * self.call.query_tiles + item.head
        plgpu.copy_gmem_to_smem(self.inputs.q.at[tile], self.q_smem, self.q_barrier)

    def _page_ids(self, item: Item, first_page) -> list:
        """Pages that the warps of this thread fetch for the step that begins at `first_page`, one a warp.

        Pages past the item's last are the last one again.
        """
        last = jnp.maximum(item.end_page - 1, 0)
        return [self.inputs.table[item.row, jnp.clip(first_page + w, 0, last)] for w in fragments.warps_of_this_thread(self.step)]

    def _fetch(self, item: Item, page_ids: list, destination, first_row: int, barrier) -> None:
        """Starts the copies of one part of each page of a step, a page a warp."""
        pages, kv_head = self.step.pages, lax.div(item.head, self.call.query_tiles)
        rows = destination.shape[0] // pages

        @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
        def fetch():
            warp = lax.axis_index("warp")

            @pl.when(warp < pages)
            def _():
                page_id = functools.reduce(lambda x, j: jnp.where(warp == j, page_ids[j], x), range(1, len(page_ids)), page_ids[0])
                source = self.inputs.pages.at[page_id * self.call.num_kv_heads + kv_head, pl.ds(first_row, rows)]
                plgpu.copy_gmem_to_smem(source, destination.at[pl.ds(warp * rows, rows)], barrier)

        fetch()

    def _closed_step(self, ahead, i, state: _Softmax) -> _Softmax:
        step, item = self.step, self.item
        more = i + 1 < self.num_steps
        # What is fetched next: this item's next step, or the following item's first.
        target = Item(**{name: jnp.where(more, x, getattr(self.following, name)) for name, x in vars(item).items()})
        target_page = jnp.where(more, item.first_page + (i + 1) * step.pages, target.first_page)
        page_ids = self._page_ids(target, target_page)  # already here: they take long to arrive
        warp = plgpu.broadcasted_iota(jnp.int32, (WARPS, QUERY_ROWS), 0, layout=PER_QUERY)
        page = item.first_page + i * step.pages + lax.div(warp, step.warps_per_page)
        plgpu.barrier_wait(self.keys_barrier)
        there = page < item.end_page
        # A softcap would bring a hidden score back: then it is hidden afterwards.
        start = jnp.where(there | (self.call.logit_softcap is not None), 0.0, _HIDDEN)
        scores = fragments.key_scores(step, self.keys, self.q_smem, start)
        self._done_with_pages()

        @pl.when(more | ahead)
        def _():
            self._fetch(target, page_ids, self.keys, 0, self.keys_barrier)

        @pl.when(~more & ahead)
        def _():
            plgpu.commit_smem()
            self._fetch_q(target)

        if self.call.logit_softcap is not None:
            scores = jnp.where(_over_rows(there, scores.shape), self._softcap(scores), _HIDDEN)
        if self.call.masks:
            first_token = (item.first_page + i * step.pages) * TOKENS
            scores = lax.cond(first_token < self._highest_hidden(), lambda s: self._hide(s, first_token), lambda s: s, scores)
        p, state = self._weights(scores, state)
        plgpu.barrier_wait(self.values_barrier)
        if self.call.fmt.v_bits < 16:
            scale, offset = fragments.value_scales(step, self.values)
            z = state.z + jnp.sum(p * _over_queries(offset, p.shape), axis=1)
            state = dataclasses.replace(state, z=z)
            p = p * _over_queries(scale, p.shape)
        acc = fragments.add_values(step, self.values, p, state.acc)
        self._done_with_pages()

        @pl.when(more)
        def _():
            self._fetch(item, page_ids, self.values, self.key_rows, self.values_barrier)

        return dataclasses.replace(state, acc=acc)

    def _done_with_pages(self) -> None:
        """The buffer may be written again. A page that one warp reads is fetched by that warp, whatever the others do."""
        if self.step.warps_per_page == 1:
            sm90.warp_done(use_twins=self.step.use_twins)
        else:
            plgpu.commit_smem()

    def _softcap(self, scores: jax.Array) -> jax.Array:
        cap = self.call.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores * (self.call.sm_scale / cap))

    def _weights(self, scores: jax.Array, state: _Softmax) -> tuple[jax.Array, _Softmax]:
        """Softmax weights relative to the new maximum, and the carry scaled to it with the weights in the denominator."""
        scale = self.call.exponent_scale
        m = jnp.maximum(state.m, jnp.max(scores, axis=1))
        # Not scores * scale - m * scale: fused into one rounding that is far from 0 for huge equal numbers.
        p = jnp.exp2((scores - _over_rows(m, scores.shape)) * scale + _LOG2_BOOST)
        alpha = jnp.exp2((state.m - m) * scale)
        acc = fragments.rescale(self.step, state.acc, alpha)
        return p, _Softmax(m=m, l=state.l * alpha + jnp.sum(p, axis=1), z=state.z * alpha, acc=acc)

    def _query_positions(self, shape) -> jax.Array:
        """Position of the query of each row, int32 `shape` as `ROWS`."""
        row = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=ROWS)
        row += lax.rem(self.item.head, self.call.query_tiles) * QUERY_ROWS
        return self.item.kv_len - self.item.q_len + lax.rem(row, self.call.num_queries)

    def _highest_hidden(self) -> jax.Array:
        """Closed pages that begin below this position may have hidden tokens."""
        bound: Any = np.int32(self.call.fmt.sink_tokens)
        if self.call.sliding_window is not None:
            bound = jnp.maximum(bound, self.item.kv_len - self.call.sliding_window)
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
        """Goes on with the sinks and the open pages."""
        plgpu.commit_smem()  # all warps are done with the pages
        sinks = self.call.fmt.sink_tokens
        closed = work_list.closed_pages(self.call.work, self.item.kv_len)
        cache_row = self.item.row * self.call.num_kv_heads + lax.div(self.item.head, self.call.query_tiles)
        for first in range(0, sinks, OPEN_TOKENS):
            refs = [r.at[cache_row, pl.ds(first, min(OPEN_TOKENS, sinks - first))] for r in self.inputs.sinks]
            state = self._open_tile(state, refs, first, jnp.minimum(self.item.kv_len, min(sinks, first + OPEN_TOKENS)), 0)
        base = closed * TOKENS
        # Sinks of a row without closed pages stand in its open pages too; there they are hidden.
        lowest = jnp.where(closed == 0, sinks, 0)

        def tile(i, state):
            first = base + i * OPEN_TOKENS
            place = pl.ds(lax.rem(first, np.int32(self.call.fmt.open_tokens)), OPEN_TOKENS)
            refs = [r.at[cache_row, place] for r in (self.inputs.open_k, self.inputs.open_v)]
            return self._open_tile(state, refs, first, self.item.kv_len, lowest)

        return lax.fori_loop(0, lax.div(self.item.kv_len - base + OPEN_TOKENS - 1, OPEN_TOKENS), tile, state)

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
        for first in range(0, OPEN_TOKENS, 8):
            self._clear_rows(self.open_values.at[pl.ds(first, 8)], count - first)
        plgpu.commit_smem()

    def _clear_rows(self, rows, count) -> None:
        """The same for 8 rows."""
        layout = plgpu.Layout.WG_STRIDED(rows.shape, vec_size=rows.shape[1] // 16)
        zeros = plgpu.layout_cast(jnp.zeros(rows.shape, rows.dtype), layout)

        @pl.when(count <= 0)
        def _():
            rows[...] = zeros

        @pl.when((count > 0) & (count < 8))
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=layout)
            rows[...] = jnp.where(row < count, plgpu.load(rows, layout=layout), zeros)

    def _write(self, state: _Softmax, out_ref, stats_ref) -> None:
        """Sums the four warps and writes the partial result, relative to their common maximum."""
        scale = self.call.exponent_scale
        self.stats_smem.at[0][...] = state.m
        plgpu.commit_smem()  # and all warps are done with the values
        m = functools.reduce(jnp.maximum, [plgpu.load(self.stats_smem.at[0, w], layout=QUERIES) for w in range(WARPS)])
        beta = jnp.exp2((state.m - plgpu.layout_cast(lax.broadcast_in_dim(m, state.m.shape, [1]), PER_QUERY)) * scale)
        self.stats_smem.at[1][...] = state.l * beta
        shape = state.acc.shape
        self.sum_smem[...] = state.acc * _over_rows(beta, shape) + _over_rows(state.z * beta, shape)
        plgpu.commit_smem()
        l = functools.reduce(jnp.add, [plgpu.load(self.stats_smem.at[1, w], layout=QUERIES) for w in range(WARPS)])
        stats_ref.at[0][...] = m * scale - _LOG2_BOOST
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


def _merge(call: _Call, partial, stats, kv_lens, q_lens, attention_sinks, q, interpret) -> jax.Array:
    """The splits of each row, and the learned sinks, to the output [B, T, N, H]."""
    batch, num_queries, num_heads, head_dim = q.shape
    group, sinks = num_heads // call.num_kv_heads, None
    if attention_sinks is not None:
        rows = jnp.repeat(attention_sinks.astype(jnp.float32).reshape(call.num_kv_heads, group), num_queries, axis=1)
        rows = jnp.pad(rows * _LOG2E, [(0, 0), (0, call.query_tiles * QUERY_ROWS - rows.shape[1])])
        sinks = rows.reshape(call.work.heads, QUERY_ROWS, 1)
    out = merge.merge(
        call.work, partial, stats, kv_lens, q_lens, sinks, num_queries, call.query_tiles, q.dtype, interpret)
    out = out.reshape(batch, call.num_kv_heads, -1, head_dim)[:, :, :group * num_queries]
    return out.reshape(batch, call.num_kv_heads, group, num_queries, head_dim).transpose(0, 3, 1, 2, 4).reshape(q.shape)
