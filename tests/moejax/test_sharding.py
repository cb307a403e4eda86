"""Meshes, and which axis of which parameter goes where."""
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from moejax.hf_config import from_hf
from moejax.model import abstract
from moejax.sharding import batch_sharding, make_mesh, param_shardings, param_spec
from tests.moejax.hf_configs import CONFIGS


def test_experts_heads_and_widths_are_split():
    mesh = make_mesh(expert=2, tensor=4)
    assert param_spec(("blocks", 0, "mlp", "w_gate_EDF"), (6, 40, 24), mesh) == PartitionSpec("expert", None, "tensor")
    assert param_spec(("blocks", 0, "attention", "w_q_NHD"), (8, 16, 40), mesh) == PartitionSpec("tensor", None, None)
    assert param_spec(("embedding_VD",), (96, 40), mesh) == PartitionSpec("tensor", None)
    assert param_spec(("blocks", 0, "attention", "q_norm", "scale"), (8, 16), mesh) == PartitionSpec()


def test_an_axis_that_does_not_divide_is_replicated_and_said(caplog):
    with caplog.at_level(logging.INFO):
        spec = param_spec(("blocks", 0, "attention", "w_k_KHD"), (3, 16, 40), make_mesh(tensor=2))
    assert spec == PartitionSpec(None, None, None)
    assert "w_k_KHD" in caplog.text and "tensor" in caplog.text


@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_has_a_sharding_that_fits(family):
    shapes = abstract(from_hf(CONFIGS[family]))[1]
    shardings = dict(nnx.to_flat_state(param_shardings(shapes, make_mesh(data=2, expert=2, tensor=2))))
    for path, leaf in nnx.to_flat_state(shapes):
        shardings[path].get_value().shard_shape(leaf.shape)  # raises when an axis is not divided evenly


def test_batch_sharding():
    x = jnp.zeros((4, 3))
    assert batch_sharding(make_mesh(data=2, tensor=2)).shard_shape(x.shape) == (2, 3)


@pytest.mark.parametrize("shape, named", [({"tensor": 0}, "tensor=0"), ({"data": 3, "expert": 3}, "needs 9 devices")])
def test_impossible_meshes(shape, named):
    with pytest.raises(ValueError, match=named):
        make_mesh(**shape)


def test_mesh_uses_the_given_devices():
    import jax

    devices = jax.devices()[2:4]
    assert np.array_equal(make_mesh(tensor=2, devices=devices).devices.reshape(-1), np.array(devices))
