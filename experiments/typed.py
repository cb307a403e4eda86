"""Arguments checked against their annotations: gin binds anything to anything, and the flaw would show far from its cause."""
from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

NAMES = {int: "int", float: "a finite float", str: "str", bool: "bool", types.NoneType: "None"}


def accepts(hint, value) -> bool:
    """Whether `value` may go where `hint` stands. What gin has not resolved yet may: it is checked when it is passed."""
    if type(value).__module__ == "gin.config":
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(arg, value) for arg in args)
    if origin is typing.Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(accepts(args[0], item) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def words(hint) -> str:
    """The hint in an error message."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, args))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in (list, tuple, Sequence):
        return f"a list of {words(args[0])}"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"{hint.__name__} (in gin @{hint.__name__}())"
    return NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def require(name: str, hint, value) -> None:
    """Raises ValueError unless `value` may go where `hint` stands."""
    if not accepts(hint, value):
        text = repr(value)
        raise ValueError(f"{name}={text if len(text) <= 100 else text[:100] + '...'}: must be {words(hint)}")


def checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a function or a dataclass, that raises ValueError naming an argument that is missing or does not fit."""
    signature, hints = inspect.signature(call), typing.get_type_hints(call)

    @functools.wraps(call, updated=())
    def checking(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as e:  # of the call, not of what it does
            raise ValueError(f"{call.__name__}: {e}; bind it in gin") from None
        for name, value in bound.arguments.items():
            require(f"{call.__name__}.{name}", hints[name], value)
        return call(*args, **kwargs)

    return checking
