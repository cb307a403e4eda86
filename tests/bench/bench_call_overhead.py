"""What one call of the jitted decode loop costs beside its steps: many layers of little work, as deep as a large model.

  PYTHONPATH=. python tests/bench/bench_call_overhead.py --layers 48 --trace_dir DIR
  XLA_FLAGS=--xla_gpu_enable_command_buffer= PYTHONPATH=. python tests/bench/bench_call_overhead.py

Times calls of 1 and of `--steps` steps: what a step takes is their difference, what a call takes beside it is the rest. With
`--trace_dir`, two calls are traced, host events included.
"""
from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.random_decode import read_config
from moejax import decode
from moejax.config import MoE
from moejax.random_model import filled_state, random_model
from pallas_kernels import dispatch
from pallas_kernels.kv_format import KVFormat


def small_config(layers: int):
    """Qwen3-30B-A3B with fewer and smaller experts and a small vocabulary."""
    config = read_config("configs/models/qwen3_30b_a3b.json")
    layer = config.layers[0]
    assert isinstance(layer.mlp, MoE)
    layer = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, num_experts=16, moe_intermediate_size=128))
    return dataclasses.replace(config, layers=(layer,) * layers, vocab_size=4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--trace_dir")
    parser.add_argument("--lock", default=os.devnull, help="a file: processes with the same one compile together, measure in turn")
    args = parser.parse_args()
    config = small_config(args.layers)
    kv_format = KVFormat(k_bits=3, v_bits=3, layout=dispatch.PAGE_LAYOUT.get(jax.default_backend(), "linear"))
    model = random_model(config, expert_weights="int4", dense_weights="int8")
    spec, params = decode.split(model, (kv_format,) * args.layers)
    max_len = 1024 + (args.repeats * 2 + 20) * (args.steps + 1)
    state = filled_state(spec, [1024] * args.batch, max_len=max_len)
    decodable = jnp.ones(config.vocab_size, bool)

    def call(limit: int) -> float:
        nonlocal state
        start = time.perf_counter()
        state, tokens = decode.generate(spec, params, state, decodable, num_steps=args.steps, limit=limit)
        np.asarray(tokens)
        return 1e3 * (time.perf_counter() - start)

    start = time.perf_counter()
    for _ in range(3):
        call(args.steps)
    print(f"{os.environ.get('XLA_FLAGS', '')!r}: {len(params)} parameters, {len(jax.tree.leaves(state))} arrays of state, "
          f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    with open(args.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        measure(args, call)


def measure(args, call) -> None:
    """Prints the times of `call`, a function of a number of steps, and traces it."""
    one, many = (np.array([call(limit) for _ in range(args.repeats)]) for limit in (1, args.steps))
    step = (np.median(many) - np.median(one)) / (args.steps - 1)
    print(f"ms: call of 1 step {np.median(one):.2f} (p99 {np.percentile(one, 99):.2f}), of {args.steps} {np.median(many):.2f}; "
          f"a step {step:.3f}, a call beside it {np.median(one) - step:.2f}", flush=True)
    if args.trace_dir:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 3
        with jax.profiler.trace(args.trace_dir, profiler_options=options):
            for _ in range(2):
                call(2)


if __name__ == "__main__":
    main()
