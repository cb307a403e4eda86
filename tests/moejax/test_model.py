"""The Transformer: properties that any correct one has, and its parts against plain numpy."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import experts
from moejax.attention import causal_attention
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE, RopeConfig
from moejax.dims import letters_of
from moejax.experts import Experts, combine, permute
from moejax.layers import RMSNorm
from moejax.model import Transformer, abstract, num_params
from moejax.sharding import map_params
from pallas_kernels.fused_router import RouterRule
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("strict_promotion")

RULE = RouterRule(num_experts_per_tok=2, norm_topk_prob=False)
MOE = MoE(num_experts=5, moe_intermediate_size=24, rule=RULE, shared_intermediate_size=20, shared_gate=True)
CONFIG = ModelConfig(
    vocab_size=53, hidden_size=40, num_heads=6, num_kv_heads=2, head_dim=16, max_position_embeddings=64, qk_norm="per_head",
    attention_bias=True, layers=(LayerConfig(mlp=MOE), LayerConfig(mlp=DenseMLP(intermediate_size=56), sliding_window=4)))


def random_params(shapes: nnx.State, seed: int = 0) -> nnx.State:
    """Weights wide enough that every part decides the logits, biases and norm scales included."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.normal(0, 0.3 if len(leaf.shape) == 1 else 1.5 / leaf.shape[-1] ** 0.5, leaf.shape)
        return jnp.asarray(1 + 0.3 * value if path[-1] == "scale" else value, leaf.dtype)

    return map_params(draw, shapes)


@pytest.fixture(scope="module")
def forward():
    """tokens, **arguments -> ModelOutput of one model, jitted."""
    graphdef, shapes = abstract(CONFIG)
    params = random_params(shapes)
    jitted = jax.jit(lambda params, tokens, kwargs: nnx.merge(graphdef, params)(tokens, **kwargs))
    return lambda tokens, **kwargs: jitted(params, jnp.asarray(tokens, jnp.int32), kwargs)


def some_tokens(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape)


def test_shapes_and_routing(forward):
    out = forward(some_tokens((2, 9)))
    assert out.logits.shape == (2, 9, 53) and out.logits.dtype == jnp.float32
    routing, none = out.router
    assert none is None
    assert routing.topk_idx.shape == (18, 2) and routing.router_logits.shape == (18, 5)
    assert int(routing.group_sizes.sum()) == 36


def test_causality(forward):
    tokens = some_tokens((1, 9))
    changed = tokens.copy()
    changed[0, 5] = (changed[0, 5] + 1) % CONFIG.vocab_size
    a, b = forward(tokens).logits, forward(changed).logits
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    assert np.abs(np.asarray(a - b))[0, 5:].max(axis=-1).min() > 1e-3


def test_rows_do_not_see_each_other(forward):
    tokens = some_tokens((2, 9))
    other = tokens.copy()
    other[1] = some_tokens((9,), seed=1)
    np.testing.assert_array_equal(forward(tokens).logits[0], forward(other).logits[0])


def test_padding_changes_nothing_and_wakes_no_expert(forward):
    tokens = some_tokens((2, 9))
    valid = jnp.asarray(np.arange(9)[None] < np.array([[9], [4]]))
    padded = forward(tokens, valid=valid)
    garbage = np.where(np.asarray(valid), tokens, 7)
    np.testing.assert_array_equal(padded.logits[0], forward(garbage, valid=valid).logits[0])
    np.testing.assert_array_equal(padded.logits[1, :4], forward(garbage, valid=valid).logits[1, :4])
    assert_close(padded.logits[1, :4], forward(tokens).logits[1, :4], "model_f32")
    routing = padded.router[0]
    assert int(routing.group_sizes.sum()) == 13 * 2
    assert (np.asarray(routing.topk_idx)[~np.asarray(valid).reshape(-1)] == 5).all()


def test_one_live_token_wakes_only_its_experts(forward):
    valid = jnp.zeros((2, 9), bool).at[0, 0].set(True)
    group_sizes = forward(some_tokens((2, 9)), valid=valid).router[0].group_sizes
    assert int((group_sizes > 0).sum()) == 2


def test_logit_positions(forward):
    tokens = some_tokens((2, 9))
    picked = forward(tokens, logit_positions=jnp.array([3, 8], jnp.int32)).logits
    whole = forward(tokens).logits
    assert picked.shape == (2, 1, 53)
    assert_close(picked[:, 0], np.stack([whole[0, 3], whole[1, 8]]), "model_f32")


def test_positions_shift_without_a_trace(forward):
    """RoPE sees distances only, so the same tokens at other positions give the same logits."""
    tokens = some_tokens((1, 9))
    shifted = forward(tokens, positions=jnp.arange(20, 29, dtype=jnp.int32)[None]).logits
    np.testing.assert_allclose(shifted, forward(tokens).logits, atol=1e-4)


def test_dynamic_rope_follows_the_longest_valid_row():
    config = dataclasses.replace(CONFIG, rope=RopeConfig(kind="dynamic", factor=4.0), max_position_embeddings=6)
    graphdef, shapes = abstract(config)
    params = random_params(shapes)
    forward = jax.jit(lambda tokens, valid=None: nnx.merge(graphdef, params)(tokens, valid=valid).logits)
    tokens = jnp.asarray(some_tokens((1, 12)), jnp.int32)
    valid = jnp.arange(12)[None] < 8
    assert_close(forward(tokens, valid)[:, :8], forward(tokens[:, :8]), "model_f32")
    assert np.abs(np.asarray(forward(tokens)[:, :8] - forward(tokens[:, :8]))).max() > 1e-2


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_causal_attention_against_numpy(window):
    B, T, N, K, H = 2, 9, 6, 2, 8
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, heads, H)) for heads in (N, K, K))
    expected = np.zeros((B, T, N, H))
    for t in range(T):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(N):
            scores = np.einsum("bh,bsh->bs", q[:, t, n], k[:, first:t + 1, n // (N // K)]) / H**0.5
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            expected[:, t, n] = np.einsum("bs,bsh->bh", p, v[:, first:t + 1, n // (N // K)])
    got = causal_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), window)
    assert_close(got, expected, "attention_f32")


@pytest.mark.parametrize("shape", [(16,), (6, 16)])
def test_rms_norm_against_numpy(shape):
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 3, 6, 16)), rng.standard_normal(shape)
    norm = RMSNorm(shape, 1e-5, jnp.float32)
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    axes = tuple(range(4 - len(shape), 4))
    expected = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + 1e-5) * scale
    assert_close(norm(jnp.asarray(x, jnp.float32)), expected, "model_f32")


@pytest.mark.parametrize("most", [0, 1024])
def test_combine_undoes_permute(most, monkeypatch):
    monkeypatch.setattr(experts, "MOST_COMPARED", most)  # sorted, or each pair compared with every other
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((7, 4)), jnp.float32)
    idx = jnp.asarray(np.stack([rng.permutation(5)[:3] for _ in range(7)]), jnp.int32)
    rows, place = permute(x, idx)
    order = np.argsort(np.asarray(idx).reshape(-1), kind="stable")
    np.testing.assert_array_equal(np.asarray(place)[order], np.arange(21))
    np.testing.assert_array_equal(rows, np.asarray(x)[order // 3])
    weights = jnp.full((7, 3), 1 / 3, jnp.float32)
    assert_close(combine(rows, place, weights), x, "model_f32")


@pytest.mark.parametrize("rule", [RULE, RouterRule(num_experts_per_tok=2, norm_topk_prob=True),
                                  RouterRule(num_experts_per_tok=5, norm_topk_prob=False)])
@pytest.mark.parametrize("skew", [False, True])
def test_experts_against_a_dense_oracle(rule, skew):
    """Every expert on every token in float64, times the router's weight; with `skew` the router sends all tokens to expert 0."""
    moe = dataclasses.replace(MOE, rule=rule)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Experts(CONFIG, moe, rngs=nnx.Rngs(0), param_dtype=jnp.float32)))
    layer = nnx.merge(graphdef, random_params(shapes))
    rng = np.random.default_rng(0)
    if skew:
        layer.router.w_router_DE[...] = layer.router.w_router_DE[...].at[:, 0].set(0.9)
    x = np.abs(rng.standard_normal((2, 7, 40))) if skew else rng.standard_normal((2, 7, 40))

    def param(*path):
        node = layer
        for name in path:
            node = getattr(node, name)
        return np.asarray(node[...], np.float64)

    def silu(a):
        return a / (1 + np.exp(-a))

    flat = x.reshape(-1, 40)
    logits = flat @ param("router", "w_router_DE")
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probs, axis=-1)[:, :rule.num_experts_per_tok]
    if skew:
        assert (chosen == 0).any(axis=-1).all()
    weights = np.zeros_like(probs)
    np.put_along_axis(weights, chosen, np.take_along_axis(probs, chosen, -1), -1)
    if rule.norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True)
    hidden = silu(np.einsum("td,edf->tef", flat, param("w_gate_EDF"))) * np.einsum("td,edf->tef", flat, param("w_up_EDF"))
    expected = np.einsum("tef,efd,te->td", hidden, param("w_down_EFD"), weights)
    shared = silu(flat @ param("shared", "w_gate_FD").T) * (flat @ param("shared", "w_up_FD").T)
    shared = shared @ param("shared", "w_down_DF").T
    expected += shared / (1 + np.exp(-flat @ param("w_shared_gate_D")))[:, None]
    got, routing = layer(jnp.asarray(x, jnp.float32), None)
    np.testing.assert_array_equal(np.sort(routing.topk_idx, axis=-1), np.sort(chosen, axis=-1))
    assert_close(np.asarray(got).reshape(-1, 40), expected, "model_f32")


def test_bfloat16_computes_in_bfloat16_with_a_float32_router():
    graphdef, shapes = abstract(CONFIG, param_dtype=jnp.bfloat16)
    dtypes = {path[-1]: leaf.get_value().dtype for path, leaf in nnx.to_flat_state(shapes)}
    assert dtypes.pop("w_router_DE") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
    jaxpr = jax.make_jaxpr(lambda p, t: nnx.merge(graphdef, p)(t).logits)(shapes, jnp.zeros((1, 3), jnp.int32))
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    wide = [eqn for eqn in products if any(var.aval.dtype != jnp.bfloat16 for var in eqn.invars)]
    assert len(products) > 8
    assert all(eqn.outvars[0].aval.shape[-1] == MOE.num_experts for eqn in wide)  # router logits only


def test_float32_parameters_with_bfloat16_computation():
    graphdef, shapes = abstract(CONFIG, dtype=jnp.bfloat16)
    tokens = jnp.asarray(some_tokens((1, 5)), jnp.int32)
    grads = jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p)(tokens).logits.sum()))(random_params(shapes))
    for path, leaf in nnx.to_flat_state(grads):
        assert leaf.get_value().dtype == jnp.float32, path
        assert bool(jnp.isfinite(leaf.get_value()).all()), path
        assert bool((leaf.get_value() != 0).any()), path


def test_abstract_is_the_real_thing_without_memory():
    graphdef, shapes = abstract(CONFIG)
    real_graphdef, params = nnx.split(nnx.jit(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))())
    assert graphdef == real_graphdef
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    assert num_params(shapes) == num_params(params) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_parameter_names_end_in_their_axes():
    for path, leaf in nnx.to_flat_state(abstract(CONFIG)[1]):
        if path[-1] != "scale":
            assert len(letters_of(path[-1], len(leaf.shape))) == len(leaf.shape)
    with pytest.raises(ValueError, match="w_gate_EDF"):
        letters_of("w_gate_EDF", 2)
