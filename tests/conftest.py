"""Settings of the whole suite. Warnings are errors (pyproject.toml)."""
import jax
import pytest

# Several devices, so that sharded code runs on any machine. Must precede the first use of a device.
if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict_promotion():
    """Mixed dtypes raise instead of promoting: a float32 parameter must not widen a bfloat16 computation unseen."""
    with jax.numpy_dtype_promotion("strict"):
        yield
