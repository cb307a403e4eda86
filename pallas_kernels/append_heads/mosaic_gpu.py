"""`append_heads` on NVIDIA Hopper, in Pallas Mosaic GPU: one launch, a warp a head.

A block has four neighbouring heads of a row; a lane has the same channels of both halves of its head, so that pairs are its own.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sm90
from pallas_kernels.sm90 import LANES, WARPS

HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything the kernel knows at compile time."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    has_scales: bool
    use_twins: bool

    @property
    def half(self) -> int:
        return self.head_dim // 2

    @property
    def layout(self):
        """[4, H / 2]: a warp a row, a lane a few neighbouring channels."""
        tiling = plgpu.Tiling(((WARPS, self.half), (self.half // LANES,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def append_heads(heads, cos, sin, pages, kv_lens, q_lens, scales, *, num_heads, eps, interpret: Any = None):
    """See `pallas_kernels.append_heads.append_heads` and `reference.append_heads`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` to run on CPU.

    Raises:
      NotImplementedError: what this kernel does not serve, by name.
    """
    (batch, all_heads, head_dim), K = heads.shape, pages[0].shape[1]
    if heads.dtype != jnp.bfloat16 or pages[0].dtype != jnp.bfloat16:
        raise NotImplementedError(f"mosaic_gpu: {heads.dtype=}, {pages[0].dtype=}: only bfloat16")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_gpu: {head_dim=}: only {', '.join(map(str, HEAD_DIMS))}")
    if num_heads % WARPS or K % WARPS:
        raise NotImplementedError(f"mosaic_gpu: {num_heads} query heads, {K} KV heads: only multiples of {WARPS}")
    call = _Call(num_heads, K, head_dim, eps, bool(scales), use_twins=interpret is not None)
    refs = [jax.new_ref(page) for page in pages]
    q = plgpu.kernel(
        functools.partial(_body, call), out_type=jax.ShapeDtypeStruct((batch, num_heads, head_dim), heads.dtype),
        grid=(batch, all_heads // WARPS), grid_names=("row", "heads"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="append_heads", interpret=interpret)(
            heads, cos, sin, kv_lens, q_lens, *scales, *refs)
    return q, tuple(jax.freeze(ref) for ref in refs)


def _body(call: _Call, heads_ref, cos_ref, sin_ref, kv_lens_ref, q_lens_ref, *refs):
    sm90.after_previous_kernel(use_twins=call.use_twins)
    *page_refs, q_ref = refs[2 * call.has_scales:]
    row, first = lax.axis_index("row"), lax.axis_index("heads") * WARPS
    kv_len, active = kv_lens_ref[row], q_lens_ref[row] > 0

    def load(ref, layout=call.layout):
        return [plgpu.load(ref.at[pl.ds(half * call.half, call.half)] if len(ref.shape) == 1 else
                           ref.at[:, pl.ds(half * call.half, call.half)], layout=layout, optimized=False) for half in range(2)]

    x = [half.astype(jnp.float32) for half in load(heads_ref.at[row, pl.ds(first, WARPS)])]

    def turned(which: int) -> list:
        """The heads after norm and RoPE."""
        normed = x if not call.has_scales else _norm(call, x, load(refs[which], call.layout.reduce(0)))
        cos, sin = (_over_heads(call, plgpu.load(ref.at[row], layout=call.layout.reduce(0), optimized=False))
                    for ref in (cos_ref, sin_ref))
        return [normed[0] * cos - normed[1] * sin, normed[1] * cos + normed[0] * sin]

    def store(ref, values: list) -> None:
        for half, value in enumerate(values):
            ref.at[:, pl.ds(half * call.half, call.half)][...] = value.astype(ref.dtype)

    def write(which: int, head, values: list) -> None:
        """which: 0 for keys, 1 for values."""
        @pl.when(active)
        def _():
            page = page_refs[which]
            store(page.at[row, pl.ds(head, WARPS), lax.rem(kv_len, page.shape[2])], values)

        if len(page_refs) > 2:
            sink = page_refs[2 + which]

            @pl.when(active & (kv_len < sink.shape[2]))
            def _():
                store(sink.at[row, pl.ds(head, WARPS), kv_len], values)

    N, K = call.num_heads, call.num_kv_heads

    @pl.when(first < N)
    def _():
        store(q_ref.at[row, pl.ds(first, WARPS)], turned(0))

    @pl.when((first >= N) & (first < N + K))
    def _():
        write(0, first - N, turned(1))

    @pl.when(first >= N + K)
    def _():
        write(1, first - N - K, x)


def _over_heads(call: _Call, x):
    """[H / 2] to [4, H / 2]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPS, call.half), [1]), call.layout)


def _norm(call: _Call, x: list, scale: list) -> list:
    """RMSNorm of four heads, rounded as the heads are."""
    mean = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=1) / call.head_dim
    inv = plgpu.layout_cast(lax.broadcast_in_dim(lax.rsqrt(mean + call.eps), (WARPS, call.half), [0]), call.layout)
    scaled = [half * inv * _over_heads(call, s.astype(jnp.float32)) for half, s in zip(x, scale)]
    return [half.astype(jnp.bfloat16).astype(jnp.float32) for half in scaled]
