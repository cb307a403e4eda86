"""Matrices kept in few bits, packed as the kernels of this platform read them: one kernel serves experts and dense projections."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.weight_rules import WeightFormat
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.packed_weights import interleave, pack_weights
from pallas_kernels.packing import pack_codes, unpack_codes
from pallas_kernels.qarray import QArray, quantize, quantize_fp8, quantize_mxfp4
from pallas_kernels.stored_weights import StoredWeights, codes_of, lowest
from pallas_kernels.tpu_weights import pack_tpu_weights


class PackedMatrices(nnx.Module):
    """Matrices [E, k, n], one an expert or a single one, in codes with a float32 scale for each group of channels and column; or in
    bfloat16.

    Attributes:
      words: the packed codes, scales and zero points.
      stored_as, layout: what they are; `TpuWeights` on a TPU, else `PackedWeights`.
    """

    def __init__(self, weight_format: WeightFormat, w: jax.Array, up: jax.Array | None = None):
        """Quantises and packs, an expert at a time.

        Args:
          weight_format: a packed one, which `weight_rules.resolve` found to fit.
          w: [E, k, n].
          up: [E, k, n], of which `w` are the gates: their columns are interleaved, for `glu`.
        """
        stored = _stored(w, up, weight_format, pack_tpu_weights if jax.default_backend() == "tpu" else pack_weights)
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


class PackedEmbedding(nnx.Module):
    """Rows [V, D] in codes, with a float32 scale for each group of a row's channels: looked up, never multiplied.

    Attributes:
      words: uint32 [V, words of D codes] in the order of `packing.pack_codes`.
      scale: float32 [V, D / group_size].
      zero: int8 [V, D / group_size], zero points of a `QArray`; absent if symmetric.
    """

    def __init__(self, weight_format: WeightFormat, embedding_VD: jax.Array):
        words, scale, zero = _packed_rows(embedding_VD, weight_format)
        self.bits, self.width, self.has_zero = weight_format.bits, embedding_VD.shape[1], zero is not None
        self.words, self.scale = nnx.Param(words), nnx.Param(scale)
        if zero is not None:
            self.zero = nnx.Param(zero)

    def __call__(self, ids: jax.Array, dtype) -> jax.Array:
        """int32 [...] to rows [..., D] in `dtype`."""
        codes = unpack_codes(self.words[...][ids][..., None], self.bits, self.width)[..., 0]
        qvalue = (codes.astype(jnp.int32) - lowest(self.bits)).astype(jnp.int8)
        scale = self.scale[...][ids]
        zero = self.zero[...][ids] if self.has_zero else None
        return QArray(qvalue, scale, zero, -1, self.width // scale.shape[-1], self.bits).dequantize(dtype)


@functools.partial(jax.jit, static_argnames=("weight_format", "pack"))
def _stored(
    w: jax.Array, up: jax.Array | None, weight_format: WeightFormat, pack: Callable[[QArray | jax.Array], StoredWeights],
) -> StoredWeights:
    kept = [_kept(x, weight_format) for x in (w, up) if x is not None]
    return pack(kept[0] if up is None else interleave(*kept))


def _kept(w: jax.Array, weight_format: WeightFormat) -> QArray | jax.Array:
    """What is packed of [E, k, n]."""
    if weight_format.bits == 16:
        return w.astype(jnp.bfloat16)
    group_size = weight_format.group_of(w.shape[1])
    match weight_format.kind:
        case "mxfp4":
            quantized: Callable[[jax.Array], QArray] = quantize_mxfp4
        case "fp8_e4m3":
            quantized = functools.partial(quantize_fp8, group_size=group_size)
        case _:
            quantized = functools.partial(
                quantize, bits=weight_format.bits, group_size=group_size, symmetric=weight_format.symmetric)
    return jax.lax.map(quantized, w)  # an expert at a time: it is done in float32


@functools.partial(jax.jit, static_argnames="weight_format")
def _packed_rows(w_VD: jax.Array, weight_format: WeightFormat) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Words, scales and zero points of rows."""
    q = quantize(w_VD, bits=weight_format.bits, axis=-1, group_size=weight_format.group_of(w_VD.shape[1]),
                 symmetric=weight_format.symmetric)
    words = pack_codes(codes_of(q)[..., None], weight_format.bits)[..., 0]
    return words, q.scale, None if q.zero_point is None else q.zero_point.astype(jnp.int8)
