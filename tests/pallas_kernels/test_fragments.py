"""The unpacking of codes in registers, run on NumPy in place of a GPU's instructions, against the layout's own unpacking."""
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mma_sm90
from pallas_kernels.paged_attention import fragments

LANE = np.arange(32, dtype=np.uint32)


def pairs(word: np.ndarray) -> np.ndarray:
    """The two bfloat16 numbers of each word, low half first: float64 [2, ...]."""
    word = np.atleast_1d(word)
    halves = np.stack([word & 0xFFFF, word >> 16]).astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


def packed(values: np.ndarray) -> np.ndarray:
    """The inverse of `pairs`; the numbers must be exact in bfloat16."""
    raw = values.astype(np.float32).view(np.uint32)
    assert not (raw & 0xFFFF).any(), "not exact in bfloat16"
    return (raw[0] >> 16) | raw[1]


def instruction(code: str, operands: list) -> np.ndarray:
    """What one of the inlined instructions computes."""
    if match := re.fullmatch(r"lop3\.b32 \$0, \$1, (\d+), (\d+|\$2), (\d+);", code):
        a, b, c = operands[0], np.uint32(int(match[1])), operands[1] if match[2] == "$2" else np.uint32(int(match[2]))
        return sum((((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)) for i in range(8)
                    if int(match[3]) >> i & 1), np.uint32(0))
    if code.startswith("fma.rn.bf16x2"):
        return packed(pairs(operands[0]) * pairs(operands[1]) + pairs(operands[2]))
    assert code.startswith("add.rn.bf16x2"), code
    return packed(pairs(operands[0]) + pairs(operands[1]))


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
    monkeypatch.setattr(fragments, "arith", types.SimpleNamespace(**{name: lanes(f) for name, f in names.items()}))
    monkeypatch.setattr(fragments, "_i32", lambda value: np.uint32(value & 0xFFFFFFFF))
    monkeypatch.setattr(fragments, "_load_words", load)
    monkeypatch.setattr(fragments, "_asm", lambda code, constraints, operands: instruction(code, operands))
    return memory


@pytest.mark.parametrize("warps_per_page", [1, 2, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("operand", ["keys", "values"])
def test_registers_hold_the_codes_of_the_warp(on_numpy, operand, bits, warps_per_page):
    channels, token_tiles = 112, 8 // warps_per_page
    codes = np.random.default_rng(0).integers(0, 1 << bits, (128, channels), dtype=np.uint32)
    if bits == 16:
        codes &= 0x3FFF  # finite numbers
    pack = mma_sm90.pack_keys if operand == "keys" else mma_sm90.pack_values
    on_numpy.append(np.asarray(pack(jnp.asarray(codes), bits)))
    tiles = tiles_of(codes, operand)
    for sub in range(warps_per_page):
        unpacker = fragments._Unpacker(bits, channels // 16, LANE * np.uint32(16), np.uint32(sub), token_tiles)
        for column in range(channels // 16):
            for m, registers in enumerate(unpacker.tiles(column)):
                want = tiles[column, sub * token_tiles + m]  # [lane, a, e]
                if bits == 16:
                    np.testing.assert_array_equal(np.stack(registers, axis=1), want[..., 0] | want[..., 1] << 16)
                else:
                    got = np.stack([pairs(r) for r in registers])  # [a, e, lane]
                    np.testing.assert_array_equal(got.transpose(2, 0, 1) - unpacker.bias(m), want)


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
