"""What a sweep is asked to run: sweep files, --param, experiments by name, and the identity of a point."""
from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import pathlib
import sys
import traceback
import types
from collections.abc import Callable

import gin

from experiments import cli, grid, inputs, sweep_folder
from experiments.signature import Parameter

SWEEP_FILE_MODULE = "moejax_sweep_file"


def load_file(path: str) -> types.ModuleType:
    """The sweep file as a module. Raises ValueError with the place of any error in it."""
    given, path = path, inputs.locate(path)
    if not pathlib.Path(path).is_file() or not path.endswith(".py"):
        raise ValueError(f"--sweep={given}: must be an existing Python file, such as configs/sweeps/smoke.py")
    spec = importlib.util.spec_from_file_location(SWEEP_FILE_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    gin.enter_interactive_mode()  # a file may be loaded again, and register its experiment again
    sys.modules[SWEEP_FILE_MODULE] = module
    with naming(path):
        spec.loader.exec_module(module)
    return module


def points_of(source: types.ModuleType, path: str) -> list[grid.Point]:
    if not callable(getattr(source, "points", None)):
        raise ValueError(f"--sweep={path}: must define points(), which returns a list of {{gin binding: value}}")
    with naming(path):
        points = source.points()
    good = isinstance(points, list) and all(isinstance(p, dict) and all(isinstance(k, str) for k in p) for p in points)
    if not good:
        raise ValueError(f"--sweep={path}: points() returned {str(points)[:80]}: must be a list of {{gin binding: value}}")
    return points


@contextlib.contextmanager
def naming(path: str):
    """Turns any error in the sweep file into a ValueError that names file and line."""
    try:
        yield
    except Exception as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
        message = e.msg if isinstance(e, SyntaxError) else cli.one_line(e)
        raise ValueError(f"--sweep={path}, line {line}: {kind}{message}") from None


def find_experiment(flag: str | None, source: types.ModuleType | None) -> Callable[..., cli.Work]:
    """The function that --experiment, or else EXPERIMENT of the sweep file, or else "quality" names."""
    said = getattr(source, "EXPERIMENT", None)
    if flag and said and flag != said:
        raise ValueError(f"--experiment={flag}: the sweep file is for EXPERIMENT={said!r}")
    name = flag or said or "quality"
    own = getattr(source, str(name), None)
    if inspect.isfunction(own):
        if not cli.is_registered(own):
            raise ValueError(f"experiment={name}: the function of the sweep file must be decorated with @cli.configurable, and "
                             "be the only one of its name")
        return own
    files = pathlib.Path(__file__).parent.glob("*.py")
    accepted = sorted(path.stem for path in files if "\n@cli.configurable\n" in path.read_text())
    if name not in accepted:
        raise ValueError(f"experiment={name}: must be one of {', '.join(accepted)}, or a configurable of the sweep file")
    return getattr(importlib.import_module(f"experiments.{name}"), name)


def parse_param(text: str) -> list[grid.Point]:
    """The points of one --param."""
    name, _, alternatives = (part.strip() for part in text.partition("="))
    try:
        values = ast.literal_eval(alternatives)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        values = None
    if not name or not isinstance(values, list):
        raise ValueError(f"--param={text}: must be NAME=[ALTERNATIVE, ...] with Python literals, such as k_bits=[4, 3] or "
                         "quality.text=[['a.txt'], ['a.txt', 'b.txt']]")
    return grid.param(name, values)


def named(points: list[grid.Point], experiment: Callable, parameters: list[Parameter]) -> list[grid.Point]:
    """The points under full gin names, and with a list of one for a lone value of a list parameter."""
    by_flag = {p.flag: p.binding for p in parameters}
    lists = {p.binding for p in parameters if p.is_list}

    def full(name: str) -> str:
        if "." not in name and name not in by_flag:
            raise ValueError(f"{name}: is no parameter of {experiment.__name__}; accepted are {', '.join(by_flag)}, or a gin "
                             "binding, which has a dot")
        return by_flag.get(name, name)

    def typed(name: str, value):
        return [value] if name in lists and value is not None and not isinstance(value, (list, tuple)) else value

    return grid.chain(*(grid.prod(*([{full(n): typed(full(n), v)}] for n, v in point.items())) for point in points))


def identified(experiment: str, common: str, points: list[grid.Point]) -> dict[str, grid.Point]:
    """Each point under its identity: a hash of the experiment's name and all bindings, the common ones included."""
    out = {}
    for point in points:
        text = json.dumps([experiment, sweep_folder.bindings(common), describe(point)], sort_keys=True)
        out[hashlib.sha256(text.encode()).hexdigest()[:16]] = point
    return out


def describe(value):
    """A bound value in JSON's terms. Raises ValueError for one that cannot be told apart from others after the sweep."""
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [describe(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: describe(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: describe({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})}
    raise ValueError(f"a point binds {value!r}: must be a finite number, text, boolean, None, dataclass, or a list of these")


def varying(points: list[grid.Point]) -> set[str]:
    """The names that not all points bind to the same value."""
    same = {name for name, value in points[0].items() if all(name in p and p[name] == value for p in points)} if points else set()
    return {name for point in points for name in point} - same


def text_of(point: grid.Point) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in point.items())
