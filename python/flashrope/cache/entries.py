"""Describes the visible rows of a sequence's pages and their positions by entries, which are plain numbers.

A sequence that only grows and shrinks at its end has no entries, because its positions follow from its slots.
``extend``, ``remove`` and ``keep`` of a ``PagedKVCache`` give a sequence an entry for each of its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """One block-table entry: rows [first, first + length) of a page are visible. Row r is at ``position`` + r."""

    position: int
    first: int
    length: int

    @property
    def end(self) -> int:
        return self.first + self.length

    def part(self, start: int, stop: int) -> Entry:
        """Returns this entry restricted to its tokens start to stop - 1. Token 0 is its first visible row."""
        return self._replace(first=self.first + start, length=stop - start)

    def moved(self, by: int) -> Entry:
        return self._replace(position=self.position + by)


Kept = list[tuple[int, Entry]]  # (n, entry): a new entry for the page with index n in the old sequence


def of_slots(page_size: int, length: int, leftpad: int) -> Kept:
    """Returns the entries, without padding, of a sequence whose positions follow from its slots."""
    kept = []
    for n in range(leftpad // page_size, -(-length // page_size)):
        start = n * page_size
        first, end = max(leftpad - start, 0), min(length - start, page_size)
        if first < end:
            kept.append((n, Entry(start - leftpad, first, end - first)))
    return kept


def tokens(entries: Sequence[Entry]) -> int:
    return sum(entry.length for entry in entries)


def slots(entries: Sequence[Entry], page_size: int) -> int:
    """Returns the number of slots in use up to the last token, including hidden slots."""
    return (len(entries) - 1) * page_size + entries[-1].end if entries else 0


def joined(entries: Sequence[Entry], others: Sequence[Entry]) -> list[Entry]:
    """Returns ``entries`` followed by ``others``. The positions of ``others`` are moved to continue after the last
    token of ``entries``."""
    if not entries or not others:
        return [*entries, *others]
    by = entries[-1].position + entries[-1].end - (others[0].position + others[0].first)
    return [*entries, *(other.moved(by) for other in others)]


def without(entries: Sequence[Entry], start: int, stop: int, close: bool) -> Kept:
    """Returns the entries without the tokens start to stop - 1, each with the index of its old entry.

    close: later tokens move down by stop - start positions. A page that keeps tokens before start and from stop on gets
    two entries.
    """
    kept, begin, down = [], 0, stop - start if close else 0
    for n, entry in enumerate(entries):
        low, high = (min(max(token - begin, 0), entry.length) for token in (start, stop))
        begin += entry.length
        if low:
            kept.append((n, entry.part(0, low)))
        if high < entry.length:
            kept.append((n, entry.part(high, entry.length).moved(-down)))
    return kept


def grown(entries: Sequence[Entry], new: int, page_size: int) -> list[Entry]:
    """Returns the entries after appending ``new`` tokens: they fill the last page, then further pages."""
    entries, position = list(entries), 0
    if entries:
        last = entries[-1]
        room = min(page_size - last.end, new)
        entries[-1] = last._replace(length=last.length + room)
        new, position = new - room, last.position + page_size
    for start in range(0, new, page_size):
        entries.append(Entry(position + start, 0, min(page_size, new - start)))
    return entries
