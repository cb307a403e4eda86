"""The command-line contract: exit codes, one-line errors, precedence, the last line of stdout, output_dir."""
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXPERIMENT = '''
import time
from experiments import cli
from pallas_kernels.kv_format import KVFormat

@cli.configurable
def sample(names: list[str], steps: int = 3, rate: float = 0.5, on: bool = False,
           ids: list[int] | None = None, kv_format: KVFormat = KVFormat(), formats: list[KVFormat] | None = None):
    """A sample experiment."""
    if steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1")
    def work():
        if steps == 13:
            raise ValueError("a bug")
        if steps == 14:
            open("/nowhere/file")
        if steps == 15:
            print("working", flush=True)
            time.sleep(60)
        return {"names": names, "steps": steps, "rate": rate, "on": on, "ids": ids, "kv": kv_format.name,
                "nan": float("nan"), "formats": [f.name for f in formats or []], "exit_code": 1 if steps == 99 else 0}
    return work

cli.main(sample, positional="names")
'''


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = tmp_path_factory.mktemp("cli") / "sample.py"
    script.write_text(EXPERIMENT)

    def call(*args, start=subprocess.run, **options):
        return start([sys.executable, str(script), *args], text=True, env=ENVIRONMENT,
                     **(options or {"capture_output": True}))

    return call


def test_flags_win_over_bindings_over_files(run, tmp_path):
    gin_file = tmp_path / "a.gin"
    gin_file.write_text("sample.steps = 4\nsample.rate = 0.25\nKVFormat.k_bits = 4\n"
                        "sample.formats = [@x/KVFormat()]\nx/KVFormat.v_bits = 2\n")
    done = run("a", "b,c", f"--gin_file={gin_file}", "--gin=sample.rate = 0.75", "--gin=KVFormat.v_bits = 3", "--steps=5",
               "--on", "--ids=1,2", "--ids=3", f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"names": ["a", "b,c"], "steps": 5, "rate": 0.75, "on": True, "ids": [1, 2, 3], "kv": "k4v3",
                      "nan": None, "formats": ["k4v2"]}
    record = json.loads((tmp_path / "out" / "results.jsonl").read_text())
    assert record["steps"] == 5 and record["command"].startswith("python -m experiments.sample")
    assert "sample.steps = 5" in (tmp_path / "out" / "config.gin").read_text()
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["versions"]["jax"]


@pytest.mark.parametrize("args, words", [
    ([], ["names", "required"]),
    (["a", "--steps=0"], ["steps=0", "at least 1"]),
    (["a", "--steps=two"], ["--steps=two", "int"]),
    (["a", "--rate=nan"], ["--rate=nan", "finite"]),
    (["a", "--nope=1"], ["nope"]),
    (["a", "--k_bits=5"], ["k_bits=5", "2, 3, 4"]),
    (["a", "--gin=sample.nope = 1"], ["nope"]),
    (["a", "--gin=sample.steps = 'x'"], ["sample.steps='x'", "int"]),
    (["a", "--gin=sample.steps = True"], ["sample.steps=True", "int"]),
    (["a", "--gin=sample.steps ="], ["parse"]),
    (["a", "--gin=sample.kv_format = @Nothing()"], ["Nothing"]),
    (["--gin=sample.names = []"], ["sample.names=[]", "must not be empty"]),
    (["--gin=sample.names = 'abc'"], ["sample.names='abc'", "a list of str"]),
    (["--gin=sample.names = @sample()"], ["sample", "refers to itself"]),
    (["a", "--gin=sample.ids = 3"], ["sample.ids=3", "a list of int or None"]),
    (["a", "--gin=sample.rate = 1e999"], ["sample.rate=inf", "finite"]),
    (["a", "--gin=sample.kv_format = 3"], ["sample.kv_format=3", "@KVFormat()"]),
    (["a", "--gin=sample.formats = [@KVFormat(), 3]"], ["sample.formats=", "a list of KVFormat"]),
    (["a", "--gin=KVFormat.k_bits = '2'"], ["KVFormat.k_bits='2'", "int"]),
    (["a", "--gin=sample.steps = [1"], ["--gin=sample.steps = [1", "EOF"]),
    (["a", "--gin=import nothing.here"], ["--gin=import nothing.here", "No module named 'nothing'"]),
    (["a", "--gin=sample.steps = %NONE"], ["%NONE", "no value", "bind NONE"]),
    (["a", "--gin=include 'nothing.gin'"], ["include 'nothing.gin'", "Unable to open"]),
    (["a", "--gin_file=missing.gin"], ["--gin_file=missing.gin", "no such file", "looked in"]),
    (["a", "--gin_file="], ["--gin_file=", "no such file"]),
    (["a", "--output_dir=/dev/null"], ["--output_dir=/dev/null", "not a folder"]),
    (["a", "--output_dir=/proc/out"], ["--output_dir=/proc/out", "not writable"]),
    (["a", "--output_dir="], ["--output_dir=", "must name a folder"]),
])
def test_bad_input_is_one_line_and_exit_code_2(run, args, words):
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_a_bug_in_the_work_keeps_its_traceback(run):
    done = run("a", "--steps=13")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_the_result_can_set_the_exit_code(run):
    done = run("a", "--steps=99")
    assert done.returncode == 1 and json.loads(done.stdout)["steps"] == 99


def test_help_names_every_flag(run):
    done = run("--help")
    assert done.returncode == 0
    assert all(f"--{name}" in done.stdout for name in ("names", "steps", "k_bits", "gin_file", "output_dir"))


@pytest.mark.parametrize("text, words", [
    ("sample.names = ['a'\n", ["EOF", "line"]), ("import nothing.here\n", ["No module named"]), ("sample.nope = 1\n", ["nope"]),
    ("include 'nothing.gin'\n", ["nothing.gin", "Unable to open"]), ("include 'bad.gin'\n", ["includes itself"]),
    ("\udcff", ["utf-8"])])
def test_a_gin_file_that_cannot_be_read_is_named(run, tmp_path, text, words):
    (tmp_path / "bad.gin").write_text(text, errors="surrogateescape")
    done = run("a", f"--gin_file={tmp_path / 'bad.gin'}")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1
    assert all(word in lines[0] for word in ["--gin_file=", "bad.gin", *words]), lines[0]


def test_includes_are_found_beside_their_file_and_under_the_root_from_any_folder(run, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.gin").write_text("include 'b.gin'\ninclude 'configs/models/moe_tiny.gin'\nsample.steps = 4\n")
    (tmp_path / "there" / "b.gin").write_text("sample.rate = 0.125\nimport experiments.train\n")
    (tmp_path / "elsewhere").mkdir()
    done = run("a", "--gin_file=../there/a.gin", cwd=tmp_path / "elsewhere", capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4 and json.loads(done.stdout)["rate"] == 0.125


def test_nothing_is_written_before_the_input_is_known_to_be_good(run, tmp_path):
    done = run("a", "--steps=0", f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 2 and not (tmp_path / "out").exists()


def test_what_stops_the_work_from_outside_is_one_line(run):
    done = run("a", "--steps=14")
    assert done.returncode == 1 and done.stderr == "error: /nowhere/file: No such file or directory\n"


def interrupted(process) -> None:
    """Waits for the first line of a process, interrupts it, and checks that it says so in one line."""
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "interrupted\n"


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_an_interrupt_of_the_work_is_one_line(run):
    interrupted(run("a", "--steps=15", start=subprocess.Popen, **PIPES))


def test_an_interrupt_of_the_imports_is_one_line(tmp_path):
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")  # in place of the real one
    interrupted(subprocess.Popen([sys.executable, "-m", "experiments.decode"], text=True, cwd=tmp_path, **PIPES))
