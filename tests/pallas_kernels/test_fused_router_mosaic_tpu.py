"""The TPU router against the shared cases, in the interpreter with NaN memory and race detection, in both DMA modes."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import RouterRule, dispatch, fused_router
from pallas_kernels.fused_router import mosaic_tpu, reference
from tests.pallas_kernels.close_page_cases import FAST_COMPILE
from tests.pallas_kernels.fused_router_cases import RULES, FusedRouterCases
from tests.tolerances import assert_close

INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)


EAGER = dataclasses.replace(INTERPRET, dma_execution_mode="eager")
interpreted = jax.jit(mosaic_tpu.fused_router, static_argnames=("rule", "interpret"), compiler_options=FAST_COMPILE)
on_cpu = functools.partial(mosaic_tpu.fused_router, interpret=INTERPRET)


class TestMosaicTpu(FusedRouterCases):
    implementation = "mosaic_tpu"

    @pytest.fixture(autouse=True)
    def _on_a_tpu(self, monkeypatch):
        monkeypatch.setattr(mosaic_tpu, "fused_router", on_cpu)
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        yield
        assert not interpret_pallas_call.races.races_found


def routed(run, x, w, rule, **others):
    return run(x, w, rule=rule, **{"bias": None, "correction_bias": None, "valid": None} | others)


@pytest.mark.parametrize("interpret", [INTERPRET, EAGER], ids=["on_wait", "eager"])
@pytest.mark.parametrize(("tokens", "width", "experts"), [(1, 256, 8), (9, 384, 60), (130, 1408, 128), (40, 2304, 256)])
def test_tiles_of_tokens_and_of_width(interpret, tokens, width, experts):
    """More than one tile of either, widths that 1,024 does not divide, tokens that fill no tile: loads add up over the tiles."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(width, experts)) / width**0.5, jnp.float32)
    valid = jnp.asarray(rng.random(tokens) < 0.8)
    ours = routed(interpreted, x, w, RULES["glm"], valid=valid, interpret=interpret)
    theirs = routed(reference.fused_router, x, w, RULES["glm"], valid=valid)
    np.testing.assert_array_equal(ours.topk_idx, theirs.topk_idx)
    np.testing.assert_array_equal(ours.group_sizes, theirs.group_sizes)
    assert_close(ours.topk_weights, theirs.topk_weights, "router_f32")
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(("x", "w", "rule", "words"), [
    (jnp.zeros((2, 8), jnp.float16), jnp.zeros((8, 4)), RULES["llama4"], "x.dtype=float16"),
    (jnp.zeros((0, 8)), jnp.zeros((8, 4)), RULES["llama4"], "no token"),
    (jnp.zeros((2, 8)), jnp.zeros((8, 1025)), RULES["llama4"], "1025 experts"),
    (jnp.zeros((2, 8)), jnp.zeros((8, 64)), RouterRule(num_experts_per_tok=33), "num_experts_per_tok=33"),
])
def test_what_it_does_not_serve_goes_to_the_reference(x, w, rule, words, monkeypatch):
    with pytest.raises(NotImplementedError, match=words):
        routed(mosaic_tpu.fused_router, x, w, rule)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    fused_router(x, w, rule=rule)
    assert dispatch.last_implementation("fused_router") == "reference"
