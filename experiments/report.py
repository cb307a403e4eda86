"""The report of a sweep: every row as JSONL, CSV and Markdown, Pareto plots, and one HTML page that holds everything.

A row is flat, with dotted columns: the keys of the experiment's row as they are, the point's bindings under "point.", what the
result says beside its rows (or all of it, when it has none) under "result.".
"""
from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import tempfile
import types

from experiments import plots, report_html, results, sweep_folder, sweep_points
from experiments.report_html import Row, cell

METRICS = ("perplexity_increase_pct", "kl")
HIGHER_IS_BETTER = ("top1_agreement_pct",)
# Rows that differ in these were not measured on the same thing: they are never compared with each other.
SERIES = ("result.checkpoint", "result.texts", "result.text", "result.context_tokens")
LOG_SPAN = 30.0
MAX_LABELS = 40


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column to compare rows by."""

    name: str
    higher_is_better: bool = False

    @classmethod
    def parse(cls, text: str) -> Metric:
        """Of "NAME", "NAME:min" or "NAME:max". Raises ValueError naming the text."""
        name, colon, direction = text.partition(":")
        if not name or (colon and direction not in ("min", "max")):
            raise ValueError(f"--report_y={text}: must be NAME, NAME:min (lower is better) or NAME:max")
        return cls(name, direction == "max" if colon else name in HIGHER_IS_BETTER)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The column on the horizontal axis, and the texts of the metrics against it (`Metric.parse`)."""

    x: str = "effective_bits"
    y: tuple[str, ...] = METRICS

    @classmethod
    def chosen(cls, x: str | None, y: list[str] | None, default: Axes) -> Axes:
        """What was given, and of `default` what was not. Raises ValueError for a text that is no metric."""
        axes = cls(x or default.x, tuple(y or default.y))
        axes.metrics()
        return axes

    @classmethod
    def of_file(cls, source: types.ModuleType | None, path: str) -> Axes:
        """REPORT_X and REPORT_Y of a sweep file. Raises ValueError for other types."""
        x, y = getattr(source, "REPORT_X", cls.x), getattr(source, "REPORT_Y", cls.y)
        if not isinstance(x, str) or not isinstance(y, (list, tuple)) or not all(isinstance(name, str) for name in y):
            raise ValueError(f"--sweep={path}: REPORT_X={x!r}, REPORT_Y={y!r}: must be a column's name and a list of them")
        return cls(x, tuple(y))

    @classmethod
    def recorded(cls, run: dict) -> Axes:
        """Those of a run file."""
        return cls(run["report"]["x"], tuple(run["report"]["y"])) if "report" in run else cls()

    def metrics(self) -> list[Metric]:
        return [Metric.parse(text) for text in self.y]


def write(folder: pathlib.Path, axes: Axes) -> dict:
    """Writes sweep.jsonl, sweep.csv, sweep.md, a plot a metric and report.html, each whole or not at all.

    Returns:
      What the sweep's result says of it: rows, the report's path, and metrics that no row has.
    """
    x, metrics = axes.x, axes.metrics()
    contents = sweep_folder.read(folder)
    names = sweep_points.varying([record["point"] for record in contents.records.values()])
    rows = sorted((row for record in contents.records.values() for row in rows_of(record, names)),
                  key=lambda row: [number(row, key) if number(row, key) is not None else math.inf for key in (x, metrics[0].name)])
    shown = [m for m in metrics if any(number(row, x) is not None and number(row, m.name) is not None for row in rows)]
    for row in rows:
        row["pareto"] = []
    for metric in shown:
        for row in pareto(rows, x, metric):
            row["pareto"].append(metric.name)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as temporary:  # two shards may finish together
        new = pathlib.Path(temporary)
        pictures = {m.name: new / Pareto(rows, x, m).save(new) for m in shown}
        (new / "sweep.jsonl").write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        (new / "sweep.csv").write_text(to_csv(rows, columns(rows, x, shown)))
        (new / "sweep.md").write_text(to_markdown(rows, x, shown) + not_fitting(contents, names))
        absent = [m.name for m in metrics if m not in shown]
        (new / "report.html").write_text(report_html.page(contents, rows, columns(rows, x, shown), pictures, x, absent))
        for path in new.iterdir():
            os.replace(path, folder / path.name)
    return {"rows": len(rows), "metrics_absent": absent, "report": str(folder / "report.html")}


def rows_of(record: dict, names: set[str]) -> list[Row]:
    """The flat rows of a finished point, none of a failed one. The bindings in `names` label rows that have no label."""
    if record["status"] != "ok":
        return []
    result = dict(record["result"])
    rows = result.get("rows")
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        del result["rows"]
    else:
        rows, result = [result], {}
    shared = flatten({"point": record["point"], "result": result, "seconds": record["seconds"],
                      "revision": record["revision"], "id": record["id"]})
    point = {name: value for name, value in record["point"].items() if name in names}
    return [{"label": label(row, point), **flatten(row), **shared} for row in rows]


def label(row: Row, point: dict) -> str:
    """A short name of a row, for plots."""
    for key in ("label", "format"):
        if row.get(key) is not None:
            return str(row[key])
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in point.items()) or "default"


def flatten(value: dict, prefix: str = "") -> Row:
    """Nested dicts as one, with dotted keys. Lists stay."""
    out: Row = {}
    for key, item in value.items():
        out |= flatten(item, f"{prefix}{key}.") if isinstance(item, dict) and item else {prefix + key: item}
    return out


def number(row: Row, key: str) -> float | None:
    """The row's value when it is a finite number."""
    value = row.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def series(rows: list[Row], x: str, metric: Metric) -> dict[str, list[Row]]:
    """The rows that have both numbers, by what they were measured on; the key names only what differs."""
    keys = [key for key in SERIES if len({json.dumps(row.get(key)) for row in rows}) > 1]
    out: dict[str, list[Row]] = {}
    for row in rows:
        if number(row, x) is not None and number(row, metric.name) is not None:
            out.setdefault(", ".join(cell(row.get(key)) for key in keys), []).append(row)
    return out


def pareto(rows: list[Row], x: str, metric: Metric) -> list[Row]:
    """The rows that no other row of their series beats: at most its `x`, at least as good, and better in one of the two."""
    sign = -1 if metric.higher_is_better else 1
    kept = []
    for group in series(rows, x, metric).values():
        best: tuple[float, float] = (math.inf, math.inf)  # (y, x) of the last row kept
        for row in sorted(group, key=lambda row: (row[x], sign * row[metric.name])):
            here = (sign * row[metric.name], row[x])
            if here[0] < best[0] or here == best:
                best = here
                kept.append(row)
    return kept


def columns(rows: list[Row], x: str, metrics: list[Metric]) -> list[str]:
    """Every column of any row: what matters most first, then bindings, then the rest in the order of the rows."""
    there = list(dict.fromkeys(key for row in rows for key in row))
    first = ["label", x, *(m.name + end for m in metrics for end in ("", "_low", "_high")), "pareto"]
    first += [key for key in there if key.startswith("point.")]
    last = [key for key in there if key.startswith("result.") or key in ("seconds", "revision", "id")]
    return list(dict.fromkeys([*(key for key in first if key in there), *(key for key in there if key not in last), *last]))


def to_csv(rows: list[Row], names: list[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def to_markdown(rows: list[Row], x: str, metrics: list[Metric]) -> str:
    """The main columns, for a README."""
    lines = [{**row, "pareto": cell(row["pareto"])} for row in rows]
    specs = {"label": "", x: ".3f", **{m.name: ".4g" for m in metrics}, "pareto": ""}
    return results.markdown_table(lines, specs) + "\n" if lines else ""


def not_fitting(contents: sweep_folder.Contents, names: set[str]) -> str:
    """The points that were refused, with the reason, under the table."""
    lines = [f"- {label({}, {k: v for k, v in r['point'].items() if k in names})}: {r['error']}" for r in contents.refused()]
    return "\nDoes not fit:\n\n" + "\n".join(lines) + "\n" if lines else ""


@dataclasses.dataclass(frozen=True)
class Pareto:
    """One labelled point a row, error bars where the row has `<metric>_low` and `<metric>_high`, and each series' frontier."""

    rows: list[Row]
    x: str
    metric: Metric

    def save(self, folder: pathlib.Path) -> str:
        """Writes a PNG and returns its name."""
        groups = series(self.rows, self.x, self.metric)
        optimal = pareto(self.rows, self.x, self.metric)
        drawn = [row for group in groups.values() for row in group]
        name = "".join(c if c.isalnum() or c in "_-." else "_" for c in f"{self.metric.name}_by_{self.x}.png")
        with plots.drawing(folder / name, size=(9, 5.5), dpi=130) as axes:
            for i, (series_name, group) in enumerate(groups.items()):
                self.draw_series(axes, f"C{i % 10}", series_name, group, optimal)
            for row in drawn if len(drawn) <= MAX_LABELS else optimal:
                axes.annotate(row["label"], (row[self.x], row[self.metric.name]), textcoords="offset points", xytext=(5, 5),
                              fontsize=7)
            set_scale(axes, [row[self.metric.name] for row in drawn])
            axes.set(xlabel=plots.LABELS.get(self.x, self.x), ylabel=plots.LABELS.get(self.metric.name, self.metric.name))
            axes.margins(0.1)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        return name

    def draw_series(self, axes, color: str, name: str, group: list[Row], optimal: list[Row]) -> None:
        """Points with error bars, and the frontier through those of them that are optimal."""
        axes.plot(*self.coordinates(group), "o", color=color, alpha=0.7, label=name or None)
        bounded = [row for row in group if None not in self.bounds(row)]
        axes.errorbar(*self.coordinates(bounded), yerr=self.errors(bounded), fmt="none", color=color, capsize=3, alpha=0.7)
        front = [row for row in optimal if any(row is other for other in group)]
        axes.plot(*self.coordinates(front), "-", color=color, drawstyle="steps-post", label=f"Pareto frontier {name}".strip())

    def coordinates(self, group: list[Row]) -> tuple[list[float], list[float]]:
        return [row[self.x] for row in group], [row[self.metric.name] for row in group]

    def bounds(self, row: Row) -> tuple[float | None, float | None]:
        return number(row, f"{self.metric.name}_low"), number(row, f"{self.metric.name}_high")

    def errors(self, group: list[Row]) -> tuple[list[float], list[float]]:
        """Lengths of the error bars below and above each point of rows that have bounds."""
        ends = [(row[self.metric.name], *self.bounds(row)) for row in group]
        return [max(0.0, y - low) for y, low, _ in ends], [max(0.0, high - y) for y, _, high in ends]


def set_scale(axes, values: list[float]) -> None:
    """A logarithmic vertical axis when the values span more than LOG_SPAN, linear around 0 when some are not positive."""
    sizes = [abs(v) for v in values if v]
    if not sizes or max(sizes) <= LOG_SPAN * min(sizes):
        return
    if min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_yscale("symlog", linthresh=max(min(sizes), max(sizes) / 1e4))
