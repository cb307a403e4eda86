"""The Hopper experts' kernel on a GPU: correctness, then its time over tunings, in one go.

  PYTHONPATH=. python tests/bench/tune_grouped_matmul.py --spec qwen3_30b_b16_gate_up_int4 --tunings 2,4,6 2,3,8
  PYTHONPATH=. python tests/bench/tune_grouped_matmul.py --layer 1 4 16 64       (gate, up and down in turn, as a layer has them)

A tuning is token_tiles,warpgroups,stages. Timed with several calls an iteration of the loop: the loop itself takes about 10 us.
Calls take turns over layers and draws of experts, so that weights come from memory and not from a cache.
"""
from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench
from pallas_kernels import bench_grouped_matmul as cases
from pallas_kernels.grouped_matmul import mosaic_gpu, reference
from pallas_kernels.grouped_matmul.mosaic_gpu import Tuning
from pallas_kernels.grouped_matmul.specs import SPECS


def function(inputs: cases.MatmulInputs, tuning: Tuning | None, ragged_dot: bool):
    """(x, weights, sizes) -> rows."""
    glu = cases.swiglu if inputs.spec.glu else None
    if ragged_dot:
        return functools.partial(reference.ragged_dot, glu=glu, preferred_element_type=jnp.dtype("bfloat16"))
    return functools.partial(mosaic_gpu.grouped_matmul, glu=glu, preferred_element_type=jnp.dtype("bfloat16"), tuning=tuning)


LAYERS = 4


def layers(inputs: cases.MatmulInputs) -> tuple[tuple, jax.Array]:
    """The weights of each layer, and the draws."""
    copies = tuple(jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), inputs.weights) for _ in range(LAYERS - 1))
    return (inputs.weights, *copies), inputs.sizes


def timed(label: str, functions: list, x, operands, bytes_moved: int, args) -> None:
    """`functions` one after the other make one call; `operands` are `layers` of each."""
    def several(i, x, *operands):
        for c in range(args.calls):
            out = x
            for f, (weights, sizes) in zip(functions, operands):
                out = f(out, weights[c % LAYERS], sizes[(i * args.calls + c) % args.turns])
            x = cases._feed(x, out)
        return out

    run = bench.loop(several, x, operands, cases._feed)
    summary = bench.sample(run, repeats=args.repeats, min_s=0.01).summary(bytes_moved * args.calls)
    us = [(summary[f"us_p{q}"] or 0) / args.calls for q in (50, 10, 90)]
    print(f"{label}: {us[0]:.2f} us ({us[1]:.2f}, {us[2]:.2f}), {bytes_moved / 1e6:.1f} MB, {summary['gb_per_s']} GB/s", flush=True)


def measure(name: str, tunings: list[Tuning | None], args) -> None:
    inputs = cases.matmul_inputs(SPECS[name], turns=args.turns)
    moved = cases.matmul_bytes(inputs)
    for tuning in tunings:
        f = function(inputs, tuning, inputs.spec.bits is None)
        out = jax.jit(f)(inputs.x, inputs.weights, inputs.sizes[0])
        error = cases.matmul_error(inputs, np.asarray(out).astype(np.float64))
        verdict = "ok " if error <= bench.TOLERANCE else "BAD"
        label = f"{verdict} {error:.1e} {name} {tuning or ('ragged_dot' if inputs.spec.bits is None else 'default')}"
        timed(label, [f], inputs.x, (layers(inputs),), moved, args)


def measure_layer(batch: int, bits: int, tuning: Tuning | None, args) -> None:
    """Gate, up and down of the same draws of experts."""
    gate_up, down = (cases.matmul_inputs(SPECS[f"qwen3_30b_b{batch}_{part}_int{bits}"], turns=args.turns)
                     for part in ("gate_up", "down"))
    moved = cases.matmul_bytes(gate_up) + cases.matmul_bytes(down)
    operands = (layers(gate_up), layers(down))
    functions = [function(x, tuning, False) for x in (gate_up, down)]
    timed(f"layer B={batch} int{bits} {tuning or 'default'}", functions, gate_up.x, operands, moved, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", nargs="*", default=[])
    parser.add_argument("--layer", nargs="*", type=int, default=[], help="batch sizes")
    parser.add_argument("--bits", nargs="*", type=int, default=[4], help="of --layer: 4, 8")
    parser.add_argument("--tunings", nargs="*", default=[], help="token_tiles,warpgroups,stages; none for the default")
    parser.add_argument("--turns", type=int, default=16, help="draws of experts")
    parser.add_argument("--calls", type=int, default=8, help="calls an iteration of the timed loop")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tunings = [Tuning(*map(int, text.split(","))) for text in args.tunings] or [None]
    read = bench.read_bandwidth(1 << 30, repeats=args.repeats, min_s=0.01)
    print(f"{jax.devices()[0].device_kind}: {read['gb_per_s']:.0f} GB/s read", flush=True)
    for name in args.spec:
        measure(name, tunings, args)
    for batch in args.layer:
        for bits in args.bits:
            for tuning in tunings:
                measure_layer(batch, bits, tuning, args)


if __name__ == "__main__":
    main()
