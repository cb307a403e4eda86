"""Instructions of NVIDIA Hopper for Pallas' inlined Mosaic GPU code: values are MLIR values of one lane.

Reference: NVIDIA, PTX ISA, warp-level matrix instructions, `lop3`, `shfl.sync`, `redux.sync`.
"""
from __future__ import annotations

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

WARPS = 4  # of a warpgroup
LANES = 32
# [4 warps, M, 8]: registers as the accumulators of `mma` have them, two of a lane side by side.
ACCUMULATOR = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, 8, 8), (2,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def warp_done(*, use_twins: bool) -> None:
    """Waits until all lanes of the warp are here: what only this warp reads in shared memory may be written anew."""
    _wait(mgpu.utils.warp_barrier, use_twins)


def warpgroup_done(*, use_twins: bool) -> None:
    """Waits until all warps of the warpgroup are here, and sees what they have stored."""
    _wait(mgpu.utils.warpgroup_barrier, use_twins)


def after_previous_kernel(*, use_twins: bool) -> None:
    """Waits until the kernel before this one is done, and lets the next one start as soon as there is room for its blocks.

    Programmatic dependent launch. What comes before it overlaps with the previous kernel and may read only what no kernel writes
    that lets the next one start early: those say so by `next_kernel_may_start` or by this function. None of them writes integers.
    """
    if not use_twins:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def next_kernel_may_start(*, use_twins: bool) -> None:
    """Lets the next kernel start as soon as there is room, if it waits by `after_previous_kernel` before it reads what this one
    writes. For kernels that are themselves started when all before them is done."""
    if not use_twins:
        plgpu.griddepcontrol_launch_dependents()


def _wait(barrier, use_twins: bool) -> None:
    if use_twins:
        plgpu.commit_smem()  # to the interpreter, what one warp reads all of them read
    else:
        plgpu.inline_mgpu()(lambda ctx: barrier())()


def i32(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(32)
    value &= 0xFFFFFFFF
    return mgpu.utils.c(value - (1 << 32) if value >= 1 << 31 else value, kind)


def f32(value: float) -> ir.Value:
    return mgpu.utils.c(value, ir.F32Type.get())


def asm(code: str, constraints: str, operands: list[ir.Value], results: int = 1, kind=None, in_step: bool = False):
    """Inline PTX. `kind`: MLIR type of the results, int32 for None. `in_step`: lanes must stay together, so it is not moved."""
    kind = kind or ir.IntegerType.get_signless(32)
    if results == 1:
        return llvm.inline_asm(kind, operands, code, constraints, has_side_effects=in_step)
    out = llvm.inline_asm(llvm.StructType.get_literal([kind] * results), operands, code, constraints, has_side_effects=in_step)
    return [llvm.extractvalue(kind, out, [i]) for i in range(results)]


def mma(acc: list[ir.Value], a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    """acc (4 float32) + a (4 bfloat16 pairs) x b (2 pairs)."""
    code = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    return asm(code, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", [*a, *b, *acc], 4, ir.F32Type.get())


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c in float32, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], kind=ir.F32Type.get())


def shift_right(x: ir.Value, by: int) -> ir.Value:
    """x >> by, or x << -by."""
    if by == 0:
        return x
    return arith.shrui(x, i32(by)) if by > 0 else arith.shli(x, i32(-by))


def lop3(a: ir.Value, b: int, c: int | ir.Value, table: int) -> ir.Value:
    """Any function of three bits, by its table."""
    if isinstance(c, int):
        return asm(f"lop3.b32 $0, $1, {b}, {c}, {table};", "=r,r", [a])
    return asm(f"lop3.b32 $0, $1, {b}, $2, {table};", "=r,r,r", [a, c])


def masked(x: ir.Value, mask: int) -> ir.Value:
    """x & mask; `mask` is for each half of the word."""
    return lop3(x, mask << 16 | mask, 0, 0xC0)


def and_or(x: ir.Value, mask: int, other: int | ir.Value) -> ir.Value:
    """(x & mask) | other, one instruction."""
    return lop3(x, mask, other, 0xEA)


def mul_pairs(a: ir.Value, b: ir.Value) -> ir.Value:
    """Of pairs of bfloat16."""
    return asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b])


def scaled(x: ir.Value, factor: int) -> ir.Value:
    return arith.muli(x, i32(factor))


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """Of the warpgroup, int32."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    return arith.andi(thread, i32(LANES - 1)), arith.andi(arith.shrui(thread, i32(5)), i32(WARPS - 1))


def shared_address(ref: ir.Value, *byte_offsets: ir.Value) -> ir.Value:
    """Address of a shared-memory ref plus offsets, as an int32: shared memory addresses are 32 bits wide."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
    for offset in byte_offsets:
        address = arith.addi(address, offset)
    return address


def global_address(ref: ir.Value, byte_offset: ir.Value) -> ir.Value:
    """Address of a device-memory ref plus an int32 offset, not negative, as an int64."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), arith.extui(i64, byte_offset))


def load_words(address: ir.Value, offset: int, count: int) -> list[ir.Value]:
    """`count` (1, 2 or 4) neighbouring words at byte `offset` from a shared (int32) or global (int64) address."""
    kind = ir.IntegerType.get_signless(32)
    if offset:
        address = arith.addi(address, mgpu.utils.c(offset, address.type))
    pointer = llvm.inttoptr(_pointer_type(address), address)
    if count == 1:
        return [llvm.load(kind, pointer, alignment=4)]
    words = llvm.load(ir.VectorType.get((count,), kind), pointer, alignment=4 * count)
    return [llvm.extractelement(words, i32(j)) for j in range(count)]


def store(value: ir.Value, address: ir.Value) -> None:
    """A scalar to a shared (int32) or global (int64) address."""
    llvm.store(value, llvm.inttoptr(_pointer_type(address), address))


def _pointer_type(address: ir.Value):
    return llvm.PointerType.get(3 if ir.IntegerType(address.type).width == 32 else 1)


def prefix_sum(x: ir.Value) -> ir.Value:
    """Sum of the int32 `x` of this lane and those below it."""
    for distance in (1, 2, 4, 8, 16):
        code = (f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; selp.b32 t, t, 0, p; add.u32 $0, t, $1;")
        x = asm(f"{{.reg .pred p; .reg .b32 t; {code}}}", "=r,r", [x], in_step=True)
    return x


def warp_sum(x: ir.Value) -> ir.Value:
    """Sum of the int32 `x` of all lanes."""
    return asm("redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [x], in_step=True)


def registers(array: fa.FragmentedArray) -> list[ir.Value]:
    """All elements that a lane holds, in order."""
    out = []
    for register in array.registers.reshape(-1):
        if isinstance(register.type, ir.VectorType):
            out += [llvm.extractelement(register, i32(j)) for j in range(register.type.shape[0])]
        else:
            out.append(register)
    return out


def array_of(values: list[ir.Value], shape: tuple[int, ...], layout, vector: int) -> fa.FragmentedArray:
    """The inverse of `registers`, for float32 in a tiled layout whose registers are vectors of `vector` elements."""
    kind = ir.VectorType.get((vector,), ir.F32Type.get())
    out = np.empty(len(values) // vector, dtype=object)
    for i in range(len(out)):
        register = llvm.mlir_undef(kind)
        for j in range(vector):
            register = llvm.insertelement(register, values[vector * i + j], i32(j))
        out[i] = register
    return fa.FragmentedArray(_registers=out.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)


def int_array(value: ir.Value) -> fa.FragmentedArray:
    """An int32 that is the same in all lanes, as a scalar of Pallas."""
    return fa.FragmentedArray.splat(value, (), is_signed=True)
