"""The command-line contract: exit codes, one-line errors, precedence, the last line of stdout, output_dir."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXPERIMENT = '''
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
        return {"names": names, "steps": steps, "rate": rate, "on": on, "ids": ids, "kv": kv_format.name,
                "nan": float("nan"), "formats": [f.name for f in formats or []], "exit_code": 1 if steps == 99 else 0}
    return work

cli.main(sample, positional="names")
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = tmp_path_factory.mktemp("cli") / "sample.py"
    script.write_text(EXPERIMENT)

    def call(*args):
        return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True,
                              env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"})

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
    (["a", "--gin_file=missing.gin"], ["missing.gin", "no such file"]),
    (["a", "--output_dir=/dev/null"], ["/dev/null", "not a folder"]),
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
