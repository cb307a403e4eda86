"""What inlined code for Hopper's warps is made of: constants, PTX instructions, shared memory. Values are MLIR, one a thread."""
from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

WARPS = 4  # of a warpgroup


def i32(value: int) -> ir.Value:
    value &= 0xFFFFFFFF
    return mgpu.utils.c(value - (1 << 32) if value >= 1 << 31 else value, ir.IntegerType.get_signless(32))


def f32(value: float) -> ir.Value:
    return mgpu.utils.c(value, ir.F32Type.get())


def asm(code: str, constraints: str, operands: list[ir.Value], results: int = 1, kind=None):
    """Inline PTX without side effects. `kind`: MLIR type of the results, int32 for None."""
    kind = kind or ir.IntegerType.get_signless(32)
    if results == 1:
        return llvm.inline_asm(kind, operands, code, constraints)
    out = llvm.inline_asm(llvm.StructType.get_literal([kind] * results), operands, code, constraints)
    return [llvm.extractvalue(kind, out, [i]) for i in range(results)]


def mma(acc: list[ir.Value], a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    """acc (4 float32) + a (4 bfloat16 pairs) x b (2 pairs)."""
    code = ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};")
    return asm(code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *acc], 4, ir.F32Type.get())


def shift(x: ir.Value, right: int) -> ir.Value:
    if right == 0:
        return x
    return arith.shrui(x, i32(right)) if right > 0 else arith.shli(x, i32(-right))


def lop3(a: ir.Value, b: int, c: int | ir.Value, table: int) -> ir.Value:
    if isinstance(c, int):
        return asm(f"lop3.b32 $0, $1, {b}, {c}, {table};", "=r,r", [a])
    return asm(f"lop3.b32 $0, $1, {b}, $2, {table};", "=r,r,r", [a, c])


def masked(x: ir.Value, mask: int) -> ir.Value:
    """`mask` is for each half of the word."""
    return lop3(x, mask << 16 | mask, 0, 0xC0)


def masked_or(x: ir.Value, mask: int, other: int | ir.Value) -> ir.Value:
    return lop3(x, mask, other, 0xEA)  # (a & b) | c


def fma(a: ir.Value, factor: float, b: ir.Value) -> ir.Value:
    return asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, f32(factor), b], kind=ir.F32Type.get())


def mul_pairs(a: ir.Value, b: ir.Value) -> ir.Value:
    return asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b])


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    return arith.andi(thread, i32(31)), arith.andi(arith.shrui(thread, i32(5)), i32(WARPS - 1))


def pointer(ref: ir.Value, *byte_offsets: ir.Value | int) -> ir.Value:
    """Address of a shared-memory ref plus offsets, as an i32: shared memory addresses are 32 bits wide."""
    word = ir.IntegerType.get_signless(32)
    address = llvm.ptrtoint(word, mgpu.utils.memref_ptr(ref))
    for offset in byte_offsets:
        address = arith.addi(address, i32(offset) if isinstance(offset, int) else offset)
    return address


def load_words(address: ir.Value, offset: int, count: int) -> list[ir.Value]:
    """`count` (1, 2 or 4) neighbouring words of shared memory at byte `offset` from `address`."""
    word = ir.IntegerType.get_signless(32)
    pointer = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(address, i32(offset)) if offset else address)
    if count == 1:
        return [llvm.load(word, pointer, alignment=4)]
    words = llvm.load(ir.VectorType.get((count,), word), pointer, alignment=4 * count)
    return [llvm.extractelement(words, i32(j)) for j in range(count)]


def times(x: ir.Value, factor: int) -> ir.Value:
    return arith.muli(x, i32(factor))
