"""`paged_attention` on TPU, in Pallas Mosaic TPU: decode over pages in the layout "tpu".

One grid step serves one row of the batch, all its KV heads:

    the open pages, then the sinks, unquantised        (copied to VMEM by the grid's pipeline)
    for each closed page that a query sees:            (copied by hand, many pages ahead, into a ring of VMEM slots)
        wait for its words; start the copy of the page that takes the slot before it
        for each KV head:  scores from the codes, online softmax, values from the codes

All pages that the call reads, row after row, are numbered; page n comes to slot n % slots, so that the copies of a row's first
pages are on their way while the row before it is worked on. A page is one contiguous run of words of all KV heads.

Scales never touch codes. With x = scale * code + offset:

    scores   q·k = (q * k_scale)·k_code + q·k_offset            k_scale, k_offset: a page's channels
    outputs  p·v = (p * v_scale)·v_code + sum(p * v_offset)     v_scale, v_offset: a page's tokens

Codes are exact as bfloat16. The other operand, float32, is cut into bfloat16 pieces that lie under one another on the rows of one
product: a decoding step has few of them, and the matrix unit takes as long for one as for many. What a row computes depends on
nothing but that row, so results do not depend, bit for bit, on the batch.
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_format import KVFormat
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.pallas_utils import MASK_VALUE, align_to
from pallas_kernels.tpu_tiles import TOKENS, plane_rows, unpack_pairs

HEAD_DIMS = (64, 128, 256)
MAX_QUERY_ROWS = 128  # queries times query heads of a KV head: rows of one product
VMEM_BYTES = 14 << 20  # a kernel may use 16 MiB on v5e and v5p; the rest is for what the compiler spills
_RING_BYTES = 2 << 20  # of pages on their way: bandwidth times latency, with room to spare
_MAX_SLOTS = 16
_HIGH_HALF = np.uint32(0xFFFF0000)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything the kernel knows at compile time."""

    layout: PageLayout
    num_kv_heads: int
    num_queries: int  # T
    columns: int  # J
    slots: int
    pieces: int  # bfloat16 pieces of a float32 operand
    sm_scale: float
    sliding_window: int | None
    logit_softcap: float | None

    @property
    def fmt(self) -> KVFormat:
        return self.layout.fmt

    @property
    def masks(self) -> bool:
        """Can some tokens of a closed page be hidden?"""
        return self.sliding_window is not None or self.fmt.sink_tokens > 0


def paged_attention(
    q, pages, open_k, open_v, block_table, kv_lens, q_lens, *, kv_format: KVFormat, sink_k, sink_v, attention_sinks,
    sm_scale: float, sliding_window: int | None, logit_softcap: float | None, interpret: Any = False,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.paged_attention`.

    Float32 queries give float32 accuracy. With bfloat16 queries, queries times key scales and weights times value scales are
    rounded to 16 bits (2**-16), and everything is added up in float32.

    Args:
      interpret: `pltpu.InterpretParams()` to run on CPU.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = open_k.shape[1]
    rows = num_heads // num_kv_heads * num_queries
    _refuse(q, open_k, open_v, sink_k, sink_v, kv_format, rows)
    layout = kv_format.page_layout(head_dim)
    call = _Call(
        layout=layout, num_kv_heads=num_kv_heads, num_queries=num_queries, columns=block_table.shape[1],
        slots=min(max(_RING_BYTES // (num_kv_heads * layout.page_bytes), 2), _MAX_SLOTS),
        pieces=2 if q.dtype == jnp.bfloat16 else 3, sm_scale=sm_scale, sliding_window=sliding_window,
        logit_softcap=logit_softcap)
    q_rows = _to_rows(q, num_kv_heads)
    inputs = [q_rows, pages, open_k, open_v]
    if kv_format.sink_tokens:
        inputs += [sink_k, sink_v]
    if attention_sinks is not None:
        inputs.append(_sink_rows(call, attention_sinks, q_rows.shape[2]))
    scalars = (block_table.reshape(-1), kv_lens, q_lens, *_page_ranges(call, kv_lens, q_lens))
    out = _kernel(call, inputs, len(scalars), attention_sinks is not None, interpret)(*scalars, *inputs)
    out = out[:, :, :rows].reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _refuse(q, open_k, open_v, sink_k, sink_v, kv_format: KVFormat, rows: int) -> None:
    if kv_format.layout != "tpu":
        raise NotImplementedError(f"mosaic_tpu: layout={kv_format.layout!r}: only 'tpu' pages are read")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_tpu: head_dim={q.shape[-1]} of {q.shape=}: only {', '.join(map(str, HEAD_DIMS))}")
    if rows > MAX_QUERY_ROWS:
        raise NotImplementedError(f"mosaic_tpu: {rows} query rows a KV head of {q.shape=}: at most {MAX_QUERY_ROWS}")
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"mosaic_tpu: q.dtype={q.dtype}: only bfloat16 and float32")
    for name, x in (("open_k", open_k), ("open_v", open_v), ("sink_k", sink_k), ("sink_v", sink_v)):
        if x is not None and x.dtype != jnp.bfloat16:
            raise NotImplementedError(f"mosaic_tpu: {name}.dtype={x.dtype}: only bfloat16")


def _to_rows(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] to [B, K, M, H], M a multiple of 8: row g * T + t is query head g of the KV head, query t; then zeros."""
    batch, num_queries, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    x = q.reshape(batch, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    x = x.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0)])


def _sink_rows(call: _Call, logits: jax.Array, rows: int) -> jax.Array:
    """Learned sinks float32 [N] to [K, M, 128], each logit in all lanes of its rows."""
    x = jnp.repeat(logits.astype(jnp.float32).reshape(call.num_kv_heads, -1), call.num_queries, axis=1)
    x = jnp.pad(x, [(0, 0), (0, rows - x.shape[1])])
    return jnp.broadcast_to(x[..., None], (*x.shape, TOKENS))


def _page_ranges(call: _Call, kv_lens, q_lens) -> tuple[jax.Array, jax.Array]:
    """First closed page that each row reads, int32 [B], and the number of pages that the rows before each row read, [B + 1]."""
    closed = jnp.maximum((kv_lens - 1) // TOKENS + 1 - call.fmt.open_pages, 0)
    first = jnp.zeros_like(closed)
    if call.sliding_window is not None:
        first = jnp.minimum(jnp.maximum(kv_lens - q_lens - call.sliding_window + 1, 0) // TOKENS, closed)
    count = jnp.where(q_lens > 0, closed - first, 0)
    return first, jnp.pad(jnp.cumsum(count, dtype=jnp.int32), [(1, 0)])


def _kernel(call: _Call, inputs: list, num_scalars: int, has_learned_sinks: bool, interpret: Any):
    """The kernel over all rows; takes the scalars and `inputs`."""
    batch, kv_heads, rows, head_dim = inputs[0].shape

    def of_row(shape):
        return pl.BlockSpec((1, *shape), lambda b, *_: (b, 0, 0, 0))

    specs = [of_row(x.shape[1:]) for x in inputs]
    specs[1] = pl.BlockSpec(memory_space=pltpu.HBM)
    if has_learned_sinks:
        specs[-1] = pl.BlockSpec(inputs[-1].shape, lambda b, *_: (0, 0, 0))
    state = pltpu.VMEM((kv_heads, rows, TOKENS), jnp.float32)
    buffers = [pltpu.VMEM((call.slots, kv_heads, call.layout.words), jnp.uint32), state, state, state,
               pltpu.VMEM((kv_heads, rows, head_dim), jnp.float32)]
    blocks = [(spec.block_shape, x.dtype) for spec, x in zip(specs, inputs) if spec.block_shape]
    _check_vmem(2 * [*blocks, blocks[0]] + [(x.shape, x.dtype) for x in buffers], inputs[0].shape)
    return pl.pallas_call(
        functools.partial(_kernel_body, call, has_learned_sinks),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, head_dim), inputs[0].dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars, grid=(batch,), in_specs=specs, out_specs=of_row((kv_heads, rows, head_dim)),
            scratch_shapes=[*buffers, pltpu.SemaphoreType.DMA((call.slots,)), pltpu.SMEM((1,), jnp.int32)]),
        # Rows in order: each starts the copies of the next row's pages.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="paged_attention", interpret=interpret)


def _check_vmem(arrays: list, q_shape: tuple[int, ...]) -> None:
    """Raises NotImplementedError when arrays, (shape, dtype), exceed VMEM: their last two axes fill tiles of 8 x 128 words."""
    total = 0
    for (*lead, rows, lanes), dtype in arrays:
        tile_rows = min(32 // dtype.itemsize, 1 << (rows - 1).bit_length())
        total += math.prod(lead) * align_to(rows, tile_rows) * align_to(lanes, TOKENS) * dtype.itemsize
    if total > VMEM_BYTES:
        raise NotImplementedError(f"mosaic_tpu: queries [B, K, M, H]={list(q_shape)}: {total / 2**20:.1f} MiB of VMEM a row of the "
                                  f"batch, at most {VMEM_BYTES / 2**20:.0f}")


def _kernel_body(
    call: _Call, has_learned_sinks: bool,
    # Prefetch
    table_ref,  # [B * J]
    kv_lens_ref,  # [B]
    q_lens_ref,  # [B]
    first_ref,  # [B]
    starts_ref,  # [B + 1]
    # Input
    q_ref,  # [1, K, M, H]
    pages_ref,  # [P, K, words], in HBM
    open_k_ref,  # [1, K, Zo, H]
    open_v_ref,
    # sinks [1, K, S, H] twice, learned sinks [K, M, 128]: those that there are; the output [1, K, M, H]; scratch
    *refs,
):
    *sink_refs, out_ref, ring, m, l, z, acc, arrived, cursor = refs
    learned_ref = sink_refs.pop() if has_learned_sinks else None
    row = pl.program_id(0)
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    fetcher = _Fetcher(call, table_ref, first_ref, starts_ref, pages_ref, ring, arrived, cursor)

    @pl.when(row == 0)
    def _():
        cursor[0] = 0
        for n in range(call.slots - 1):
            fetcher.start(n)

    @pl.when((kv_len == 0) | (q_len == 0))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when((kv_len > 0) & (q_len > 0))
    def _():
        heads = [_Head(call, h, q_ref, m, l, z, acc, kv_len, q_len) for h in range(call.num_kv_heads)]
        # Token s lies at s % ring_tokens: what a place holds is the last such s that does not lie beyond the newest page.
        last, ring_tokens = lax.div(kv_len - 1, TOKENS) * TOKENS + TOKENS - 1, call.fmt.open_tokens
        for head in heads:
            head.begin()
            head.add_tokens(
                open_k_ref, open_v_ref, lambda i: last - lax.rem(last + ring_tokens - i, ring_tokens), lowest=call.fmt.sink_tokens)
            if sink_refs:
                head.add_tokens(sink_refs[0], sink_refs[1], lambda i: i, lowest=0)

        def page(n, _):
            fetcher.start(n + call.slots - 1)
            slot = fetcher.wait(n)
            first_token = (first_ref[row] + n - starts_ref[row]) * TOKENS
            for head in heads:
                head.add_page(_PageWords(call.layout, ring, slot, head.index), first_token)
            return 0

        lax.fori_loop(starts_ref[row], starts_ref[row + 1], page, 0)
        for head in heads:
            head.finish(out_ref, learned_ref)


@dataclasses.dataclass(frozen=True)
class _Fetcher:
    """Copies pages, numbered over all rows, from device memory into the ring. The fields are refs; see `_kernel_body`."""

    call: _Call
    table: Any
    first: Any
    starts: Any
    pages: Any
    ring: Any
    arrived: Any
    cursor: Any  # row of the last page whose copy was started

    def start(self, n) -> None:
        """Starts the copy of page n, if there is such a page. To be called for every n, in order."""
        total = self.starts[self.starts.shape[0] - 1]

        @pl.when(n < total)
        def _():
            row = lax.while_loop(lambda r: self.starts[r + 1] <= n, lambda r: r + 1, self.cursor[0])
            self.cursor[0] = row
            page = self.table[row * self.call.columns + self.first[row] + n - self.starts[row]]
            self._copy(page, lax.rem(jnp.int32(n), self.call.slots)).start()

    def wait(self, n):
        """The slot of page n, once its words are there."""
        slot = lax.rem(n, self.call.slots)
        self._copy(0, slot).wait()
        return slot

    def _copy(self, page, slot):
        return pltpu.make_async_copy(self.pages.at[page], self.ring.at[slot], self.arrived.at[slot])


@dataclasses.dataclass(frozen=True)
class _PageWords:
    """What a page of one KV head holds, as a kernel computes with it."""

    layout: PageLayout
    ring: Any
    slot: Any
    head: int

    def keys(self) -> jax.Array:
        """Codes, or plain values at 16 bits: bfloat16 [H, 128]."""
        f = self.layout.fmt
        parts = [self._codes("k_codes", f.k_bits, self.layout.base_channels)]
        if f.outlier_channels:
            parts.append(self._codes("outlier_codes", f.outlier_bits, f.outlier_channels))
        return jnp.concatenate(parts, axis=0)

    def values(self) -> jax.Array:
        """As `keys`."""
        return self._codes("v_codes", self.layout.fmt.v_bits, self.layout.head_dim)

    def key_scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Scale and offset of each channel, float32 [1, H]; None where keys are plain values."""
        f, head_dim = self.layout.fmt, self.layout.head_dim
        if not f.keys.is_quantized:
            return None
        first, _ = self.layout.planes()["k_scales"]
        scale, offset = _halves(self._words(first, align_to(head_dim, TOKENS))[:, :head_dim])
        if f.outlier_channels and not f.outliers.is_quantized:
            promoted = lax.broadcasted_iota(jnp.int32, scale.shape, 1) >= self.layout.base_channels
            scale = jnp.where(promoted, 1.0, scale)  # the offset is padding, 0
        return scale, offset

    def value_scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Scale and offset of each token, float32 [1, 128]; None where values are plain values."""
        if not self.layout.fmt.values.is_quantized:
            return None
        return _halves(self._words(*self.layout.planes()["v_scales"]))

    def _words(self, first: int, count: int) -> jax.Array:
        """uint32 [1, count]."""
        return self.ring[self.slot, pl.ds(self.head, 1), pl.ds(first, count)]

    def _codes(self, plane: str, bits: int, channels: int) -> jax.Array:
        rows = plane_rows(channels, bits)
        words = self._words(self.layout.planes()[plane][0], rows * TOKENS).reshape(rows, TOKENS)
        pairs = unpack_pairs(words, bits, channels)
        if bits == 16:
            return pltpu.bitcast(pairs, jnp.bfloat16)
        return pltpu.bitcast(pairs, jnp.uint16).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Head:
    """One KV head of a row: its queries and its online softmax, which lives in VMEM.

    m, l, z [K, M, 128]: running maximum of the scores, denominator, and weights times value offsets, in all lanes; acc [K, M, H]:
    weights times values. M query rows; scores of S tokens are float32 [M, S].
    """

    call: _Call
    index: int
    q_ref: Any
    m: Any
    l: Any
    z: Any
    acc: Any
    kv_len: Any
    q_len: Any

    def begin(self) -> None:
        self.m[self.index] = jnp.full(self.m.shape[1:], MASK_VALUE, jnp.float32)
        for ref in (self.l, self.z, self.acc):
            ref[self.index] = jnp.zeros(ref.shape[1:], jnp.float32)

    def add_tokens(self, k_ref, v_ref, position, lowest: int) -> None:
        """Unquantised tokens, in bfloat16 [1, K, S, H]; token i stands at position(i). Those below `lowest` are left out."""
        v = v_ref[0, self.index]

        def there(positions):
            return (positions < self.kv_len) & (positions >= lowest)

        scores = _product(self._queries(), k_ref[0, self.index], 1, self.call.pieces)
        positions = position(lax.broadcasted_iota(jnp.int32, scores.shape, 1))
        weights, alpha = self._weigh(scores, there(positions) & self._seen(positions))
        # 0 * NaN is NaN: values that are not there must be taken out as well.
        present = there(position(lax.broadcasted_iota(jnp.int32, (v.shape[0], 1), 0)))
        v = jnp.where(present, v.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
        self._add_values(alpha, _product(weights, v, 0, self.call.pieces), 0.0)

    def add_page(self, page: _PageWords, first) -> None:
        """A closed page, from position `first` on."""
        q = self._queries()
        bias: jax.Array | float = 0.0
        z: jax.Array | float = 0.0
        if (scales := page.key_scales()) is not None:
            bias = jnp.sum(q * scales[1], axis=1, keepdims=True)
            q = q * scales[0]
        scores = _product(q, page.keys(), 0, self.call.pieces) + bias
        seen = None
        if self.call.masks:
            positions = first + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            seen = (positions >= self.call.fmt.sink_tokens) & self._seen(positions)
        weights, alpha = self._weigh(scores, seen)
        if (scales := page.value_scales()) is not None:
            z = jnp.sum(weights * scales[1], axis=1, keepdims=True)
            weights = weights * scales[0]
        self._add_values(alpha, _product(weights, page.values(), 1, self.call.pieces), z)

    def finish(self, out_ref, learned_ref) -> None:
        """Writes the outputs: 0 for queries that do not count."""
        m, l = self.m[self.index, :, :1], self.l[self.index, :, :1]
        total = l
        scale: jax.Array | float = 1.0
        if learned_ref is not None:
            logits = learned_ref[self.index, :, :1]
            top = jnp.maximum(m, logits)
            scale = jnp.exp(m - top)
            total = l * scale + jnp.exp(logits - top)
        out = (self.acc[self.index] + self.z[self.index, :, :1]) * (scale / total)
        valid = self._query_index((out.shape[0], 1)) < self.q_len
        out_ref[0, self.index] = jnp.where(valid, out, 0.0).astype(out_ref.dtype)

    def _queries(self) -> jax.Array:
        return self.q_ref[0, self.index].astype(jnp.float32) * self.call.sm_scale

    def _query_index(self, shape) -> jax.Array:
        """Which query each row is."""
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        return lax.rem(row, self.call.num_queries) if self.call.num_queries > 1 else jnp.zeros_like(row)

    def _seen(self, positions) -> jax.Array:
        distance = self.kv_len - self.q_len + self._query_index(positions.shape) - positions
        seen = distance >= 0
        if self.call.sliding_window is not None:
            seen &= distance < self.call.sliding_window
        return seen

    def _weigh(self, scores, seen) -> tuple[jax.Array, jax.Array]:
        """Takes tokens into the maximum and the denominator: weights [M, S], and the factor of what was there before, [M, 1]."""
        if self.call.logit_softcap is not None:
            scores = self.call.logit_softcap * jnp.tanh(scores / self.call.logit_softcap)
        if seen is not None:
            scores = jnp.where(seen, scores, MASK_VALUE)
        before = self.m[self.index, :, :1]
        m = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - m)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        alpha = jnp.exp(before - m)
        self._store(self.m, m)
        self._store(self.l, alpha * self.l[self.index, :, :1] + jnp.sum(weights, axis=1, keepdims=True))
        return weights, alpha

    def _add_values(self, alpha, values, z) -> None:
        self.acc[self.index] = alpha * self.acc[self.index] + values
        self._store(self.z, alpha * self.z[self.index, :, :1] + z)

    def _store(self, ref, x) -> None:
        ref[self.index] = jnp.broadcast_to(x, ref.shape[1:])


def _product(x, y, axis: int, pieces: int) -> jax.Array:
    """float32 [M, n]: x, float32 [M, c], times y, bfloat16, contracted over y's `axis`, with x in that many bfloat16 pieces."""
    parts, rest = [], x
    for _ in range(pieces):
        parts.append(_cut(rest))
        rest = rest - parts[-1]
    stacked = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
    out = lax.dot_general(stacked, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
    rows = x.shape[0]
    return functools.reduce(jnp.add, [out[i * rows:(i + 1) * rows] for i in reversed(range(pieces))])


def _cut(x):
    """float32 with all but the high 16 bits cleared: a bfloat16 value. (A conversion and back is no rounding for a compiler.)"""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & _HIGH_HALF, jnp.float32)


def _halves(words) -> tuple[jax.Array, jax.Array]:
    """The bfloat16 numbers in the low and in the high halves of uint32 words, as float32."""
    return lax.bitcast_convert_type(words << 16, jnp.float32), lax.bitcast_convert_type(words & _HIGH_HALF, jnp.float32)
