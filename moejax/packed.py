"""Matrices kept in few bits, packed as the kernels of this platform read them: one kernel serves experts and dense projections."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.packed_weights import BLOCK, MAX_CHUNK, interleave, pack_weights
from pallas_kernels.qarray import QArray, quantize
from pallas_kernels.stored_weights import StoredWeights
from pallas_kernels.tpu_weights import pack_tpu_weights

# "bf16" leaves weights as they are; the others are packed, "packed_bf16" bit for bit.
WEIGHT_BITS = {"bf16": 16, "packed_bf16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}


class PackedMatrices(nnx.Module):
    """Matrices [E, k, n], one an expert or a single one, in codes with a float32 scale for every 128 channels (or k) and column; or
    in bfloat16.

    Attributes:
      words: the packed codes and scales.
      stored_as, layout: what they are; `TpuWeights` on a TPU, else `PackedWeights`.
    """

    def __init__(self, what: str, weights: str, w: jax.Array, up: jax.Array | None = None):
        """Quantises and packs.

        Args:
          what: their name, for messages.
          weights: a name of WEIGHT_BITS other than "bf16".
          w: [E, k, n].
          up: [E, k, n], of which `w` are the gates: their columns are interleaved, for `glu`.

        Raises:
          ValueError: matrices whose sizes cannot be packed.
        """
        _, k, n = w.shape
        if k % BLOCK or n % BLOCK:
            raise ValueError(f"{what} in {weights!r}: matrices of {k} x {n}; both must be multiples of {BLOCK}")
        kept = [_kept(x, WEIGHT_BITS[weights]) for x in (w, up) if x is not None]
        pack = pack_tpu_weights if jax.default_backend() == "tpu" else pack_weights
        stored = pack(kept[0] if up is None else interleave(*kept))
        self.stored_as: Any = type(stored)
        self.words, self.layout = nnx.Param(stored.words), stored.layout

    def __call__(
        self, x: jax.Array, group_sizes: jax.Array | None = None, *, bias: jax.Array | None = None,
        glu: Callable[[jax.Array, jax.Array], jax.Array] | None = None, preferred_element_type=None,
    ) -> jax.Array:
        """`grouped_matmul` of rows x [M, k] with these; without `group_sizes` all rows with the single one."""
        sizes = jnp.full(1, x.shape[0], jnp.int32) if group_sizes is None else group_sizes
        return grouped_matmul(x, self.weights(), sizes, bias=bias, glu=glu, preferred_element_type=preferred_element_type)

    def weights(self) -> StoredWeights:
        """What the kernels take."""
        return self.stored_as(self.words[...], self.layout)


def _kept(w: jax.Array, bits: int) -> QArray | jax.Array:
    """What is packed of [E, k, n]."""
    return w.astype(jnp.bfloat16) if bits == 16 else quantize(w, bits=bits, group_size=math.gcd(w.shape[1], MAX_CHUNK))


def check_name(parameter: str, weights: str) -> None:
    """Raises ValueError unless `weights` is a name of WEIGHT_BITS."""
    if weights not in WEIGHT_BITS:
        raise ValueError(f"{parameter}={weights!r}: accepted are {', '.join(WEIGHT_BITS)}")
