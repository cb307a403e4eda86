"""The one command-line contract of every experiment.

    python -m experiments.NAME [--gin_file=F]... [--gin=BINDING]... [--PARAMETER=VALUE]... [--output_dir=DIR]

An experiment is one gin-configurable function. It checks its arguments, loads what it needs, and returns a callable without
arguments that does the work and returns the result, a dict with units in its keys. So bad input is refused before any work:

  * errors while binding and building: one line on stderr that names the value and what is accepted, exit code 2;
  * the last line of stdout is the result as one JSON object, exit code 0, or `exit_code` out of the result;
  * anything else is a bug and keeps its traceback, exit code 1.

Every parameter of the function whose type is a str, int, float, bool or a list of these is an absl flag; so is every such field
of a parameter that is a dataclass (`kv_format: KVFormat` gives `--k_bits`). Flags win over gin bindings, those over gin files.
"""
from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import logging.handlers
import math
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import gin
from absl import flags

from experiments import results

SCALARS = (str, int, float, bool)
Work = Callable[[], dict]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One flag: `binding` is the gin name it sets, `kind` its scalar type, `is_list` whether it repeats."""

    flag: str
    binding: str
    kind: type
    is_list: bool


def main(experiment: Callable[..., Work], *, positional: str | None = None, argv: Sequence[str] | None = None) -> None:
    """Runs `experiment` under the contract above and exits the process.

    Args:
      experiment: the function; its docstring is the help text.
      positional: a list parameter that takes arguments without a flag name.
      argv: the command line without the program, `sys.argv[1:]` by default.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parameters = parameters_of(experiment)
    flag_values = define_flags(parameters)
    if any(a in ("-h", "--help", "-help", "--helpfull") for a in argv):
        print(f"{inspect.getdoc(experiment)}\n\nFlags:\n{flag_values.get_help()}")
        sys.exit(0)
    run(lambda: build(experiment, parameters, flag_values, positional, argv))


def run(prepare: Callable[[], tuple[Work, results.Output | None]]) -> NoReturn:
    """Prepares and does work under the contract above and exits the process."""
    with buffered_log() as log:
        try:
            work, output = prepare()
        except (ValueError, NotImplementedError, OSError, SyntaxError, flags.Error) as e:
            print(f"error: {one_line(e)}", file=sys.stderr)
            log.buffer.clear()
            sys.exit(2)
        log.flush()
        log.capacity = 0  # from here on at once
        result = work()
    exit_code = result.pop("exit_code", 0)
    for key, value in result.items():
        if hasattr(value, "save"):  # a plot
            result[key] = None if output is None else str(output.folder / value.save(output.folder))
    if output is not None:
        output.record(result)
    sys.stdout.flush()
    print(json.dumps(results.jsonable(result), allow_nan=False), flush=True)
    sys.exit(exit_code)


@contextlib.contextmanager
def buffered_log() -> Iterator[logging.handlers.MemoryHandler]:
    """Sends what moejax and pallas_kernels log to stderr, held back until it is known that the input is good."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, target=target)
    loggers = [logging.getLogger(name) for name in ("moejax", "pallas_kernels")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [handler], False
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.handlers, logger.propagate = [], True


def build(experiment, parameters, flag_values, positional, argv) -> tuple[Work, results.Output | None]:
    """Parses flags and gin, calls the experiment. Raises what `main` turns into exit code 2."""
    rest = flag_values([experiment.__name__, *argv])[1:]
    if rest and positional is None:
        raise ValueError(f"unexpected argument {rest[0]!r}: everything is a flag, see --help")
    configure(experiment, parameters, flag_values, positional, rest)
    check_bindings(experiment, parameters)
    output = results.Output(flag_values.output_dir, experiment.__name__, argv) if flag_values.output_dir else None
    work = gin.get_configurable(experiment.__name__)()
    if output is not None:
        output.write_config(gin.operative_config_str())
    return work, output


def configure(experiment, parameters, flag_values, positional=None, rest=()) -> None:
    """Clears gin's configuration and binds what the parsed flags say: files, then bindings, then the experiment's own flags.

    Raises:
      ValueError, SyntaxError, OSError: something cannot be read or bound. Types are not checked here, see `check_bindings`.
    """
    gin.enter_interactive_mode()  # the same experiment may be configured again in one process (tests)
    gin.clear_config()
    defaults = inspect.signature(experiment).parameters
    gin.parse_config([f"{experiment.__name__}.{name} = @{kind.__name__}()"
                      for name, kind in dataclass_parameters(experiment).items()
                      if defaults[name].default is not inspect.Parameter.empty])
    for path in flag_values.gin_file:
        if not pathlib.Path(path).is_file():
            raise ValueError(f"--gin_file={path}: no such file")
        gin.parse_config_file(path)
    gin.parse_config(flag_values.gin)
    for p in parameters:
        value = flag_values[p.flag].value
        if p.is_list and p.flag == positional:
            value = [*(value or []), *rest] or None
        if value is not None:
            gin.bind_parameter(p.binding, parse_value(p, value))


def register(*kinds: type) -> None:
    """Makes dataclasses gin-configurable under their own names, e.g. `KVFormat.k_bits = 3`. Calling it again is harmless."""
    for kind in kinds:
        try:
            gin.get_configurable(kind.__name__)
        except ValueError:
            gin.external_configurable(kind, name=kind.__name__)


def register_function(function: Callable) -> None:
    """The same for a function that builds a config value."""
    gin.external_configurable(function, name=function.__name__)


def configurable(experiment: Callable[..., Work]) -> Callable[..., Work]:
    """Decorator of an experiment: registers it, and the dataclasses among its parameters, with gin. Returns it unchanged."""
    register(*dataclass_parameters(experiment).values())
    gin.external_configurable(experiment, name=experiment.__name__)
    return experiment


def dataclass_parameters(experiment) -> dict[str, type]:
    hints = typing.get_type_hints(experiment)
    return {name: hints[name] for name in inspect.signature(experiment).parameters if dataclasses.is_dataclass(hints[name])}


def parameters_of(experiment) -> list[Parameter]:
    """The flags of an experiment, out of its signature."""
    hints = typing.get_type_hints(experiment)
    out: dict[str, Parameter] = {}

    def add(name: str, binding: str, hint) -> None:
        scalar = scalar_type(hint)
        if scalar is not None:
            out.setdefault(name, Parameter(name, binding, *scalar))

    for name in inspect.signature(experiment).parameters:
        add(name, f"{experiment.__name__}.{name}", hints[name])
    for kind in dataclass_parameters(experiment).values():
        for name, hint in typing.get_type_hints(kind).items():
            add(name, f"{kind.__name__}.{name}", hint)
    return list(out.values())


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


def check_bindings(experiment, parameters: list[Parameter]) -> None:
    """Raises ValueError for a required parameter without a value and for a gin value of the wrong type."""
    required = {name for name, p in inspect.signature(experiment).parameters.items() if p.default is p.empty}
    name = experiment.__name__
    for missing in [n for n in required if not _is_bound(f"{name}.{n}")]:
        flag = f"--{missing} or " if any(p.binding == f"{name}.{missing}" for p in parameters) else ""
        raise ValueError(f"{missing} is required: {flag}--gin='{name}.{missing} = ...' or a --gin_file that binds it")
    for p in parameters:
        if not _is_bound(p.binding):  # the default holds
            continue
        value = gin.query_parameter(p.binding)
        items = value if p.is_list and isinstance(value, (list, tuple)) else [value]
        accepted = (int, float) if p.kind is float else (p.kind,)
        for item in items:
            wrong = not isinstance(item, accepted) or (isinstance(item, bool) and p.kind is not bool)
            if item is not None and wrong and type(item).__module__ != "gin.config":
                kind = f"a list of {p.kind.__name__}" if p.is_list else p.kind.__name__
                raise ValueError(f"{p.binding}={value!r}: must be {kind}")


def _is_bound(binding: str) -> bool:
    try:
        gin.query_parameter(binding)
    except ValueError:
        return False
    return True


def one_line(error: Exception) -> str:
    """The message of an error without line breaks and without gin's note on where it was called."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith("In call to configurable")]
    return " ".join(kept) or type(error).__name__
