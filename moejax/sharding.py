"""Where arrays live on a mesh: parameter name -> axis letters (`moejax.dims`) -> logical axes -> mesh axes, in one table."""
from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.dims import LOGICAL_AXES, letters_of

log = logging.getLogger(__name__)

MESH_AXES = ("data", "expert", "tensor")
# Logical axis -> mesh axis. "embed" is not split: activations of every token stay whole.
RULES: dict[str, str | None] = {
    "batch": "data",
    "expert": "expert",
    "ffn": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "vocab": "tensor",
    "embed": None,
}


def make_mesh(*, data: int = 1, expert: int = 1, tensor: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `MESH_AXES` over the first data * expert * tensor devices.

    Raises:
      ValueError: an axis below 1, or more devices asked for than there are.
    """
    shape = (data, expert, tensor)
    for name, size in zip(MESH_AXES, shape):
        if size < 1:
            raise ValueError(f"{name}={size}: a mesh axis has at least 1 device")
    devices = jax.devices() if devices is None else devices
    if math.prod(shape) > len(devices):
        raise ValueError(f"mesh data={data} x expert={expert} x tensor={tensor} needs {math.prod(shape)} devices, "
                         f"there are {len(devices)}")
    return Mesh(np.array(devices[:math.prod(shape)]).reshape(shape), MESH_AXES)


def param_spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How the parameter at `path` is split over `mesh`.

    Norm scales are replicated. So is an axis that its mesh axis does not divide (3 KV heads over 2 devices), which is logged.
    """
    if path[-1] == "scale":
        return PartitionSpec()
    axes: list[str | None] = []
    for letter, size in zip(letters_of(path[-1], len(shape)), shape):
        axis = RULES.get(LOGICAL_AXES.get(letter, ""))
        if axis is not None and size % mesh.shape[axis]:
            log.info("%s: axis %s of size %d is replicated, mesh axis %s has %d devices",
                     ".".join(map(str, path)), letter, size, axis, mesh.shape[axis])
            axis = None
        axes.append(axis)
    return PartitionSpec(*axes)


def param_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """`NamedSharding` of every parameter, in the structure of `params` (arrays or `jax.ShapeDtypeStruct`s)."""
    return map_params(lambda path, leaf: NamedSharding(mesh, param_spec(path, leaf.shape, mesh)), params)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of [B, ...] arrays: rows over "data"."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def shard(params: nnx.State, mesh: Mesh) -> nnx.State:
    """`params` laid out over `mesh`."""
    return jax.device_put(params, param_shardings(params, mesh))


def map_params(fn: Callable[[tuple[Any, ...], Any], Any], params: nnx.State) -> nnx.State:
    """Applies fn(path, array) to every parameter; path is like ("blocks", 0, "mlp", "w_gate_EDF")."""
    return nnx.from_flat_state([(path, leaf.replace(fn(path, leaf.get_value()))) for path, leaf in nnx.to_flat_state(params)])
