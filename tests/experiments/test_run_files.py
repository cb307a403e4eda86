"""Every decode and quality run file names things that exist, and builds on the shipped model."""
import pathlib

import pytest

from experiments import cli, signature
from experiments.decode import decode
from experiments.quality import quality

ROOT = pathlib.Path(__file__).parents[2]
RUNS = {path.stem: path for path in (ROOT / "configs" / "runs").glob("*.gin") if not path.stem.startswith("train_")}
EXPERIMENTS = {"demo": quality, "quality": quality, "decode": decode, "bench_cpu": decode}


def test_every_run_file_is_tested():
    assert RUNS.keys() == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_builds(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    parameters = signature.parameters_of(EXPERIMENTS[name])
    argv = [f"--gin_file={RUNS[name]}", "--checkpoint=checkpoints/moe_10m"]
    work, output = cli.build(EXPERIMENTS[name], parameters, signature.define_flags(parameters), None, argv)
    assert callable(work) and output is None
    assert RUNS[name].read_text().startswith("#")  # what it is, what to override, what to expect
