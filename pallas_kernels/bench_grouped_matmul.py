"""Cases of `grouped_matmul` for `bench`: random experts of a named shape, the bytes they must move, and checks against float64."""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import TINY, Case
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.specs import GroupedMatmulSpec
from pallas_kernels.packed_weights import BLOCK, PackedWeights, pack_weights
from pallas_kernels.pallas_utils import cdiv
from pallas_kernels.qarray import quantize

STOCK_EXPERTS = 8  # distinct random experts; all others are copies of them, each copy in memory of its own


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class MatmulInputs:
    """Arguments of `grouped_matmul`.

    Attributes:
      x: bfloat16 [m, k].
      weights: [E, k, n], bfloat16 or packed.
      sizes: int32 [turns, E].
    """

    spec: GroupedMatmulSpec
    x: jax.Array
    weights: jax.Array | PackedWeights
    sizes: jax.Array

    def multiply(self, implementation: str | None, x, weights, sizes) -> jax.Array:
        return grouped_matmul(x, weights, sizes, glu=swiglu if self.spec.glu else None, implementation=implementation)


def matmul_inputs(spec: GroupedMatmulSpec, *, turns: int) -> MatmulInputs:
    """Random inputs; every turn draws its experts anew."""
    key = jax.random.key(0)
    w = jax.random.normal(key, (min(STOCK_EXPERTS, spec.num_experts), spec.k, spec.n), jnp.bfloat16) * spec.k**-0.5
    stock = w if spec.bits is None else pack_weights(quantize(
        w, bits=spec.bits, group_size=spec.group_size, scale_dtype=spec.scale_dtype))
    index = np.arange(spec.num_experts) % len(w)
    weights = jax.tree.map(jax.jit(functools.partial(jnp.take, indices=index, axis=0)), stock)
    x = jax.random.normal(jax.random.key(1), (spec.m, spec.k), jnp.bfloat16)
    return MatmulInputs(spec, x, weights, jnp.asarray(np.stack([spec.group_sizes(seed) for seed in range(turns)])))


def matmul_bytes(inputs: MatmulInputs) -> int:
    """Bytes one call must move, the mean of all turns: weights of every expert that has rows, once; rows read, rows written."""
    spec = inputs.spec
    hit = float(np.mean(np.count_nonzero(np.asarray(inputs.sizes), axis=1)))
    rows = 2 * spec.m * (spec.k + spec.n // (2 if spec.glu else 1))
    return round(hit * inputs.weights.nbytes / inputs.weights.shape[0]) + rows


def grouped_matmul_case(spec: GroupedMatmulSpec, working_set_bytes: int) -> Case:
    """Expert products at decode sizes. Calls take turns over draws of experts that together take at least `working_set_bytes`."""
    once = matmul_bytes(matmul_inputs(spec, turns=1))
    inputs = matmul_inputs(spec, turns=max(1, cdiv(working_set_bytes, once)))

    def call(implementation, i, x, weights, sizes):
        return inputs.multiply(implementation, x, weights, sizes[i % sizes.shape[0]])

    def check(implementation) -> float:
        out = jax.jit(functools.partial(call, implementation, 0))(inputs.x, inputs.weights, inputs.sizes)
        return matmul_error(inputs, np.asarray(out).astype(np.float64))

    return Case(
        "grouped_matmul", call, inputs.x, (inputs.weights, inputs.sizes), _feed, matmul_bytes(inputs), check)


def _feed(x: jax.Array, out: jax.Array) -> jax.Array:
    """x as it was, but not in the eyes of the compiler; see `bench.add_tiny`."""
    columns = min(x.shape[1], out.shape[1])
    return x.at[:, :columns].add(out[:, :columns] * jnp.asarray(TINY, out.dtype))


def matmul_error(inputs: MatmulInputs, out: np.ndarray) -> float:
    """Worst relative L2 error of a row of the first turn, against float64."""
    if not np.isfinite(out).all():
        return math.inf
    x = np.asarray(inputs.x).astype(np.float64)
    worst, row = 0.0, 0
    for expert, size in enumerate(np.asarray(inputs.sizes[0])):
        if not size:
            continue
        one = jax.tree.map(lambda leaf, e=expert: leaf[e], inputs.weights)
        w = np.asarray(one.dequantize() if isinstance(one, PackedWeights) else one).astype(np.float64)
        want = x[row:row + size] @ w
        if inputs.spec.glu:
            pairs = want.reshape(size, -1, 2, BLOCK // 2)
            gate, up = (pairs[:, :, i].reshape(size, -1) for i in range(2))
            want = gate / (1 + np.exp(-gate)) * up
        errors = np.linalg.norm(out[row:row + size] - want, axis=1) / np.linalg.norm(want, axis=1)
        worst, row = max(worst, float(errors.max())), row + int(size)
    return worst
