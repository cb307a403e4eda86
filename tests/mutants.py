"""Breaks the code on purpose, one line at a time, and proves that the suite notices: `python -m tests.mutants [NAME ...]`.

Each mutant is one textual replacement in a copy of the tree, and the few tests that must then fail. A mutant whose tests stay
green, or whose text is no longer found exactly once, is a failure of this script.
"""
from __future__ import annotations

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("moejax", "pallas_kernels", "experiments", "tests", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `path` and becomes `new`; `tests` (pytest arguments) must then fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS: tuple[Mutant, ...] = ()


def run_tests(tree: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def copy_tree(folder: str) -> pathlib.Path:
    tree = pathlib.Path(folder)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, tree / name)
    return tree


def survives(tree: pathlib.Path, mutant: Mutant) -> str | None:
    """Why this mutant counts as a failure, or None when its tests caught it."""
    path = tree / mutant.path
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"{mutant.old!r} occurs {original.count(mutant.old)} times in {mutant.path}, must be once"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        done = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original)
    if done.returncode == 1:  # pytest: tests were run and some failed
        return None
    return f"not caught (pytest exit code {done.returncode}): {done.stdout.strip().splitlines()[-1:]}"


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    if unknown := set(names) - {m.name for m in MUTANTS}:
        print(f"error: unknown mutants {sorted(unknown)}; known are {[m.name for m in MUTANTS]}", file=sys.stderr)
        return 2
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        baseline = run_tests(tree, " ".join(dict.fromkeys(" ".join(m.tests for m in chosen).split())))
        if baseline.returncode:
            print(f"the tests fail without any mutant:\n{baseline.stdout[-2000:]}")
            return 1
        for mutant in chosen:
            why = survives(tree, mutant)
            print(f"{'caught' if why is None else 'SURVIVED'}  {mutant.name}{'' if why is None else ': ' + why}", flush=True)
            failures += why is not None
    print(f"{len(chosen) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
