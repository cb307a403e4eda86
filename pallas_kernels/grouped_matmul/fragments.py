"""Packed expert weights on Hopper's tensor cores: the steps of `grouped_matmul` that work in registers.

A warpgroup works on one or two blocks of 32 output columns of one expert, a chunk of up to 128 channels a warp at a time; four or
two warps (`split`) share a block's channels, chunk by chunk in turn:

    sums  float32 [4, 32, 8]   warp x output columns x tokens     chunk's codes (registers, operand A) x tokens (operand B)

and lies in registers as the accumulator of `mma.m16n8k16` does (`SUMS`). Codes of up to four bits become bfloat16 by two logical
instructions a pair: `(word & mask) | exponent` is the number 128 + code. That offset is not removed element by element: the sum of
a group's tokens times minus the offset, which is a product on the tensor core too, is added to the products of a scale group. They
are whole numbers times tokens then, and are added to the sums times the scale of their column: codes are multiplied exactly, and
scales in float32.

Every function here has a twin in plain JAX (`use_twins=True`), which computes the same from the same words; the interpreter runs
those, because it cannot run inlined instructions.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import sm90
from pallas_kernels.packed_weights import BLOCK, UNIT, WeightLayout, unpack_chunks
from pallas_kernels.pallas_utils import cdiv
from pallas_kernels.sm90 import LANES, WARPS, and_or, f32, i32, scaled, shift_right

TOKENS = 8  # the N of the instruction
SUMS = sm90.ACCUMULATOR  # [4, columns, 8]
_SCALAR = plgpu.Layout.WG_SPLAT(())
_INT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
_ONE = 0x3F803F80  # a pair of bfloat16 1.0


def output_layout(columns: int):
    """Layout of [columns, 8] in the registers of a warpgroup: the 8 tokens of a column lie side by side; columns is 16 or 32."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((columns, TOKENS), (columns // WARPS, TOKENS), (columns // 16,))), warp_dims=(-5,), lane_dims=(-3, -2),
        vector_dim=-1)


def find_tile(group_sizes_ref, index, tile_rows: int, *, use_twins: bool) -> tuple[jax.Array, ...]:
    """Rows of every expert are cut into tiles of up to `tile_rows`; tiles are numbered through.

    Args:
      group_sizes_ref: int32 GMEM [E].
      index: int32, number of a tile.

    Returns:
      int32 scalars: the tile's expert, its first row, one past the expert's last row, the number of tiles, and the rows of all
      experts. The first three are 0 when there is no such tile.
    """
    if use_twins:
        return _find_tile_twin(group_sizes_ref[...], index, tile_rows)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=(_INT,) * 5)
    return body(lambda ctx, sizes, index: _find_tile(sizes, index.registers.item(), tile_rows))(group_sizes_ref, index)


def add_products(
    layout: WeightLayout, split: int, words_ref, x_ref, first_row, end_row, first_chunk, sums: tuple[jax.Array, ...], *,
    use_twins: bool,
) -> tuple[jax.Array, ...]:
    """Adds the product of one chunk a warp and the tokens, for each tile of eight tokens.

    Args:
      layout: of the weights.
      split: warps that share a block.
      words_ref: uint32 SMEM [4, words]: warp w has chunk first_chunk + w % split; what stands past the matrix means nothing.
      x_ref: bfloat16 GMEM [M, k].
      first_row, end_row: int32; tokens are the rows of x from first_row on. Tiles that begin at end_row or later are left out;
        what stands in sums for rows from end_row on means nothing.
      first_chunk: int32.
      sums: float32 [4, 32, 8] as `SUMS`, one a tile of tokens.
    """
    if use_twins:
        return _add_products_twin(layout, split, words_ref[...], x_ref[...], first_row, end_row, first_chunk, sums)
    body = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR, (SUMS,) * len(sums)),
        return_type=(plgpu.ShapeDtypeStruct((WARPS, BLOCK, TOKENS), jnp.float32, layout=SUMS),) * len(sums))

    def build(ctx, words, x, first_row, end_row, first_chunk, sums):
        rows = [scalar.registers.item() for scalar in (first_row, end_row, first_chunk)]
        return _AddProducts(layout, split, words, x, *rows).run(sums)

    return body(build)(words_ref, x_ref, first_row, end_row, first_chunk, sums)


def store_rows(out_ref, values: jax.Array, first_row, end_row, first_column, *, use_twins: bool) -> None:
    """Writes [columns, 8] as `output_layout` to out_ref GMEM [M, N] from (first_row, first_column) on, rows before end_row only."""
    columns = values.shape[0]
    if use_twins:
        for t in range(TOKENS):
            @pl.when(first_row + t < end_row)
            def _(t=t):
                out_ref[first_row + t, pl.ds(first_column, columns)] = values[:, t]
        return
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), output_layout(columns), _SCALAR, _SCALAR, _SCALAR))
    body(lambda ctx, out, values, *place: _store_rows(out, values, *(p.registers.item() for p in place)))(
        out_ref, values, first_row, end_row, first_column)


# Twins.


def _find_tile_twin(sizes, index, tile_rows: int) -> tuple[jax.Array, ...]:
    tiles = (sizes + (tile_rows - 1)) // tile_rows
    tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    is_it = (index >= tile_ends - tiles) & (index < tile_ends)
    first = row_ends - sizes + (index - (tile_ends - tiles)) * tile_rows
    expert = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    found = [jnp.sum(jnp.where(is_it, value, 0), dtype=jnp.int32) for value in (expert, first, row_ends)]
    return *found, tile_ends[-1], row_ends[-1]


def _add_products_twin(layout: WeightLayout, split: int, words, x, first_row, end_row, first_chunk, sums):
    codes, scale, zero = unpack_chunks(words, layout)
    if scale is None:
        groups, scale = 1, jnp.ones((WARPS, 1, BLOCK), jnp.float32)
        values = jax.lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.bfloat16).astype(jnp.float32)
    else:
        groups = layout.groups
        values = codes.astype(jnp.float32) - (1 << layout.bits - 1)
        if zero is not None:
            values = values - jnp.repeat(zero.astype(jnp.float32), layout.chunk // groups, axis=1)
    values = values.reshape(WARPS, groups, layout.chunk // groups, BLOCK)
    chunk = first_chunk + jnp.arange(WARPS, dtype=jnp.int32) % split
    has_chunk = (chunk < layout.chunks)[:, None, None]
    channels = chunk[:, None] * layout.chunk + jnp.arange(layout.chunk, dtype=jnp.int32)
    out = []
    for t, total in enumerate(sums):
        rows = jnp.minimum(first_row + TOKENS * t + jnp.arange(TOKENS, dtype=jnp.int32), end_row - 1)
        tokens = x[rows[:, None, None], channels].astype(jnp.float32).reshape(TOKENS, WARPS, groups, -1)
        products = jnp.einsum("wgkn,twgk->wgnt", values, tokens, precision="highest")
        products = jnp.sum(products * scale.astype(jnp.float32)[..., None], axis=1)
        out.append(jnp.where(has_chunk, total + products, total))
    return tuple(out)


# Instructions.


def _find_tile(sizes, index: ir.Value, tile_rows: int) -> tuple[fa.FragmentedArray, ...]:
    """Every lane looks at some experts; one prefix sum carries rows (low half) and tiles (high half) at once."""
    num_experts = ir.MemRefType(sizes.type).shape[0]
    each = cdiv(num_experts, LANES)
    lane, _ = sm90.lane_and_warp()
    first = scaled(lane, each)
    base = sm90.global_address(sizes, i32(0))
    both = []
    for j in range(each):
        expert = arith.addi(first, i32(j))
        inside = arith.cmpi(arith.CmpIPredicate.slt, expert, i32(num_experts))
        address = arith.addi(base, arith.extui(base.type, scaled(arith.select(inside, expert, i32(0)), 4)))
        size = arith.select(inside, sm90.load_words(address, 0, 1)[0], i32(0))
        tiles = arith.divui(arith.addi(size, i32(tile_rows - 1)), i32(tile_rows))
        both.append(arith.addi(size, arith.shli(tiles, i32(16))))
    own = both[0]
    for x in both[1:]:
        own = arith.addi(own, x)
    through = sm90.prefix_sum(own)
    before = arith.subi(through, own)
    found = [i32(0)] * 3
    for j, x in enumerate(both):
        after = arith.addi(before, x)
        place = arith.subi(index, arith.shrui(before, i32(16)))
        count = arith.subi(arith.shrui(after, i32(16)), arith.shrui(before, i32(16)))
        is_it = arith.cmpi(arith.CmpIPredicate.ult, place, count)  # unsigned: an index before the first is a huge one
        low = i32(0xFFFF)
        values = [arith.addi(first, i32(j)), arith.addi(arith.andi(before, low), scaled(place, tile_rows)), arith.andi(after, low)]
        found = [arith.select(is_it, value, old) for value, old in zip(values, found)]
        before = after
    total = sm90.warp_sum(own)
    both_totals = arith.shrui(total, i32(16)), arith.andi(total, i32(0xFFFF))
    return tuple(sm90.int_array(x) for x in (*(sm90.warp_sum(x) for x in found), *both_totals))


class _AddProducts:
    """Builds the body of `add_products`."""

    def __init__(self, layout: WeightLayout, split: int, words_ref, x_ref, first_row, end_row, first_chunk):
        self.layout, self.x_ref, self.first_row, self.end_row = layout, x_ref, first_row, end_row
        lane, warp = sm90.lane_and_warp()
        self.group, i = arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
        self.chunk = sm90.shared_address(words_ref, scaled(warp, layout.words * 4))
        self.lane = lane
        chunk = arith.addi(first_chunk, arith.andi(warp, i32(split - 1)))
        self.has_chunk = arith.cmpi(arith.CmpIPredicate.slt, chunk, i32(layout.chunks))
        self.token_byte = arith.addi(scaled(chunk, 2 * layout.chunk), scaled(i, 16))

    def run(self, sums) -> tuple[fa.FragmentedArray, ...]:
        tiles = self._present([sm90.registers(total) for total in sums])
        return tuple(sm90.array_of(tile, (WARPS, BLOCK, TOKENS), SUMS.to_mgpu(), 2) for tile in tiles)

    def _present(self, sums: list[list[ir.Value]]) -> list[list[ir.Value]]:
        """`sums` of the first tiles: all at once when there are tokens in the second half, else the first half alone."""
        half = len(sums) // 2
        first = arith.addi(self.first_row, i32(TOKENS * half))
        there = arith.andi(self.has_chunk, arith.cmpi(arith.CmpIPredicate.slt, first, self.end_row))
        flat = [v for tile in sums for v in tile]
        branch = scf.IfOp(there, [v.type for v in flat], has_else=True)  # type: ignore[call-arg]
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([v for tile in self._tiles(sums) for v in tile])
        with ir.InsertionPoint(branch.else_block):
            rest = [*self._present(sums[:half]), *sums[half:]] if half else sums
            scf.yield_([v for tile in rest for v in tile])
        each = len(sums[0])
        return [list(branch.results)[t * each:(t + 1) * each] for t in range(len(sums))]

    def _tiles(self, sums: list[list[ir.Value]]) -> list[list[ir.Value]]:
        """sums (four a column tile of 16) plus the chunk's products with each tile of tokens; codes are unpacked once."""
        layout = self.layout
        tokens = [self._tokens(t) for t in range(len(sums))]
        columns = [[tile[:4], tile[4:]] for tile in sums]
        if layout.bits == 16:
            products = self._products(range(layout.units), tokens)
            return [[arith.addf(total, p) for both in zip(tile, totals) for p, total in zip(*both)]
                    for tile, totals in zip(products, columns)]
        per_group = layout.units // layout.groups
        for group in range(layout.groups):
            units = range(group * per_group, (group + 1) * per_group)
            scales = self._numbers(layout.scale_word + group * layout.scale_words, layout.scale_dtype)
            products = self._products(units, tokens)
            for t, product in enumerate(products):
                product = self._without_offset(group, product, [tokens[t][unit] for unit in units])
                columns[t] = [[sm90.fma(scale[c // 2], p, total) for c, (p, total) in enumerate(zip(*both))]
                              for scale, *both in zip(scales, product, columns[t])]
        return [[*tile[0], *tile[1]] for tile in columns]

    def _tokens(self, t: int) -> list[list[ir.Value]]:
        """The lane's eight channels of each unit, of token `group` of the tile: four pairs."""
        # Rows of others are not read: eight rows where one is needed are as many bytes from the L2 cache as the weights.
        row = arith.minsi(arith.addi(self.first_row, arith.addi(self.group, i32(TOKENS * t))), arith.subi(self.end_row, i32(1)))
        address = sm90.global_address(self.x_ref, arith.addi(scaled(row, 2 * self.layout.k), self.token_byte))
        return [sm90.load_words(address, 2 * UNIT * unit, 4) for unit in range(self.layout.units)]

    def _products(self, units: range, tokens: list[list[list[ir.Value]]]) -> list[list[list[ir.Value]]]:
        """For each tile of tokens and both column tiles, the sum over `units` of codes (as of `_operands`) times tokens."""
        # Two sums each, added at the end: one instruction after the other waits for its accumulator, four at a time do not.
        halves = [[[[f32(0.0)] * 4 for r in range(2)] for j in range(2)] for _ in tokens]
        for unit in units:
            operands = self._operands(unit)
            for tile, sums in zip(tokens, halves):
                for j, b in enumerate(_halves(tile[unit])):
                    sums[j] = [sm90.mma(x, [operands[4 * a + 2 * r + j] for a in range(4)], b) for r, x in enumerate(sums[j])]
        return [[_add(*both) for both in zip(*sums)] for sums in halves]

    def _without_offset(self, group: int, products, tokens: list[list[ir.Value]]) -> list[list[ir.Value]]:
        """`products` of a scale group minus the sum of its tokens times offset and zero point."""
        layout = self.layout
        offset = 0 if layout.bits == 8 else 128 + (1 << layout.bits - 1)
        if not offset and not layout.has_zero:
            return products
        factor = _ONE if layout.has_zero else _bfloat16_pair(-float(offset))
        halves = [[f32(0.0)] * 4 for j in range(2)]
        for pairs in tokens:
            halves = [sm90.mma(x, [i32(factor)] * 4, b) for x, b in zip(halves, _halves(pairs))]
        total = _add(*halves)
        if not layout.has_zero:
            return [_add(product, total) for product in products]
        zeros = self._numbers(layout.zero_word + group * BLOCK // 2, "bfloat16")
        factors = [[arith.subf(f32(-float(offset)), z) for z in column] for column in zeros]
        return [[sm90.fma(f[c // 2], x, p) for c, (x, p) in enumerate(zip(total, product))]
                for f, product in zip(factors, products)]

    def _numbers(self, word: int, dtype: str) -> list[list[ir.Value]]:
        """The lane's numbers at `word` of the chunk, float32: for each column tile r, of the columns g and g + 8."""
        size = 16 if dtype == "float32" else 8
        address = arith.addi(self.chunk, scaled(self.group, size))
        words = sm90.load_words(address, 4 * word, size // 4)
        kind = ir.F32Type.get()
        if dtype == "float32":
            flat = [arith.bitcast(kind, w) for w in words]
        else:
            flat = [arith.bitcast(kind, x) for w in words for x in (arith.shli(w, i32(16)), arith.andi(w, i32(0xFFFF0000)))]
        return [flat[:2], flat[2:]]

    def _operands(self, unit: int) -> list[ir.Value]:
        """The lane's 16 slots of a unit as bfloat16 pairs."""
        planes, first = [], 0
        for bits in self.layout.planes:
            planes.append(self._plane(first + unit * LANES * bits, bits))
            first += self.layout.units * LANES * bits
        if self.layout.bits == 3:
            [third] = planes[1]
            low = [_code(planes[0][s // 8], 2, s % 8) for s in range(16)]
            return [and_or(shift_right(third, s - 2), 0x00040004, x) for s, x in enumerate(low)]
        fields = 16 // self.layout.bits
        return [_code(planes[0][s // fields], self.layout.bits, s % fields) for s in range(16)]

    def _plane(self, word: int, bits: int) -> list[ir.Value]:
        """The lane's words of a unit in a plane that begins at `word` of the chunk."""
        load = min(4, bits)
        address = arith.addi(self.chunk, scaled(self.lane, 4 * load))
        return [w for piece in range(bits // load) for w in sm90.load_words(address, 4 * (word + piece * LANES * load), load)]


def _halves(token_pairs: list[ir.Value]) -> list[list[ir.Value]]:
    """Operand B of the two tiles along k of a unit."""
    return [token_pairs[:2], token_pairs[2:]]


def _add(a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    return [arith.addf(x, y) for x, y in zip(a, b)]


def _bfloat16_pair(value: float) -> int:
    """Twice the bits of a number that is exact in bfloat16."""
    half = int(np.float32(value).view(np.uint32)) >> 16
    return half << 16 | half


def _code(word: ir.Value, bits: int, field: int) -> ir.Value:
    """A pair of codes as bfloat16: plus 128 for up to four bits, minus 128 (so with its sign) for eight; 16 bits as they are."""
    if bits == 16:
        return word
    word = shift_right(word, bits * field)
    if bits < 8:
        mask = (1 << bits) - 1
        return and_or(word, mask << 16 | mask, 0x43004300)
    low, high = and_or(word, 0x000F000F, 0x43004300), and_or(shift_right(word, 4), 0x000F000F, 0x43004300)
    # (128 + high) * 16 - 2304 = 16 high - 256, exactly; plus 128 + low.
    high = sm90.asm("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [high, i32(0x41804180), i32(0xC510C510)])
    return sm90.asm("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [low, high])


def _store_rows(out, values: fa.FragmentedArray, first_row, end_row, first_column) -> None:
    columns, width = values.shape[0], ir.MemRefType(out.type).shape[1]
    vector = columns // 16
    lane, warp = sm90.lane_and_warp()
    each = TOKENS // vector  # lanes side by side along the tokens
    column = arith.addi(first_column, arith.addi(scaled(warp, columns // WARPS), arith.divui(lane, i32(each))))
    row = arith.addi(first_row, scaled(arith.remui(lane, i32(each)), vector))
    size = mgpu.utils.bytewidth(values.mlir_dtype)
    for j, value in enumerate(sm90.registers(values)):
        at = arith.addi(row, i32(j))
        place = scaled(arith.addi(scaled(at, width), column), size)
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, at, end_row)):
            sm90.store(value, sm90.global_address(out, place))
