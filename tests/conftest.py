"""Settings of the whole suite. Warnings are errors (pyproject.toml)."""
import os
import pathlib

# Most of the suite's time is compilation; unoptimised code halves it. Tests that need what users run ask for it
# (compiler_options). Must precede the first import of jax; processes that tests start inherit it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
# Workers, the processes that tests start, and the mutants share what they compile.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

# Several devices, so that sharded code runs on any machine. Must precede the first use of a device.
if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


# Linux gives a process 65,530 memory maps (vm.max_map_count). Every compiled program takes some, and the compiler crashes when it
# gets none: a worker that has run most of the suite comes to that.
MOST_MAPS = 20_000
MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def programs_are_forgotten():
    """Gives up compiled programs after a module when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def strict_promotion():
    """Mixed dtypes raise instead of promoting: a float32 parameter must not widen a bfloat16 computation unseen."""
    with jax.numpy_dtype_promotion("strict"):
        yield
