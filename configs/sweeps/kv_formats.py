"""KV cache formats: published methods, ours, and one axis of the space at a time.

Every published method is a preset (see moejax/kv_presets.py for what each shares with its paper). The other points are the grid
of key and value bits, the number of promoted key channels with and without the calibrated rotation, single changes around 2-bit
keys and values with 16 channels at 4 bits, 4 sink tokens and rotated values, and our formats with more and fewer tokens left at
16 bits. Scored with the cache as decoding writes it, against
the 16-bit cache on the same windows; intervals are 95 % bootstrap intervals over blocks of 64 tokens.

Expected: about an hour on 2 quiet cores with --checkpoint=data/raw/SmolLM2-135M-Instruct.Q4_1.gguf --context=2048 --windows=2
--sample_tokens=0 (`make data` fetches the weights, which are quantised to 4 bits).
"""
from experiments.grid import chain, param, prod
from moejax.kv_presets import PRESETS

OPTION = "CacheOptions."


def bits(k: int, v: int) -> dict:
    return {"quality.k_bits": [k], "quality.v_bits": [v]}


def unquantised(sinks: int, open_pages: int) -> dict:
    return {OPTION + "sink_tokens": sinks, OPTION + "open_pages": open_pages}


def ours() -> list[dict]:
    """Our formats of 2.5 (lean and fast), 2.75 (likewise), 3.25 and 4.25 bits, without their windows."""
    calibrated = {OPTION + "v_rotation": "hadamard", OPTION + "k_rotation": "calibrated"}
    lean = {OPTION + "scale_dtype": "float8_e4m3", OPTION + "v_symmetric": True, OPTION + "v_range": "clipped"}

    def promoted(channels: int, at: int = 4) -> dict:
        return {OPTION + "outlier_channels": channels, OPTION + "outlier_bits": at}

    return prod([calibrated], [
        bits(2, 2) | promoted(24) | lean, bits(2, 2) | promoted(8), bits(2, 2) | promoted(24) | lean | {OPTION + "k_group": 32},
        bits(2, 2) | promoted(24), bits(2, 3) | promoted(24), bits(4, 3) | promoted(8, at=8)])


def points() -> list[dict]:
    sinks = {OPTION + "sink_tokens": 4}
    rotated = {OPTION + "v_rotation": "hadamard"}
    promoted = {OPTION + "outlier_channels": 16, OPTION + "outlier_bits": 4}
    plain = [bits(2, 2) | sinks | rotated]
    base = plain[0] | promoted
    changes = [
        *param(OPTION + "sink_tokens", [0, 1, 16]), *param(OPTION + "page_size", [64, 256]), *param(OPTION + "open_pages", [2, 3]),
        *param(OPTION + "k_range", ["clipped"]), *param(OPTION + "v_range", ["clipped"]),
        *param(OPTION + "v_rotation", ["none", "block_hadamard"]), *param(OPTION + "k_rotation", ["hadamard", "block_hadamard"]),
        *param(OPTION + "outlier_choice", ["page"]), *param(OPTION + "k_group", [32, 64]),
        *param(OPTION + "scale_dtype", ["float16", "float8_e4m3"]),
        *param(OPTION + "k_symmetric", [True]), *param(OPTION + "v_symmetric", [True]), *param(OPTION + "v_codes", ["gaussian"]),
        *param(OPTION + "k_sparse", [82]), *param(OPTION + "v_sparse", [82]), *param(OPTION + "v_axis", ["channel"]),
        {"quality.skip_first_layers": 2, "quality.skip_last_layers": 2},
    ]
    return chain(
        param("quality.preset", [[name] for name in PRESETS]),
        [bits(k, v) | sinks | rotated for k in (2, 3, 4) for v in (2, 3, 4)],
        prod(plain, [{OPTION + "outlier_channels": n, OPTION + "outlier_bits": 4} for n in (8, 16, 24, 32)],
             param(OPTION + "k_rotation", ["none", "calibrated"])),
        prod(plain, [{OPTION + "outlier_channels": 8, OPTION + "outlier_bits": 8}],
             param(OPTION + "k_rotation", ["none", "calibrated"])),
        prod([bits(3, 3) | sinks | rotated], param(OPTION + "key_rope", ["pre"])),
        [bits(b, b) | sinks | {OPTION + "k_axis": "token"} for b in (2, 4)],
        [base | change for change in changes],
        # oscar-2 keeps 64 sinks and 256 to 383 recent tokens at 16 bits: ours with windows up to its own, and it without them.
        prod(ours(), [unquantised(4, 1), unquantised(64, 1), unquantised(64, 2), unquantised(64, 3)]),
        [bits(2, 2) | sinks | rotated | {OPTION + "k_axis": "token", OPTION + "k_rotation": "hadamard",
                                         OPTION + "k_range": "clipped", OPTION + "v_range": "clipped"}],
    )
