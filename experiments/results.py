"""Where results go: one JSONL record a run, beside the operative configuration and the environment that made it."""
from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import math
import os
import pathlib
import platform
import shlex
import subprocess
import tempfile
from typing import Any, BinaryIO

log = logging.getLogger(__name__)


class Output:
    """The folder of one experiment's results.

    Holds `results.jsonl` (appended, one line a run), `config.gin` (operative configuration of the last run) and
    `environment.json` (versions, devices, command, revision).

    Raises:
      ValueError: the folder cannot be made or written. Nothing is, before `write_config`.
    """

    def __init__(self, folder: str, name: str, argv: list[str]):
        self.folder = pathlib.Path(folder)
        self.command = shlex.join(["python", "-m", f"experiments.{name}", *argv])
        self.name = name
        if not folder:
            raise ValueError("--output_dir=: must name a folder")
        for file in ("results.jsonl", "config.gin", "environment.json"):
            require_writable_file(f"--output_dir={folder}", self.folder / file)

    def write_config(self, operative_config: str) -> None:
        """Writes the configuration and the environment, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "config.gin", operative_config)
        write_atomic(self.folder / "environment.json", json.dumps(environment(self.command), indent=1) + "\n")

    def record(self, result: dict) -> None:
        """Appends one line: the result, with experiment, command and time."""
        line = {"experiment": self.name, "command": self.command, "utc": utc_now(), **result}
        append_jsonl(self.folder / "results.jsonl", line)


def append_jsonl(path: pathlib.Path, record: dict) -> None:
    """Appends one record as one line, in one write, so that a killed run leaves no half line behind another's.

    A last line that was torn all the same (a full disk, a lost machine) is dropped.
    """
    data = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = mended_end(fd, size, path) + data
        os.write(fd, data)
    finally:
        os.close(fd)


def mended_end(fd: int, size: int, path: pathlib.Path) -> bytes:
    """Cuts a last line that has no end off a JSON lines file; what to write first where it is whole but for that end."""
    begin = os.pread(fd, size, 0).rfind(b"\n") + 1
    try:
        json.loads(os.pread(fd, size, begin))
        return b"\n"
    except ValueError:
        log.warning("%s: its last line was torn (a run that was killed, a full disk) and is dropped", path)
        os.ftruncate(fd, begin)
        return b""


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes a file through a temporary one and a rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def locked(path: pathlib.Path, refusal: str) -> BinaryIO:
    """The file, open for appending, that no other process may have open so; the lock is gone with the process, however it ends.

    Raises:
      ValueError: another process has it; the message is `refusal`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(refusal) from None
    except OSError:  # a file system without locks
        pass
    return file


def require_writable_folder(name: str, folder: pathlib.Path) -> None:
    """Raises ValueError unless the folder can be written, or made where it does not exist; `name` is the parameter that says so,
    and its value."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"{name}: {path} exists and is not a folder")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise ValueError(f"{name}: {path} is not writable ({e.strerror})") from None


def require_writable_file(name: str, file: pathlib.Path) -> None:
    """The same of a file, which may exist."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{name}: {file} exists and is not a file")
    require_writable_folder(name, file.parent)


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
