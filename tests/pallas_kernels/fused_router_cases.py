"""What every implementation of `fused_router` must do. Subclass `FusedRouterCases` and set `implementation`."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import RouterRule, fused_router
from tests.pallas_kernels.close_page_cases import FAST_COMPILE
from tests.tolerances import assert_close

RULES = {
    "mixtral": RouterRule(num_experts_per_tok=2, norm_topk_prob=True),
    "olmoe": RouterRule(num_experts_per_tok=5),
    "gpt_oss": RouterRule(num_experts_per_tok=4, score_fn="topk_softmax"),
    "deepseek_v2": RouterRule(num_experts_per_tok=3, routed_scaling_factor=16.0),
    "deepseek_v3": RouterRule(num_experts_per_tok=4, score_fn="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
                              n_group=4, topk_group=2),
    "glm": RouterRule(num_experts_per_tok=3, score_fn="sigmoid", norm_topk_prob=True),
    "llama4": RouterRule(num_experts_per_tok=1, score_fn="sigmoid"),
    "deepseek_v4": RouterRule(num_experts_per_tok=3, score_fn="sqrt_softplus", norm_topk_prob=True, routed_scaling_factor=1.5),
}
EXPERTS, WIDTH, TOKENS = 12, 64, 40


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.normal(size=(WIDTH, EXPERTS)) / 8 - 0.05, jnp.float32)


def oracle(x, w, rule: RouterRule, bias=None, correction_bias=None):
    """(ids, weights) per token, one token at a time in float64."""
    ids, weights = [], []
    for row in np.asarray(x).astype(np.float64):
        logits = row @ np.asarray(w).astype(np.float64) + (0 if bias is None else np.asarray(bias))
        exp = np.exp(logits - logits.max())
        score = {
            "softmax": exp / exp.sum(), "topk_softmax": exp, "sigmoid": 1 / (1 + np.exp(-logits)),
            "sqrt_softplus": np.sqrt(np.log1p(np.exp(logits)))}[rule.score_fn]
        choice = score + (0 if correction_bias is None else np.asarray(correction_bias))
        groups = choice.reshape(rule.n_group, -1)
        if rule.n_group > 1:
            best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1))[:rule.topk_group]
            groups = np.where(np.isin(np.arange(rule.n_group), best)[:, None], groups, -np.inf)
        top = np.argsort(-groups.reshape(-1), kind="stable")[:rule.num_experts_per_tok]
        weight = score[top]
        if rule.norm_topk_prob or rule.score_fn == "topk_softmax":
            weight = weight / weight.sum()
        ids.append(top)
        weights.append(weight * rule.routed_scaling_factor)
    return np.stack(ids), np.stack(weights)


route = jax.jit(fused_router, static_argnames=("rule", "implementation"), compiler_options=FAST_COMPILE)


def sum_of_squares(w, x, rule, implementation):
    return jnp.sum(fused_router(x, w, rule=rule, implementation=implementation).topk_weights ** 2)


router_gradient = jax.jit(
    jax.grad(sum_of_squares), static_argnames=("rule", "implementation"), compiler_options=FAST_COMPILE)


class FusedRouterCases:
    implementation: str | None = None

    def run(self, x, w, rule, **kwargs):
        return route(x, w, rule=rule, implementation=self.implementation, **kwargs)

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("family", RULES)
    def test_oracle(self, family, with_bias):
        x, w = inputs()
        biases = {}
        if with_bias:
            biases["bias"] = jnp.linspace(-1, 1, EXPERTS, dtype=jnp.float32)
            if RULES[family].score_fn != "topk_softmax":
                biases["correction_bias"] = jnp.linspace(0.5, -0.5, EXPERTS, dtype=jnp.float32)
        routing = self.run(x, w, RULES[family], **biases)
        ids, weights = oracle(x, w, RULES[family], **biases)
        np.testing.assert_array_equal(routing.topk_idx, ids)
        assert_close(routing.topk_weights, weights, "router_f32")
        assert_close(routing.router_logits, np.asarray(x) @ np.asarray(w) + np.asarray(biases.get("bias", 0)), "router_f32")
        np.testing.assert_array_equal(routing.group_sizes, np.bincount(ids.reshape(-1), minlength=EXPERTS))
        assert (routing.topk_idx.dtype, routing.group_sizes.dtype) == (jnp.int32, jnp.int32)
        assert (routing.topk_weights.dtype, routing.router_logits.dtype) == (jnp.float32, jnp.float32)

    def test_without_normalisation_weights_are_the_full_softmax(self):
        x, w = inputs()
        weights = np.asarray(self.run(x, w, RULES["olmoe"]).topk_weights)
        assert (weights.sum(1) < 0.95).all() and (weights > 0).all()

    def test_correction_bias_chooses_but_does_not_weigh(self):
        x, w = inputs()
        rule = RouterRule(num_experts_per_tok=2, score_fn="sigmoid")
        bias = jnp.full(EXPERTS, -10.0).at[jnp.array([3, 8])].set(10.0)
        routing = self.run(x, w, rule, correction_bias=bias)
        assert set(np.unique(routing.topk_idx)) == {3, 8}
        assert (np.asarray(routing.topk_weights) <= 1).all()

    def test_correction_bias_is_not_rounded_to_half_precision(self):
        """Biases 1e-3 apart near 5: bfloat16 cannot tell them apart."""
        x, w = jnp.zeros((3, WIDTH)), jnp.zeros((WIDTH, EXPERTS))
        bias = 5 + 1e-3 * jnp.arange(EXPERTS, dtype=jnp.float32)
        routing = self.run(x, w, RouterRule(num_experts_per_tok=3, score_fn="sigmoid"), correction_bias=bias)
        np.testing.assert_array_equal(routing.topk_idx, [[11, 10, 9]] * 3)

    def test_groups_keep_the_best_expert_out(self):
        """The single best expert stands in a group whose two best sum to less."""
        rule = RouterRule(num_experts_per_tok=2, score_fn="sigmoid", n_group=3, topk_group=1)
        logits = jnp.array([[5, -9, -9, -9, 2, 2.5, -9, -9, 1, 1, -9, -9]])
        routing = self.run(jnp.ones((1, 1)), logits, rule)
        np.testing.assert_array_equal(routing.topk_idx, [[5, 4]])

    def test_invalid_rows_wake_no_expert(self):
        x, w = inputs()
        valid = np.arange(TOKENS) % 3 != 0
        for name in ("olmoe", "gpt_oss", "deepseek_v3"):
            clean = self.run(x, w, RULES[name])
            routing = self.run(jnp.where(valid[:, None], x, jnp.nan), w, RULES[name], valid=jnp.asarray(valid))
            np.testing.assert_array_equal(routing.topk_idx[~valid], EXPERTS)
            assert not np.asarray(routing.topk_weights)[~valid].any()
            np.testing.assert_array_equal(routing.topk_idx[valid], clean.topk_idx[valid])
            np.testing.assert_array_equal(routing.topk_weights[valid], clean.topk_weights[valid])
            chosen = np.asarray(clean.topk_idx)[valid].reshape(-1)
            np.testing.assert_array_equal(routing.group_sizes, np.bincount(chosen, minlength=EXPERTS))

    def test_ties_go_to_the_lower_expert(self):
        routing = self.run(jnp.zeros((TOKENS, WIDTH)), jnp.zeros((WIDTH, EXPERTS)), RULES["mixtral"])
        np.testing.assert_array_equal(routing.topk_idx, [[0, 1]] * TOKENS)
        np.testing.assert_array_equal(routing.topk_weights, 0.5)

    def test_half_precision_inputs_are_computed_in_float32(self):
        x, w = inputs()
        half = x.astype(jnp.bfloat16)
        np.testing.assert_array_equal(
            self.run(half, w, RULES["olmoe"]).router_logits,
            self.run(half.astype(jnp.float32), w, RULES["olmoe"]).router_logits)

    def test_very_negative_logits_give_no_nan(self):
        for rule in RULES.values():
            routing = self.run(jnp.ones((TOKENS, WIDTH)), jnp.full((WIDTH, EXPERTS), -4.0), rule)
            assert np.isfinite(np.asarray(routing.topk_weights)).all()

    @pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
    def test_weights_are_differentiable(self, family):
        x, w = inputs()
        gradient = router_gradient(w, x, rule=RULES[family], implementation=self.implementation)
        assert np.isfinite(np.asarray(gradient)).all() and np.asarray(gradient).any()
