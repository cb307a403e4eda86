"""Runs an experiment at every point of a grid, resumably, and reports all of them together.

    python -m experiments.sweep --sweep=configs/sweeps/NAME.py --output_dir=DIR [--shard=i/n] [--experiment=NAME]
    python -m experiments.sweep --output_dir=DIR --experiment=quality --param="k_bits=[4, 3, 2]" --param="sink_tokens=[0, 4]"
    python -m experiments.sweep --output_dir=DIR --report_only

A sweep file is Python. It defines `points()`, which returns a list of {gin binding: value} built with `experiments.grid`, and may
set EXPERIMENT ("quality" otherwise), the name of an experiment in experiments/ or of a `cli.configurable` function of the file
itself; REPORT_X and REPORT_Y, what --report_x and --report_y are then by default; and PROCESS_PER_POINT = True. Its docstring heads
the report. Each --param is NAME=[ALTERNATIVE, ...], Python literals; several are crossed with each
other and with the file's points. NAME is a gin binding or a flag of the experiment. Where the binding is itself a list, an
alternative that is not one stands for a list of one: k_bits=[4, 3] is short for k_bits=[[4], [3]].

--gin_file, --gin and the experiment's own flags hold for every point; a point's own bindings win over them.

Every point is checked before any runs. All run in this process, one after another, so what an experiment keeps between calls (a
model, reference scores) is loaded once. With PROCESS_PER_POINT each has a process of its own: its peak of memory is its own. Each
finished point is one line of DIR/points.jsonl; the same command again goes on after the last of them. A point that fails is
recorded and stays failed until --retry_failed; so does one that is refused because it does not fit into the device's memory, which
is no failure of the sweep. The files that its contents come from (texts, checkpoints) are no part of a point's identity: after
changing one, use another folder. With --shard=i/n several processes share the points and DIR; the last to finish writes the report
of all: sweep.jsonl, sweep.csv, sweep.md, plots and report.html.

The exit code is 1 when a point of the sweep has failed, 2 for bad input, 0 otherwise.
"""
from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import multiprocessing
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import process
from typing import Any

import gin
import jax
from absl import flags
from tqdm import tqdm

from experiments import cli, grid, report, results, signature, sweep_folder, sweep_points
from experiments.sweep_folder import PointsFile, Shard
from experiments.sweep_points import describe, text_of
from moejax import accounting


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A checked sweep. `common` is the gin configuration that all points share, `points` maps id -> bindings; `alone`: each has a
    process of its own; `axes`: the columns to plot."""

    experiment: Callable[..., cli.Work]
    common: str
    points: dict[str, grid.Point]
    title: str
    alone: bool
    axes: report.Axes

    def describe(self, shard: Shard, environments: list[dict]) -> dict:
        """What the run file says; enough to write the report without the sweep file."""
        title, _, notes = self.title.partition("\n")
        return {"experiment": self.experiment.__name__, "title": title.rstrip("."), "notes": inspect.cleandoc(notes),
                "about": inspect.getdoc(self.experiment) or "", "common": self.common, "ids": shard.deal(list(self.points)),
                "report": {"x": self.axes.x, "y": list(self.axes.y)}, "environments": environments}


def define_flags(values: flags.FlagValues) -> flags.FlagValues:
    """Adds the flags of this module to the given ones."""
    flags.DEFINE_string("sweep", None, "Python file that defines points()", flag_values=values)
    flags.DEFINE_string("experiment", None, "experiment to run, 'quality' unless the sweep file says otherwise", flag_values=values)
    flags.DEFINE_multi_string("param", [], "NAME=[ALTERNATIVE, ...] of one binding; repeat it to cross several", flag_values=values)
    flags.DEFINE_string("shard", None, "i/n: run the i-th of n equal shares, i from 0", flag_values=values)
    flags.DEFINE_boolean("retry_failed", False, "run failed points again", flag_values=values)
    flags.DEFINE_boolean("report_only", False, "run nothing, report what --output_dir holds", flag_values=values)
    x, y = dataclasses.astuple(report.Axes())
    flags.DEFINE_string("report_x", None, f"column on the horizontal axis, lower is better; {x} unless the sweep file has another",
                        flag_values=values)
    flags.DEFINE_multi_string("report_y", None, "metric(s) to plot against it; NAME:max where higher is better; "
                              f"{', '.join(y)} unless the sweep file has others", flag_values=values)
    return values


def own_flags(argv: list[str]) -> flags.FlagValues:
    """The flags of this module out of a command line whose experiment, and so whose other flags, are not known yet."""
    values = define_flags(flags.FlagValues())
    flags.DEFINE_string("output_dir", None, "", flag_values=values)
    values(["sweep", *argv], known_only=True)
    return values


def prepare(argv: list[str]) -> tuple[cli.Work, None]:
    """Checks everything and returns the work. Raises what `cli.run` turns into exit code 2; nothing is written until then."""
    given = own_flags(argv)
    for name, value in (("sweep", given.sweep), ("experiment", given.experiment)):
        if value == "":
            raise ValueError(f"--{name}=: must not be empty")
    if not given.output_dir:
        raise ValueError("--output_dir is required: the folder for points, tables and the report")
    folder = pathlib.Path(given.output_dir)
    if given.report_only:
        runs = sweep_folder.read(folder).runs
        if not runs:
            raise ValueError(f"--output_dir={folder}: holds no sweep to report")
        axes = report.Axes.chosen(given.report_x, given.report_y, report.Axes.recorded(next(iter(runs.values()))))
        return lambda: summary(folder, 0, report.write(folder, axes)), None
    shard = Shard.parse(given.shard)
    sweep = checked(argv)
    here = sweep.describe(shard, [])
    for name, there in sweep_folder.read(folder).runs.items():
        sweep_folder.check_same(folder, name, there, here)
    output = results.Output(given.output_dir, "sweep", argv)
    points_file = PointsFile(folder / shard.name("points", "jsonl"))  # makes the folder: last
    return lambda: run(sweep, shard, points_file, output, given.retry_failed, argv), None


def checked(argv: list[str]) -> Sweep:
    """The sweep that the command line describes, each of its points bound once. Raises ValueError, flags.Error, OSError."""
    given = own_flags(argv)
    source = sweep_points.load_file(given.sweep) if given.sweep else None
    if source is None and not given.param:
        raise ValueError("no points: give --sweep=FILE.py or --param='NAME=[ALTERNATIVE, ...]'")
    experiment = sweep_points.find_experiment(given.experiment, source)
    parameters = signature.parameters_of(experiment)
    values = define_flags(signature.define_flags(parameters))
    rest = values(["sweep", *argv])[1:]
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}: everything is a flag, see --help")
    lists = [sweep_points.points_of(source, given.sweep)] if source else []
    points = sweep_points.named(grid.prod(*lists, *map(sweep_points.parse_param, given.param)), experiment, parameters)
    if not points:
        raise ValueError(f"--sweep={given.sweep}: points() returned none")
    cli.configure(experiment, parameters, values)
    common = "\n".join(sweep_folder.bindings(gin.config_str(max_line_length=100_000)))
    sweep = Sweep(experiment, common, sweep_points.identified(experiment.__name__, common, points),
                  ((source and source.__doc__) or f"Sweep of {experiment.__name__}").strip(),
                  getattr(source, "PROCESS_PER_POINT", False),
                  report.Axes.chosen(given.report_x, given.report_y, report.Axes.of_file(source, given.sweep)))
    for point in sweep.points.values():
        configure(sweep, point)
    return sweep


def run(sweep: Sweep, shard: Shard, points_file: PointsFile, output: results.Output, retry_failed: bool, argv: list[str]) -> dict:
    """Runs what this shard still has to, and reports when no point of any shard is missing. `argv`: the command line."""
    folder = output.folder
    before = sweep_folder.read(folder)
    name = shard.name("run", "json")
    environment = (in_a_process if sweep.alone else call)(results.environment, output.command)
    environments = [*before.runs.get(name, {}).get("environments", []), environment]
    results.write_atomic(folder / name, json.dumps(sweep.describe(shard, environments), indent=1) + "\n")
    mine = shard.deal(list(sweep.points))
    done = {i for i, record in before.records.items() if record["status"] == "ok" or not retry_failed}
    todo = [i for i in mine if i not in done]
    names = sweep_points.varying(list(sweep.points.values()))
    bar = tqdm(total=len(mine), initial=len(mine) - len(todo), unit="point", file=sys.stderr, dynamic_ncols=True)
    with points_file, bar:
        for i in todo:
            bar.set_description(text_of({k: v for k, v in sweep.points[i].items() if k in names}))
            record = run_alone(argv, i, sweep.points[i]) if sweep.alone else run_point(sweep, sweep.points[i])
            points_file.append({"id": i, "experiment": sweep.experiment.__name__, "revision": environment["revision"], **record})
            if record["status"] != "ok":
                bar.write(f"{record['status']}: {text_of(sweep.points[i])}: {record['error']}", file=sys.stderr)
            bar.update()
    everywhere = sweep.points.keys() <= sweep_folder.read(folder).records.keys()
    return summary(folder, len(todo), report.write(folder, sweep.axes) if everywhere else None)


def summary(folder: pathlib.Path, ran: int, written: dict | None) -> dict:
    """The result: counts of points over all shards, and where the report is (None: other shards are still to finish)."""
    contents = sweep_folder.read(folder)
    failed = contents.failed()
    return {"output_dir": str(folder), "points_run": ran, "points_finished": len(contents.records), "points_failed": len(failed),
            "points_refused": len(contents.refused()), "points_missing": len(contents.missing()),
            **(written or {"report": None}), "exit_code": 1 if failed else 0}


def run_point(sweep: Sweep, point: grid.Point) -> dict:
    """Runs one point; what it raises is part of the record."""
    start = time.perf_counter()
    record: dict[str, Any] = {"point": describe(point), "utc": results.utc_now()}
    try:
        configure(sweep, point)
        work = gin.get_configurable(sweep.experiment.__name__)()
        refuse_without_effect(point, gin.operative_config_str())
        with contextlib.redirect_stdout(sys.stderr):
            result = {k: v for k, v in work().items() if not hasattr(v, "save")}  # without its plots
        exit_code = result.pop("exit_code", 0)
        result = json.loads(json.dumps(results.jsonable(result), allow_nan=False))
        record |= {"status": "failed" if exit_code else "ok", "result": result}
        record |= {"error": f"the experiment ended with {exit_code=}"} if exit_code else {}
    except accounting.DoesNotFitError as e:
        record |= {"status": "refused", "error": cli.one_line(e)}
    except (ValueError, NotImplementedError) as e:
        record |= {"status": "failed", "error": cli.one_line(e)}
    except jax.errors.JaxRuntimeError as e:
        full = "RESOURCE_EXHAUSTED" in str(e)  # what is known beforehand fitted, what the compiled program needs beside it did not
        record |= {"status": "refused", "error": f"out of memory while it ran: {cli.one_line(e)}"} if full else failure(e)
    except Exception as e:
        record |= failure(e)
    return {**record, "seconds": time.perf_counter() - start}


def failure(error: Exception) -> dict:
    """What is recorded of an error that is being handled."""
    return {"status": "failed", "error": f"{type(error).__name__}: {cli.one_line(error)}", "traceback": traceback.format_exc()}


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns."""
    return function(*args)


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """The same, from a process that does nothing else. Raises BrokenProcessPool when it dies."""
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, spawn, initializer=_die_silently) as pool:
        return pool.submit(function, *args).result()


def _die_silently() -> None:
    """An interrupt is said by the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_alone(argv: list[str], point_id: str, point: grid.Point) -> dict:
    """`run_point` in a process of its own. This one has touched no device, whose memory would then be partly its own."""
    start, utc = time.perf_counter(), results.utc_now()
    try:
        return in_a_process(_run_again_checked, argv, point_id)
    except process.BrokenProcessPool:
        return {"point": describe(point), "utc": utc, "status": "failed", "seconds": time.perf_counter() - start,
                "error": "its process was killed or crashed (the system's memory?)"}


def _run_again_checked(argv: list[str], point_id: str) -> dict:
    sweep = checked(argv)
    return run_point(sweep, sweep.points[point_id])


def configure(sweep: Sweep, point: grid.Point) -> None:
    """Makes gin's configuration that of one point. Raises ValueError naming the point when it cannot be bound."""
    gin.clear_config()
    gin.parse_config(sweep.common)
    try:
        for name, value in point.items():
            gin.bind_parameter(name, value)
        cli.check_bindings(sweep.experiment, signature.parameters_of(sweep.experiment))
    except ValueError as e:
        raise ValueError(f"point {text_of(point) or 'without bindings'}: {cli.one_line(e)}") from None


def refuse_without_effect(point: grid.Point, operative: str) -> None:
    """Raises ValueError for a binding of something that the experiment never calls: its points would all measure the same."""
    for name in point:
        scoped = name.rpartition(".")[0]
        scope, _, selector = scoped.rpartition("/")
        used = f"# Parameters for {scope + '/' if scope else ''}{selector.rpartition('.')[2]}:"
        if selector.rpartition(".")[2] != "macro" and used not in operative:
            raise ValueError(f"{name} has no effect: the experiment does not use {scoped} here")


def main(argv: list[str] | None = None) -> None:
    """Runs the sweep that the command line describes and exits the process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(a in ("-h", "--help", "-help", "--helpfull") for a in argv):
        print(f"{__doc__}\nFlags, beside those of the experiment:\n{define_flags(signature.define_flags([])).get_help()}")
        sys.exit(0)
    cli.run(lambda: prepare(argv))


if __name__ == "__main__":
    main()
