import jax.numpy as jnp
import pytest

from pallas_kernels import RouterRule, fused_router
from tests.pallas_kernels.fused_router_cases import FusedRouterCases


class TestReference(FusedRouterCases):
    implementation = "reference"


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ({"num_experts_per_tok": 2, "score_fn": "relu"}, "score_fn='relu'"),
    ({"num_experts_per_tok": 2, "n_group": 2, "topk_group": 3}, "topk_group=3"),
    ({"num_experts_per_tok": 2, "score_fn": "topk_softmax", "norm_topk_prob": True}, "norm_topk_prob=True"),
])
def test_bad_rules_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RouterRule(**kwargs)


@pytest.mark.parametrize(("change", "message"), [
    ({"x": jnp.zeros((3, 7))}, "x.shape"),
    ({"x": jnp.zeros((3, 8), jnp.int32)}, "x.dtype"),
    ({"w": jnp.zeros((8, 6), jnp.bfloat16)}, "w.dtype=bfloat16"),
    ({"bias": jnp.zeros(5)}, "bias.shape"),
    ({"correction_bias": jnp.zeros(6, jnp.bfloat16)}, "correction_bias.dtype"),
    ({"valid": jnp.ones(3)}, "valid.dtype"),
    ({"rule": RouterRule(num_experts_per_tok=7)}, "num_experts_per_tok=7"),
    ({"rule": RouterRule(num_experts_per_tok=2, n_group=4, topk_group=2)}, "num_experts=6"),
])
def test_bad_input_is_named(change, message):
    arguments = {"x": jnp.zeros((3, 8)), "w": jnp.zeros((8, 6)), "rule": RouterRule(num_experts_per_tok=2)} | change
    with pytest.raises(ValueError, match=message):
        fused_router(**arguments)
