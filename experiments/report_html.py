"""The HTML page of a sweep's report: one file, plots inside, no links."""
from __future__ import annotations

import base64
import html
import json
import pathlib
from typing import Any

from experiments import plots, results
from experiments.sweep_folder import Contents, bindings

Row = dict[str, Any]
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222 }
.wide { overflow-x: auto } img { max-width: 100% } h2 { margin-top: 1.6em }
table { border-collapse: collapse; font-size: 13px } th, td { padding: 3px 9px; text-align: right; white-space: nowrap }
th { background: #eee; text-align: left } td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
tr.pareto { background: #e6f4e6; font-weight: 600 } pre { background: #f5f5f5; padding: .7em; white-space: pre-wrap }
dt { font-weight: 600 } .failed { color: #a00 }
"""
PARETO_NOTE = ("A point is Pareto-optimal when no other one measured on the same checkpoint, texts and context has at most its "
               "{x} and is at least as good in the metric, one of the two strictly.")


def page(contents: Contents, rows: list[Row], columns: list[str], pictures: dict[str, pathlib.Path], x: str,
         absent: list[str]) -> str:
    """The whole page.

    Args:
      contents: of the sweep's folder.
      rows: flat rows, sorted, with the metrics that each is optimal for under "pareto".
      columns: of the table, in order.
      pictures: the plot of each metric.
      x: the column that the metrics are compared by.
      absent: metrics that were asked for and that no row has.
    """
    run = next(iter(contents.runs.values()))
    constant, shown = split_constant(rows, columns)
    parts = [f"<h1>{text(run['title'])}</h1>", state(contents, rows), notes(run, x, absent)]
    parts += ["<h2>Measured on</h2>", definitions(constant)] if constant else []
    for metric, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        name = text(plots.LABELS.get(metric, metric))
        parts.append(f'<h2>{name}</h2><img alt="{name} against {text(x)}" src="data:image/png;base64,{data}">')
    parts += [f"<h2>All {len(rows)} rows</h2>", f"<p>Sorted by {text(x)}. Highlighted: Pareto-optimal for the metrics under "
              "“pareto”.</p>", table(rows, shown), failures(contents), provenance(contents)]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(run["title"])}</title>'
            f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n")


def cell(value: Any) -> str:
    """A value as text: lists of texts joined, other structures as JSON, absent ones empty."""
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return " ".join(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return "" if value is None else str(value)


def text(value) -> str:
    """A value, escaped; floats to five digits."""
    return html.escape(f"{value:.5g}" if isinstance(value, float) else cell(value))


def split_constant(rows: list[Row], columns: list[str]) -> tuple[dict[str, object], list[str]]:
    """What the results say of the whole ("result.") and is the same in every row, and the columns that remain."""
    constant = {key: rows[0].get(key) for key in columns
                if key.startswith("result.") and all(row.get(key) == rows[0].get(key) for row in rows)} if rows else {}
    return {key.removeprefix("result."): value for key, value in constant.items()}, [k for k in columns if k not in constant]


def state(contents: Contents, rows: list[Row]) -> str:
    failed, missing = len(contents.failed()), len(contents.missing())
    refused = len(contents.refused())
    counts = (f"{len(contents.records)} points finished, {failed} of them failed"
              f"{f', {refused} do not fit into memory' if refused else ''}, {missing} still to run; {len(rows)} rows.")
    return f"<p{' class=failed' if failed or missing else ''}>{counts} Written {text(results.utc_now())}.</p>"


def notes(run: dict, x: str, absent: list[str]) -> str:
    out = [f"<p>{text(part)}</p>" for part in run["notes"].split("\n\n") if part]
    out.append(f"<h2>What was measured</h2><p>Experiment <code>{text(run['experiment'])}</code>:</p>")
    out.append(f"<pre>{text(run['about'])}</pre>")
    out.append(f"<p>{text(PARETO_NOTE.format(x=x))} Error bars and the columns <code>_low</code> and <code>_high</code> are the "
               "bounds that the experiment gives.</p>")
    out += [f"<p class=failed>No row has both {text(x)} and {text(name)}: not plotted.</p>" for name in absent]
    return "\n".join(out)


def definitions(values: dict[str, object]) -> str:
    return "<dl>" + "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in values.items()) + "</dl>"


def table(rows: list[Row], columns: list[str]) -> str:
    head = "".join(f"<th>{text(key)}</th>" for key in columns)
    cells = ["".join(f"<td>{text(row.get(key))}</td>" for key in columns) for row in rows]
    body = "\n".join(f"<tr{' class=pareto' if row['pareto'] else ''}>{line}</tr>" for row, line in zip(rows, cells))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def failures(contents: Contents) -> str:
    kinds = {"Failed points": contents.failed(), "Points that do not fit into memory": contents.refused()}
    return "".join(listing(title, records) for title, records in kinds.items() if records)


def listing(title: str, failed: list[dict]) -> str:
    """Points and their errors."""
    items = []
    for record in failed:
        point = ", ".join(f"{name} = {value!r}" for name, value in record["point"].items()) or "without bindings"
        trace = text(record.get("traceback"))
        trace = trace and f"<details><summary>traceback</summary><pre>{trace}</pre></details>"
        items.append(f"<li><code>{text(point)}</code>: {text(record['error'])}{trace}</li>")
    return f'<h2 class="failed">{text(title)}</h2><ul>{"".join(items)}</ul>'


def provenance(contents: Contents) -> str:
    """Commands, common bindings, environments."""
    run = next(iter(contents.runs.values()))
    environments = [env for each in contents.runs.values() for env in each["environments"]]
    commands = "\n".join(dict.fromkeys(env["command"] for env in environments))
    common = "\n".join(bindings(run["common"])) or "none"
    out = [f"<h2>Commands</h2><pre>{text(commands)}</pre><h2>Bindings of all points</h2><pre>{text(common)}</pre>",
           "<h2>Environment</h2>"]
    for name, each in contents.runs.items():
        for env in each["environments"]:
            out.append(f"<h3>{text(name)}, {text(env['utc'])}</h3>{definitions(env)}")
    return "\n".join(out)
