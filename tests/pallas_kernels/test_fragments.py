"""The unpacking of codes in registers, run on NumPy in place of a GPU's instructions, against the layout's own unpacking."""
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, mma_sm90, sm90
from pallas_kernels.paged_attention import fragments

LANE = np.arange(32, dtype=np.uint32)


def pairs(word: np.ndarray) -> np.ndarray:
    """The two bfloat16 numbers of each word, low half first: float64 [2, ...]."""
    word = np.atleast_1d(word)
    halves = np.stack([word & 0xFFFF, word >> 16]).astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


def instruction(code: str, operands: list) -> np.ndarray:
    """What one of the inlined instructions computes."""
    if match := re.fullmatch(r"lop3\.b32 \$0, \$1, (\d+), (\d+|\$2), (\d+);", code):
        a, b, c = operands[0], np.uint32(int(match[1])), operands[1] if match[2] == "$2" else np.uint32(int(match[2]))
        return sum((((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)) for i in range(8)
                    if int(match[3]) >> i & 1), np.uint32(0))
    match = re.fullmatch(r"prmt\.b32 \$0, \$1, 0, 0x([0-7]{4});", code)
    assert match, code
    octets = [operands[0] >> np.uint32(8 * j) & 0xFF for j in range(4)] + [np.uint32(0)] * 4
    return sum(octets[int(digit)] << np.uint32(8 * j) for j, digit in enumerate(reversed(match[1]))).astype(np.uint32)


@pytest.fixture
def on_numpy(monkeypatch):
    """Makes `fragments` compute on uint32 arrays over lanes; returns the list that stands for shared memory."""
    memory: list[np.ndarray] = []

    def load(address, offset, count):
        first = (address + np.uint32(offset)) // np.uint32(4)
        return [memory[0][first + np.uint32(j)] for j in range(count)]

    def lanes(function):
        return lambda a, b: function(a + np.zeros(32, np.uint32), b).astype(np.uint32)

    names = {"addi": np.add, "muli": np.multiply, "divui": np.floor_divide, "remui": np.remainder, "andi": np.bitwise_and,
             "shrui": np.right_shift, "shli": np.left_shift}
    arith = types.SimpleNamespace(
        **{name: lanes(f) for name, f in names.items()}, subf=np.subtract, select=np.where, cmpi=lambda _, a, b: a == b,
        CmpIPredicate=types.SimpleNamespace(eq=None))
    for module in (fragments, sm90):
        monkeypatch.setattr(module, "arith", arith)
    monkeypatch.setattr(sm90, "i32", lambda value: np.uint32(value & 0xFFFFFFFF))
    monkeypatch.setattr(sm90, "load_words", load)
    monkeypatch.setattr(sm90, "asm", lambda code, constraints, operands: instruction(code, operands))
    return memory


@pytest.mark.parametrize("warps_per_page", [1, 2, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("channels", [16, 112, 128])
def test_key_operands_hold_the_codes_of_the_warp(on_numpy, channels, bits, warps_per_page):
    if bits == 3 and warps_per_page == 4:
        return  # not served
    codes, token_tiles = some_codes(channels, bits), 8 // warps_per_page
    on_numpy.append(np.asarray(mma_sm90.pack_keys(jnp.asarray(codes), bits)))
    tiles, count = tiles_of(codes, "keys"), channels // 16
    for sub in range(warps_per_page):
        operands = fragments._Operands(
            bits, LANE * np.uint32(16), token_tiles, np.uint32(sub) if warps_per_page > 1 else None)
        seen = {}
        for k in range((count + 1) // 2):
            for column, m, registers in operands.pair(k, min(2, count - 2 * k)):
                seen[2 * k + column, m] = registers
        assert len(seen) == count * token_tiles
        for column in range(count):
            check_registers([seen[column, m] for m in range(token_tiles)], tiles[column, sub * token_tiles:], bits)


@pytest.mark.parametrize("warps_per_page", [1, 2, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_value_operands_hold_the_codes_of_the_warp(on_numpy, monkeypatch, head_dim, bits, warps_per_page):
    codes = some_codes(head_dim, bits)
    on_numpy.append(np.asarray(mma_sm90.pack_values(jnp.asarray(codes), bits)))
    tiles = tiles_of(codes, "values").swapaxes(0, 1).reshape(-1, 32, 4, 2)
    step = fragments.Step(KVFormat(v_bits=bits, layout="mma_sm90").page_layout(head_dim), warps_per_page, use_twins=False)
    monkeypatch.setattr(sm90, "shared_address", lambda ref, page, lane: lane)
    for warp in range(warps_per_page):
        monkeypatch.setattr(sm90, "lane_and_warp", lambda warp=warp: (LANE, np.uint32(warp)))
        operands = fragments._value_operands(step, None)
        for octet in range(step.octets):
            check_registers(operands.run(octet), tiles[8 * (warp * step.octets + octet):], bits)


def some_codes(channels: int, bits: int) -> np.ndarray:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (128, channels), dtype=np.uint32)
    return codes & 0x3FFF if bits == 16 else codes  # finite numbers


def check_registers(operands: list, want: np.ndarray, bits: int) -> None:
    """Operands of neighbouring tiles against codes [tile, lane, a, e]."""
    if bits == 16:
        for registers, codes in zip(operands, want):
            np.testing.assert_array_equal(np.stack(registers, axis=1), codes[..., 0] | codes[..., 1] << 16)
        return
    numbers = [[pairs(r) for r in registers] for registers in operands]  # of each tile and a: [e, lane]
    units = fragments._units(bits, len(numbers))
    for registers, unit, codes in zip(fragments._separated(numbers, bits), units, want):
        np.testing.assert_array_equal(np.stack(registers).transpose(2, 0, 1) * unit, codes)


def tiles_of(codes: np.ndarray, operand: str) -> np.ndarray:
    """[channel tile, token tile, lane, a, e]: which code each register half holds, from the instruction's definition."""
    lane, a, e = np.indices((32, 4, 2))
    row, i, h = lane // 4 + 8 * (a % 2), lane % 4, a // 2
    count = codes.shape[1] // 16
    out = np.empty((count, 8, 32, 4, 2), np.uint32)
    for tile in range(count):
        for m in range(8):
            if operand == "values":
                out[tile, m] = codes[16 * m + 8 * h + 2 * i + e, 16 * tile + row]
            elif tile // 2 < count // 2:
                out[tile, m] = codes[16 * m + row, 32 * (tile // 2) + 8 * i + 4 * (tile % 2) + 2 * h + e]
            else:
                out[tile, m] = codes[16 * m + row, 16 * tile + 4 * i + 2 * h + e]
    return out
