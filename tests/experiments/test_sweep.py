"""`experiments.sweep`: each point exactly once through kills and shards, one report of all, bad input refused before work."""
import csv
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SWEEP = '''"""A toy sweep.

What it is for.
"""
import json, time
from experiments import cli
from experiments.grid import param, prod, chain

EXPERIMENT = "toy"

@cli.configurable
def toy(a: int = 1, b: list[int] = [0], log: str = "", pause: float = 0.0, fail: str = "") -> cli.Work:
    """Counts.

    Args:
      a: a number.
    """
    def work():
        with open(log, "a") as file:
            file.write(json.dumps([a, b]) + "\\n")
        time.sleep(pause)
        if fail == "value":
            raise ValueError("no such <a>")
        if fail:
            raise RuntimeError("broken")
        return {"rows": [{"format": f"a{a}b{b[0]}", "effective_bits": float(a), "kl": 10.0 / a + b[0], "kl_low": 9.0 / a,
                          "kl_high": 12.0 / a + b[0], "nested": {"x": a}}], "checkpoint": "none"}
    return work

def points():
    return chain(prod(param("toy.a", [1, 2, 4]), param("b", [0, 1])), EXTRA)
'''


@pytest.fixture
def sweep(tmp_path):
    """Runs the toy sweep in a process of its own: (flags, extra points) -> completed process; `.log()` lists what ran."""
    def command(*flags, extra="[]"):
        (tmp_path / "toy.py").write_text(SWEEP + f"\nEXTRA = {extra}\n")
        return [sys.executable, "-m", "experiments.sweep", f"--sweep={tmp_path / 'toy.py'}", f"--output_dir={tmp_path / 'out'}",
                f"--gin=toy.log='{tmp_path / 'log'}'", *flags]

    def call(*flags, extra="[]"):
        return subprocess.run(command(*flags, extra=extra), cwd=ROOT, capture_output=True, text=True, timeout=120)

    call.command = command
    call.out = tmp_path / "out"
    call.log = lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    return call


ALL = [[a, [b]] for a in (1, 2, 4) for b in (0, 1)]


def test_report_holds_every_row_and_nothing_from_outside(sweep):
    done = sweep()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["points_run"], result["points_failed"], result["rows"]) == (6, 0, 6) and sweep.log() == ALL
    page = (sweep.out / "report.html").read_text()
    for a, (b,) in ALL:
        assert f"a{a}b{b}" in page
    assert "http://" not in page and "https://" not in page and "data:image/png;base64," in page
    assert "A toy sweep" in page and "What it is for." in page and "experiments.sweep" in page
    rows = list(csv.DictReader((sweep.out / "sweep.csv").open()))
    assert [row["label"] for row in rows] == ["a1b0", "a1b1", "a2b0", "a2b1", "a4b0", "a4b1"]
    assert [row["pareto"] for row in rows] == ["kl", "", "kl", "", "kl", ""]
    assert rows[2]["nested.x"] == "2" and rows[2]["point.toy.b"] == "[0]" and rows[2]["result.checkpoint"] == "none"
    assert (sweep.out / "kl_by_effective_bits.png").read_bytes().startswith(b"\x89PNG")
    assert "perplexity_increase_pct" in result["metrics_absent"]


def test_a_killed_sweep_goes_on_where_it_was(sweep):
    process = subprocess.Popen(sweep.command("--gin=toy.pause=0.7"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    points = sweep.out / "points.jsonl"
    for _ in range(600):
        if points.exists() and points.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = points.read_bytes().count(b"\n")
    assert 2 <= finished < 6 and not (sweep.out / "report.html").exists()
    with points.open("ab") as file:
        file.write(b'{"id": "half a li')
    ran = len(sweep.log())
    done = sweep("--gin=toy.pause=0.7")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["points_run"] == 6 - finished
    assert len(sweep.log()) == ran + 6 - finished and sorted(map(str, sweep.log()[ran:])) == sorted(map(str, ALL[finished:]))
    records = [json.loads(line) for line in points.read_text().splitlines()]
    assert len({r["id"] for r in records}) == len(records) == 6
    again = sweep("--gin=toy.pause=0.7")
    assert json.loads(again.stdout.splitlines()[-1])["points_run"] == 0


def test_two_shards_are_one_sweep(sweep):
    first = sweep("--shard=0/2")
    assert json.loads(first.stdout.splitlines()[-1])["report"] is None or sweep.log() == ALL[::2]
    second = sweep("--shard=1/2")
    assert sweep.log() == ALL[::2] + ALL[1::2]
    assert json.loads(second.stdout.splitlines()[-1])["rows"] == 6
    split = (sweep.out / "sweep.csv").read_text()
    os.rename(sweep.out, sweep.out.with_name("split"))
    sweep()
    whole = (sweep.out / "sweep.csv").read_text()

    def without_times(text):
        return sorted(re.sub(r"\b\d+\.\d{3,}(e-\d+)?\b", "", line) for line in text.splitlines())

    assert without_times(split) == without_times(whole)


def test_failed_points_are_listed_and_do_not_stop_the_rest(sweep):
    extra = "[{'toy.a': 8, 'toy.fail': 'value'}, {'toy.a': 9, 'toy.fail': 'other'}]"
    done = sweep(extra=extra)
    assert done.returncode == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["points_finished"], result["points_failed"], result["rows"]) == (8, 2, 6)
    page = (sweep.out / "report.html").read_text()
    assert "no such &lt;a&gt;" in page and "RuntimeError: broken" in page and "Traceback" in page
    assert json.loads(sweep(extra=extra).stdout.splitlines()[-1])["points_run"] == 0
    assert json.loads(sweep("--retry_failed", extra=extra).stdout.splitlines()[-1])["points_run"] == 2


@pytest.mark.parametrize(("flags", "extra", "words"), [
    (["--shard=2/2"], "[]", ["--shard=2/2", "i/n"]), (["--param=a=3"], "[]", ["--param=a=3", "NAME=[ALTERNATIVE"]),
    (["--param=c=[1]"], "[]", ["c: is no parameter of toy", "a, b"]), ([], "[{'toy.nothing': 1}]", ["nothing"]),
    ([], "[{'toy.a': 'text'}]", ["a=", "int"]), ([], "3", ["toy.py", "line"]), (["--experiment=quality"], "[]", ["quality", "toy"]),
    (["--a=3"], "[]", ["toy.a"]), (["--report_y=kl:best"], "[]", ["kl:best"]), (["more"], "[]", ["more"])])
def test_bad_input_is_refused_before_anything_runs(sweep, flags, extra, words):
    done = sweep(*flags, extra=extra)
    lines = done.stderr.strip().splitlines()
    if flags == ["--a=3"]:  # a flag for all points, that the points bind themselves: theirs win
        assert done.returncode == 0
        return
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert all(word in lines[0] for word in words), lines
    assert not (sweep.out / "points.jsonl").exists()


def test_a_folder_of_another_sweep_is_refused(sweep):
    sweep()
    done = sweep("--gin=toy.pause=0.01")
    assert done.returncode == 2 and "other common bindings" in done.stderr and "toy.pause" in done.stderr
