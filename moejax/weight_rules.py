"""What each weight matrix of a model is kept in: ordered rules, resolved against a config before any weight is read.

A matrix has a dotted name, as the model holds it:

    embedding, lm_head
    layers.3.attention.qkv, layers.3.attention.out
    layers.3.mlp.gate_up, layers.3.mlp.down            a dense layer's MLP
    layers.3.experts.gate_up, layers.3.experts.down    the routed experts
    layers.3.shared.gate_up, layers.3.shared.down      the shared expert

A rule is PATTERN=FORMAT. A pattern is a run of whole parts of a name, in each of which *, ? and [0-3] stand for what they do in
file names: `experts`, `experts.down`, `layers.0`, `layers.[0-3].attention`, `lm_head`. Of the rules that match a matrix the last
decides; without any it stays as it is loaded. Routers and norms are no such matrices: they are never quantised.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moejax.config import ModelConfig, MoE
from pallas_kernels.packed_weights import BLOCK, MAX_CHUNK
from pallas_kernels.qarray import MX_GROUP

# "bf16" leaves weights as they are loaded; the others are packed, "packed_bf16" bit for bit.
# The kernels read all but the last two yet, which the reference serves.
WEIGHT_BITS = {"bf16": 16, "packed_bf16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8_e4m3": 8, "mxfp4": 4}
GROUP_SIZES = (32, 64, 128)
DENSE = ("attention", "mlp", "shared", "lm_head")
# Matrices of one module: all of them are packed, or none.
_PARTNERS = {"qkv": "out", "out": "qkv", "gate_up": "down", "down": "gate_up"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """What a matrix is kept in.

    Attributes:
      kind: a name of WEIGHT_BITS.
      group_size: channels of the contraction that share a scale: 32, 64 or 128; None for the largest of them that divides it.
      symmetric: no zero points.

    Raises:
      ValueError: a field out of what is accepted, or one that 16 bits do not have.
    """

    kind: str
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self):
        if self.kind not in WEIGHT_BITS:
            raise ValueError(f"{self.kind!r}: accepted are {', '.join(WEIGHT_BITS)}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ValueError(f"group size {self.group_size}: accepted are {', '.join(map(str, GROUP_SIZES))}")
        if self.bits == 16 and (self.group_size is not None or not self.symmetric):
            raise ValueError(f"{self.name!r}: {self.kind} has neither groups nor zero points")
        if self.has_float_codes and not self.symmetric:
            raise ValueError(f"{self.name!r}: {self.kind} has no zero points")
        if self.kind == "mxfp4" and self.group_size not in (None, MX_GROUP):
            raise ValueError(f"{self.name!r}: groups of mxfp4 are of {MX_GROUP}")

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """Of KIND, with ":g32", ":g64" or ":g128" for the group size and ":sym" or ":asym" behind it: "int4:g64:asym". Raises
        ValueError that names the text."""
        kind, *options = text.split(":")
        fields: dict[str, int | bool] = {}
        for option in options:
            if option[:1] == "g" and option[1:].isdecimal() and "group_size" not in fields:
                fields["group_size"] = int(option[1:])
            elif option in ("sym", "asym") and "symmetric" not in fields:
                fields["symmetric"] = option == "sym"
            else:
                raise ValueError(f"{text!r}: accepted are KIND, KIND:g32, :g64 or :g128, and :sym or :asym, such as int4:g64:asym")
        try:
            return cls(kind=kind, **fields)  # type: ignore[arg-type]
        except ValueError as e:
            raise ValueError(str(e) if not options else f"{text!r}: {e}") from None

    @property
    def bits(self) -> int:
        return WEIGHT_BITS[self.kind]

    @property
    def has_float_codes(self) -> bool:
        return self.kind in ("fp8_e4m3", "mxfp4")

    @property
    def packed(self) -> bool:
        """Is it anything but left as it is?"""
        return self.kind != "bf16"

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        return self.kind + (f":g{self.group_size}" if self.group_size else "") + ("" if self.symmetric else ":asym")

    def group_of(self, k: int) -> int:
        """Channels a group of a contraction of k."""
        return MX_GROUP if self.kind == "mxfp4" else self.group_size or math.gcd(k, MAX_CHUNK)


class Matrix(NamedTuple):
    """Sizes of a matrix, or of each of several: contraction and columns (of gate and up each)."""

    k: int
    n: int


# The format of each packed matrix: by its name, or by what comes after the layer in it.
Formats = Mapping[str, WeightFormat]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule. `said` is what the user wrote, for messages."""

    pattern: str
    format: WeightFormat
    said: str

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Of PATTERN=FORMAT. Raises ValueError that names the text."""
        pattern, equals, name = text.partition("=")
        if not (pattern and equals and name):
            raise ValueError(f"weight_rules={text!r}: must be PATTERN=FORMAT, such as experts=int4 or layers.0.attention=int8:g64")
        try:
            return cls(pattern, WeightFormat.parse(name), f"weight_rules={text!r}")
        except ValueError as e:
            raise ValueError(f"weight_rules={text!r}: {e}") from None

    def matches(self, name: str) -> bool:
        """Is the pattern a run of whole parts of this name?"""
        parts, patterns = name.split("."), self.pattern.split(".")
        return any(all(map(fnmatch.fnmatchcase, parts[i:], patterns)) for i in range(len(parts) - len(patterns) + 1))


def matrices(config: ModelConfig) -> dict[str, Matrix]:
    """The matrices that rules are about, by name."""
    D, heads, kv_heads = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out = {"embedding": Matrix(D, config.vocab_size)}

    def gated(name: str, width: int) -> dict[str, Matrix]:
        return {f"{name}.gate_up": Matrix(D, width), f"{name}.down": Matrix(width, D)}

    for i, layer in enumerate(config.layers):
        out[f"layers.{i}.attention.qkv"] = Matrix(D, heads + 2 * kv_heads)
        out[f"layers.{i}.attention.out"] = Matrix(heads, D)
        if not isinstance(layer.mlp, MoE):
            out |= gated(f"layers.{i}.mlp", layer.mlp.intermediate_size)
            continue
        out |= gated(f"layers.{i}.experts", layer.mlp.moe_intermediate_size)
        if layer.mlp.shared_intermediate_size:
            out |= gated(f"layers.{i}.shared", layer.mlp.shared_intermediate_size)
    return out | {"lm_head": Matrix(D, config.vocab_size)}


def rules_of(
    config: ModelConfig, expert_weights: str = "bf16", dense_weights: str = "bf16", weight_rules: Sequence[str] = (),
) -> tuple[Rule, ...]:
    """The shorthands as rules, then the rules.

    Args:
      expert_weights: the format of routed experts.
      dense_weights: that of attention, dense and shared MLPs and the output projection.
      weight_rules: texts of rules, which win over the two.

    Raises:
      ValueError: an unknown format, a text that is no rule, or experts' weights for a model without experts.
    """
    rules = []
    names = matrices(config)
    for parameter, text, patterns in (
            ("expert_weights", expert_weights, ("experts",)), ("dense_weights", dense_weights, DENSE)):
        try:
            weight_format = WeightFormat.parse(text)
        except ValueError as e:
            raise ValueError(f"{parameter}={text!r}: {str(e).removeprefix(f'{text!r}: ')}") from None
        made = [Rule(pattern, weight_format, f"{parameter}={text!r}") for pattern in patterns]
        made = [rule for rule in made if any(map(rule.matches, names))] if weight_format.packed else []
        if weight_format.packed and not made:
            raise ValueError(f"{parameter}={text!r}: the model has no experts")
        rules += made
    return (*rules, *map(Rule.parse, weight_rules))


def described(rules: Sequence[Rule]) -> str:
    """The rules in short."""
    return ", ".join(f"{rule.pattern}={rule.format.name}" for rule in rules) or "none"


def resolve(config: ModelConfig, rules: Sequence[Rule]) -> dict[str, WeightFormat]:
    """The format of every matrix that is packed, by name.

    Raises:
      ValueError: a rule that matches nothing, asks for a router, or that later rules leave without effect; a matrix whose sizes a
        format cannot hold; two matrices of which only one is packed, where they must go together. The message names them.
    """
    there = matrices(config)
    deciding = {name: [rule for rule in rules if rule.matches(name)][-1:] for name in there}
    for rule in rules:
        if not any(map(rule.matches, there)):
            if any(rule.matches(f"layers.{i}.router") for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoE)):
                raise ValueError(f"{rule.said}: routers are never quantised")
            raise ValueError(f"{rule.said}: matches no matrix; there are {_listed(there)}")
        if not any(chosen and chosen[0] is rule for chosen in deciding.values()):
            raise ValueError(f"{rule.said}: has no effect, later rules decide all that it matches")
    formats = {name: chosen[0].format for name, chosen in deciding.items() if chosen and chosen[0].format.packed}
    for name, weight_format in formats.items():
        _check(name, weight_format, there[name], formats, config)
    return formats


def formats_of(
    config: ModelConfig, expert_weights: str = "bf16", dense_weights: str = "bf16", weight_rules: Sequence[str] = (),
) -> dict[str, WeightFormat]:
    """`resolve` of `rules_of`."""
    return resolve(config, rules_of(config, expert_weights, dense_weights, weight_rules))


def of_layer(formats: Formats, layer: int) -> dict[str, WeightFormat]:
    """Those of one layer, by what comes after it in their names."""
    start = f"layers.{layer}."
    return {name.removeprefix(start): f for name, f in formats.items() if name.startswith(start)}


def of_module(formats: Formats, module: str) -> dict[str, WeightFormat]:
    """Those of one module of a layer ("experts"), by the last part of their names."""
    return {name.removeprefix(f"{module}."): f for name, f in formats.items() if name.startswith(f"{module}.")}


def _check(name: str, weight_format: WeightFormat, matrix: Matrix, formats: Formats, config: ModelConfig) -> None:
    """Raises ValueError for a format that this matrix cannot have."""
    where = f"{name} in {weight_format.name!r}"
    k, n = matrix
    group = weight_format.group_of(k)
    if name == "embedding":
        if weight_format.bits == 16 or weight_format.has_float_codes:
            raise ValueError(f"{where}: accepted are bf16, int8, int4, int3, int2")
        if config.tie_word_embeddings and "lm_head" not in formats:
            raise ValueError(f"{where}: it is the output projection too; give lm_head a format as well")
    if k % BLOCK or (n % BLOCK and name not in ("embedding", "lm_head")):
        raise ValueError(f"{where}: matrices of {k} x {n}; both must be multiples of {BLOCK}")
    if k % group:
        accepted = ", ".join(str(size) for size in GROUP_SIZES if k % size == 0)
        raise ValueError(f"{where}: groups of {group} do not divide its {k} channels; accepted are {accepted}")
    module, _, last = name.rpartition(".")
    if last in _PARTNERS and (partner := f"{module}.{_PARTNERS[last]}") not in formats:
        raise ValueError(f"{where}: {partner} must be packed too ('packed_bf16' keeps it in bfloat16)")


def _listed(there: Mapping[str, Matrix]) -> str:
    """The names, those of all layers in one."""
    layers = {int(name.split(".")[1]) for name in there if name.startswith("layers.")}
    kinds = dict.fromkeys("layers.N." + ".".join(name.split(".")[2:]) if name.startswith("layers.") else name for name in there)
    return f"{', '.join(kinds)} (N from 0 to {max(layers)})"
