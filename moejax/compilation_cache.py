"""Keeps compiled programs on disk, so that a second process starts without compiling."""
from __future__ import annotations

import os
import pathlib

import jax


def enable(folder: str | os.PathLike | None = None) -> pathlib.Path:
    """Turns the persistent compilation cache on, for every program however small.

    Args:
      folder: where it lies. None: what jax is configured with already (JAX_COMPILATION_CACHE_DIR), else `moejax/jax` in the
        user's cache folder (XDG_CACHE_HOME, or ~/.cache).

    Returns:
      The folder.
    """
    chosen = folder or jax.config.jax_compilation_cache_dir
    if chosen is None:
        cache_home = os.environ.get("XDG_CACHE_HOME")
        chosen = (pathlib.Path(cache_home) if cache_home else pathlib.Path.home() / ".cache") / "moejax" / "jax"
    path = pathlib.Path(chosen).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
