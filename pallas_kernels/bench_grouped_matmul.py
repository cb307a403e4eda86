"""Cases of `grouped_matmul` for `bench`: random experts of a named shape, the bytes they must move, and checks against float64."""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bench import TINY, Case
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.specs import GroupedMatmulSpec
from pallas_kernels.packed_weights import BLOCK, PackedWeights, WeightLayout
from pallas_kernels.pallas_utils import cdiv

CHECKED_EXPERTS = 16  # spread over those that have rows, the first and the last among them


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


def matmul_inputs(spec: GroupedMatmulSpec, *, turns: int, seed: int = 0) -> MatmulInputs:
    """Random inputs; every turn draws its experts anew. Shapes that differ in their rows only share the weights of a seed."""
    x = jax.random.normal(jax.random.key(1), (spec.m, spec.k), jnp.bfloat16)
    weights = _random_weights(seed, spec.num_experts, spec.k, spec.n, spec.bits, spec.group_size, spec.scale_dtype)
    return MatmulInputs(spec, x, weights, jnp.asarray(np.stack([spec.group_sizes(seed) for seed in range(turns)])))


@functools.lru_cache(maxsize=4)
def _random_weights(
    seed: int, num_experts: int, k: int, n: int, bits: int | None, group_size: int | None, scale_dtype: str,
) -> jax.Array | PackedWeights:
    """bfloat16, or packed words made as such, on the device: any code is as likely as any other."""
    key = jax.random.key(seed)
    if bits is None or group_size is None:
        return jax.jit(lambda: jax.random.normal(key, (num_experts, k, n), jnp.bfloat16) * jnp.bfloat16(k**-0.5))()
    layout = WeightLayout(k=k, n=n, bits=bits, group_size=group_size, scale_dtype=scale_dtype)

    def make() -> jax.Array:
        lead = (num_experts, layout.blocks, layout.chunks)
        words = jax.random.bits(key, (*lead, layout.words), jnp.uint32)
        in_word = () if scale_dtype == "float32" else (2,)
        scale = jax.random.uniform(key, (*lead, layout.zero_word - layout.scale_word, *in_word), scale_dtype, 0.5, 1.5)
        scale = scale * jnp.asarray(2.0 ** (1 - bits) * k**-0.5, scale.dtype)  # a sum of k products is about 1
        return words.at[..., layout.scale_word:layout.zero_word].set(lax.bitcast_convert_type(scale, jnp.uint32))

    return PackedWeights(jax.jit(make)(), layout)


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
    """Worst relative L2 error of a row of the first turn, against float64, over CHECKED_EXPERTS of the experts that have rows."""
    if not np.isfinite(out).all():
        return math.inf
    x = np.asarray(inputs.x).astype(np.float64)
    sizes = np.asarray(inputs.sizes[0])
    ends, hit = np.cumsum(sizes), np.flatnonzero(sizes)
    worst = 0.0
    for expert in hit[np.linspace(0, len(hit) - 1, min(len(hit), CHECKED_EXPERTS)).astype(int)]:
        rows = slice(ends[expert] - sizes[expert], ends[expert])
        want = x[rows] @ np.asarray(_dense(inputs.weights, expert)).astype(np.float64)
        if inputs.spec.glu:
            pairs = want.reshape(len(want), -1, 2, BLOCK // 2)
            gate, up = (pairs[:, :, i].reshape(len(want), -1) for i in range(2))
            want = gate / (1 + np.exp(-gate)) * up
        worst = max(worst, float(np.max(np.linalg.norm(out[rows] - want, axis=1) / np.linalg.norm(want, axis=1))))
    return worst


@jax.jit
def _dense(weights: jax.Array | PackedWeights, expert: jax.Array) -> jax.Array:
    """float32 [k, n] of one expert."""
    one = jax.tree.map(lambda leaf: leaf[expert], weights)
    return one.dequantize() if isinstance(one, PackedWeights) else one.astype(jnp.float32)
