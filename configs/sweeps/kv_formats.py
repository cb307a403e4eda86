"""KV cache formats: published methods, ours, and one axis of the space at a time.

Every published method is a preset (see moejax/kv_presets.py for what each shares with its paper). The other points are the grid
of key and value bits, the number of promoted key channels with and without the calibrated rotation, and single changes around 2-bit
keys and values with 16 channels at 4 bits, 4 sink tokens and rotated values. Scored with the cache as decoding writes it, against
the 16-bit cache on the same windows; intervals are 95 % bootstrap intervals over blocks of 64 tokens.

Expected: about 40 minutes on 2 quiet cores with --checkpoint=data/raw/SmolLM2-135M-Instruct.Q4_1.gguf --context=2048 --windows=2
--sample_tokens=0 (`make data` fetches the weights, which are quantised to 4 bits).
"""
from experiments.grid import chain, param, prod
from moejax.kv_presets import PRESETS

OPTION = "CacheOptions."


def bits(k: int, v: int) -> dict:
    return {"quality.k_bits": [k], "quality.v_bits": [v]}


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
        # oscar-2 keeps 64 sinks and 256 to 383 recent tokens at 16 bits: ours with its windows, and it without them.
        [bits(2, 2) | rotated | {OPTION + "outlier_channels": 8, OPTION + "outlier_bits": 4, OPTION + "k_rotation": "calibrated",
                                 OPTION + "sink_tokens": 64, OPTION + "open_pages": 3},
         bits(2, 2) | sinks | rotated | {OPTION + "k_axis": "token", OPTION + "k_rotation": "hadamard",
                                         OPTION + "k_range": "clipped", OPTION + "v_range": "clipped"}],
    )
