"""Sweeps of a dummy experiment: every point once through kills, shards and failures; refusals; what the report holds."""
import collections
import csv
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from experiments import report, sweep, sweep_folder, sweep_points
from experiments.grid import param
from experiments.report import Metric, pareto
from pallas_kernels.kv_format import KVFormat
from tests.experiments.conftest import assert_refused

ROOT = pathlib.Path(__file__).parents[2]
SWEEP_FILE = '''
"""A dummy sweep.

Notes <b>on it</b>."""
import dataclasses, pathlib, time
from experiments import cli
from experiments.grid import param, prod

EXPERIMENT = "dummy"

@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    mode: str = "a"

@cli.configurable
def dummy(log: str, bits: int = 4, extra: Extra = Extra(), seconds: float = 0.0, ids: list[int] | None = None):
    """A dummy & its help."""
    if bits == 5:
        raise ValueError(f"{bits=}: must not be 5")
    def work():
        with open(log, "a") as f:
            f.write(f"{bits}{extra.mode}\\n")
        time.sleep(seconds)
        if bits == 7:
            raise KeyError("a bug")
        print("a table")
        row = {"label": f"b{bits}<{extra.mode}>", "effective_bits": bits + 0.5, "deep": {"x": {"y": bits}}, "ids": ids}
        loss = 100.0 / bits ** 2 + (extra.mode == "b")
        name = "perplexity_increase_pct"
        first = row | {name: loss, name + "_low": loss - 1, name + "_high": loss + 1}
        return {"checkpoint": "model_m", "texts": ["t.txt"], "rows": [first, row | {"label": "second", "kl": float("nan")}],
                "exit_code": 3 if bits == 9 else 0}
    return work

def points():
    return prod(param("dummy.bits", [2, 3, 4]), param("Extra.mode", ["a", "b"]))
'''
PLACE = f"dummy.py, line {SWEEP_FILE[:SWEEP_FILE.index('return prod')].count(chr(10)) + 1}:"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "dummy.py").write_text(SWEEP_FILE)
    return tmp_path / "dummy.py"


@pytest.fixture
def flags(file, tmp_path):
    """The command line of the dummy sweep into tmp_path/out."""
    return [f"--sweep={file}", f"--output_dir={tmp_path / 'out'}", f"--log={tmp_path / 'log'}"]


@pytest.fixture
def run(capsys):
    def call(*argv):
        with pytest.raises(SystemExit) as exited:
            sweep.main(list(map(str, argv)))
        text = capsys.readouterr()
        result = json.loads(text.out.splitlines()[-1]) if text.out else None
        return types.SimpleNamespace(code=exited.value.code, result=result, out=text.out, err=text.err)

    return call


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def ran(tmp_path):
    """How often each point began."""
    return collections.Counter((tmp_path / "log").read_text().split())


def rows_without_times(path):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in lines(path)]


ALL = {f"{bits}{mode}": 1 for bits in (2, 3, 4) for mode in "ab"}


def test_all_points_and_all_rows(run, flags, tmp_path):
    done = run(*flags)
    assert done.code == 0 and len(done.out.splitlines()) == 1 and "a table" in done.err
    assert ran(tmp_path) == ALL
    assert done.result["points_run"] == done.result["points_finished"] == 6 and done.result["rows"] == 12
    records = lines(tmp_path / "out" / "points.jsonl")
    assert [r["point"] for r in records[:2]] == [{"dummy.bits": 2, "Extra.mode": "a"}, {"dummy.bits": 2, "Extra.mode": "b"}]
    assert all(r["status"] == "ok" and len(r["result"]["rows"]) == 2 and r["seconds"] > 0 and r["utc"] for r in records)
    again = run(*flags)
    assert again.code == 0 and again.result["points_run"] == 0 and ran(tmp_path) == ALL


def test_a_grid_from_the_command_line(run, flags, tmp_path):
    done = run(*flags, "--param=ids=[1, [2, 3]]", "--gin=dummy.seconds=0.001")
    assert done.result["points_finished"] == 12
    values = [r["point"]["dummy.ids"] for r in lines(tmp_path / "out" / "points.jsonl")]
    assert values == [[1], [2, 3]] * 6


def test_points_win_over_common_bindings(run, flags, tmp_path):
    assert run(*flags, "--bits=8", "--mode=z").code == 0
    assert ran(tmp_path) == ALL


def test_killed_and_resumed_every_point_runs_once(run, flags, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    flags = [*flags, "--param=ids=[1, 2, 3]", "--seconds=0.05"]
    process = subprocess.Popen([sys.executable, "-m", "experiments.sweep", *flags], env=environment, cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    points = tmp_path / "out" / "points.jsonl"
    deadline = time.monotonic() + 60
    while not (points.is_file() and points.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = points.read_bytes().count(b"\n")
    assert 3 <= finished < 18 and not (tmp_path / "out" / "report.html").exists()
    done = run(*flags)
    assert done.code == 0 and done.result["points_run"] == 18 - finished and done.result["points_missing"] == 0
    records = lines(points)
    assert len({r["id"] for r in records}) == len(records) == 18
    starts = ran(tmp_path)
    assert set(starts) == set(ALL) and 18 <= sum(starts.values()) <= 19  # the point that was running began twice
    assert len(json.loads((tmp_path / "out" / "run.json").read_text())["environments"]) == 2


@pytest.mark.parametrize("keep", [-1, -30, -400])
def test_a_half_written_last_line_is_dropped_and_its_point_runs_again(keep, run, flags, tmp_path):
    assert run(*flags).code == 0
    points = tmp_path / "out" / "points.jsonl"
    last = points.read_bytes().splitlines(keepends=True)[-1]
    assert len(last) > 400
    points.write_bytes(points.read_bytes()[:keep])
    done = run(*flags)
    assert done.code == 0 and done.result["points_run"] == 1 and ran(tmp_path) == {**ALL, "4b": 2}
    assert len({r["id"] for r in lines(points)}) == len(lines(points)) == 6


def test_two_shards_merge_to_the_same_as_one(run, flags, tmp_path):
    run(*flags)
    shards = [flags[0], f"--output_dir={tmp_path / 'shards'}", flags[2]]
    second = run(*shards, "--shard=1/2")
    assert second.code == 0 and second.result["report"] is None and second.result["points_run"] == 3
    assert not (tmp_path / "shards" / "sweep.csv").exists()
    first = run(*shards, "--shard=0/2")
    assert first.code == 0 and first.result["points_run"] == 3 and first.result["rows"] == 12
    assert ran(tmp_path) == dict.fromkeys(ALL, 2)
    assert {p.name for p in (tmp_path / "shards").glob("points*")} == {"points.0of2.jsonl", "points.1of2.jsonl"}
    one, two = (sorted(rows_without_times(tmp_path / d / "sweep.jsonl"), key=lambda r: (r["id"], r["label"]))
                for d in ("out", "shards"))
    assert one == two
    assert run(*shards).result["points_run"] == 0  # all of it, unsharded: nothing left


def test_report_only_merges_what_is_there(run, flags, tmp_path):
    run(*flags, "--shard=1/2")
    done = run(flags[1], "--report_only")
    assert done.code == 0 and done.result["rows"] == 6 and done.result["points_run"] == 0
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_failing_point_does_not_stop_the_others(run, flags, tmp_path):
    more = [*flags, "--param=dummy.seconds=[0.0]"]
    file = tmp_path / "dummy.py"
    file.write_text(SWEEP_FILE.replace("[2, 3, 4]", "[2, 5, 7, 9]"))
    done = run(*more)
    assert done.code == 1 and done.result["points_failed"] == 6 and done.result["rows"] == 4
    records = {(r["point"]["dummy.bits"], r["point"]["Extra.mode"]): r for r in lines(tmp_path / "out" / "points.jsonl")}
    assert records[5, "a"]["error"].startswith("bits=5: must not be 5") and "traceback" not in records[5, "a"]
    assert "KeyError" in records[7, "b"]["error"] and "Traceback" in records[7, "b"]["traceback"]
    assert "exit_code=3" in records[9, "a"]["error"] and records[2, "b"]["status"] == "ok"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Failed points" in page and "bits=5: must not be 5" in page and "Traceback" in page
    assert run(*more).result["points_run"] == 0
    file.write_text(file.read_text().replace("if bits == 5", "if bits == 50"))
    mended = run(*more, "--retry_failed")
    assert mended.code == 1 and mended.result["points_run"] == 6 and mended.result["points_failed"] == 4
    assert mended.result["rows"] == 8


REFUSING = (SWEEP_FILE.replace("import dataclasses, pathlib, time", "import dataclasses, os, pathlib, time\nimport jax\n"
                               "from moejax.accounting import DoesNotFitError")
            .replace("[2, 3, 4]", "[2, 5, 7]")
            .replace('raise ValueError(f"{bits=}: must not be 5")', 'raise DoesNotFitError("it takes 5 GiB (all of it 5.0)")')
            .replace('raise KeyError("a bug")', 'raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of 7 bytes")')
            .replace("time.sleep(seconds)", "if bits == 8:\n            os._exit(9)"))


def test_points_that_do_not_fit_are_refused_and_no_failure(run, flags, file, tmp_path):
    file.write_text(REFUSING)
    done = run(*flags)
    assert done.code == 0 and (done.result["points_refused"], done.result["points_failed"], done.result["rows"]) == (4, 0, 4)
    records = {r["point"]["dummy.bits"]: r for r in lines(tmp_path / "out" / "points.jsonl")}
    assert records[5]["status"] == records[7]["status"] == "refused" and records[2]["status"] == "ok"
    assert records[5]["error"] == "it takes 5 GiB (all of it 5.0)"
    assert records[7]["error"] == "out of memory while it ran: RESOURCE_EXHAUSTED: of 7 bytes"
    page, table = ((tmp_path / "out" / name).read_text() for name in ("report.html", "sweep.md"))
    assert "Points that do not fit into memory" in page and "Failed points" not in page and "4 do not fit" in page
    assert "Does not fit:\n\n- bits=5, mode=a: it takes 5 GiB (all of it 5.0)\n" in table
    assert run(*flags).result["points_run"] == 0
    assert run(*flags, "--retry_failed").result["points_run"] == 4


def test_a_process_for_every_point(run, flags, file, tmp_path):
    said = 'PROCESS_PER_POINT = True\nREPORT_X = "pid"\nREPORT_Y = ["kl:max", "bits"]\n'
    text = REFUSING.replace("EXPERIMENT =", said + "EXPERIMENT =").replace("[2, 5, 7]", "[2, 5]")
    file.write_text(text.replace('"deep":', '"pid": os.getpid(), "bits": bits, "deep":'))
    done = run(*flags)
    assert done.code == 0 and (done.result["points_refused"], done.result["points_failed"]) == (2, 0)
    rows = lines(tmp_path / "out" / "sweep.jsonl")
    assert len({row["pid"] for row in rows}) == len(rows) / 2 == 2 and os.getpid() not in {row["pid"] for row in rows}
    assert (tmp_path / "out" / "bits_by_pid.png").is_file() and done.result["metrics_absent"] == ["kl"]
    (tmp_path / "out" / "bits_by_pid.png").unlink()
    assert run(flags[1], "--report_only").result["rows"] == 4 and (tmp_path / "out" / "bits_by_pid.png").is_file()


def test_a_point_that_kills_its_process_has_failed(run, flags, file, tmp_path):
    file.write_text(REFUSING.replace("EXPERIMENT =", "PROCESS_PER_POINT = True\nEXPERIMENT =").replace("[2, 5, 7]", "[8, 2]"))
    done = run(*flags)
    assert done.code == 1 and (done.result["points_failed"], done.result["rows"]) == (2, 4)
    records = {r["point"]["dummy.bits"]: r for r in lines(tmp_path / "out" / "points.jsonl")}
    assert records[8]["status"] == "failed" and "its process was killed or crashed" in records[8]["error"]


def test_axes_of_a_file_that_are_none_are_refused(run, flags, file):
    file.write_text(SWEEP_FILE.replace("EXPERIMENT =", "REPORT_Y = 'kl'\nEXPERIMENT ="))
    assert_refused(run(*flags), "dummy.py", "REPORT_Y='kl'", "list")


def test_the_small_sweep_of_decode_steps(run, tmp_path):
    done = run("--sweep=configs/sweeps/decode_bits_smoke.py", f"--output_dir={tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert (done.result["points_refused"], done.result["points_failed"], done.result["rows"]) == (1, 0, 2)
    rows = {row["kv_format"]: row for row in lines(tmp_path / "out" / "sweep.jsonl")}
    assert rows["k3v3"]["read_weights_gb"] < rows["k16v16"]["read_weights_gb"]
    assert all(row["peak_process_gb"] > 0 and row["tpot_ms_p50"] > 0 for row in rows.values())
    table = (tmp_path / "out" / "sweep.md").read_text()
    assert "peak_process_gb" in table and "closed KV pages" in table and "context=1073741824" in table


def test_report(run, flags, tmp_path):
    run(*flags)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert set(re.findall(r'(?:src|href)="([^"]{10})', page)) == {"data:image"}
    assert page.count('<img alt="') == 1  # kl is NaN everywhere
    assert "No row has both effective_bits and kl" in page
    for word in ("A dummy sweep", "Notes &lt;b&gt;on it&lt;/b&gt;", "A dummy &amp; its help", "model_m", "t.txt", "jaxlib",
                 "python -m experiments.sweep", "dummy.log =", "deep.x.y", "point.Extra.mode", "All 12 rows"):
        assert word in page, word
    rows = lines(tmp_path / "out" / "sweep.jsonl")
    assert [row["effective_bits"] for row in rows] == sorted(row["effective_bits"] for row in rows) and len(rows) == 12
    for row in rows:
        assert f"<td>{row['label'].replace('<', '&lt;').replace('>', '&gt;')}</td>" in page and row["id"] in page
    assert page.count("<tr class=pareto>") == 3 == sum(bool(row["pareto"]) for row in rows)
    assert {row["label"] for row in rows if row["pareto"]} == {"b2<a>", "b3<a>", "b4<a>"}
    table = list(csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    assert len(table) == 12 and {"label", "deep.x.y", "point.dummy.bits", "result.checkpoint"} <= set(table[0])
    png = tmp_path / "out" / "perplexity_increase_pct_by_effective_bits.png"
    assert png.read_bytes().startswith(b"\x89PNG") and "| b2<a>" in (tmp_path / "out" / "sweep.md").read_text()


def test_report_of_other_metrics(run, flags):
    done = run(*flags, "--report_x=deep.x.y", "--report_y=perplexity_increase_pct:max", "--report_y=nothing")
    assert done.code == 0 and done.result["metrics_absent"] == ["nothing"]


def row(x, y, **more):
    return {"x": x, "y": y, **more}


def test_pareto():
    rows = [row(2, 9), row(3, 5), row(3, 5), row(3, 6), row(4, 5), row(5, 1), row(6, None), row(None, 0), row(7, 2)]
    assert pareto(rows, "x", Metric("y")) == [row(2, 9), row(3, 5), row(3, 5), row(5, 1)]
    assert pareto(rows, "x", Metric("y", higher_is_better=True)) == [row(2, 9)]
    two = [row(2, 1, **{"result.checkpoint": "a"}), row(3, 2, **{"result.checkpoint": "b"})]
    assert pareto(two, "x", Metric("y")) == two  # of different models: never compared


def test_error_bars_reach_the_bounds():
    plot = report.Pareto([], "x", Metric("y"))
    assert plot.errors([row(1, 5, y_low=3, y_high=9), row(1, 5, y_low=5.5, y_high=6)]) == ([2, 0], [4, 1])
    assert None in plot.bounds(row(1, 5, y_low=3))


@pytest.mark.parametrize("values, scale", [
    ([1, 30], None), ([1, 31], "log"), ([0, 0.1, 3], None), ([0, 0.1, 4], "symlog"), ([-0.01, 2], "symlog"), ([0], None),
    ([], None)])
def test_scale_is_logarithmic_over_thirtyfold(values, scale):
    said = []
    report.set_scale(types.SimpleNamespace(set_yscale=lambda name, **options: said.append(name)), values)
    assert said == ([scale] if scale else [])


def test_rows_without_a_label_get_the_bindings_that_vary():
    points = [{"f.a": 1, "f.b": 2}, {"f.a": 1, "f.b": 3}, {"f.a": 1, "f.b": 2, "g.c": 4}]
    names = sweep_points.varying(points)
    assert names == {"f.b", "g.c"} and sweep_points.varying(points[:1]) == set()
    record = {"status": "ok", "point": points[2], "result": {"loss": 1.5}, "seconds": 1.0, "revision": None, "id": "x"}
    assert [r["label"] for r in report.rows_of(record, names)] == ["b=2, c=4"]


def test_identity_is_that_of_the_bindings():
    def ids(common, points):
        return list(sweep_points.identified("f", common, points))

    one = ids("a = 1", [{"f.x": 1, "f.y": KVFormat(k_bits=3)}])
    assert one == ids("a = 1", [{"f.y": KVFormat(k_bits=3), "f.x": 1}])
    others = [ids("a = 2", [{"f.x": 1, "f.y": KVFormat(k_bits=3)}]), ids("a = 1", [{"f.x": 1, "f.y": KVFormat(k_bits=4)}]),
              ids("a = 1", [{"f.x": 1.0, "f.y": KVFormat(k_bits=3)}]), ids("a = 1", [{"f.x": True, "f.y": KVFormat(k_bits=3)}])]
    assert one not in others and len({str(o) for o in others}) == 4
    with pytest.raises(ValueError, match="a point binds"):
        ids("", param("f.x", [object()]))


def test_the_folder_of_another_sweep_is_refused(run, flags, file, tmp_path):
    run(*flags, "--seconds=0.001")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert_refused(run(*flags, "--seconds=0.002"), "out", "common bindings", "dummy.seconds = 0.001", "dummy.seconds = 0.002")
    assert_refused(run(*flags), "common bindings", "only here: none")
    file.write_text(SWEEP_FILE.replace("dummy", "other"))
    assert_refused(run(*flags, "--seconds=0.001"), "experiment dummy", "other")
    assert before == {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}


def test_shards_of_different_sweeps_are_not_reported_together(run, flags, tmp_path):
    """As when two shards with different flags began at the same moment."""
    run(*flags, "--shard=0/2")
    other = json.loads((tmp_path / "out" / "run.0of2.json").read_text())
    (tmp_path / "out" / "run.1of2.json").write_text(json.dumps(other | {"common": other["common"] + "\ndummy.seconds = 1.0"}))
    assert_refused(run(flags[1], "--report_only"), "common bindings", "dummy.seconds = 1.0")


def test_a_damaged_folder_is_refused(run, flags, tmp_path):
    run(*flags)
    points = tmp_path / "out" / "points.jsonl"
    whole = points.read_bytes()
    points.write_bytes(b"garbage\n" + whole)
    assert_refused(run(*flags), "points.jsonl", "line 1")
    points.write_bytes(whole)
    (tmp_path / "out" / "run.json").unlink()
    assert_refused(run(*flags), "no run.json")


def test_a_points_file_has_one_writer(run, flags, tmp_path):
    run(*flags)
    with sweep_folder.PointsFile(tmp_path / "out" / "points.jsonl"):
        assert_refused(run(*flags), "points.jsonl", "another process", "--shard")


@pytest.mark.parametrize("old, new, words", [
    ("", "", []),
    ('"dummy.bits"', '"dummy.nope"', ["nope", "dummy"]),
    ('"dummy.bits"', '"nobits"', ["nobits", "accepted", "bits"]),
    ('"dummy.bits"', '"nobody.bits"', ["nobody"]),
    ("[2, 3, 4]", "[2, 'x']", ["dummy.bits='x'", "int"]),
    ("[2, 3, 4]", "[2, float('nan')]", ["nan", "finite"]),
    ("[2, 3, 4]", "[]", [PLACE, "at least one"]),
    ("param(\"Extra.mode\"", "param(\"dummy.bits\"", ["dummy.bits bound twice"]),
    ("return prod", "return", ["points() returned", "list"]),
    ("return prod", "return undefined", [PLACE, "NameError", "undefined"]),
    ("return prod", "return return", [PLACE, "SyntaxError"]),
    ("def points", "def pints", ["points()"]),
    ('EXPERIMENT = "dummy"', 'EXPERIMENT = "nobody"', ["experiment=nobody", "quality"]),
    ("@cli.configurable", "", ["dummy", "@cli.configurable"]),
])
def test_bad_sweep_files(old, new, words, run, flags, file, tmp_path):
    file.write_text(SWEEP_FILE.replace(old, new))
    if not words:
        assert run(*flags).code == 0
        return
    assert_refused(run(*flags), *words)
    assert {p.name for p in tmp_path.iterdir()} <= {"dummy.py", "__pycache__"}


@pytest.mark.parametrize("more, words", [
    (["--shard=2/2"], ["--shard=2/2", "0/2"]),
    (["--shard=x"], ["--shard=x"]),
    (["--experiment=quality"], ["experiment=quality", "dummy"]),
    (["--bits=x"], ["--bits=x", "int"]),
    (["--nope=1"], ["nope"]),
    (["stray"], ["stray"]),
    (["--gin=dummy.nope=1"], ["nope"]),
    (["--gin_file=missing.gin"], ["missing.gin"]),
    (["--param=ids"], ["--param=ids", "NAME=[ALTERNATIVE"]),
    (["--param=ids=4"], ["--param=ids=4", "NAME=[ALTERNATIVE"]),
    (["--param=ids=[a]"], ["--param=ids=[a]", "literals"]),
    (["--param=bits=[1]"], ["dummy.bits", "twice"]),
    (["--report_y=kl:up"], ["--report_y=kl:up", "NAME:max"]),
    (["--report_only"], ["no sweep"]),
    (["--sweep=nowhere.py"], ["--sweep=nowhere.py", "existing"]),
])
def test_bad_flags(more, words, run, flags, tmp_path):
    assert_refused(run(*flags, *more), *words)
    assert {p.name for p in tmp_path.iterdir()} <= {"dummy.py", "__pycache__"}


def test_what_is_required(run, flags):
    assert_refused(run(flags[0]), "--output_dir")
    assert_refused(run(flags[1]), "--sweep", "--param")
    assert_refused(run(*flags[:2]), "log", "required")


def test_a_binding_that_nothing_uses_fails_its_points(run, tmp_path, flags, file):
    file.write_text(SWEEP_FILE + "\n@dataclasses.dataclass\nclass Unused:\n    a: int = 1\ncli.register(Unused)\n")
    done = run(*flags, "--param=Unused.a=[1, 2]")
    assert done.code == 1 and done.result["points_failed"] == 12 and not (tmp_path / "log").exists()
    assert "Unused.a has no effect" in lines(tmp_path / "out" / "points.jsonl")[0]["error"]


def test_help_names_every_flag(run, capsys):
    with pytest.raises(SystemExit) as exited:
        sweep.main(["--help"])
    out = capsys.readouterr().out
    assert exited.value.code == 0
    for name in "sweep experiment param shard retry_failed report_only report_x report_y gin gin_file output_dir".split():
        assert f"--{name}" in out


def test_the_shipped_sweep_files_name_real_bindings():
    for path in sorted((ROOT / "configs" / "sweeps").glob("*.py")):
        checked = sweep.checked([f"--sweep={path}"])
        assert checked.points and checked.title
