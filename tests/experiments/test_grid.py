"""The algebra of sweeps: laws, order, duplicates, refusals."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.grid import chain, param, prod, subsample, zipped

A, B = param("a", [1, 2]), param("b", [1, 2, 3])
VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def test_prod_varies_the_last_list_fastest():
    assert prod(A, param("b", "x y".split())) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert prod() == [{}] and prod(A) == A == prod(A, [{}]) and prod(A, []) == []


@given(VALUES, VALUES, VALUES)
def test_laws(x, y, z):
    a, b, c = param("a", x), param("b", y), param("c", z)
    assert prod(a, b, c) == prod(prod(a, b), c) == prod(a, prod(b, c))
    assert len(prod(a, b)) == len(set(x)) * len(set(y))
    assert prod(chain(a, b), c) == chain(prod(a, c), prod(b, c))
    assert chain(a, a) == chain(a) and chain(a, chain(b, c)) == chain(chain(a, b), c)


def test_duplicates_are_dropped_and_the_first_stays():
    repeated = param("a", [3, 1, 3, 2, 1])
    assert prod(repeated) == chain(repeated) == zipped(repeated) == subsample(repeated, 3) == [{"a": 3}, {"a": 1}, {"a": 2}]
    assert zipped(param("k", [3, 2, 2]), param("v", [2, 2, 1])) == [{"k": 3, "v": 2}, {"k": 2, "v": 2}, {"k": 2, "v": 1}]
    assert chain(A, param("a", [2, 3]), A) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert chain([{"a": 1, "b": 2}], [{"b": 2, "a": 1}]) == [{"a": 1, "b": 2}]
    assert zipped(param("a", [1, 2]), [{"b": 1}, {"b": 1}]) == [{"a": 1, "b": 1}, {"a": 2, "b": 1}]


def test_values_of_different_types_are_different_points():
    assert len(chain(param("a", [1, 1.0, True, "1", None, [1], (1,)]))) == 7


def test_zipped():
    assert zipped(A, param("b", [[8], [9]])) == [{"a": 1, "b": [8]}, {"a": 2, "b": [9]}]
    assert zipped() == []


@given(st.integers(0, 6), st.integers(0, 3))
def test_subsample_keeps_order_and_grows(n, seed):
    points = prod(A, B)
    chosen = subsample(points, n, seed)
    assert len(chosen) == n and [p for p in points if p in chosen] == chosen
    assert all(p in subsample(points, min(n + 1, 6), seed) for p in chosen)
    assert chosen == subsample(points, n, seed)
    assert {str(p) for p in subsample(points[::-1], n, seed)} == {str(p) for p in chosen}


def test_subsample_depends_on_the_seed():
    points = param("a", range(100))
    assert len({str(subsample(points, 5, seed)) for seed in range(5)}) == 5
    chosen = [subsample(points, 50, seed) for seed in range(40)]
    counts = [sum(point in some for some in chosen) for point in points]
    assert min(counts) > 5 and max(counts) < 35  # nobody is always or never chosen


def test_arguments_are_left_alone():
    a, b = [{"a": 1}, {"a": 1}], [{"b": 2}, {"b": 3}]
    for out in (prod(a), chain(a, b), zipped(a, b), subsample(b, 1)):
        out[0]["c"] = 1
    assert a == [{"a": 1}, {"a": 1}] and b == [{"b": 2}, {"b": 3}]


@pytest.mark.parametrize("call, words", [
    (lambda: prod(A, B, A), ["prod", "a bound twice"]),
    (lambda: prod(A, [{"a": 1}]), ["a bound twice", "[1]"]),
    (lambda: zipped(A, param("a", [3, 4])), ["zipped", "a bound twice", "[3]"]),
    (lambda: zipped(A, B), ["(a) has 2", "(b) has 3"]),
    (lambda: zipped(A, A[:0]), ["(a) has 2", "has 0"]),
    (lambda: param("a", []), ["param a", "at least one"]),
    (lambda: param("a", "xy"), ["values='xy'", "list"]),
    (lambda: param("a", 3), ["values=3", "list"]),
    (lambda: param("", [1]), ["name=''"]),
    (lambda: subsample(A, 3), ["n=3", "0 to 2"]),
    (lambda: subsample(A, -1), ["n=-1"]),
    (lambda: subsample(A, 1.5), ["n=1.5"]),
])
def test_refusals(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert all(word in str(refused.value) for word in words), refused.value
