"""The page book: invariants under any order of calls, and every refusal."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import page_table
from moejax.page_table import OutOfPages
from pallas_kernels.pallas_utils import INVALID

SLOTS, PAGES, MAX_LEN, PAGE = 3, 7, 20, 4


def empty() -> page_table.PageTable:
    return page_table.create(max_batch=SLOTS, num_pages=PAGES, max_len=MAX_LEN, page_size=PAGE)


def test_pages_are_allocated_for_closed_pages_only():
    table = page_table.allocate(empty(), 1, 2 * PAGE - 1)
    assert table.num_owned(1) == 1 and table.num_free == PAGES - 1
    assert page_table.allocate(table, 1, PAGE) is table  # owns enough
    table = page_table.allocate(table, 1, 3 * PAGE)
    assert table.block_table[1].tolist() == [0, 1, 2, INVALID, INVALID]


def test_open_pages_need_no_page_of_the_pool():
    table = page_table.create(max_batch=2, num_pages=3, max_len=5 * PAGE, page_size=PAGE, open_pages=3)
    assert [table.closed_pages(n) for n in (1, 3 * PAGE - 1, 3 * PAGE, 4 * PAGE - 1, 5 * PAGE)] == [0, 0, 1, 1, 3]
    table = page_table.append(page_table.allocate(table, 0, 5 * PAGE), 0, 4 * PAGE)
    table = page_table.fork(table, 0, 1)
    assert table.block_table[:, :3].tolist() == [[0, 1, 2], [0, 1, INVALID]]
    page_table.check(table)


def test_values_are_not_changed_in_place():
    table = empty()
    before = [a.copy() for a in (table.block_table, table.ref_counts, table.kv_lens)]
    page_table.free(page_table.append(page_table.allocate(table, 0, 9), 0, 9), 0)
    assert all(np.array_equal(a, b) for a, b in zip(before, (table.block_table, table.ref_counts, table.kv_lens)))


def test_a_fork_shares_closed_pages_and_frees_only_its_own():
    table = page_table.append(page_table.allocate(empty(), 0, 3 * PAGE), 0, 2 * PAGE + 1)  # one page ahead
    table = page_table.fork(table, 0, 2)
    assert table.block_table[2].tolist() == [0, 1, INVALID, INVALID, INVALID] and table.kv_lens[2] == 2 * PAGE + 1
    assert table.ref_counts.tolist() == [2, 2, 1, 0, 0, 0, 0]
    table = page_table.free(page_table.allocate(table, 2, 3 * PAGE), 0)
    assert table.ref_counts.tolist() == [1, 1, 0, 1, 0, 0, 0]
    page_table.check(table)


def test_refusals():
    table = page_table.append(page_table.allocate(empty(), 0, MAX_LEN), 0, MAX_LEN)
    with pytest.raises(OutOfPages, match=r"slot 1 needs 3 more pages.*2 of 7 are free"):
        page_table.allocate(table, 1, 3 * PAGE)
    with pytest.raises(ValueError, match=r"num_tokens=24.*at most 20"):
        page_table.allocate(table, 0, MAX_LEN + PAGE)
    with pytest.raises(ValueError, match="0 are allocated"):
        page_table.append(table, 1, PAGE)
    with pytest.raises(ValueError, match="slot 0: must be free"):
        page_table.fork(table, 1, 0)
    for name in ("max_batch", "max_len", "page_size", "open_pages"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            page_table.create(**{"max_batch": 1, "num_pages": 1, "max_len": 4, "page_size": 4, name: 0})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grow", "fork", "free"]), st.integers(0, SLOTS - 1), st.integers(0, 9)), max_size=25))
def test_invariants_hold_after_any_calls(calls):
    table, lens = empty(), [0] * SLOTS
    for name, slot, n in calls:
        try:
            if name == "grow":
                table = page_table.append(page_table.allocate(table, slot, lens[slot] + n), slot, n)
                lens[slot] += n
            elif name == "fork":
                table = page_table.fork(table, slot, n % SLOTS)
                lens[n % SLOTS] = lens[slot]
            else:
                table, lens[slot] = page_table.free(table, slot), 0
        except (ValueError, OutOfPages):
            pass
        page_table.check(table)
        assert table.kv_lens.tolist() == lens
        assert table.num_free == PAGES - len(set(table.block_table.ravel().tolist()) - {INVALID})
    for slot in range(SLOTS):
        table = page_table.free(table, slot)
    assert table.num_free == PAGES
