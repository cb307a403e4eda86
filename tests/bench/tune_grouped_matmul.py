"""The Hopper experts' kernel on a GPU: correctness, then its time over tunings, in one go.

  PYTHONPATH=. python tests/bench/tune_grouped_matmul.py --spec qwen3_30b_b16_gate_up_int4 --tunings 2,4,6 2,3,8
  PYTHONPATH=. python tests/bench/tune_grouped_matmul.py --layer 1 4 16 64       (gate, up and down in turn, as a layer has them)

A tuning is token_tiles,warpgroups,stages. A program makes ITERATIONS times `--calls` calls; programs are queued one behind the
other, so that what Python takes does not show. Calls take turns over layers and draws of experts: weights come from memory and not
from a cache. What a program of no kernel takes is printed first: most of it is part of every time.
"""
from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import bench
from pallas_kernels import bench_grouped_matmul as cases
from pallas_kernels.grouped_matmul import mosaic_gpu, reference
from pallas_kernels.grouped_matmul.mosaic_gpu import Tuning
from pallas_kernels.grouped_matmul.specs import SPECS

LAYERS = 2
ITERATIONS = 8


def function(spec, tuning: Tuning | None):
    """(x, weights, sizes) -> rows."""
    options = {"glu": cases.swiglu if spec.glu else None, "preferred_element_type": jnp.dtype("bfloat16")}
    if spec.bits is None:
        return functools.partial(reference.ragged_dot, **options)
    return jax.jit(functools.partial(mosaic_gpu.grouped_matmul, tuning=tuning, **options))  # lowered once, not for every call


def nothing(x, weights, sizes):
    """As little as can be that depends on the draw."""
    return x + sizes[0].astype(x.dtype) * cases.TINY


def timed(label: str, functions: list, all_inputs: list[cases.MatmulInputs], bytes_moved: int, args) -> None:
    """`functions` one after the other make one call, each with inputs of its own."""
    operands = [(tuple(cases.matmul_inputs(i.spec, turns=1, seed=s).weights for s in range(LAYERS)), i.sizes) for i in all_inputs]

    @jax.jit
    def program(x, operands):
        def several(i, x):
            for c in range(args.calls):
                out = x
                for f, (weights, sizes) in zip(functions, operands):
                    out = f(out, weights[c % LAYERS], sizes[(i * args.calls + c) % args.turns])
                x = cases._feed(x, out)
            return x

        return lax.fori_loop(0, ITERATIONS, several, x)

    def run(n: int) -> None:
        x = all_inputs[0].x
        for _ in range(n):
            x = program(x, operands)
        jax.block_until_ready(x)

    calls = args.calls * ITERATIONS
    summary = bench.sample(run, repeats=args.repeats, min_s=0.02).summary(bytes_moved * calls)
    us, low, high = ((summary[f"us_p{q}"] or 0) / calls for q in (50, 10, 90))
    rate = summary["gb_per_s"] or 0
    print(f"{label}: {us:.2f} us ({low:.2f}, {high:.2f}), {bytes_moved / 1e6:.1f} MB, {rate:.0f} GB/s", flush=True)


def measure(name: str, tuning: Tuning | None, args) -> None:
    inputs = cases.matmul_inputs(SPECS[name], turns=args.turns)
    f = function(inputs.spec, tuning)
    out = jax.jit(f)(inputs.x, inputs.weights, inputs.sizes[0])
    error = cases.matmul_error(inputs, np.asarray(out).astype(np.float64))
    verdict = "ok " if error <= bench.TOLERANCE else "BAD"
    label = f"{verdict} {error:.1e} {name} {tuning or ('ragged_dot' if inputs.spec.bits is None else 'default')}"
    timed(label, [f], [inputs], cases.matmul_bytes(inputs), args)


def measure_layer(batch: int, bits: int, tuning: Tuning | None, args) -> None:
    """Gate, up and down of the same draws of experts."""
    both = [cases.matmul_inputs(SPECS[f"qwen3_30b_b{batch}_{part}_int{bits}"], turns=args.turns) for part in ("gate_up", "down")]
    moved = sum(map(cases.matmul_bytes, both))
    timed(f"layer B={batch} int{bits} {tuning or 'default'}", [function(x.spec, tuning) for x in both], both, moved, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", nargs="*", default=[])
    parser.add_argument("--layer", nargs="*", type=int, default=[], help="batch sizes")
    parser.add_argument("--bits", nargs="*", type=int, default=[4], help="of --layer: 4, 8")
    parser.add_argument("--tunings", nargs="*", default=["default"], help="tiles,warpgroups,stages[,blocks[,shared]]")
    parser.add_argument("--turns", type=int, default=16, help="draws of experts")
    parser.add_argument("--calls", type=int, default=8, help="calls an iteration of the timed loop")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit_s", type=float, default=float("inf"), help="nothing new is begun after this many seconds")
    args = parser.parse_args()
    start = time.perf_counter()
    read = bench.read_bandwidth(1 << 30, repeats=args.repeats, min_s=0.01)
    print(f"{jax.devices()[0].device_kind}: {read['gb_per_s']:.0f} GB/s read", flush=True)
    timed("no kernel", [nothing], [cases.matmul_inputs(SPECS["tiny_int4"], turns=args.turns)], 0, args)
    tunings = [None if text == "default" else Tuning(*map(int, text.split(","))) for text in args.tunings]
    work = [functools.partial(measure, name, tuning, args) for name in args.spec for tuning in tunings]
    work += [functools.partial(measure_layer, batch, bits, tuning, args)
             for bits in args.bits for batch in args.layer for tuning in tunings]
    for i, one in enumerate(work):
        if time.perf_counter() - start > args.limit_s:
            print(f"{len(work) - i} of {len(work)} left out after {args.limit_s:.0f} s")
            break
        try:
            one()
        except ValueError as error:  # a tuning that does not fit into shared memory
            print(f"{one.args}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
