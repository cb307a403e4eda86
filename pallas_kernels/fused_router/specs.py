"""Routing rules and named shapes of `fused_router`."""
from __future__ import annotations

import dataclasses
from typing import Literal, get_args

ScoreFn = Literal["softmax", "sigmoid", "sqrt_softplus", "topk_softmax"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How router logits become experts and weights. Immutable and hashable, so it can be a static argument under jit.

    Attributes:
      num_experts_per_tok: X, experts a token wakes.
      score_fn: "softmax" over all experts, "sigmoid" or "sqrt_softplus" of each logit, or "topk_softmax": experts are chosen
        on the logits and the softmax is taken over the chosen ones (the same as "softmax" with `norm_topk_prob`, unless a
        correction bias takes part in the choice).
      norm_topk_prob: whether the chosen weights are divided by their sum. Must be False for "topk_softmax", whose weights sum
        to 1 by construction.
      routed_scaling_factor: multiplies the weights last.
      n_group, topk_group: experts stand in `n_group` equal consecutive groups, and only the `topk_group` groups with the
        largest sum of their two best (corrected) scores take part in the choice. 1, 1: no groups.

    Raises:
      ValueError: a field out of what is accepted.
    """

    num_experts_per_tok: int
    score_fn: ScoreFn = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self):
        if self.score_fn not in get_args(ScoreFn):
            raise ValueError(f"RouterRule.score_fn={self.score_fn!r}: accepted are {', '.join(get_args(ScoreFn))}")
        for name in ("num_experts_per_tok", "n_group", "topk_group"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"RouterRule.{name}={value!r}: must be an integer of at least 1")
        if self.topk_group > self.n_group:
            raise ValueError(f"RouterRule.topk_group={self.topk_group}: must not exceed n_group={self.n_group}")
        if self.score_fn == "topk_softmax" and self.norm_topk_prob:
            raise ValueError("RouterRule.norm_topk_prob=True: must be False for score_fn='topk_softmax'")

    def check_num_experts(self, num_experts: int) -> None:
        """Raises ValueError when this rule cannot choose among `num_experts` experts."""
        if num_experts % self.n_group:
            raise ValueError(f"{num_experts=}: must be a multiple of RouterRule.n_group={self.n_group}")
        group = num_experts // self.n_group
        if self.n_group > 1 and group < 2:
            raise ValueError(f"{num_experts=}: RouterRule.n_group={self.n_group} groups need two experts each")
        if self.num_experts_per_tok > group * self.topk_group:
            raise ValueError(
                f"RouterRule.num_experts_per_tok={self.num_experts_per_tok}: must not exceed the "
                f"{group * self.topk_group} experts that can be chosen")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedRouterSpec:
    """T tokens of width D, E experts."""

    num_tokens: int
    hidden_size: int
    num_experts: int
    rule: RouterRule


SPECS = {
    "mixtral_decode": FusedRouterSpec(
        num_tokens=16, hidden_size=4096, num_experts=8,
        rule=RouterRule(num_experts_per_tok=2, norm_topk_prob=True)),
    "olmoe_decode": FusedRouterSpec(
        num_tokens=16, hidden_size=2048, num_experts=64, rule=RouterRule(num_experts_per_tok=8)),
    "qwen3_30b_decode": FusedRouterSpec(
        num_tokens=16, hidden_size=2048, num_experts=128,
        rule=RouterRule(num_experts_per_tok=8, norm_topk_prob=True)),
    "gpt_oss_20b_decode": FusedRouterSpec(
        num_tokens=16, hidden_size=2880, num_experts=32,
        rule=RouterRule(num_experts_per_tok=4, score_fn="topk_softmax")),
    "deepseek_v3_decode": FusedRouterSpec(
        num_tokens=16, hidden_size=7168, num_experts=256,
        rule=RouterRule(num_experts_per_tok=8, score_fn="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
                        n_group=8, topk_group=4)),
}
