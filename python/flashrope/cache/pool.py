"""Manages the pages of a ``PagedKVCache``: which sequences hold which pages, and the block table on the device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..calls.cache_tables import CachePositions, CacheTables
from . import entries
from .entries import Entry
from .new_tokens import NewTokens
from .storage import made_outside_inference_mode, upload

UNUSED = 2**31 - 1  # a table entry without a page; no page has this number, so validate=True reports the entry
INITIAL_ROWS = 16  # rows of the table on the device, before it grows


class OutOfPages(RuntimeError):
    """Raised by a call that needs more pages than are free. The call has changed nothing: free or truncate sequences
    and call again.

    Attributes:
        never: True if the whole pool is too small for the sequences of the call. Waiting for free pages does not help.
    """

    never: bool = False


@dataclasses.dataclass(slots=True)
class Sequence:
    row: int  # its row of the table on the device
    pages: list[int]
    length: int = 0  # slots in use
    leftpad: int = 0
    entries: list[Entry] | None = None  # one per page up to the last token; None: all slots after leftpad are visible

    @property
    def tokens(self) -> int:
        """Returns the number of visible tokens, left padding included, as ``lengths`` counts them."""
        return self.length if self.entries is None else entries.tokens(self.entries)


class Change(NamedTuple):
    """Block-table entry n of a sequence gets a new page: a copy of the page `shared`, or an empty page if `shared` is
    None."""

    sequence: Sequence
    n: int
    shared: int | None


class PagePool:
    """Counts how many sequences hold each page, and keeps the block table.

    max_seqlen: the largest number of tokens of a sequence. None: as many as the block-table entries of a
        sequence hold.
    copy_pages: a function (source, target) that copies pages to other pages in all layers. Its arguments are page
        numbers, int64 on the device.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_pages: int,
        device: torch.device,
        copy_pages: Callable[..., None],
        max_seqlen: int | None = None,
    ):
        self.pages, self.page_size, self.max_pages, self.max_seqlen = pages, page_size, max_pages, max_seqlen
        self.device, self.copy_pages = device, copy_pages
        self.references = [0] * pages
        self.free = list(range(pages - 1, -1, -1))  # taken from the end
        self.rows = list(range(INITIAL_ROWS - 1, -1, -1))
        self.table = self._new_table(INITIAL_ROWS)
        self.changed: dict[int, int] = {}  # new entries of the flattened table, not on the device yet

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(made_outside_inference_mode(state))

    def _new_table(self, rows: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.full((rows, self.max_pages), UNUSED, dtype=torch.int32, device=self.device)

    # ---- sequences

    def new_sequence(self) -> Sequence:
        if not self.rows:
            rows = len(self.table)
            table = self._new_table(2 * rows)
            table[:rows] = self.table
            self.table, self.rows = table, list(range(2 * rows - 1, rows - 1, -1))
        return Sequence(self.rows.pop(), [])

    def fork(self, parent: Sequence) -> Sequence:
        child = self.new_sequence()
        shared = parent.pages[: -(-parent.length // self.page_size)]  # without the parent's reserved pages
        self.hold(child, shared)
        child.length, child.leftpad = parent.length, parent.leftpad
        child.entries = None if parent.entries is None else list(parent.entries)
        return child

    def end(self, sequence: Sequence) -> None:
        self.give_back(sequence, 0)
        self.rows.append(sequence.row)

    def hold(self, sequence: Sequence, pages: list[int]) -> None:
        """Replaces the sequence's pages by ``pages``."""
        for page in pages:
            self.references[page] += 1
        self.give_back(sequence, 0)
        for n, page in enumerate(pages):
            self._set(sequence, n, page)
        sequence.pages = list(pages)

    def give_back(self, sequence: Sequence, kept: int) -> None:
        while len(sequence.pages) > kept:
            page = sequence.pages.pop()
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)
            self._set(sequence, len(sequence.pages), UNUSED)

    def show(self, sequence: Sequence, pages: list[int], shown: list[Entry]) -> None:
        """Replaces the sequence's pages by ``pages``, and its block-table entries by ``shown``."""
        self.hold(sequence, pages)
        sequence.entries, sequence.leftpad = shown or None, 0
        sequence.length = entries.slots(shown, self.page_size)

    def entries_of(self, sequence: Sequence) -> entries.Kept:
        if sequence.entries is None:
            return entries.of_slots(self.page_size, sequence.length, sequence.leftpad)
        return list(enumerate(sequence.entries))

    def grow(self, sequence: Sequence, seqlen_new: int) -> None:
        """Counts seqlen_new tokens that were written to the sequence."""
        sequence.length += seqlen_new
        if sequence.entries is not None:
            sequence.entries = entries.grown(sequence.entries, seqlen_new, self.page_size)

    def _set(self, sequence: Sequence, n: int, page: int) -> None:
        self.changed[sequence.row * self.max_pages + n] = page

    # ---- room for new tokens

    def check_fits(self, subject: str, tokens: tuple[int, int], used: tuple[int, int]) -> None:
        """Checks that a sequence can get more tokens and more block-table entries.

        Every operation that adds tokens or entries to a sequence calls this before it changes anything.

        Args:
            subject: the beginning of the error's text: the argument, if an argument is wrong, and the sequence.
            tokens: how many tokens the sequence has, and how many more it would get.
            used: how many block-table entries the sequence has, and how many more it would get.

        Raises:
            ValueError: the sequence would exceed max_seqlen, or its row of the block table.
        """
        for (now, more), most, unit in (
            (tokens, self.max_seqlen, "tokens"),
            (used, self.max_pages, "block-table entries"),
        ):
            if most is not None and now + more > most:
                raise ValueError(f"{subject} has {now} of {most} {unit}: no room for {more}")

    def check_room(self, name: int, sequence: Sequence, seqlen_new: int) -> None:
        """Checks with ``check_fits`` that seqlen_new more tokens fit in the sequence with the number ``name``."""
        if not seqlen_new:
            return
        now, end = -(-sequence.length // self.page_size), -(-(sequence.length + seqlen_new) // self.page_size)
        if end > self.max_pages and self.max_seqlen is None and len(set(sequence.pages)) == len(sequence.pages):
            return  # the sequence would need more pages than the pool has, so OutOfPages will be raised
        self.check_fits(f"sequence {name}", (sequence.tokens, seqlen_new), (now, end - now))

    def check(self, needed: int, never: bool) -> None:
        """Raises OutOfPages if fewer than ``needed`` pages are free. never: the value of ``OutOfPages.never``."""
        missing = needed - len(self.free)
        if missing > 0:
            pages = "page" if needed == 1 else "pages"
            error = OutOfPages(
                f"needs {needed} more {pages}, {len(self.free)} of {self.pages} are free: {missing} missing"
                + ("; the whole pool is too small for this call" if never else "")
            )
            error.never = never
            raise error

    def shared_page(self, sequence: Sequence) -> int | None:
        """Returns the page that the next token goes to, if this page must be copied first because another sequence also
        holds it. Otherwise returns None. Later pages are never shared."""
        pages = sequence.pages[sequence.length // self.page_size :]
        return pages[0] if pages and self.references[pages[0]] > 1 else None

    def _changes(self, growing: list[tuple[Sequence, int]], references) -> list[Change]:
        """Returns the page allocations and copies that appending new tokens to sequences needs.

        growing: (sequence, number of new tokens). references: how many sequences hold each page.
        """
        changes: list[Change] = []
        copied: Counter[int] = Counter()
        for sequence, count in growing:
            shared = self.shared_page(sequence)
            if shared is not None and references[shared] - copied[shared] > 1:
                copied[shared] += 1
                changes.append(Change(sequence, sequence.length // self.page_size, shared))
            end = -(-(sequence.length + count) // self.page_size)
            changes.extend(Change(sequence, n, None) for n in range(len(sequence.pages), end))
        return changes

    def reserve(self, selected: Iterable[Sequence], counts: list[int]) -> list[Change]:
        """Gives every sequence the pages for its number of new tokens. If it gets tokens and another sequence shares
        the last page that holds tokens, it also gets a copy of this page."""
        selected = list(selected)
        # Sorted by the rows that a sequence has in its last page. If all holders of that page are in this call, the
        # sequence with the most rows keeps the page, and writes after the rows of the other holders. So a call that
        # fails after writing can still be undone.
        growing = [(sequence, count) for sequence, count in zip(selected, counts, strict=True) if count]
        growing.sort(key=lambda each: each[0].length % self.page_size)
        changes = self._changes(growing, self.references)
        if len(changes) > len(self.free):
            # How many sequences would hold each page if the cache had no sequences but the selected ones.
            alone = Counter(page for sequence in selected for page in sequence.pages)
            never = len(alone) + len(self._changes(growing, alone)) > self.pages
            self.check(len(changes), never)
        taken = self.free[: -len(changes) - 1 : -1]
        copies = [(old, page) for (_, _, old), page in zip(changes, taken, strict=True) if old is not None]
        if copies:
            self.copy_pages(*upload(tuple(zip(*copies, strict=True)), torch.int64, self.device))
        for (sequence, n, old), page in zip(changes, taken, strict=True):
            self.references[self.free.pop()] = 1
            if old is None:
                sequence.pages.append(page)
            else:
                self.references[old] -= 1
                sequence.pages[n] = page
            self._set(sequence, n, page)
        return changes

    def undo(self, changes: list[Change]) -> None:
        for sequence, n, old in reversed(changes):
            page = sequence.pages[n]
            self.references[page] = 0
            self.free.append(page)
            if old is None:
                sequence.pages.pop()
            else:
                self.references[old] += 1
                sequence.pages[n] = old
            self._set(sequence, n, UNUSED if old is None else old)

    # ---- tables that kernels read

    def tables(
        self,
        selected: list[Sequence],
        padding: list[int],
        new: NewTokens | None = None,
        appends: bool = True,
        positioned: bool = False,
    ) -> CacheTables:
        """Returns the tables of a call. Changes are copied to the device in one transfer.

        new: None stands for no new tokens. appends: whether the call adds the new tokens. positioned: return explicit
            positions even if no tokens of a sequence were moved.
        """
        with torch.inference_mode(False):  # only a tensor made outside of inference mode counts how often it is written
            return self._tables(selected, padding, new or NewTokens.of(0, range(len(selected))), appends, positioned)

    def _tables(
        self, selected: list[Sequence], padding: list[int], new: NewTokens, appends: bool, positioned: bool
    ) -> CacheTables:
        pads = padding if any(padding) else []
        parts = [[sequence.row for sequence in selected], [sequence.length for sequence in selected], pads, new.starts]
        parts += [[*self.changed], [*self.changed.values()]]
        sizes = [len(part) for part in parts]
        values = upload([value for part in parts for value in part], torch.int64, self.device)
        table_rows, seqlens, leftpad, starts, taken, pages = values.split_with_sizes(sizes)
        if self.changed:
            self.table.view(-1).index_copy_(0, taken, pages.to(torch.int32))
            self.changed.clear()
        block_table = self.table.index_select(0, table_rows)
        positions = None
        if positioned or any(sequence.entries is not None for sequence in selected):
            counts = new.counts if appends else [0] * len(selected)
            positions = self._positions(selected, pads or [0] * len(selected), counts)
        own_leftpad = leftpad.to(torch.int32) if pads else None
        added = new.in_tables(starts.to(torch.int32) if new.packed else None, appends)
        return CacheTables(seqlens.to(torch.int32), block_table, own_leftpad, added, positions)

    def _positions(self, selected: list[Sequence], padding: list[int], counts: list[int]) -> CachePositions:
        """Returns the sequences' page_positions, page_first and page_lengths after their new tokens are written."""
        tables = torch.zeros(3, len(selected), self.max_pages, dtype=torch.int32, device="cpu")
        for b, (sequence, pad, count) in enumerate(zip(selected, padding, counts, strict=True)):
            if sequence.entries is None:  # positions follow from slots
                tables[0, b] = torch.arange(self.max_pages, device="cpu") * self.page_size - pad
                tables[2, b] = self.page_size
            elif shown := entries.grown(sequence.entries, count, self.page_size):
                tables[:, b, : len(shown)] = torch.tensor(shown, dtype=torch.int32, device="cpu").T
        if self.device.type == "cuda":
            tables = tables.pin_memory()
        return CachePositions(*tables.to(self.device, non_blocking=True).unbind())
