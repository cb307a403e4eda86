"""What a Transformer is, as frozen values without model names. `moejax.hf_config` reads config.json into them."""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from pallas_kernels.fused_router import RouterRule

HiddenAct = Literal["silu", "gelu", "gelu_tanh", "relu", "quick_gelu"]
HIDDEN_ACTS: tuple[HiddenAct, ...] = get_args(HiddenAct)
INT32_MAX = 2**31 - 1
QK_NORMS = ("none", "per_head", "full")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def require_int(name: str, value, least: int = 1, most: int = INT32_MAX) -> None:
    """Raises ValueError unless `value` is an int (no bool) from `least` to `most`: devices count in int32."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
    if value > most:
        raise ValueError(f"{name}={value}: must be an integer of at most {most}")


def require_positive(name: str, value) -> None:
    """Raises ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}={value!r}: must be a positive number")


def require_in(name: str, value, accepted: tuple) -> None:
    """Raises ValueError unless `value` is one of `accepted`."""
    if value not in accepted:
        raise ValueError(f"{name}={value!r}: accepted are {', '.join(map(str, accepted))}")


def token_ids(name: str, value) -> tuple[int, ...]:
    """The ids of a special token's entry: one, several or none (None). Raises ValueError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for i in ids:
        require_int(name, i, least=0)
    return ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base wavelength.
      kind: how frequencies are scaled for longer contexts.
      factor: scaling factor, all kinds but "default".
      original_max_position_embeddings: context length before scaling, tokens ("yarn", "llama3").
      attention_factor: "yarn": multiplies cos and sin; None derives it from `factor` (and `mscale`, `mscale_all_dim`).
      beta_fast, beta_slow: "yarn": rotations over the original context between which the two frequency sets are blended.
      truncate: "yarn": round the blend's range to whole channel pairs.
      low_freq_factor, high_freq_factor: "llama3": bounds of the blend.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self):
        require_in("RopeConfig.kind", self.kind, ROPE_KINDS)
        require_positive("RopeConfig.theta", self.theta)
        if self.theta <= 1:
            raise ValueError(f"RopeConfig.theta={self.theta}: must exceed 1")
        require_positive("RopeConfig.factor", self.factor)
        if self.factor < 1:
            raise ValueError(f"RopeConfig.factor={self.factor}: must be at least 1")
        if self.kind in ("yarn", "llama3"):
            require_int("RopeConfig.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.kind == "yarn":
            require_positive("RopeConfig.beta_fast", self.beta_fast)
            require_positive("RopeConfig.beta_slow", self.beta_slow)
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            require_positive("RopeConfig.low_freq_factor", low)
            require_positive("RopeConfig.high_freq_factor", high)
            if low is None or high is None or high <= low:
                raise ValueError(f"RopeConfig.high_freq_factor={high}: must exceed low_freq_factor={low}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """Gated MLP: down(act(gate(x)) * up(x)). `bias` adds one to each of the three projections."""

    intermediate_size: int
    bias: bool = False

    def __post_init__(self):
        require_int("DenseMLP.intermediate_size", self.intermediate_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of gated MLPs.

    Attributes:
      num_experts: experts in the layer.
      moe_intermediate_size: hidden width of one expert.
      rule: how the router turns logits into experts and weights.
      shared_intermediate_size: hidden width of the expert that every token passes; 0 for none.
      shared_gate: scale the shared expert's output by sigmoid(x @ w), one number a token.
    """

    num_experts: int
    moe_intermediate_size: int
    rule: RouterRule
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        require_int("MoE.num_experts", self.num_experts)
        require_int("MoE.moe_intermediate_size", self.moe_intermediate_size)
        require_int("MoE.shared_intermediate_size", self.shared_intermediate_size, least=0)
        if self.rule.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.rule.num_experts_per_tok}: "
                             f"must be at most num_experts={self.num_experts}")
        if self.shared_gate and not self.shared_intermediate_size:
            raise ValueError("MoE.shared_gate=True: needs shared_intermediate_size > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One block. `sliding_window` w: the query at t sees key positions s with t - s < w; None sees all of the past."""

    mlp: DenseMLP | MoE
    sliding_window: int | None = None

    def __post_init__(self):
        if self.sliding_window is not None:
            require_int("LayerConfig.sliding_window", self.sliding_window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer. Immutable and hashable: part of the static argument of jitted functions.

    Attributes:
      vocab_size: rows of the embedding.
      hidden_size: model width D.
      num_heads, num_kv_heads, head_dim: N, K, H. `num_heads` is a multiple of `num_kv_heads`; `head_dim` is even.
      layers: one entry a block; blocks may differ.
      max_position_embeddings: context length the model was made for, tokens.
      rms_norm_eps: epsilon of every RMSNorm.
      rope: rotary embedding.
      tie_word_embeddings: logits use the embedding.
      attention_bias, attention_out_bias: biases of the q, k, v / output projections.
      qk_norm: RMSNorm of q and k before RoPE: "per_head" over H channels, "full" over all heads' channels at once.
      clip_qkv: q, k (after their norm) and v are clipped to [-clip_qkv, clip_qkv].
      hidden_act: activation of the gate.
      bos_token_id, eos_token_ids, pad_token_id: special tokens as config.json gives them.
      decodable_vocab_size: ids from here on only pad the vocabulary and are never sampled; None means vocab_size.

    Raises:
      ValueError: a field out of what is accepted; the message names field, value and accepted values.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: Literal["none", "per_head", "full"] = "none"
    clip_qkv: float | None = None
    hidden_act: HiddenAct = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decodable_vocab_size: int | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"):
            require_int(f"ModelConfig.{name}", getattr(self, name))
        require_positive("ModelConfig.rms_norm_eps", self.rms_norm_eps)
        require_in("ModelConfig.qk_norm", self.qk_norm, QK_NORMS)
        require_in("ModelConfig.hidden_act", self.hidden_act, HIDDEN_ACTS)
        if self.clip_qkv is not None:
            require_positive("ModelConfig.clip_qkv", self.clip_qkv)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"ModelConfig.num_heads={self.num_heads}: must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim={self.head_dim}: must be even (RoPE turns pairs of channels)")
        if self.rope.kind == "dynamic" and self.head_dim == 2:
            raise ValueError("ModelConfig.head_dim=2: must be at least 4 with dynamic RoPE")
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ValueError(f"ModelConfig.layers={self.layers!r}: must be a non-empty tuple of LayerConfig")
        object.__setattr__(self, "eos_token_ids", token_ids("ModelConfig.eos_token_ids", self.eos_token_ids))
        if self.bos_token_id is not None:
            require_int("ModelConfig.bos_token_id", self.bos_token_id, least=0)
        if self.decodable_vocab_size is not None:
            require_int("ModelConfig.decodable_vocab_size", self.decodable_vocab_size)
            if self.decodable_vocab_size > self.vocab_size:
                raise ValueError(f"ModelConfig.decodable_vocab_size={self.decodable_vocab_size}: "
                                 f"must be at most vocab_size={self.vocab_size}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_decodable(self) -> int:
        """Ids below this may be sampled."""
        return self.vocab_size if self.decodable_vocab_size is None else self.decodable_vocab_size

    @property
    def max_cached_positions(self) -> int | None:
        """Longest sequence that a KV cache can serve, tokens; None when nothing but memory limits it.

        "dynamic" RoPE changes every key's rotation once the sequence outgrows max_position_embeddings, which cached keys
        cannot follow.
        """
        return self.max_position_embeddings if self.rope.kind == "dynamic" else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Raises ValueError or TypeError on what is not one."""
        fields = dict(data)
        fields["rope"] = RopeConfig(**fields["rope"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        fields["layers"] = tuple(_layer_from_dict(layer) for layer in fields["layers"])
        return cls(**fields)


def repeat_layers(num_layers: int, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """`num_layers` equal blocks, for `ModelConfig.layers`."""
    require_int("num_layers", num_layers)
    return (layer,) * num_layers


def _layer_from_dict(layer: dict[str, Any]) -> LayerConfig:
    mlp = dict(layer["mlp"])
    if "num_experts" in mlp:
        return LayerConfig(sliding_window=layer["sliding_window"], mlp=MoE(**{**mlp, "rule": RouterRule(**mlp["rule"])}))
    return LayerConfig(sliding_window=layer["sliding_window"], mlp=DenseMLP(**mlp))
