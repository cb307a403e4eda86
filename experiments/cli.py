"""The one command-line contract of every experiment.

    python -m experiments.NAME [--gin_file=F]... [--gin=BINDING]... [--PARAMETER=VALUE]... [--output_dir=DIR]

An experiment is one gin-configurable function. It checks its arguments, loads what it needs, and returns a callable without
arguments that does the work and returns the result, a dict with units in its keys. So bad input is refused before any work:

  * errors while binding and building: one line on stderr that names the value and what is accepted, exit code 2;
  * the last line of stdout is the result as one JSON object, exit code 0, or `exit_code` out of the result;
  * an interrupt (Ctrl-C): one line, exit code 130;
  * work that no bug stops (a full disk, no network, a loss that is no number): one line, exit code 1;
  * anything else is a bug and keeps its traceback, exit code 1.

Every parameter of the function whose type is a str, int, float, bool or a list of these is an absl flag; so is every such field
of a parameter that is a dataclass (`kv_format: KVFormat` gives `--k_bits`). Flags win over gin bindings, those over gin files.
"""
from __future__ import annotations

import contextlib
import inspect
import json
import logging
import logging.handlers
import pathlib
import re
import signal
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import gin
from absl import flags

import experiments
from experiments import inputs, results, typed
from experiments.signature import Parameter, dataclass_parameters, define_flags, hints_of, parameters_of, parse_value

gin.add_config_file_search_path(str(inputs.ROOT))  # includes may name files from there, or beside the file that has them
gin.config._FILE_READERS[:] = gin.config._FILE_READERS[:1]  # no includes out of Python packages: that look-up fails on folders

Work = Callable[[], dict]


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
    if signal.getsignal(signal.SIGINT) is experiments.leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prepared_and_done(prepare)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    sys.exit(130)


def prepared_and_done(prepare: Callable[[], tuple[Work, results.Output | None]]) -> NoReturn:
    """`run`, but for interrupts."""
    with buffered_log() as log:
        try:
            work, output = prepare()
        except (ValueError, NotImplementedError, OSError, SyntaxError, flags.Error) as e:
            print(f"error: {one_line(e)}", file=sys.stderr)
            log.buffer.clear()
            sys.exit(2)
        log.flush()
        log.capacity = 0  # from here on at once
        try:
            result = work()
            exit_code = result.pop("exit_code", 0)
            keep(result, output)
        except (OSError, FloatingPointError) as e:
            print(f"error: {one_line(e)}", file=sys.stderr)
            sys.exit(1)
    sys.stdout.flush()
    print(json.dumps(results.jsonable(result), allow_nan=False), flush=True)
    sys.exit(exit_code)


def keep(result: dict, output: results.Output | None) -> None:
    """Saves the plots of a result, in place of which it then has their paths, and the result itself."""
    for key, value in result.items():
        if hasattr(value, "save"):  # a plot
            result[key] = None if output is None else str(output.folder / value.save(output.folder))
    if output is not None:
        output.record(result)


@contextlib.contextmanager
def buffered_log() -> Iterator[logging.handlers.MemoryHandler]:
    """Sends what our packages log to stderr, held back until it is known that the input is good."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, target=target)
    loggers = [logging.getLogger(name) for name in ("experiments", "moejax", "pallas_kernels")]
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
    output = results.Output(flag_values.output_dir, experiment.__name__, argv) if flag_values.output_dir is not None else None
    try:
        work = gin.get_configurable(experiment.__name__)()
    except RecursionError:
        raise ValueError(f"a gin binding of {experiment.__name__} refers to itself") from None
    if output is not None:
        output.write_config(gin.operative_config_str())
    return work, output


def configure(experiment, parameters, flag_values, positional=None, rest=()) -> None:
    """Clears gin's configuration and binds what the parsed flags say: files, then bindings, then the experiment's own flags.

    Raises:
      ValueError: something cannot be read or bound. Types are not checked here, see `check_bindings`.
    """
    gin.enter_interactive_mode()  # the same experiment may be configured again in one process (tests)
    gin.clear_config()
    defaults = inspect.signature(experiment).parameters
    gin.parse_config([f"{experiment.__name__}.{name} = @{kind.__name__}()"
                      for name, kind in dataclass_parameters(experiment).items()
                      if defaults[name].default is not inspect.Parameter.empty])
    for path in flag_values.gin_file:
        if not (found := pathlib.Path(inputs.locate(path))).is_file():
            raise ValueError(f"--gin_file={path}: no such file{inputs.looked_for(path)}")
        gin.add_config_file_search_path(str(found.absolute().parent))  # for its includes
        with naming(f"--gin_file={path}"):
            gin.parse_config_file(str(found))
    for binding in flag_values.gin:
        with naming(f"--gin={binding}"):
            gin.parse_config(binding)
    for p in parameters:
        value = flag_values[p.flag].value
        if p.is_list and p.flag == positional:
            value = [*(value or []), *rest] or None
        if value is not None:
            gin.bind_parameter(p.binding, parse_value(p, value))


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Turns what gin raises on a file or binding into a ValueError that names it; what gin logs meanwhile is dropped."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    except tokenize.TokenError as e:
        raise ValueError(f"{source}: {e.args[0]}, line {e.args[1][0]}") from None
    except RecursionError:
        raise ValueError(f"{source}: includes itself") from None
    except (ValueError, SyntaxError, OSError, ImportError, TypeError) as e:
        raise ValueError(f"{source}: {one_line(e)}") from None
    finally:
        logging.disable(disabled)


def register(*kinds: type) -> None:
    """Makes dataclasses gin-configurable under their own names, e.g. `KVFormat.k_bits = 3`. Calling it again is harmless."""
    for kind in kinds:
        if not is_registered(kind):
            gin.external_configurable(typed.checked(kind), name=kind.__name__)


def is_registered(function_or_class: Callable) -> bool:
    """Whether gin calls this one by its name."""
    try:
        return inspect.unwrap(gin.get_configurable(function_or_class.__name__)) is function_or_class
    except ValueError:
        return False


def register_function(function: Callable) -> None:
    """The same for a function that builds a config value."""
    gin.external_configurable(typed.checked(function), name=function.__name__)


def configurable(experiment: Callable[..., Work]) -> Callable[..., Work]:
    """Decorator of an experiment: registers it, and the dataclasses among its parameters, with gin. Returns it unchanged."""
    register(*dataclass_parameters(experiment).values())
    gin.external_configurable(typed.checked(experiment), name=experiment.__name__)
    return experiment


def check_bindings(experiment, parameters: list[Parameter]) -> None:
    """Raises ValueError for a required parameter without a value, a macro without one, an empty text or list, and a value of the
    wrong type. What gin makes of references and macros is checked when it is passed (`typed.checked`)."""
    required = {name for name, p in inspect.signature(experiment).parameters.items() if p.default is p.empty}
    name = experiment.__name__
    for missing in [n for n in required if not _is_bound(f"{name}.{n}")]:
        flag = f"--{missing} or " if any(p.binding == f"{name}.{missing}" for p in parameters) else ""
        raise ValueError(f"{missing} is required: {flag}--gin='{name}.{missing} = ...' or a --gin_file that binds it")
    for binding, hint in hints_of(experiment).items():
        if not _is_bound(binding):  # the default holds
            continue
        value = gin.query_parameter(binding)
        typed.require(binding, hint, value)
        if binding.startswith(f"{name}.") and isinstance(value, (str, list, tuple)) and not value:
            raise ValueError(f"{binding}={value!r}: must not be empty")
    try:
        with gin.unlock_config():  # back to unlocked: other experiments may still be registered
            gin.finalize()
    except ValueError as e:
        macro = re.search(r"No bindings specified for '(.+)/gin.macro'", str(e))
        raise ValueError(f"%{macro[1]}: the macro has no value; bind {macro[1]} = ... in gin" if macro else one_line(e)) from None


def _is_bound(binding: str) -> bool:
    try:
        gin.query_parameter(binding)
    except ValueError:
        return False
    return True


def one_line(error: Exception) -> str:
    """The message of an error without line breaks and without gin's note on where it was called."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith("In call to configurable")]
    return " ".join(kept) or type(error).__name__
