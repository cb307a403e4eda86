import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.qarray import quantize
from tests.pallas_kernels.grouped_matmul_cases import GroupedMatmulCases, PackedMatmulCases


class TestReference(GroupedMatmulCases):
    implementation = "reference"


class TestReferencePacked(PackedMatmulCases):
    implementation = "reference"


class TestRaggedDot(GroupedMatmulCases):
    implementation = "ragged_dot"


@pytest.mark.parametrize(("change", "message"), [
    ({"x": jnp.zeros((4, 9))}, "x.shape"),
    ({"x": jnp.zeros((4, 8), jnp.int32)}, "x.dtype"),
    ({"w": jnp.zeros((3, 8, 6), jnp.int8)}, "w.dtype"),
    ({"w": quantize(jnp.ones((3, 8, 6)), bits=8, axis=-1)}, "w.axis=-1"),
    ({"bias": jnp.zeros((3, 8))}, "bias.shape"),
    ({"glu": jnp.multiply}, "multiple of 32"),
    ({"group_sizes": jnp.zeros(2, jnp.int32)}, "group_sizes.shape"),
    ({"group_sizes": jnp.zeros(3)}, "group_sizes.dtype"),
])
def test_bad_input_is_named(change, message):
    arguments = {"x": jnp.zeros((4, 8)), "w": jnp.zeros((3, 8, 6)), "group_sizes": jnp.zeros(3, jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments)
