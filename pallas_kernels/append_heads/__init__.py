"""`append_heads`: what is between the projections and the attention of a decode step: norms, RoPE, and the cache's new token."""
from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels import dispatch
from pallas_kernels.append_heads import reference

__all__ = ["OpenPages", "append_heads"]

dispatch.register_mosaic("append_heads", "mosaic_gpu")
dispatch.register("append_heads", "reference", reference.append_heads)


class OpenPages(NamedTuple):
    """The unquantised part of a layer's cache: open pages [B, K, Zo, H], and sinks [B, K, S, H] or None."""

    open_k: jax.Array
    open_v: jax.Array
    sink_k: jax.Array | None = None
    sink_v: jax.Array | None = None


def append_heads(
    heads: jax.Array, cos: jax.Array, sin: jax.Array, pages: OpenPages, kv_lens: jax.Array, q_lens: jax.Array, *, num_heads: int,
    eps: float, q_scale: jax.Array | None = None, k_scale: jax.Array | None = None, implementation: str | None = None,
) -> tuple[jax.Array, OpenPages]:
    """Norms and rotates the queries and the key of one token a row, and writes its key and value into the open page.

    Token s lies at place s % Zo of the open pages, and at s of the sinks if s < S.

    Args:
      heads: bfloat16 or float32 [B, N + 2 K, H]: queries, keys, values, as projected.
      cos, sin: float32 [B, H / 2], of the row's position; channel i is rotated with channel i + H / 2.
      pages: of the layer. Their buffers are reused where they are donated.
      kv_lens: int32 [B], tokens in each sequence before this one.
      q_lens: int32 [B], 0 for rows that write nothing; their queries are garbage.
      num_heads: N.
      eps: of the RMS norms.
      q_scale, k_scale: [H], scales of the RMS norm of each head; both None for no norms.
      implementation: None for the first of the platform's order that can serve the call, or a registered name.

    Returns:
      (queries [B, N, H] in the dtype of `heads`, pages with the token in them).

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: no implementation can serve the call.
    """
    (B, all_heads, H), K = heads.shape, pages.open_k.shape[1]
    if all_heads != num_heads + 2 * K or pages.open_k.shape != (B, K, pages.open_k.shape[2], H):
        raise ValueError(f"{heads.shape=}, {pages.open_k.shape=}: must be [B, N + 2 K, H] and [B, K, Zo, H] with N={num_heads}")
    if cos.shape != (B, H // 2) or sin.shape != cos.shape:
        raise ValueError(f"{cos.shape=}, {sin.shape=}: must be {(B, H // 2)}")
    if (q_scale is None) != (k_scale is None):
        raise ValueError("q_scale and k_scale: one is None and the other is not")
    q, new = dispatch.call(
        "append_heads", implementation, heads, cos, sin, tuple(x for x in pages if x is not None), kv_lens, q_lens,
        tuple(x for x in (q_scale, k_scale) if x is not None), num_heads=num_heads, eps=eps)
    return q, OpenPages(*new)
