"""The algebra of sweeps. A sweep is a list of points, a point a dict {gin binding name: value}.

    prod(param("quality.k_bits", [4, 3, 2]), chain(param("CacheOptions.sink_tokens", [0, 4]), [{"quality.context": 512}]))

Everything is pure: lists come in, a new list goes out, in an order that depends on the arguments alone. Duplicates are dropped,
the first stays; `param` alone keeps them, as `zipped` pairs by place.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

Point = dict[str, Any]


def param(name: str, values: Iterable[Any]) -> list[Point]:
    """One point for each alternative of one binding.

    Args:
      name: gin binding, "quality.k_bits", or a flag of the experiment, "k_bits".
      values: alternatives, at least one. For a binding that is itself a list, alternatives are lists: [[4], [4, 2]].

    Raises:
      ValueError: an empty name, no values, or a text in place of a list of values.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"param {name=}: must be the name of a gin binding, such as 'quality.k_bits'")
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ValueError(f"param {name}: values={values!r} must be a list of alternatives")
    points = [{name: value} for value in values]
    if not points:
        raise ValueError(f"param {name}: values must hold at least one alternative")
    return points


def prod(*lists: list[Point]) -> list[Point]:
    """Every combination of one point out of each list, the last list varying fastest. `prod()` is the one point without bindings.

    Raises:
      ValueError: two lists bind the same name, be it to the same value.
    """
    points: list[Point] = [{}]
    for part in lists:
        points = [_merged(left, right, "prod") for left in points for right in part]
    return _unique(points)


def chain(*lists: list[Point]) -> list[Point]:
    """The points of every list, one list after another."""
    return _unique(point for part in lists for point in part)


def zipped(*lists: list[Point]) -> list[Point]:
    """The first points of all lists merged, the second ones, and so on.

    Raises:
      ValueError: lists of different lengths, or two lists that bind the same name.
    """
    for i, part in enumerate(lists):
        if len(part) != len(lists[0]):
            raise ValueError(f"zipped: lists must be of one length; the first ({_names(lists[0])}) has {len(lists[0])} points, "
                             f"number {i + 1} ({_names(part)}) has {len(part)}")
    points = []
    for parts in zip(*lists):
        point: Point = {}
        for part in parts:
            point = _merged(point, part, "zipped")
        points.append(point)
    return _unique(points)


def subsample(points: list[Point], n: int, seed: int = 0) -> list[Point]:
    """`n` of the points, chosen at random, in their old order.

    The choice depends on `seed` and on each point's bindings alone: a larger `n` keeps what a smaller one chose, and so does a
    longer list as far as its new points do not displace old ones.

    Raises:
      ValueError: `n` is negative or exceeds the number of points.
    """
    points = _unique(points)
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= len(points):
        raise ValueError(f"subsample {n=}: must be an int from 0 to {len(points)}, the number of points")

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed}:{key(points[i])}".encode()).digest()

    return [points[i] for i in sorted(sorted(range(len(points)), key=rank)[:n])]


def key(point: Point) -> str:
    """Equal for points that bind the same names to the same values of the same types (1, 1.0 and True differ), in any order."""
    return repr(sorted(point.items(), key=lambda item: item[0]))


def _merged(left: Point, right: Point, where: str) -> Point:
    twice = sorted(left.keys() & right.keys())
    if twice:
        raise ValueError(f"{where}: {', '.join(twice)} bound twice, to {[left[k] for k in twice]} and "
                         f"{[right[k] for k in twice]}")
    return left | right


def _names(points: list[Point]) -> str:
    return ", ".join(dict.fromkeys(name for point in points for name in point)) or "without bindings"


def _unique(points: Iterable[Point]) -> list[Point]:
    out: dict[str, Point] = {}
    for point in points:
        out.setdefault(key(point), dict(point))
    return list(out.values())
