"""Low-bit pages on Hopper's tensor cores: the steps of attention that work on packed words, in registers.

A warpgroup works on one step: `4 // warps_per_page` pages of one KV head, `warps_per_page` warps a page. Each warp multiplies its
own tokens, M = 128 / warps_per_page of them, by eight query rows, and keeps its own part of the output, so that no warp waits
for another. All arrays have a leading axis of 4 warps:

    scores  float32 [4, M, 8]   tokens of the warp x query rows           mma 1: K codes (registers) x (q * K scale)
    acc     float32 [4, H, 8]   channels x query rows, sum over tokens    mma 2: V codes (registers) x (p * V scale)

Every array lies in registers as the accumulator of `mma.m16n8k16` does (`ROWS`), so that softmax between the two products is
elementwise code in Pallas; `movmatrix` turns it into the second product's operand without shared memory.

Codes of 2, 3 and 4 bits become bfloat16 by one or two logical instructions a pair of codes: `(word & mask) | exponent` is the
number 2**(7 - offset) + code for a code that starts at mantissa bit `offset`. That bias is not removed element by element: it is
the same for all codes of a bit field, so its product with the other operand is one more tensor-core tile a page.

Every function here has a twin in plain JAX (`use_twins=True`), which computes the same from the same words; the interpreter runs
those, because it cannot run inlined instructions.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from pallas_kernels import mma_sm90
from pallas_kernels.kv_format import QUANT_BITS, KVFormat
from pallas_kernels.mma_sm90 import QUAD_WORDS, TILE, TOKEN_TILES
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.quantize import bits_to_float32

WARPS = 4
QUERY_ROWS = 8  # the N of the instruction
OPEN_TOKENS = WARPS * TILE  # tokens of an unquantised tile: a token tile a warp

ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, 8, QUERY_ROWS), (2,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
PER_ROW = ROWS.reduce(2)  # [4, M]: one number a token
PER_QUERY = ROWS.reduce(1)  # [4, 8]: one number a query row
QUERIES = ROWS.reduce((0, 1))  # [8]

_ONE = 0x3F803F80  # a pair of bfloat16 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What the functions below need to know at compile time."""

    layout: PageLayout
    warps_per_page: int
    use_twins: bool

    @property
    def fmt(self) -> KVFormat:
        return self.layout.fmt

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def pages(self) -> int:
        """Pages a step."""
        return WARPS // self.warps_per_page

    @property
    def tokens(self) -> int:
        """Tokens of a warp."""
        return mma_sm90.TOKENS // self.warps_per_page

    @property
    def token_tiles(self) -> int:
        return self.tokens // TILE


def key_scores(step: Step, words_ref, q_ref, start: jax.Array) -> jax.Array:
    """Scores of the tokens of a step's pages, without the softmax scale.

    Args:
      step: compile-time shape.
      words_ref: uint32 SMEM [pages * key rows, H / 2], the keys' part of each page.
      q_ref: bfloat16 SMEM [8, H].
      start: float32 [4, 8] as `PER_QUERY`: what the sums begin with; 0, or very negative for a warp without a page.

    Returns:
      float32 [4, M, 8] as `ROWS`.
    """
    if step.use_twins:
        return _key_scores_twin(step, words_ref[...], q_ref[...], start)
    result = plgpu.ShapeDtypeStruct((WARPS, step.tokens, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), PER_QUERY), return_type=result)
    return body(lambda ctx, words, q, start: _KeyScores(step, words, q, start).run())(words_ref, q_ref, start)


def value_scales(step: Step, words_ref) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of each token's values, float32 [4, M] as `PER_ROW`, of uint32 SMEM [pages * value rows, H / 2]."""
    if step.use_twins:
        words = words_ref[...].reshape(step.pages, -1)[:, _value_scale_word(step):][:, :mma_sm90.TOKENS]
        words = words.reshape(WARPS, step.tokens)
        return bits_to_float32(words & 0xFFFF, "bfloat16"), bits_to_float32(words >> 16, "bfloat16")
    result = plgpu.ShapeDtypeStruct((WARPS, step.tokens), jnp.float32, layout=PER_ROW)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result, result))
    return body(lambda ctx, words: _load_value_scales(step, words))(words_ref)


def add_values(step: Step, words_ref, p: jax.Array, acc: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds the values of a step's pages, weighted: acc - bias grows by sum over tokens of code * p.

    Args:
      step: compile-time shape.
      words_ref: uint32 SMEM [pages * value rows, H / 2], the values' part of each page.
      p: float32 [4, M, 8] as `ROWS`, softmax weights times value scales; rounded to bfloat16 here.
      acc: float32 [4, H, 8] as `ROWS`.
      bias: float32 [4, 8, 8] as `ROWS`: what acc holds too much, in every channel the same; all 8 rows are equal.

    Returns:
      acc and bias.
    """
    if step.use_twins:
        codes = _value_codes(step, words_ref[...].reshape(step.pages, -1)).reshape(WARPS, step.tokens, step.head_dim)
        return acc + _dot("wth,wtn->whn", codes, _round(p)), bias
    acc_type = plgpu.ShapeDtypeStruct((WARPS, step.head_dim, QUERY_ROWS), jnp.float32, layout=ROWS)
    bias_type = plgpu.ShapeDtypeStruct((WARPS, 8, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS, ROWS, ROWS), return_type=(acc_type, bias_type))
    return body(lambda ctx, words, p, acc, bias: _AddValues(step, words, p, acc, bias).run())(words_ref, p, acc, bias)


def open_scores(step: Step, k_ref, q_ref) -> jax.Array:
    """Scores float32 [4, 16, 8] as `ROWS` of a bfloat16 SMEM tile [64, H] of keys; warp w has the tokens 16 w … 16 w + 15."""
    if step.use_twins:
        return _dot("wth,nh->wtn", k_ref[...].reshape(WARPS, TILE, step.head_dim), q_ref[...])
    result = plgpu.ShapeDtypeStruct((WARPS, TILE, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=result)
    return body(lambda ctx, k, q: _open_scores_body(step, k, q))(k_ref, q_ref)


def add_open_values(step: Step, v_ref, p: jax.Array, acc: jax.Array) -> jax.Array:
    """acc plus the bfloat16 SMEM tile [64, H] of values weighted by p, float32 [4, 16, 8] as `ROWS`. No value may be NaN."""
    if step.use_twins:
        return acc + _dot("wth,wtn->whn", v_ref[...].reshape(WARPS, TILE, step.head_dim), _round(p))
    acc_type = plgpu.ShapeDtypeStruct((WARPS, step.head_dim, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS, ROWS), return_type=acc_type)
    return body(lambda ctx, v, p, acc: _add_open_values_body(step, v, p, acc))(v_ref, p, acc)


def rescale(step: Step, acc: jax.Array, bias: jax.Array, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """acc and bias (as in `add_values`) times alpha, float32 [4, 8] as `PER_QUERY`; a warp whose alphas are all 1 skips it."""
    if step.use_twins:
        return acc * alpha[:, None], bias * alpha[:, None]
    acc_type, bias_type = (
        plgpu.ShapeDtypeStruct((WARPS, rows, QUERY_ROWS), jnp.float32, layout=ROWS) for rows in (step.head_dim, 8))
    body = plgpu.inline_mgpu(arg_types=(ROWS, ROWS, PER_QUERY), return_type=(acc_type, bias_type))
    return body(lambda ctx, acc, bias, alpha: _rescale_body(step, acc, bias, alpha))(acc, bias, alpha)


def warp_done(step: Step) -> None:
    """Waits until all lanes of the warp are here: what only this warp reads in shared memory may be written anew."""
    if not step.use_twins:
        plgpu.inline_mgpu()(lambda ctx: mgpu.utils.warp_barrier())()


def warps_of_this_thread(step: Step) -> list:
    """Warps that this program must speak for, as int32 scalars: the thread's own one, or all of them where there are no threads."""
    if step.use_twins:
        return [np.int32(warp) for warp in range(WARPS)]
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return [plgpu.inline_mgpu(return_type=result)(lambda ctx: fa.FragmentedArray.splat(_lane_and_warp()[1], (), is_signed=True))()]


# Twins.


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _round(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def _key_scores_twin(step: Step, words, q, start) -> jax.Array:
    layout = step.layout
    words, q = words.reshape(step.pages, -1), q.astype(jnp.float32)
    total = jnp.zeros((step.pages, mma_sm90.TOKENS, QUERY_ROWS), jnp.float32)
    for segment in _key_segments(layout):
        channels = slice(segment.channel, segment.channel + segment.channels)
        plane = words[:, segment.code_word:segment.code_word + mma_sm90.plane_words(segment.channels, segment.bits)]
        codes = mma_sm90.unpack_keys(plane, segment.bits, segment.channels)
        if segment.bits == 16:
            total += _dot("pth,nh->ptn", bits_to_float32(codes, "bfloat16"), q[:, channels])
            continue
        scales = words[:, segment.scale_word:segment.scale_word + segment.channels]
        scale, offset = (bits_to_float32(s, "bfloat16") for s in jnp.split(mma_sm90.unpack_pairs(scales), 2, axis=-1))
        scaled = _round(q[None, :, channels] * scale[:, None])
        total += _dot("pth,pnh->ptn", codes, scaled) + _dot("ph,nh->pn", offset, q[:, channels])[:, None]
    return total.reshape(WARPS, step.tokens, QUERY_ROWS) + start[:, None]


def _value_codes(step: Step, words: jax.Array) -> jax.Array:
    """Value codes (the values themselves at 16 bits) float32 [pages, 128, H], of the values' parts."""
    _, size = step.layout.planes()["v_codes"]
    codes = mma_sm90.unpack_values(words[:, :size], step.fmt.v_bits, step.head_dim)
    return bits_to_float32(codes, "bfloat16") if step.fmt.v_bits == 16 else codes.astype(jnp.float32)


# Where things lie in a page.


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Key channels that are stored alike. Words are counted from the page's start."""

    channel: int
    channels: int
    bits: int
    code_word: int
    scale_word: int

    @property
    def tiles(self) -> int:
        return self.channels // TILE


def _key_segments(layout: PageLayout) -> list[_Segment]:
    planes, base = layout.planes(), layout.base_channels
    segments = [_Segment(0, base, layout.fmt.k_bits, planes["k_codes"][0], planes.get("k_scales", (0, 0))[0])]
    if layout.fmt.outlier_channels:
        segments.append(_Segment(
            base, layout.fmt.outlier_channels, layout.fmt.outlier_bits, planes["outlier_codes"][0],
            planes.get("outlier_scales", (0, 0))[0]))
    return segments


def _value_scale_word(step: Step) -> int:
    """First word of the value scales, counted from the start of the values' part."""
    return step.layout.planes()["v_scales"][0] - step.layout.key_words


# Instructions.


def _i32(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    value &= 0xFFFFFFFF
    return mgpu.utils.c(value - (1 << 32) if value >= 1 << 31 else value, i32)


def _f32(value: float) -> ir.Value:
    return mgpu.utils.c(value, ir.F32Type.get())


def _asm(code: str, constraints: str, operands: list[ir.Value], results: int = 1, kind=None):
    """Inline PTX without side effects. `kind`: MLIR type of the results, int32 for None."""
    kind = kind or ir.IntegerType.get_signless(32)
    if results == 1:
        return llvm.inline_asm(kind, operands, code, constraints)
    out = llvm.inline_asm(llvm.StructType.get_literal([kind] * results), operands, code, constraints)
    return [llvm.extractvalue(kind, out, [i]) for i in range(results)]


def _mma(acc: list[ir.Value], a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    """acc (4 float32) + a (4 bfloat16 pairs) x b (2 pairs)."""
    code = ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};")
    return _asm(code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *acc], 4, ir.F32Type.get())


def _shift(x: ir.Value, right: int) -> ir.Value:
    if right == 0:
        return x
    return arith.shrui(x, _i32(right)) if right > 0 else arith.shli(x, _i32(-right))


def _lop3(a: ir.Value, b: int, c: int | ir.Value, table: int) -> ir.Value:
    if isinstance(c, int):
        return _asm(f"lop3.b32 $0, $1, {b}, {c}, {table};", "=r,r", [a])
    return _asm(f"lop3.b32 $0, $1, {b}, $2, {table};", "=r,r,r", [a, c])


def _and_or(x: ir.Value, mask: int, other: int | ir.Value) -> ir.Value:
    return _lop3(x, mask, other, 0xEA)  # (a & b) | c


def _mul_pairs(a: ir.Value, b: ir.Value) -> ir.Value:
    return _asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b])


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    return arith.andi(thread, _i32(31)), arith.andi(arith.shrui(thread, _i32(5)), _i32(WARPS - 1))


def _pointer(ref: ir.Value, *byte_offsets: ir.Value | int) -> ir.Value:
    """Address of a shared-memory ref plus offsets, as an i32: shared memory addresses are 32 bits wide."""
    i32 = ir.IntegerType.get_signless(32)
    address = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    for offset in byte_offsets:
        address = arith.addi(address, _i32(offset) if isinstance(offset, int) else offset)
    return address


def _load_words(address: ir.Value, offset: int, count: int) -> list[ir.Value]:
    """`count` (1, 2 or 4) neighbouring words of shared memory at byte `offset` from `address`."""
    i32 = ir.IntegerType.get_signless(32)
    pointer = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(address, _i32(offset)) if offset else address)
    if count == 1:
        return [llvm.load(i32, pointer, alignment=4)]
    words = llvm.load(ir.VectorType.get((count,), i32), pointer, alignment=4 * count)
    return [llvm.extractelement(words, _i32(j)) for j in range(count)]


def _scale(x: ir.Value, factor: int) -> ir.Value:
    return arith.muli(x, _i32(factor))


def _split_pair(register: ir.Value) -> list[ir.Value]:
    return [llvm.extractelement(register, _i32(j)) for j in range(2)]


def _accumulators(array: fa.FragmentedArray) -> list[list[ir.Value]]:
    """Registers of a `ROWS` array, four for each tile of 16 rows (two for a last half tile)."""
    flat = [value for register in array.registers.reshape(-1) for value in _split_pair(register)]
    return [flat[i:i + 4] for i in range(0, len(flat), 4)]


def _array(tiles: list[list[ir.Value]], rows: int) -> fa.FragmentedArray:
    """The inverse of `_accumulators`, for [4, rows, 8]."""
    layout = ROWS.to_mgpu()
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    flat = [value for tile in tiles for value in tile]
    registers = []
    for i in range(0, len(flat), 2):
        vector = llvm.mlir_undef(pair)
        for j in range(2):
            vector = llvm.insertelement(vector, flat[i + j], _i32(j))
        registers.append(vector)
    shape = layout.registers_shape((WARPS, rows, QUERY_ROWS))
    out = np.empty(len(registers), dtype=object)
    out[:] = registers
    return fa.FragmentedArray(_registers=out.reshape(shape), _layout=layout, _is_signed=None)


# Unpacking.


def field_offset(field: int) -> tuple[int, int]:
    """(shift, mantissa bit) of 2-bit field 0 … 7: after `word >> shift` it starts at that bit of each half."""
    shift = (0, 0, 0, 6, 6, 6, 10, 10)[field]
    return shift, 2 * field - shift


def field_bias(bits: int, field: int) -> int:
    """What an unpacked code of that field is too large by."""
    if bits in (2, 3):
        return 1 << (7 - field_offset(field)[1])
    return 128 if bits == 4 else 0


class _Unpacker:
    """Codes of some of the 8 token tiles of an operand tile column, as bfloat16 pairs.

    `base` is the lane's address of the plane's first quad; `sub` the warp's place in its page (an i32), whose `token_tiles` tiles
    start at tile `sub * token_tiles`.
    """

    def __init__(self, bits: int, columns: int, base: ir.Value, sub: ir.Value, token_tiles: int):
        self.bits, self.base, self.sub, self.token_tiles = bits, base, sub, token_tiles
        self.fields = 16 // (2 if bits == 3 else bits)
        # Does a warp's share of the tiles fill whole quads, so that its fields are known at compile time?
        self.static = token_tiles % self.fields == 0
        if token_tiles < TOKEN_TILES:
            first_quad = arith.divui(_scale(sub, token_tiles), _i32(self.fields))
            self.base = arith.addi(base, _scale(first_quad, QUAD_WORDS * 4))
        self.third_base = arith.addi(base, _i32(columns * TOKEN_TILES // 8 * QUAD_WORDS * 4))

    def tiles(self, column: int) -> list[list[ir.Value]]:
        """Registers a = 0 … 3 of each of the warp's token tiles."""
        quads: dict[int, list[ir.Value]] = {}
        out = []
        for m in range(self.token_tiles):
            quad = column * TOKEN_TILES // self.fields + m // self.fields
            if quad not in quads:
                quads[quad] = self._load(quad)
            field = m % self.fields
            if self.bits == 3:
                third = self._third_bits(column, m)
                out.append([self._two_bits(w, field, t) for w, t in zip(quads[quad], third)])
            else:
                out.append([self._code(w, field) for w in quads[quad]])
        return out

    def bias(self, m: int) -> int:
        return field_bias(self.bits, m % self.fields)

    def _load(self, quad: int) -> list[ir.Value]:
        words = _load_words(self.base, quad * QUAD_WORDS * 4, 4)
        if self.static:
            return words
        first_field = arith.remui(_scale(self.sub, self.token_tiles), _i32(self.fields))
        shift = _scale(first_field, 16 // self.fields)
        return [arith.shrui(w, shift) for w in words]

    def _code(self, word: ir.Value, field: int) -> ir.Value:
        if self.bits == 2:
            return self._two_bits(word, field, None)
        if self.bits == 4:
            return _and_or(_shift(word, 4 * field), 0x000F000F, 0x43004300)
        if self.bits == 8:
            word = _shift(word, 8 * field)
            low, high = _and_or(word, 0x000F000F, 0x43004300), _and_or(_shift(word, 4), 0x000F000F, 0x43004300)
            # (128 + high) * 16 - 2176 = 16 high - 128, exactly; plus 128 + low.
            high = _asm("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [high, _i32(0x41804180), _i32(0xC508C508)])
            return _asm("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [low, high])
        return word

    def _two_bits(self, word: ir.Value, field: int, third: ir.Value | None) -> ir.Value:
        shift, offset = field_offset(field)
        exponent = (134 - offset) << 7
        code = _and_or(_shift(word, shift), 0x00030003 << offset, exponent << 16 | exponent)
        if third is None:
            return code
        return _and_or(third, 0x00040004 << offset, code)

    def _third_bits(self, column: int, m: int) -> list[ir.Value]:
        """The words of the third-bit plane, shifted so that tile m's bit stands two bits above the field's offset."""
        tile = column * TOKEN_TILES
        quad, parity = tile // 16, tile % 16 // 8
        words = _load_words(self.third_base, quad * QUAD_WORDS * 4, 4)
        target = field_offset(m % self.fields)[1] + 2
        if self.token_tiles == TOKEN_TILES:
            return [_shift(w, mma_sm90.third_bit_position(8 * parity + m) - target) for w in words]
        place = arith.addi(_scale(self.sub, 2 * self.token_tiles), _i32(2 * m + 2))
        place = arith.addi(arith.andi(place, _i32(15)), _i32(parity))
        return [_shift(arith.andi(arith.shrui(w, place), _i32(0x00010001)), -target) for w in words]


class _KeyScores:
    """Builds the body of `key_scores`."""

    def __init__(self, step: Step, words_ref, q_ref, start: fa.FragmentedArray):
        self.step = step
        lane, warp = _lane_and_warp()
        group, self.i = arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))
        self.sub = arith.remui(warp, _i32(step.warps_per_page))
        page = arith.divui(warp, _i32(step.warps_per_page))
        self.page = _pointer(words_ref, _scale(page, step.layout.key_words * 4))
        self.codes = arith.addi(self.page, _scale(lane, 16))
        self.q = _pointer(q_ref, _scale(group, step.head_dim * 2))
        self.start = [value for register in start.registers.reshape(-1) for value in _split_pair(register)]

    def run(self) -> fa.FragmentedArray:
        first = [*self.start, *self.start]
        first_per_tile = [first] * self.step.token_tiles
        operands = []
        for segment in _key_segments(self.step.layout):
            q = self._pairs(self.q, 2 * segment.channel, segment.tiles)
            unpacker = _Unpacker(
                segment.bits, segment.tiles, arith.addi(self.codes, _i32(segment.code_word * 4)), self.sub,
                self.step.token_tiles)
            if segment.bits in QUANT_BITS:
                scale_byte = segment.scale_word * 4
                scales = self._pairs(self.page, scale_byte, segment.tiles)
                offsets = self._pairs(self.page, scale_byte + 2 * segment.channels, segment.tiles)
                for z, b in zip(offsets, q):
                    first_per_tile = self._add_to_all(first_per_tile, [z[0], z[0], z[1], z[1]], b)
                q = [[_mul_pairs(x, s) for x, s in zip(b, scale)] for b, scale in zip(q, scales)]
            operands.append((unpacker, q))
        for unpacker, q in operands:
            first_per_tile = self._remove_bias(first_per_tile, unpacker, q)
        scores = first_per_tile
        for unpacker, q in operands:
            for column, b in enumerate(q):
                scores = [_mma(c, a, b) for c, a in zip(scores, unpacker.tiles(column))]
        return _array(scores, self.step.tokens)

    def _add_to_all(self, tiles, a, b):
        """The same product added to every tile; they are still one and the same at this point."""
        assert all(t is tiles[0] for t in tiles)
        return [_mma(tiles[0], a, b)] * len(tiles)

    def _remove_bias(self, tiles, unpacker: _Unpacker, q):
        if not unpacker.bias(0):
            return tiles
        total = [_f32(0.0)] * 4
        for b in q:
            total = _mma(total, [_i32(_ONE)] * 4, b)
        fma = "fma.rn.f32 $0, $1, $2, $3;"
        return [
            [_asm(fma, "=f,f,f,f", [t, _f32(-float(unpacker.bias(m))), c], kind=ir.F32Type.get()) for t, c in zip(total, tile)]
            for m, tile in enumerate(tiles)]

    def _pairs(self, base: ir.Value, byte: int, tiles: int) -> list[list[ir.Value]]:
        """The lane's two pairs of neighbouring 16-bit channels, for each channel tile of an array at `byte` from `base`."""
        out, address = [], arith.addi(base, _scale(self.i, 16))
        for r in range(tiles // 2):
            words = _load_words(address, byte + 64 * r, 4)
            out += [words[:2], words[2:]]
        if tiles % 2:
            address = arith.addi(base, _scale(self.i, 8))
            out.append(_load_words(address, byte + 64 * (tiles // 2), 2))
        return out


def _rescale_body(step: Step, acc, bias, alpha) -> tuple[fa.FragmentedArray, fa.FragmentedArray]:
    factors = [value for register in alpha.registers.reshape(-1) for value in _split_pair(register)]
    all_one = _asm(
        "{.reg .pred p, q; setp.eq.f32 p, $1, 0f3F800000; setp.eq.and.f32 q, $2, 0f3F800000, p; "
        "vote.sync.all.pred p, q, 0xffffffff; selp.u32 $0, 1, 0, p;}", "=r,f,f", factors)
    tiles = [*_accumulators(acc), *_accumulators(bias)]
    flat = [value for tile in tiles for value in tile]
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, all_one, _i32(1)), [v.type for v in flat], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(flat)
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([arith.mulf(v, factors[j % 2]) for j, v in enumerate(flat)])
    results = list(branch.results)
    count = len(results) - 2
    return _array([results[i:i + 4] for i in range(0, count, 4)], step.head_dim), _array([results[count:]], 8)


class _AddValues:
    """Builds the body of `add_values`."""

    def __init__(self, step: Step, words_ref, p, acc, bias):
        self.step, self.p, self.acc, self.bias = step, p, acc, bias
        lane, warp = _lane_and_warp()
        page = arith.divui(warp, _i32(step.warps_per_page))
        codes = _pointer(words_ref, _scale(page, step.layout.value_words * 4), _scale(lane, 16))
        self.unpacker = _Unpacker(
            step.fmt.v_bits, step.head_dim // TILE, codes, arith.remui(warp, _i32(step.warps_per_page)), step.token_tiles)

    def run(self) -> tuple[fa.FragmentedArray, fa.FragmentedArray]:
        operands = _probability_operands(self.p)
        acc = _accumulators(self.acc)
        for column in range(0, len(acc), 2):  # two at a time: two independent chains of instructions
            pair = [self.unpacker.tiles(c) for c in (column, column + 1)]
            for m, b in enumerate(operands):
                for c in (0, 1):
                    acc[column + c] = _mma(acc[column + c], pair[c][m], b)
        bias = self.bias
        if self.unpacker.bias(0):
            [rows] = _accumulators(self.bias)
            rows = [*rows, *rows]
            for m, b in enumerate(operands):
                half = (126 + self.unpacker.bias(m).bit_length()) << 7  # a power of two as bfloat16
                rows = _mma(rows, [_i32(half << 16 | half)] * 4, b)
            bias = _array([rows[:2]], 8)
        return _array(acc, self.step.head_dim), bias


def _probability_operands(p: fa.FragmentedArray) -> list[list[ir.Value]]:
    """Operand B of each token tile: rounded to bfloat16 and transposed within the warp."""
    out = []
    for c in _accumulators(p):
        pairs = [_asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [c[j + 1], c[j]]) for j in (0, 2)]
        out.append([_asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x]) for x in pairs])
    return out


def _load_value_scales(step: Step, words_ref) -> tuple[fa.FragmentedArray, fa.FragmentedArray]:
    lane, warp = _lane_and_warp()
    page = arith.divui(warp, _i32(step.warps_per_page))
    sub = arith.remui(warp, _i32(step.warps_per_page))
    address = _pointer(
        words_ref, _scale(page, step.layout.value_words * 4), _scale(sub, step.tokens * 4), _scale(arith.shrui(lane, _i32(2)), 4))
    layout, f32 = PER_ROW.to_mgpu(), ir.F32Type.get()
    scales, offsets = [], []
    for row in range(step.tokens // 8):
        [word] = _load_words(address, (_value_scale_word(step) + 8 * row) * 4, 1)
        scales.append(arith.bitcast(f32, arith.shli(word, _i32(16))))
        offsets.append(arith.bitcast(f32, arith.andi(word, _i32(0xFFFF0000))))
    return _row_array(scales, layout, step.tokens), _row_array(offsets, layout, step.tokens)


def _row_array(values: list[ir.Value], layout, rows: int) -> fa.FragmentedArray:
    registers = np.empty(len(values), dtype=object)
    vector = ir.VectorType.get((1,), ir.F32Type.get())
    registers[:] = [llvm.insertelement(llvm.mlir_undef(vector), v, _i32(0)) for v in values]
    return fa.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((WARPS, rows))), _layout=layout, _is_signed=None)


def _open_scores_body(step: Step, k_ref, q_ref) -> fa.FragmentedArray:
    lane, warp = _lane_and_warp()
    group, i = arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))
    row_bytes = 2 * step.head_dim
    k = _pointer(k_ref, _scale(warp, TILE * row_bytes), _scale(group, row_bytes), _scale(i, 16))
    q = _pointer(q_ref, _scale(group, row_bytes), _scale(i, 16))
    acc = [_f32(0.0)] * 4
    for r in range(step.head_dim // 32):
        low, high, b = (_load_words(x, offset + 64 * r, 4) for x, offset in ((k, 0), (k, 8 * row_bytes), (q, 0)))
        for j in (0, 2):
            acc = _mma(acc, [low[j], high[j], low[j + 1], high[j + 1]], b[j:j + 2])
    return _array([acc], TILE)


def _add_open_values_body(step: Step, v_ref, p, acc) -> fa.FragmentedArray:
    lane, warp = _lane_and_warp()
    row_bytes = 2 * step.head_dim
    # Lane l gives the address of row l % 8 of 8 x 8 matrix l // 8: token half matrix // 2, channel half matrix % 2.
    token = arith.addi(arith.andi(lane, _i32(7)), arith.andi(arith.shrui(lane, _i32(1)), _i32(8)))
    channel = arith.andi(lane, _i32(8))
    v = _pointer(v_ref, _scale(warp, TILE * row_bytes), _scale(token, row_bytes), _scale(channel, 2))
    [b] = _probability_operands(p)
    tiles = _accumulators(acc)
    code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    for column in range(len(tiles)):
        address = arith.addi(v, _i32(2 * TILE * column))
        # Reads shared memory: must stay behind the wait for the copy that wrote it.
        i32 = ir.IntegerType.get_signless(32)
        out = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * 4), [address], code, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
        a = [llvm.extractvalue(i32, out, [j]) for j in range(4)]
        tiles[column] = _mma(tiles[column], a, b)
    return _array(tiles, step.head_dim)
