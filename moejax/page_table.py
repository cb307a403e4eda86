"""The host's book of pages: who owns which page of the pool. Pure functions over a frozen value; nothing here touches a device.

Only closed pages live in the pool, and a closed page never changes: sharing one is a reference count, and there is no
copy-on-write. A sequence of n tokens owns the pages that are closed then, `closed_pages`; they can be allocated ahead.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.pallas_utils import INVALID, cdiv


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageTable:
    """Which pages each slot owns.

    Attributes:
      block_table: int32 [B, J]; the first entries of a row are its pages in order, the rest is INVALID.
      ref_counts: int32 [P]; how many rows name each page; 0 is free.
      kv_lens: int32 [B]; tokens in each slot's sequence.
      page_size: tokens a page.
      open_pages: last pages of a sequence that are not in the pool, the one being filled included; of layers that differ, the
        fewest. (Layers with more may close a page when it is shared already: every owner writes the same words.)

    Invariants: ref_counts[p] equals the number of entries of block_table that are p; no row names a page twice; a row's pages
    cover its closed tokens, that is closed_pages(kv_lens) <= pages of the row.
    """

    block_table: np.ndarray
    ref_counts: np.ndarray
    kv_lens: np.ndarray
    page_size: int
    open_pages: int = 1

    def closed_pages(self, num_tokens: int) -> int:
        """See `closed_pages`."""
        return closed_pages(num_tokens, self.page_size, self.open_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return int(np.count_nonzero(self.ref_counts == 0))

    def num_owned(self, slot: int) -> int:
        """Pages that `slot` owns."""
        return int(np.count_nonzero(self.block_table[slot] != INVALID))


def closed_pages(num_tokens: int, page_size: int, open_pages: int) -> int:
    """Pages that a sequence of `num_tokens` tokens has closed: the oldest open page closes when the newest is full."""
    return max(num_tokens // page_size + 1 - open_pages, 0)


def create(*, max_batch: int, num_pages: int, max_len: int, page_size: int, open_pages: int = 1) -> PageTable:
    """An empty table: `max_batch` slots of sequences of up to `max_len` tokens, `num_pages` pages.

    Raises:
      ValueError: a size below 1 (`num_pages` may be 0: sequences shorter than a page own none).
    """
    for name, value, least in (("max_batch", max_batch, 1), ("num_pages", num_pages, 0), ("max_len", max_len, 1),
                               ("page_size", page_size, 1), ("open_pages", open_pages, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    return PageTable(np.full((max_batch, cdiv(max_len, page_size)), INVALID, np.int32), np.zeros(num_pages, np.int32),
                     np.zeros(max_batch, np.int32), page_size, open_pages)


def allocate(table: PageTable, slot: int, num_tokens: int) -> PageTable:
    """Gives `slot` the pages it needs to reach `num_tokens` tokens. Lowest free page ids first.

    Raises:
      ValueError: more tokens than a row of the block table can hold.
      OutOfPages: the pool has too few free pages; the table is as before.
    """
    owned, needed = table.num_owned(slot), table.closed_pages(num_tokens)
    if num_tokens > table.block_table.shape[1] * table.page_size:
        raise ValueError(f"{num_tokens=} of slot {slot}: at most {table.block_table.shape[1] * table.page_size} fit into "
                         f"{table.block_table.shape[1]} pages of {table.page_size} tokens")
    if needed <= owned:
        return table
    free = np.flatnonzero(table.ref_counts == 0)[:needed - owned]
    if len(free) < needed - owned:
        raise OutOfPages(f"slot {slot} needs {needed - owned} more pages for {num_tokens} tokens, {table.num_free} of "
                         f"{len(table.ref_counts)} are free")
    block_table, ref_counts = table.block_table.copy(), table.ref_counts.copy()
    block_table[slot, owned:needed] = free
    ref_counts[free] = 1
    return dataclasses.replace(table, block_table=block_table, ref_counts=ref_counts)


def append(table: PageTable, slot: int, num_tokens: int) -> PageTable:
    """Records `num_tokens` more tokens in `slot`. Raises ValueError when pages they closed had not been allocated."""
    kv_lens = table.kv_lens.copy()
    kv_lens[slot] += num_tokens
    closed = table.closed_pages(int(kv_lens[slot]))
    if num_tokens < 0 or closed > table.num_owned(slot):
        raise ValueError(f"{num_tokens=} more in slot {slot}: {kv_lens[slot]} tokens close {closed} pages, "
                         f"{table.num_owned(slot)} are allocated")
    return dataclasses.replace(table, kv_lens=kv_lens)


def fork(table: PageTable, source: int, target: int) -> PageTable:
    """Makes the free slot `target` a copy of `source` that shares its closed pages; pages allocated ahead are not shared.

    The open pages and the sinks have to be copied on the device (`moejax.decode.copy_slot`).

    Raises:
      ValueError: `target` is in use.
    """
    if table.num_owned(target) or table.kv_lens[target] or source == target:
        raise ValueError(f"slot {target}: must be free to become a copy of slot {source}")
    closed = table.closed_pages(int(table.kv_lens[source]))
    block_table, ref_counts, kv_lens = table.block_table.copy(), table.ref_counts.copy(), table.kv_lens.copy()
    shared = block_table[source, :closed]
    block_table[target, :closed] = shared
    ref_counts[shared] += 1
    kv_lens[target] = kv_lens[source]
    return dataclasses.replace(table, block_table=block_table, ref_counts=ref_counts, kv_lens=kv_lens)


def free(table: PageTable, slot: int) -> PageTable:
    """Gives up `slot`'s pages; those that no other slot shares become free. Freeing a free slot changes nothing."""
    block_table, ref_counts, kv_lens = table.block_table.copy(), table.ref_counts.copy(), table.kv_lens.copy()
    pages = block_table[slot]
    ref_counts[pages[pages != INVALID]] -= 1
    block_table[slot], kv_lens[slot] = INVALID, 0
    return dataclasses.replace(table, block_table=block_table, ref_counts=ref_counts, kv_lens=kv_lens)


def check(table: PageTable) -> None:
    """Raises AssertionError when an invariant of `PageTable` does not hold."""
    named = table.block_table[table.block_table != INVALID]
    assert np.array_equal(np.bincount(named, minlength=len(table.ref_counts)), table.ref_counts), "reference counts"
    for slot, row in enumerate(table.block_table):
        owned = table.num_owned(slot)
        assert (row[:owned] != INVALID).all(), f"slot {slot}: a gap in {row}"
        assert len(set(row[:owned].tolist())) == owned, f"slot {slot}: a page twice in {row}"
        assert table.closed_pages(int(table.kv_lens[slot])) <= owned, f"slot {slot}: closed pages without a page"
