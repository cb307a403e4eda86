"""A second process compiles nothing, and the cache lies where it was asked to."""
import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp
from moejax import compilation_cache
events = []
jax.monitoring.register_event_listener(lambda name, **kwargs: events.append(name))
print(compilation_cache.enable())
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(sum(e.endswith("/cache_hits") for e in events), sum(e.endswith("/cache_misses") for e in events))
"""


def run(**environment) -> tuple[str, int, int]:
    """(folder, hits, misses) of one process."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
                          env={**kept, "JAX_PLATFORMS": "cpu", **environment})
    folder, counts = done.stdout.splitlines()
    hits, misses = counts.split()
    return folder, int(hits), int(misses)


def test_the_second_process_only_reads(tmp_path):
    folder, hits, misses = run(XDG_CACHE_HOME=str(tmp_path))
    assert folder == str(tmp_path / "moejax" / "jax") and hits == 0 and misses > 0
    assert run(XDG_CACHE_HOME=str(tmp_path)) == (folder, misses, 0)


def test_what_jax_is_configured_with_wins(tmp_path):
    folder, _, misses = run(XDG_CACHE_HOME=str(tmp_path / "xdg"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert folder == str(tmp_path / "own") and misses > 0 and any((tmp_path / "own").iterdir())
