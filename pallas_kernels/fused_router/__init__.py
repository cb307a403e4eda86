"""`fused_router`: hidden states to chosen experts and weights, every family's rule."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.fused_router import reference
from pallas_kernels.fused_router.reference import Routing
from pallas_kernels.fused_router.specs import RouterRule

__all__ = ["RouterRule", "Routing", "fused_router"]

dispatch.register_mosaic("fused_router", "mosaic_tpu")
dispatch.register("fused_router", "reference", reference.fused_router)


def fused_router(
    x: jax.Array, w: jax.Array, *, rule: RouterRule, bias: jax.Array | None = None,
    correction_bias: jax.Array | None = None, valid: jax.Array | None = None, implementation: str | None = None,
) -> Routing:
    """Chooses experts: logits = x @ w + bias, scores, (groups), top-k of score + correction_bias, weights from the scores.

    Everything is computed in float32. Of equal scores the lower expert id wins.

    Args:
      x: [T, D] hidden states, any float dtype.
      w: [D, E] router weights, float32: half precision would move tokens to other experts.
      rule: how logits become experts and weights.
      bias: float32 [E], part of the logits.
      correction_bias: float32 [E], added to the scores for the choice alone, never to the weights.
      valid: bool [T]; False marks padding, which wakes no expert.
      implementation: None for the first of the platform's order that can serve the call, or a registered name.

    Returns:
      `Routing`.

    Raises:
      ValueError: shapes, dtypes or a rule that do not fit together.
      NotImplementedError: no implementation can serve the call.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"{x.shape=}, {w.shape=}: must be [T, D] and [D, E]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{x.dtype=}: must be a float dtype")
    num_experts = w.shape[1]
    for name, array in (("w", w), ("bias", bias), ("correction_bias", correction_bias)):
        if array is not None and array.dtype != jnp.float32:
            raise ValueError(f"{name}.dtype={array.dtype}: router parameters must be float32")
    for name, array in (("bias", bias), ("correction_bias", correction_bias)):
        if array is not None and array.shape != (num_experts,):
            raise ValueError(f"{name}.shape={array.shape}: must be ({num_experts},)")
    if valid is not None and (valid.shape != x.shape[:1] or valid.dtype != jnp.bool_):
        raise ValueError(f"{valid.shape=}, {valid.dtype=}: must be bool {x.shape[:1]}")
    rule.check_num_experts(num_experts)
    return dispatch.call(
        "fused_router", implementation, x, w, rule=rule, bias=bias, correction_bias=correction_bias, valid=valid)
