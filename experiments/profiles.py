"""Kernel times out of a profile of the device."""
from __future__ import annotations

import collections
import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, float]]:
    """Records what runs on the device; the dict is filled at the end: kernel name to its microseconds in all, longest first.

    Two more entries: "total" is their sum, "span" the time from the first kernel's start to the last one's end, gaps included.
    Empty where the device has no kernels (a CPU).
    """
    kernels: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield kernels
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            kernels |= _kernels(jax.profiler.ProfileData.from_file(str(file)))


def _kernels(data) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    starts, ends = [], []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                total[event.name] += event.duration_ns / 1e3
                starts.append(event.start_ns)
                ends.append(event.start_ns + event.duration_ns)
    if not total:
        return {}
    span = (max(ends) - min(starts)) / 1e3
    return {"span": span, "total": sum(total.values()), **dict(total.most_common())}
