"""Small things that kernels and references share, defined here once."""
from __future__ import annotations

import jax
import jax.numpy as jnp

# Stands in for minus infinity in masked logits: finite, so that `MASK_VALUE - MASK_VALUE` is 0 and not NaN, and far enough
# from the float32 limit (3.4e38) that subtracting a large logit from it cannot overflow.
MASK_VALUE = -1e38

INVALID = -1  # page id of a block-table entry that names no page


def cdiv(a, b: int):
    """Smallest integer >= a / b, for b > 0; `a` an int or an integer array."""
    return -(-a // b)


def align_to(a: int, b: int) -> int:
    """Smallest multiple of b that is >= a, for b > 0."""
    return cdiv(a, b) * b


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype to multiply `dtype` operands in: XLA on CPU has no fast bfloat16 products, so float32 there."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(dtype)
