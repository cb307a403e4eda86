"""The flags of an experiment, out of its signature, and what their texts mean."""
from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags

SCALARS = (str, int, float, bool)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One flag: `binding` is the gin name it sets, `kind` its scalar type, `is_list` whether it repeats."""

    flag: str
    binding: str
    kind: type
    is_list: bool


def dataclass_parameters(experiment) -> dict[str, type]:
    hints = typing.get_type_hints(experiment)
    return {name: hints[name] for name in inspect.signature(experiment).parameters if dataclasses.is_dataclass(hints[name])}


def parameters_of(experiment) -> list[Parameter]:
    """The flags of an experiment, out of its signature."""
    out: dict[str, Parameter] = {}
    for binding, hint in hints_of(experiment).items():
        name, scalar = binding.rpartition(".")[2], scalar_type(hint)
        if scalar is not None:
            out.setdefault(name, Parameter(name, binding, *scalar))
    return list(out.values())


def hints_of(experiment) -> dict[str, Any]:
    """Gin binding -> type hint of each parameter, and of each field of those that are dataclasses."""
    out = {f"{experiment.__name__}.{name}": hint for name, hint in typing.get_type_hints(experiment).items() if name != "return"}
    for kind in dataclass_parameters(experiment).values():
        out |= {f"{kind.__name__}.{name}": hint for name, hint in typing.get_type_hints(kind).items()}
    return out


def scalar_type(hint) -> tuple[type, bool] | None:
    """(scalar, is it a list) of a type hint, `X | None` and Literal included; None for anything else."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        return scalar_type(inner[0]) if len(inner) == 1 else None
    if origin is typing.Literal:
        return type(args[0]), False
    if origin in (list, tuple, Sequence) and args and args[0] in SCALARS:
        return args[0], True
    return (hint, False) if hint in SCALARS else None


def define_flags(parameters: list[Parameter]) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_multi_string("gin_file", [], "gin file(s), in order", flag_values=values)
    flags.DEFINE_multi_string("gin", [], "gin binding(s), after the files", flag_values=values)
    flags.DEFINE_string("output_dir", None, "folder for results.jsonl, config.gin, environment.json", flag_values=values)
    for p in parameters:
        text = f"sets {p.binding} ({'list of ' if p.is_list else ''}{p.kind.__name__})"
        if p.is_list:
            how = "; repeat it" if p.kind is str else "; repeat it or separate by commas"
            flags.DEFINE_multi_string(p.flag, None, text + how, flag_values=values)
        elif p.kind is bool:
            flags.DEFINE_boolean(p.flag, None, text, flag_values=values)
        else:
            flags.DEFINE_string(p.flag, None, text, flag_values=values)
    return values


def parse_value(p: Parameter, value) -> Any:
    """The typed value of a flag's text. Raises ValueError naming flag, text and type."""
    if p.is_list:
        items = value if p.kind is str else [part for item in value for part in item.split(",")]
        return [_scalar(p, item) for item in items]
    return value if p.kind is bool else _scalar(p, value)


def _scalar(p: Parameter, text: str):
    if p.kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--{p.flag}={text}: must be true or false")
        return text.lower() == "true"
    try:
        value = p.kind(text)
    except ValueError:
        raise ValueError(f"--{p.flag}={text}: must be {p.kind.__name__}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"--{p.flag}={text}: must be finite")
    return value
