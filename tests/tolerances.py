"""The one table of tolerances: name -> how far a result may be from the exact one, and why that far."""
from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|actual - desired| <= atol + rtol * |desired|, elementwise."""

    atol: float
    rtol: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "attention_f32": Tolerance(
        2e-5, 2e-5, "float32 accumulation against float64: logits of up to 30 carry 30 * 2**-24 * sqrt(H) of error into exp"),
    "attention_bf16_output": Tolerance(
        1e-4, 2**-8, "the result is rounded once to bfloat16, half of a unit of 2**-7; float32 error comes on top"),
    "attention_order_f32": Tolerance(
        3e-6, 3e-6, "the same float32 numbers summed in another order: values of size 1, a few units of 2**-24"),
    "matmul_f32": Tolerance(2e-5, 2e-5, "float32 accumulation of up to 512 products of size 1: sqrt(512) * 2**-24 * 8"),
    "matmul_bf16_output": Tolerance(2e-3, 2**-8, "the result is rounded once to bfloat16; inputs are the same rounded numbers"),
    "router_f32": Tolerance(1e-6, 2e-6, "a float32 product over 64 channels and one softmax, against float64"),
    "dequantize_f32": Tolerance(0.0, 3e-7, "scale * code + offset in float32, two roundings or one fused one, against float64"),
    "gaussian_levels": Tolerance(5e-3, 0.0, "levels from a table with four decimals, times a scale of up to 50"),
    "logits_f32": Tolerance(
        2e-4, 2e-5, "logits of size 10 of the same float32 model, with attention summed in another order and layers deep"),
    "train_loss_f32": Tolerance(
        1e-5, 1e-5, "the same float32 training step with its sums over the batch in another order, four steps of Adam later"),
    "decode_f32": Tolerance(
        1e-4, 1e-5, "logits of up to 10 through two float32 layers, summed in another order and in other matrix shapes"),
    "decode_bf16_kv": Tolerance(
        1e-2, 0.0, "float32 noise moves a key or value that lies on a rounding boundary by one bfloat16 step: one step in a key "
                   "channel 20 times as large as the others"),
    "rope_frequencies": Tolerance(0.0, 1e-6, "a few float32 roundings, one after each step as in transformers, against float64"),
    "model_f32": Tolerance(
        2e-5, 2e-5, "the same float32 model with products summed in another order; logits of size 1, activations of a few units"),
}


def assert_close(actual, desired, name: str) -> None:
    """Compares as float64 within the named tolerance; NaN is never close to anything."""
    t = TOLERANCES[name]
    actual, desired = np.asarray(actual).astype(np.float64), np.asarray(desired).astype(np.float64)
    assert not np.isnan(actual).any(), "NaN in the result"
    np.testing.assert_allclose(actual, desired, rtol=t.rtol, atol=t.atol, equal_nan=False, err_msg=f"{name}: {t.reason}")
