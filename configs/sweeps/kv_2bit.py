"""Two-bit keys: what moves the error below 2.75 effective bits, each point with rotated values and the calibrated key rotation.

Scales of 8 bits and values without zero points cost a little and pay for more promoted key channels; then what sinks, recent
pages at 16 bits, groups of keys within a page and a third bit for values bring. `moejax-2.5` and `moejax-2.75` come from here.

Expected: about 35 minutes on one core with --checkpoint=data/raw/SmolLM2-135M-Instruct.Q4_1.gguf --context=2048 --windows=2
--sample_tokens=0 (`make data` fetches the weights, which are quantised to 4 bits).
"""
from experiments.grid import chain, param, prod

OPTION = "CacheOptions."
F8 = {OPTION + "scale_dtype": "float8_e4m3"}
SYMMETRIC_V = {OPTION + "v_symmetric": True}
CLIPPED_V = {OPTION + "v_range": "clipped"}
CLIPPED_K = {OPTION + "k_range": "clipped"}
ALL = SYMMETRIC_V | CLIPPED_V | F8


def channels(n: int) -> dict:
    return {OPTION + "outlier_channels": n}


def sinks(n: int, open_pages: int = 1) -> dict:
    return {OPTION + "sink_tokens": n} | ({OPTION + "open_pages": open_pages} if open_pages > 1 else {})


def points() -> list[dict]:
    base = {"quality.k_bits": [2], "quality.v_bits": [2], OPTION + "v_rotation": "hadamard", OPTION + "k_rotation": "calibrated",
            OPTION + "outlier_bits": 4}
    wider_v = base | {"quality.v_bits": [3]} | sinks(4)
    return chain(
        prod([base | sinks(4)], [
            channels(16) | F8, channels(16) | SYMMETRIC_V, channels(16) | SYMMETRIC_V | CLIPPED_V,
            channels(16) | F8 | CLIPPED_V | CLIPPED_K, channels(8) | CLIPPED_V | CLIPPED_K,
            channels(16) | SYMMETRIC_V | CLIPPED_V | CLIPPED_K, channels(24) | F8, channels(24) | ALL,
            channels(24) | SYMMETRIC_V | F8, channels(32) | ALL, channels(24) | ALL | {OPTION + "k_symmetric": True}]),
        prod([base | channels(24) | ALL], [sinks(64, 3), sinks(4, 2), sinks(64)]),
        [base | channels(16) | ALL | sinks(4, 2)],
        prod([wider_v], [channels(24) | ALL, channels(32) | ALL, channels(24) | SYMMETRIC_V | CLIPPED_V]),
        prod([base | channels(24) | ALL | sinks(64)], param(OPTION + "k_group", [32, 64])),
    )
