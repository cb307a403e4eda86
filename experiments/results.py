"""Where results go: one JSONL record a run, beside the operative configuration and the environment that made it."""
from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
from typing import Any


class Output:
    """The folder of one experiment's results.

    Holds `results.jsonl` (appended, one line a run), `config.gin` (operative configuration of the last run) and
    `environment.json` (versions, devices, command, revision).

    Raises:
      OSError, ValueError: the folder cannot be made or written.
    """

    def __init__(self, folder: str, name: str, argv: list[str]):
        self.folder = pathlib.Path(folder)
        self.command = shlex.join(["python", "-m", f"experiments.{name}", *argv])
        self.name = name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"--output_dir={folder}: exists and is not a folder") from None
        if not os.access(self.folder, os.W_OK):
            raise ValueError(f"--output_dir={folder}: is not writable")

    def write_config(self, operative_config: str) -> None:
        """Writes the configuration and the environment, whole or not at all."""
        write_atomic(self.folder / "config.gin", operative_config)
        write_atomic(self.folder / "environment.json", json.dumps(environment(self.command), indent=1) + "\n")

    def record(self, result: dict) -> None:
        """Appends one line: the result, with experiment, command and time."""
        line = {"experiment": self.name, "command": self.command, "utc": utc_now(), **result}
        append_jsonl(self.folder / "results.jsonl", line)


def append_jsonl(path: pathlib.Path, record: dict) -> None:
    """Appends one record as one line, in one write, so that a killed run leaves no half line behind another's."""
    data = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a file through a temporary one and a rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def environment(command: str) -> dict[str, Any]:
    """What a reader needs to judge a number: versions, devices, command and revision."""
    import importlib.metadata

    import jax

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
    return {
        "command": command,
        "utc": utc_now(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "platform": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "cpu_count": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "revision": git_revision(),
    }


def git_revision() -> str | None:
    """Commit of the working tree, with "+changes" when it differs from it; None outside of a repository."""
    root = pathlib.Path(__file__).resolve().parents[1]

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def jsonable(value):
    """The value with numpy scalars and arrays as Python ones, and numbers that JSON has no word for as null."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, pathlib.Path):
        return str(value)
    return value


def markdown_table(rows: list[dict], columns: dict[str, str]) -> str:
    """A table of `rows`; `columns` maps key -> format spec ("" for plain text), in order."""
    def cell(row: dict, key: str, spec: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, spec)

    body = [[cell(row, key, spec) for key, spec in columns.items()] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in body)) for i, key in enumerate(columns)]
    lines = [list(columns), ["-" * w for w in widths], *body]
    return "\n".join("| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in lines)


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
