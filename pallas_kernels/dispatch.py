"""Which implementation of an op runs: the one place that decides.

Every op registers its implementations by name. A call names one, or leaves it to `implementation=None`: then the names of
`PLATFORM_ORDER` are tried in turn, and one that raises NotImplementedError (it cannot serve these shapes or this device) hands
over to the next; what was refused is logged, with the reason. ValueError means that the call is wrong, and passes through.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.kv_format import KVFormat

_log = logging.getLogger(__name__)

PLATFORM_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("reference",),
    "gpu": ("mosaic_gpu", "ragged_dot", "reference"),
    "tpu": ("mosaic_tpu", "ragged_dot", "reference"),
}

# Kernels in modules of their own: the platform, and what they run on.
MOSAIC = {"mosaic_gpu": ("gpu", "NVIDIA Hopper"), "mosaic_tpu": ("tpu", "TPU")}

# The order inside pages that a platform's kernels read.
PAGE_LAYOUT = {"gpu": "mma_sm90", "tpu": "tpu"}

_registry: dict[str, dict[str, Callable[..., Any]]] = {}
_served: dict[str, str] = {}


def register(op: str, implementation: str, function: Callable[..., Any]) -> None:
    """Adds an implementation of `op`. Raises ValueError when that name is taken."""
    functions = _registry.setdefault(op, {})
    if implementation in functions:
        raise ValueError(f"{op}: implementation {implementation!r} is registered already")
    functions[implementation] = function


def register_mosaic(op: str, *names: str) -> None:
    """Adds the functions `pallas_kernels.OP.NAME.OP` for the names, by default all of MOSAIC."""
    for name in names or MOSAIC:
        register(op, name, functools.partial(_run_mosaic, op, name))


def implementations(op: str) -> tuple[str, ...]:
    """Registered implementation names of `op`. Raises ValueError for an unknown op."""
    return tuple(_functions(op))


def last_implementation(op: str) -> str | None:
    """The implementation that served the last call of `op`, None before the first.

    A call inside jit counts when it is traced, not when the compiled function runs again.
    """
    _functions(op)
    return _served.get(op)


def call(op: str, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Runs `op` with the named implementation, or with the first of this platform's order that can serve the call.

    Raises:
      ValueError: unknown implementation, or one the implementation raised.
      NotImplementedError: the named implementation, or every one of the order, cannot serve the call; lists the reasons.
    """
    functions = _functions(op)
    refused: dict[str, str] = {}
    for name in _candidates(op, implementation):
        try:
            result = functions[name](*args, **kwargs)
        except NotImplementedError as error:
            refused[name] = str(error)
            continue
        if refused:
            _log.warning("%s: %s serves this call; %s", op, name, _reasons(refused))
        _served[op] = name
        return result
    raise NotImplementedError(f"{op}: no implementation can serve this call; {_reasons(refused)}")


def with_layout(kv_format: KVFormat, layout: str | None, head_dim: int) -> KVFormat:
    """`kv_format` in `layout`; None: in what this platform's kernels read if the format can be stored so, else in linear.

    Raises ValueError for a format that cannot be stored in `layout`, or does not fit `head_dim`.
    """
    if layout is None and jax.default_backend() in PAGE_LAYOUT:
        try:
            return with_layout(kv_format, PAGE_LAYOUT[jax.default_backend()], head_dim)
        except ValueError as error:
            _log.warning("pages of %s are in linear order: %s", kv_format.name, error)
    chosen = dataclasses.replace(kv_format, layout=layout or "linear")
    chosen.check_head_dim(head_dim)
    return chosen


def _run_mosaic(op: str, name: str, *args: Any, **kwargs: Any) -> Any:
    platform, chip = MOSAIC[name]
    if jax.default_backend() != platform:
        raise NotImplementedError(f"{name}: runs on {chip}, not on {jax.default_backend()}")
    if platform == "gpu" and (capability := jax.devices()[0].compute_capability) != "9.0":
        raise NotImplementedError(f"{name}: runs on {chip}, not on a GPU of {capability=}")
    module = importlib.import_module(f"pallas_kernels.{op}.{name}")  # only now: it needs parts of jax that other platforms may lack
    arrays = {key: value for key, value in kwargs.items() if isinstance(value, (jax.Array, np.ndarray))}
    static = ((key, value) for key, value in kwargs.items() if key not in arrays)
    return _jitted(getattr(module, op), *static)(*args, **arrays)


@functools.cache
def _jitted(function: Callable[..., Any], *static: tuple[str, Any]) -> Callable[..., Any]:
    """`function` with these arguments bound. Jitted: equal calls, as a model has many, are traced and lowered once; that takes half
    a second."""
    return jax.jit(functools.partial(function, **dict(static)))


def _functions(op: str) -> dict[str, Callable[..., Any]]:
    if op not in _registry:
        raise ValueError(f"{op=}: registered ops are {', '.join(sorted(_registry))}")
    return _registry[op]


def _candidates(op: str, implementation: str | None) -> tuple[str, ...]:
    known = _functions(op)
    if implementation is None:
        order = PLATFORM_ORDER.get(jax.default_backend(), ("reference",))
        return tuple(name for name in order if name in known)
    if implementation not in known:
        raise ValueError(f"{op}: {implementation=}: accepted are None, {', '.join(known)}")
    return (implementation,)


def _reasons(refused: dict[str, str]) -> str:
    return "; ".join(f"{name} refused: {reason}" for name, reason in refused.items())
