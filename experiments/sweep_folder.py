"""What a sweep keeps in its folder while it runs, so that it can be killed, resumed, and spread over processes.

    points.jsonl   one line a finished point, on disk before the next point starts
    run.json       what was asked for: experiment, common bindings, points, and the environment of every session

Shard i of n has points.<i>of<n>.jsonl and run.<i>of<n>.json of its own. Every process reads all of them and writes its own.
"""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import types
from typing import Any, Self

from experiments import results, typed


@dataclasses.dataclass(frozen=True)
class Shard:
    """Share `index` of `count` equal shares."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Of "i/n"; None is everything. Raises ValueError naming the text."""
        if text is None:
            return cls()
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError(f"--shard={text}: must be i/n with i from 0 to n-1, such as 0/2")
        return cls(int(match[1]), int(match[2]))

    def deal(self, items: list) -> list:
        """This shard's items, dealt round-robin."""
        return items[self.index::self.count]

    def name(self, stem: str, ending: str) -> str:
        """File name of this shard."""
        return f"{stem}.{ending}" if self.count == 1 else f"{stem}.{self.index}of{self.count}.{ending}"


@dataclasses.dataclass(frozen=True)
class Contents:
    """Everything found in a folder: the run files by name, and the record of each finished point by its id."""

    runs: dict[str, dict]
    records: dict[str, dict]

    def missing(self) -> list[str]:
        """Ids of points that were asked for and are not finished."""
        asked = dict.fromkeys(i for run in self.runs.values() for i in run["ids"])
        return [i for i in asked if i not in self.records]

    def failed(self) -> list[dict]:
        return [record for record in self.records.values() if record["status"] not in ("ok", "refused")]

    def refused(self) -> list[dict]:
        """Of points that the device's memory is too small for."""
        return [record for record in self.records.values() if record["status"] == "refused"]


def read(folder: pathlib.Path) -> Contents:
    """What all shards left in the folder. Of a point recorded twice the success counts, or else the later line.

    Raises:
      ValueError: a file is damaged, other than by a half-written last line, or the files are not of one sweep.
    """
    runs: dict[str, dict] = {}
    for path in sorted(folder.glob("run*.json")):
        try:
            runs[path.name] = json.loads(path.read_text())
            if not typed.accepts(list[str], runs[path.name]["ids"]) or not isinstance(runs[path.name]["common"], str):
                raise ValueError("other types")
            runs[path.name]["experiment"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--output_dir={folder}: {path.name} is not a sweep's run file; use another folder") from None
    records: dict[str, dict] = {}
    for path in sorted(folder.glob("points*.jsonl")):
        for record in read_lines(path.read_bytes(), path)[0]:
            if record["status"] == "ok" or records.get(record["id"], record)["status"] != "ok":
                records[record["id"]] = record
    if records and not runs:
        raise ValueError(f"--output_dir={folder}: has points but no run.json that says what they are; use another folder")
    for name, run in runs.items():
        check_same(folder, name, run, next(iter(runs.values())))
    return Contents(runs, records)


def check_same(folder: pathlib.Path, name: str, there: dict, here: dict) -> None:
    """Raises ValueError when two runs differ in their experiment or common bindings, naming the differences."""
    if there["experiment"] != here["experiment"]:
        raise ValueError(f"--output_dir={folder}: holds a sweep of the experiment {there['experiment']} ({name}), this one is of "
                         f"{here['experiment']}; use another folder")
    old, new = (set(bindings(run["common"])) for run in (there, here))
    if old != new:
        raise ValueError(f"--output_dir={folder}: holds a sweep with other common bindings ({name}); only there: "
                         f"{', '.join(sorted(old - new)) or 'none'}; only here: {', '.join(sorted(new - old)) or 'none'}; "
                         "use another folder")


def bindings(config: str) -> list[str]:
    """The bindings of a configuration that has each on one line."""
    return [line for line in config.splitlines() if line and not line.startswith("#")]


def read_lines(data: bytes, path: pathlib.Path) -> tuple[list[dict], int]:
    """(records, bytes that they take). A last line that is not whole is left out.

    Raises:
      ValueError: any other line is not a record of a point.
    """
    records: list[dict] = []
    end = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("half a line")
            record = json.loads(line)
            record["id"], record["status"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is not a record of a point; mend or remove the file") from None
        records.append(record)
        end += len(line)
    return records, end


class PointsFile:
    """The points file of this process, open for appending; nobody else may have it open so.

    Raises:
      ValueError: another process has it.
    """

    def __init__(self, path: pathlib.Path):
        self._file = results.locked(path, f"{path}: another process is writing it; give each its own --shard=i/n or --output_dir")
        self._file.seek(0)
        self._file.truncate(read_lines(self._file.read(), path)[1])

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line and returns when it is on disk."""
        self._file.write((json.dumps(results.jsonable(record), allow_nan=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._file.close()
