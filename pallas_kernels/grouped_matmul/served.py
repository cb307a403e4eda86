"""What the Mosaic kernels of `grouped_matmul` serve, whatever the device."""
from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.qarray import FLOAT_CODES
from pallas_kernels.stored_weights import StoredWeights

MAX_ROWS = 4096  # above, a kernel that computes 64 rows or more at a time is in order
OUT_DTYPES = ("bfloat16", "float32")


def refuse_others(backend: str, weights: type[StoredWeights], x, w, out_dtype) -> None:
    """Raises NotImplementedError, by name, for what `backend`, which reads `weights`, does not serve."""
    if not isinstance(w, weights):
        raise NotImplementedError(f"{backend}: {type(w).__name__} weights {w.shape}: only {weights.__name__} are read")
    if w.layout.float_codes:
        kind = FLOAT_CODES[w.layout.bits].name
        raise NotImplementedError(f"{backend}: {kind} weights {w.shape}: only integer codes and bfloat16 are read")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{backend}: x.dtype={x.dtype}: only bfloat16")
    if not 0 < x.shape[0] <= MAX_ROWS:
        raise NotImplementedError(f"{backend}: {x.shape=}: 1 to {MAX_ROWS} rows")
    if jnp.dtype(out_dtype).name not in OUT_DTYPES:
        raise NotImplementedError(f"{backend}: preferred_element_type={jnp.dtype(out_dtype)}: only {', '.join(OUT_DTYPES)}")
