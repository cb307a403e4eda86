"""Low-bit pages on Hopper's tensor cores: the steps of attention that work on packed words, in registers.

A warpgroup works on one step: `4 // warps_per_page` pages of one KV head, `warps_per_page` warps a page. Each warp multiplies its
own tokens, M = 128 / warps_per_page of them, by eight query rows, and keeps its own part of the output, so that no warp waits
for another. All arrays have a leading axis of 4 warps:

    scores  float32 [4, M, 8]   tokens of the warp x query rows           mma 1: K codes (registers) x (q * K scale)
    acc     float32 [4, H, 8]   channels x query rows, sum over tokens    mma 2: V codes (registers) x (p * V scale)

Every array lies in registers as the accumulator of `mma.m16n8k16` does (`ROWS`), so that softmax between the two products is
elementwise code in Pallas; `movmatrix` turns it into the second product's operand without shared memory.

Codes of up to 8 bits are operands as they are: a half word whose upper byte is zero is, as a bfloat16, its lower byte times 2**-133
(subnormal numbers, and the first normal ones, which are spaced alike). So one logical instruction, which clears the other fields,
makes a pair of operands; there is no exponent to set and no bias to remove. A code at bit b counts 2**b-fold. The first field of a
byte is not even masked: its operand is the whole byte, and what it has too much is subtracted from the sums (`_separated`).
So that no product is too small for a float32, queries and softmax weights come 2**64-fold (`BOOST`).

Every function here has a twin in plain JAX (`use_twins=True`), which computes the same from the same words; the interpreter runs
those, because it cannot run inlined instructions.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels import mma_sm90, sm90
from pallas_kernels.kv_format import QUANT_BITS, KVFormat
from pallas_kernels.mma_sm90 import QUAD_WORDS, TILE
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.pallas_utils import cdiv
from pallas_kernels.quantize import bits_to_float32
from pallas_kernels.sm90 import WARPS

QUERY_ROWS = 8  # the N of the instruction
OPEN_TOKENS = WARPS * TILE  # tokens of an unquantised tile: a token tile a warp

ROWS = sm90.ACCUMULATOR  # [4, M, 8]
PER_ROW = ROWS.reduce(2)  # [4, M]: one number a token
PER_QUERY = ROWS.reduce(1)  # [4, 8]: one number a query row
QUERIES = ROWS.reduce((0, 1))  # [8]

# Queries and softmax weights are this much larger than they are: products with codes, which are tiny as bfloat16, become normal.
BOOST = 2.0**64
_QUAD_BYTES = 4 * QUAD_WORDS
_LSB = -133  # the last bit of a subnormal bfloat16 is 2 ** _LSB


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

    @property
    def octets(self) -> int:
        """Octets of value tiles of a warp."""
        return self.token_tiles * self.head_dim // TILE // 8


def key_scores(step: Step, words_ref, q_ref, start: jax.Array) -> jax.Array:
    """Scores of the tokens of a step's pages, without the softmax scale.

    Args:
      step: compile-time shape.
      words_ref: uint32 SMEM [pages * key rows, H / 2], the keys' part of each page.
      q_ref: bfloat16 SMEM [8, H], times `BOOST`.
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


def add_values(step: Step, words_ref, p: jax.Array, acc: jax.Array) -> jax.Array:
    """Adds the values of a step's pages, weighted: sum over tokens of code * p. `finished_values` gives the sum its unit.

    Args:
      step: compile-time shape.
      words_ref: uint32 SMEM [pages * value rows, H / 2], the values' part of each page.
      p: float32 [4, M, 8] as `ROWS`, softmax weights times `BOOST` times value scales; rounded to bfloat16 here.
      acc: float32 [4, H, 8] as `ROWS`.

    Returns:
      acc.
    """
    if step.use_twins:
        codes = _value_codes(step, words_ref[...].reshape(step.pages, -1)).reshape(WARPS, step.tokens, step.head_dim)
        return acc + _dot("wth,wtn->whn", codes, _round(p))
    acc_type = plgpu.ShapeDtypeStruct((WARPS, step.head_dim, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS, ROWS), return_type=acc_type)
    return body(lambda ctx, words, p, acc: _add_values_body(step, words, p, acc))(words_ref, p, acc)


def finished_values(step: Step, acc: jax.Array) -> jax.Array:
    """What `add_values` has added up, as the sum of codes (or values) times p."""
    if step.use_twins or step.fmt.v_bits == 16:
        return acc
    acc_type = plgpu.ShapeDtypeStruct((WARPS, step.head_dim, QUERY_ROWS), jnp.float32, layout=ROWS)
    return plgpu.inline_mgpu(arg_types=(ROWS,), return_type=acc_type)(lambda ctx, acc: _finished_values_body(step, acc))(acc)


def open_scores(step: Step, k_ref, q_ref) -> jax.Array:
    """Scores float32 [4, 16, 8] as `ROWS` of a bfloat16 SMEM tile [64, H] of keys; warp w has the tokens 16 w … 16 w + 15.

    q_ref: bfloat16 SMEM [8, H], times `BOOST`.
    """
    if step.use_twins:
        return _dot("wth,nh->wtn", k_ref[...].reshape(WARPS, TILE, step.head_dim), q_ref[...]) / BOOST
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


def rescale(step: Step, acc: jax.Array, alpha: jax.Array) -> jax.Array:
    """acc (as in `add_values`) times alpha, float32 [4, 8] as `PER_QUERY`; a warp whose alphas are all 1 skips it."""
    if step.use_twins:
        return acc * alpha[:, None]
    acc_type = plgpu.ShapeDtypeStruct((WARPS, step.head_dim, QUERY_ROWS), jnp.float32, layout=ROWS)
    body = plgpu.inline_mgpu(arg_types=(ROWS, PER_QUERY), return_type=acc_type)
    return body(lambda ctx, acc, alpha: _rescale_body(step, acc, alpha))(acc, alpha)


def warps_of_this_thread(step: Step) -> list:
    """Warps that this program must speak for, as int32 scalars: the thread's own one, or all of them where there are no threads."""
    if step.use_twins:
        return [np.int32(warp) for warp in range(WARPS)]
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    body = plgpu.inline_mgpu(return_type=result)
    return [body(lambda ctx: sm90.int_array(sm90.lane_and_warp()[1]))()]


# Twins.


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _round(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def _key_scores_twin(step: Step, words, q, start) -> jax.Array:
    layout = step.layout
    words, q = words.reshape(step.pages, -1), q.astype(jnp.float32) / BOOST
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


# Arrays and their registers.


def _accumulators(array: fa.FragmentedArray) -> list[list[ir.Value]]:
    """Registers of a `ROWS` array, four for each tile of 16 rows (two for a last half tile)."""
    flat = sm90.registers(array)
    return [flat[i:i + 4] for i in range(0, len(flat), 4)]


def _array(tiles: list[list[ir.Value]], rows: int) -> fa.FragmentedArray:
    """The inverse of `_accumulators`, for [4, rows, 8]."""
    return sm90.array_of([value for tile in tiles for value in tile], (WARPS, rows, QUERY_ROWS), ROWS.to_mgpu(), 2)


# Operands.


def field_bit(bits: int, tile: int) -> int:
    """The bit at which an operand of tile `tile` of an octet holds its code."""
    if bits == 3:
        return (0, 3, 2, 5)[tile % 4]
    return tile * bits % 8


def _units(bits: int, tiles: int) -> list[float]:
    """What sums over operands are multiplied by to be sums over codes, for each tile from the first of an octet on."""
    return [1.0 if bits == 16 else 2.0**-(_LSB + field_bit(bits, t)) for t in range(tiles)]


def _byte_fields(words: list[ir.Value], bits: int, count: int, high: bool) -> list[list[ir.Value]]:
    """Operands of the first `count` fields of the low or the high byte of each half. The first one's holds all of them."""
    if high:
        words = first = [sm90.asm("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [w]) for w in words]
    else:
        first = [sm90.masked(w, (1 << bits * count) - 1) for w in words]
    return [first, *([sm90.masked(w, ((1 << bits) - 1) << bits * f) for w in words] for f in range(1, count))]


def _separated(sums: list[list[ir.Value]], bits: int) -> list[list[ir.Value]]:
    """Sums over each tile's own field, from sums over operands, of which a byte's first one holds the others' fields as well."""
    out, fields = list(sums), 8 // bits if bits in (2, 4) else 1
    for first in range(0, len(out), fields):
        for other in sums[first + 1:first + fields]:
            out[first] = [arith.subf(x, y) for x, y in zip(out[first], other)]
    return out


def _three_bit_octet(base: ir.Value, quad: int, odd: int | ir.Value) -> list[list[ir.Value]]:
    """Operands of the first or the second octet (`odd`: 0, 1 or an i32) of the three quads from `quad` on."""
    if isinstance(odd, int):
        x = sm90.load_words(base, (quad + 2 * odd) * _QUAD_BYTES, 4)
        y = [sm90.shift_right(w, 8 * odd) for w in sm90.load_words(base, (quad + 1) * _QUAD_BYTES, 4)]
    else:
        x = sm90.load_words(arith.addi(base, sm90.scaled(odd, 2 * _QUAD_BYTES)), quad * _QUAD_BYTES, 4)
        y = [arith.shrui(w, sm90.scaled(odd, 8)) for w in sm90.load_words(base, (quad + 1) * _QUAD_BYTES, 4)]
    middle, far = ([sm90.shift_right(w, by) for w in x] for by in (4, 10))
    places = ((x, 0), (x, 3), (middle, 2), (middle, 5), (y, 0), (y, 3), (far, 2))
    out = [[sm90.masked(w, 7 << bit) for w in words] for words, bit in places]
    return [*out, [sm90.and_or(high, 0x00C000C0, sm90.masked(low, 0x20)) for high, low in zip(y, far)]]


class _Operands:
    """Operands A of a warp's tiles, four registers of code pairs each.

    Run k is `length` tiles (8, 4 or 2) from tile 8 * k + `length` * `sub` on, `sub` an i32, or None for 0. Of 3 bits it is octet
    k, or octet k + `sub` where `sub` is not None, for even k.
    """

    def __init__(self, bits: int, base: ir.Value, length: int, sub: ir.Value | None):
        self.bits, self.base, self.length, self.sub = bits, base, length, sub
        self.fields = 16 // bits  # of a half word
        self.shift = None
        if sub is not None and bits != 3:
            start = sm90.scaled(sub, length)
            self.base = arith.addi(base, sm90.scaled(arith.divui(start, sm90.i32(self.fields)), _QUAD_BYTES))
            if length < self.fields:
                self.shift = sm90.scaled(arith.remui(start, sm90.i32(self.fields)), bits)

    def run(self, k: int) -> list[list[ir.Value]]:
        if self.bits == 3:
            return _three_bit_octet(self.base, k // 2 * 3, k % 2 if self.sub is None else self.sub)
        out = []
        for quad in range(cdiv(self.length, self.fields)):
            words = sm90.load_words(self.base, (k * 8 // self.fields + quad) * _QUAD_BYTES, 4)
            if self.bits == 16:
                out.append(words)
                continue
            if self.shift is not None:
                words = [arith.shrui(w, self.shift) for w in words]
            for high in range(2 if self.length >= self.fields else 1):
                out += _byte_fields(words, self.bits, min(8 // self.bits, self.length), bool(high))
        return out

    def pair(self, k: int, columns: int):
        """Of key tiles: (column, token tile, operand) of the columns 2 * k and 2 * k + 1, or of the first of them alone."""
        if self.bits != 3:
            yield from ((c, m, a) for c in range(columns) for m, a in enumerate(self.run(2 * k + c)))
        elif columns == 2:
            octets = [self.run(2 * k)] if self.sub is not None else [self.run(2 * k), self.run(2 * k + 1)]
            yield from ((c, 4 * o + f, octet[4 * c + f]) for c in (0, 1) for o, octet in enumerate(octets) for f in range(4))
        else:
            octet = _three_bit_octet(self.base, 3 * k, 0)
            if self.sub is not None:
                first = arith.cmpi(arith.CmpIPredicate.eq, self.sub, sm90.i32(0))
                octet = [[arith.select(first, x, y) for x, y in zip(octet[f], octet[f + 4])] for f in range(4)]
            yield from ((0, m, a) for m, a in enumerate(octet))


class _KeyScores:
    """Builds the body of `key_scores`."""

    def __init__(self, step: Step, words_ref, q_ref, start: fa.FragmentedArray):
        self.step = step
        lane, warp = sm90.lane_and_warp()
        group, self.i = arith.shrui(lane, sm90.i32(2)), arith.andi(lane, sm90.i32(3))
        self.sub = None if step.warps_per_page == 1 else arith.remui(warp, sm90.i32(step.warps_per_page))
        page = arith.divui(warp, sm90.i32(step.warps_per_page))
        self.page = sm90.shared_address(words_ref, sm90.scaled(page, step.layout.key_words * 4))
        self.codes = arith.addi(self.page, sm90.scaled(lane, 16))
        self.q = sm90.shared_address(q_ref, sm90.scaled(group, step.head_dim * 2))
        self.start = sm90.registers(start)

    def run(self) -> fa.FragmentedArray:
        scores = [[*self.start, *self.start]] * self.step.token_tiles
        for segment in _key_segments(self.step.layout):
            sums, rest = self._segment(segment)
            units = _units(segment.bits, self.step.token_tiles)
            scores = [[sm90.fma(r, sm90.f32(1 / BOOST), x) for r, x in zip(rest, tile)] for tile in scores] if rest else scores
            scores = [[sm90.fma(x, sm90.f32(unit / BOOST), y) for x, y in zip(*tiles)] for *tiles, unit in zip(sums, scores, units)]
        return _array(scores, self.step.tokens)

    def _segment(self, segment: _Segment):
        """Sums over the operands of each token tile, and the product of offsets and queries, the same for all tokens."""
        operands = _Operands(segment.bits, arith.addi(self.codes, sm90.i32(segment.code_word * 4)), self.step.token_tiles, self.sub)
        sums, rest = [[sm90.f32(0.0)] * 4] * self.step.token_tiles, [sm90.f32(0.0)] * 4
        for k in range(cdiv(segment.tiles, 2)):
            q = self._pairs(self.q, 2 * segment.channel, segment.tiles, k)
            if segment.bits in QUANT_BITS:
                scales, offsets = (
                    self._pairs(self.page, segment.scale_word * 4 + byte, segment.tiles, k) for byte in (0, 2 * segment.channels))
                for z, b in zip(offsets, q):
                    rest = sm90.mma(rest, [z[0], z[0], z[1], z[1]], b)
                q = [[sm90.mul_pairs(x, s) for x, s in zip(*pairs)] for pairs in zip(q, scales)]
            for column, m, a in operands.pair(k, len(q)):
                sums[m] = sm90.mma(sums[m], a, q[column])
        return _separated(sums, segment.bits), rest if segment.bits in QUANT_BITS else None

    def _pairs(self, base: ir.Value, byte: int, tiles: int, k: int) -> list[list[ir.Value]]:
        """The lane's two pairs of neighbouring 16-bit channels, for the channel tiles 2 k and 2 k + 1 of an array at `byte`."""
        if 2 * k + 1 < tiles:
            words = sm90.load_words(arith.addi(base, sm90.scaled(self.i, 16)), byte + 64 * k, 4)
            return [words[:2], words[2:]]
        return [sm90.load_words(arith.addi(base, sm90.scaled(self.i, 8)), byte + 64 * k, 2)]


def _rescale_body(step: Step, acc, alpha) -> fa.FragmentedArray:
    factors = sm90.registers(alpha)
    all_one = sm90.asm(
        "{.reg .pred p, q; setp.eq.f32 p, $1, 0f3F800000; setp.eq.and.f32 q, $2, 0f3F800000, p; "
        "vote.sync.all.pred p, q, 0xffffffff; selp.u32 $0, 1, 0, p;}", "=r,f,f", factors)
    flat = [value for tile in _accumulators(acc) for value in tile]
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, all_one, sm90.i32(1)), [v.type for v in flat], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(flat)
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([arith.mulf(v, factors[j % 2]) for j, v in enumerate(flat)])
    results = list(branch.results)
    return _array([results[i:i + 4] for i in range(0, len(results), 4)], step.head_dim)


def _value_operands(step: Step, words_ref) -> _Operands:
    lane, warp = sm90.lane_and_warp()
    page, sub = (f(warp, sm90.i32(step.warps_per_page)) for f in (arith.divui, arith.remui))
    base = sm90.shared_address(words_ref, sm90.scaled(page, step.layout.value_words * 4), sm90.scaled(lane, 16))
    octets, bits = step.octets, step.fmt.v_bits
    if octets == 1 and bits == 3:  # two warps share the three quads of two octets
        base = arith.addi(base, sm90.scaled(arith.divui(sub, sm90.i32(2)), 3 * _QUAD_BYTES))
        return _Operands(bits, base, 8, arith.remui(sub, sm90.i32(2)))
    return _Operands(bits, arith.addi(base, sm90.scaled(sub, octets * bits * _QUAD_BYTES // 2)), 8, None)


def _add_values_body(step: Step, words_ref, p, acc) -> fa.FragmentedArray:
    operands, b, sums = _value_operands(step, words_ref), _probability_operands(p), _accumulators(acc)
    for octet in range(step.octets):
        for f, a in enumerate(operands.run(octet)):
            m, column = divmod(8 * octet + f, len(sums))
            sums[column] = sm90.mma(sums[column], a, b[m])
    return _array(sums, step.head_dim)


def _finished_values_body(step: Step, acc) -> fa.FragmentedArray:
    sums = _separated(_accumulators(acc), step.fmt.v_bits)
    tiles = []
    for tile, unit in zip(sums, _units(step.fmt.v_bits, len(sums))):  # in two steps: the unit is beyond float32
        tiles.append([arith.mulf(arith.mulf(x, sm90.f32(2.0**64)), sm90.f32(unit / 2.0**64)) for x in tile])
    return _array(tiles, step.head_dim)


def _probability_operands(p: fa.FragmentedArray) -> list[list[ir.Value]]:
    """Operand B of each token tile: rounded to bfloat16 and transposed within the warp."""
    out = []
    for c in _accumulators(p):
        pairs = [sm90.asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [c[j + 1], c[j]]) for j in (0, 2)]
        out.append([sm90.asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x]) for x in pairs])
    return out


def _load_value_scales(step: Step, words_ref) -> tuple[fa.FragmentedArray, fa.FragmentedArray]:
    lane, warp = sm90.lane_and_warp()
    page = arith.divui(warp, sm90.i32(step.warps_per_page))
    sub = arith.remui(warp, sm90.i32(step.warps_per_page))
    address = sm90.shared_address(
        words_ref, sm90.scaled(page, step.layout.value_words * 4), sm90.scaled(sub, step.tokens * 4),
        sm90.scaled(arith.shrui(lane, sm90.i32(2)), 4))
    layout, f32 = PER_ROW.to_mgpu(), ir.F32Type.get()
    scales, offsets = [], []
    for row in range(step.tokens // 8):
        [word] = sm90.load_words(address, (_value_scale_word(step) + 8 * row) * 4, 1)
        scales.append(arith.bitcast(f32, arith.shli(word, sm90.i32(16))))
        offsets.append(arith.bitcast(f32, arith.andi(word, sm90.i32(0xFFFF0000))))
    scale, offset = (sm90.array_of(values, (WARPS, step.tokens), layout, 1) for values in (scales, offsets))
    return scale, offset


def _open_scores_body(step: Step, k_ref, q_ref) -> fa.FragmentedArray:
    lane, warp = sm90.lane_and_warp()
    group, i = arith.shrui(lane, sm90.i32(2)), arith.andi(lane, sm90.i32(3))
    row_bytes = 2 * step.head_dim
    k = sm90.shared_address(k_ref, sm90.scaled(warp, TILE * row_bytes), sm90.scaled(group, row_bytes), sm90.scaled(i, 16))
    q = sm90.shared_address(q_ref, sm90.scaled(group, row_bytes), sm90.scaled(i, 16))
    acc = [sm90.f32(0.0)] * 4
    for r in range(step.head_dim // 32):
        low, high, b = (sm90.load_words(x, offset + 64 * r, 4) for x, offset in ((k, 0), (k, 8 * row_bytes), (q, 0)))
        for j in (0, 2):
            acc = sm90.mma(acc, [low[j], high[j], low[j + 1], high[j + 1]], b[j:j + 2])
    return _array([[arith.mulf(x, sm90.f32(1 / BOOST)) for x in acc]], TILE)


def _add_open_values_body(step: Step, v_ref, p, acc) -> fa.FragmentedArray:
    lane, warp = sm90.lane_and_warp()
    row_bytes = 2 * step.head_dim
    # Lane l gives the address of row l % 8 of 8 x 8 matrix l // 8: token half matrix // 2, channel half matrix % 2.
    token = arith.addi(arith.andi(lane, sm90.i32(7)), arith.andi(arith.shrui(lane, sm90.i32(1)), sm90.i32(8)))
    channel = arith.andi(lane, sm90.i32(8))
    v = sm90.shared_address(v_ref, sm90.scaled(warp, TILE * row_bytes), sm90.scaled(token, row_bytes), sm90.scaled(channel, 2))
    [b] = _probability_operands(p)
    tiles = _accumulators(acc)
    code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    for column in range(len(tiles)):
        address = arith.addi(v, sm90.i32(2 * TILE * column))
        # Reads shared memory: must stay behind the wait for the copy that wrote it.
        i32 = ir.IntegerType.get_signless(32)
        out = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * 4), [address], code, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
        a = [llvm.extractvalue(i32, out, [j]) for j in range(4)]
        tiles[column] = sm90.mma(tiles[column], a, b)
    return _array(tiles, step.head_dim)
