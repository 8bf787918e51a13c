"""``PagedKVCache``: sequences in pages of one pool, which forks share until they write."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..rotary.rotary import Rotary
from .step import Step
from .storage import Cache, OpenStep, check_integer, check_padding, check_queries, count_new, describe, upload

UNUSED = 2**31 - 1  # a table entry without a page; no page has this number, so validate=True reports the entry
INITIAL_ROWS = 16  # of the table on the device


class OutOfPages(RuntimeError):
    """A call needs more pages than are free. It has changed nothing: free or truncate sequences and call again.

    Attributes:
        never: True if the whole pool is too small for the sequences of the call: waiting for free pages is in vain.
    """

    never: bool = False


@dataclasses.dataclass(slots=True)
class _Sequence:
    row: int  # of the table on the device
    pages: list[int]
    length: int = 0
    leftpad: int = 0


class _Change(NamedTuple):
    """Entry n of a sequence got a new page, as a copy of the shared page `shared`, or as one page more (None)."""

    sequence: _Sequence
    n: int
    shared: int | None


class _OfSequences(dict[int, int]):
    """A number by sequence. ``cache.lengths(sequences)``, a method before, still works."""

    def __init__(self, cache: PagedKVCache, name: str, values: dict[int, int]):
        super().__init__(values)
        self._cache, self._name = cache, name

    def __missing__(self, sequence):
        self._cache._get(sequence)  # says why
        raise KeyError(sequence)

    def __call__(self, sequences: Sequence[int]) -> list[int]:
        warnings.warn(
            f"{self._name}: expected {self._name}[sequence], as in KVCache, got a call; PagedKVCache.{self._name} is a "
            "property now, and a later version refuses the call",
            FutureWarning,
            stacklevel=2,
        )
        return [self[sequence] for sequence in self._cache._select(sequences)]


class PagedKVCache(Cache):
    """The keys and values of sequences that are allocated, forked and freed, for all layers of a model or one.

    Args:
        pages: number of pages.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        heads_kv, head_dim: of k and v; head_dim is a multiple of 8 up to 256.
        dtype: float16, bfloat16, float32 or float64.
        device: None is torch's default.
        max_seqlen: largest number of tokens of a sequence; it sets the width of the block table. None: the whole pool.
        layers: number of layers. They share the sequences, their pages and lengths: a page has a part in every layer.
        rotated_keys: as in ``KVCache``. Forks share rotated keys as they share raw ones: positions do not move.
        cache_dtype: as in ``KVCache``: None, "int8" or "int4".

    Attributes:
        k, v: (pages, page_size, heads_kv, head_dim), with several layers (layers, pages, page_size, heads_kv,
            head_dim), uninitialized where there is no token. On the CPU a view of heads-first storage, which is faster
            to read there. ``layer(i)`` returns k and v of one layer.
        k_scale, v_scale: as in ``KVCache``.
        rotated_keys: the Rotary of every layer, or None.
        nbytes: bytes of k and v, and of their scales.

    With several layers new tokens come in steps: ``with cache.step(sequences, seqlen_new) as step`` takes pages once,
    every layer calls ``step.attend(q, rotary, k, v, layer=i)``, and the end of the block counts the tokens, in all
    layers or none. ``allocate``, ``fork``, ``truncate`` and ``free`` hold for all layers at once.

    Prompts of different lengths are padded on the left: ``leftpad`` of the first step is the number of padding tokens
    of every sequence. The cache remembers it, forks inherit it, and positions count behind it. Lengths include it.

    ``allocate`` and ``fork`` return the number of a new sequence, and no number is used twice. An unknown or freed
    number, or a repeated one in a list, is a ValueError. A page that several sequences share is copied before one of
    them writes to it; the last sequence that holds it writes in place.

    A call that raises leaves every sequence, its tokens and the number of free pages unchanged. No call waits for the
    device. Under torch.autocast float32 q, k and v become the autocast type, as in ``attention``, so make the cache in
    that type.

    A CUDA graph does not replay what the host does. Capture ``attention_with_cache(q, *cache.layer(i), rotary,
    seqlens, k, v, block_table)`` of every layer with your own seqlens and block_table. Before every replay call
    ``cache.reserve(sequences, k.shape[1])`` and copy ``cache.seqlens(sequences)`` and ``cache.block_table(sequences)``
    into them. After it call ``cache.advance(sequences, k.shape[1])``.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        max_seqlen: int | None = None,
        layers: int = 1,
        rotated_keys: Rotary | Sequence[Rotary] | None = None,
        cache_dtype: str | None = None,
    ):
        self.pages, self.page_size = check_integer("pages", pages, 1), check_integer("page_size", page_size, 16, 256)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size: expected 16, 32, 64, 128 or 256, got {page_size}")
        self.max_seqlen = pages * page_size if max_seqlen is None else check_integer("max_seqlen", max_seqlen, 1)
        self._limited = max_seqlen is not None
        self.max_pages = -(-self.max_seqlen // page_size)
        self._allocate(
            (self.pages, self.page_size), heads_kv, head_dim, dtype, device, layers, rotated_keys, cache_dtype
        )
        self._next = 0
        self._sequences: dict[int, _Sequence] = {}
        self._references = [0] * self.pages
        self._free = list(range(self.pages - 1, -1, -1))  # taken from the end
        self._rows = list(range(INITIAL_ROWS - 1, -1, -1))
        self._table = self._new_table(INITIAL_ROWS)
        self._changed: dict[int, int] = {}  # new entries of the flattened table, not on the device yet

    def _new_table(self, rows: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.full((rows, self.max_pages), UNUSED, dtype=torch.int32, device=self.k.device)

    @property
    def sequences(self) -> list[int]:
        """The sequences that exist, oldest first."""
        return list(self._sequences)

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence holds."""
        return len(self._free)

    @property
    def lengths(self) -> dict[int, int]:
        """The number of tokens of every sequence, left padding included, known to the host."""
        return _OfSequences(self, "lengths", {name: sequence.length for name, sequence in self._sequences.items()})

    @property
    def padding(self) -> dict[int, int]:
        """The left padding of every sequence, known to the host."""
        return _OfSequences(self, "padding", {name: sequence.leftpad for name, sequence in self._sequences.items()})

    def seqlens(self, sequences: Sequence[int]) -> torch.Tensor:
        """The number of tokens of every sequence, (n,) int32 on the device."""
        return upload([each.length for each in self._select(sequences).values()], torch.int32, self.k.device)

    def leftpad(self, sequences: Sequence[int]) -> torch.Tensor:
        """The left padding of every sequence, (n,) int32 on the device."""
        return upload([each.leftpad for each in self._select(sequences).values()], torch.int32, self.k.device)

    def block_table(self, sequences: Sequence[int]) -> torch.Tensor:
        """The pages of every sequence, (n, ceil(max_seqlen / page_size)) int32 on the device.

        A copy: later calls do not change it. Entries without a page are 2**31 - 1, which validate=True refuses.
        """
        return self._tables(self._select(sequences), [])[1]

    def allocate(self, length: int = 0) -> int:
        """A new, empty sequence with pages reserved for ``length`` tokens; see ``reserve``.

        Raises:
            OutOfPages: how many pages are missing.
            ValueError: length exceeds max_seqlen.
        """
        self.refuse_in_step("allocate")
        length = check_integer("length", length, 0, self.max_seqlen if self._limited else None)
        needed = -(-length // self.page_size)
        self._check_pages(needed, never=needed > self.pages)
        name = self._add(_Sequence(self._take_row(), []))
        self._reserve({name: self._sequences[name]}, length)
        return name

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens and left padding, in all layers.

        It shares their pages until one of the two sequences is appended to.
        """
        self.refuse_in_step("fork")
        parent = self._get(sequence)
        shared = parent.pages[: -(-parent.length // self.page_size)]  # without the parent's reserved pages
        child = _Sequence(self._take_row(), shared, parent.length, parent.leftpad)
        for n, page in enumerate(shared):
            self._references[page] += 1
            self._set(child, n, page)
        return self._add(child)

    def reserve(self, sequences: Sequence[int], seqlen_new: int) -> None:
        """Reserves pages for seqlen_new more tokens of every sequence, so that appending them cannot fail.

        Reserved pages stay with their sequence until it is truncated or freed. A fork does not share them. Forking ends
        the reservation in the last page that holds tokens, because that page is then shared.

        Raises:
            OutOfPages: how many pages are missing.
            ValueError: a sequence would exceed max_seqlen.
        """
        self.refuse_in_step("reserve")
        self._reserve(self._select(sequences), check_integer("seqlen_new", seqlen_new))

    def step(self, sequences: Sequence[int], seqlen_new: int, leftpad: Sequence[int] | None = None) -> Step:
        """The step in which every layer gets seqlen_new tokens of every one of these sequences.

        Args:
            sequences: n numbers from ``allocate`` and ``fork``.
            seqlen_new: new tokens of every sequence.
            leftpad: how many tokens from the first are padding, one number per sequence, for sequences that hold
                nothing but padding. None: as before.

        Raises:
            OutOfPages: on entering the step: how many pages are missing.
            TypeError, ValueError: names the argument, what was expected and what came, or the sequence that would
                exceed max_seqlen.
            RuntimeError: a step of this cache is open.
        """
        return self._step(self._select(sequences), check_integer("seqlen_new", seqlen_new), leftpad)

    def _step(self, selected: dict[int, _Sequence], seqlen_new: int, leftpad) -> Step:
        padding = [sequence.leftpad for sequence in selected.values()]
        if leftpad is not None:
            lengths = [sequence.length for sequence in selected.values()]
            padding = check_padding(leftpad, padding, lengths, seqlen_new)
        return Step(self, selected, len(selected), seqlen_new, padding)

    def append(
        self,
        sequences: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
        impl: str | None = None,
        leftpad: Sequence[int] | None = None,
    ) -> None:
        """Appends k, v (n, seqlen_new, heads_kv, head_dim) to n sequences. Raises what ``attend`` raises.

        With several layers, k and v have a dimension of layers in front. leftpad: as in ``step``. If sequences get
        different numbers of tokens, append the largest number and ``truncate`` the others.
        """
        if self.layers > 1:
            return self._append_layers(self.step(sequences, self._new_of_layers(k, v), leftpad), k, v, impl)
        self.refuse_new("append")
        selected = self._select(sequences)
        with self._step(selected, count_new(k, v, self, len(selected)), leftpad) as step:
            step.append(k, v, 0, impl)

    def attend(
        self,
        sequences: Sequence[int],
        q: torch.Tensor,
        rotary: Rotary,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: int | None = None,
        leftpad: Sequence[int] | None = None,
        **options,
    ):
        """Appends k, v to the sequences, if given, then attends to all their keys.

        Args:
            sequences: n numbers from ``allocate`` and ``fork``.
            q: (n, seqlen_q, heads_q, head_dim).
            k, v: (n, seqlen_new, heads_kv, head_dim), or both None. With several layers None: see ``step``.
            layer: 0 to layers - 1, the keys to read; with one layer it may be None.
            leftpad: as in ``step``.
            rotary, options: as in ``KVCache.attend``.

        Returns:
            out, like q; with return_lse (out, lse), lse (n, heads_q, seqlen_q).

        Raises:
            OutOfPages: how many pages are missing.
            TypeError, ValueError: names the argument, what was expected and what came, or the sequence that would
                exceed max_seqlen.
        """
        selected = self._select(sequences)
        if k is None and v is None and leftpad is None:
            check_queries(q, len(selected))
            tables = self._tables(selected, [x.leftpad for x in selected.values()])
            return self._attend(q, rotary, (k, v), tables, layer, options)
        self.refuse_new("attend")
        with self._step(selected, count_new(k, v, self, len(selected)), leftpad) as step:
            return step.attend(q, rotary, k, v, layer, **options)

    def advance(self, sequences: Sequence[int], seqlen_new: int) -> None:
        """Counts seqlen_new tokens that a replayed CUDA graph has written to every sequence.

        Raises:
            ValueError: they were not reserved.
        """
        self.refuse_in_step("advance")
        selected, seqlen_new = self._select(sequences), check_integer("seqlen_new", seqlen_new)
        for name, sequence in selected.items():
            room = min(len(sequence.pages) * self.page_size, self.max_seqlen) - sequence.length
            if self._shared_page(sequence) is not None:
                room = 0
            if seqlen_new > room:
                raise ValueError(f"seqlen_new: expected at most {room}, reserved for sequence {name}, got {seqlen_new}")
        for sequence in selected.values():
            sequence.length += seqlen_new

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens from ``length`` on, in all layers, such as those that speculative decoding rejects.

        Pages without tokens, reserved ones too, are given back. A length above the present one is a ValueError; it
        counts left padding.
        """
        self.refuse_in_step("truncate")
        shortened = self._get(sequence)
        shortened.length = check_integer(f"length of sequence {sequence}", length, 0, shortened.length)
        shortened.leftpad = min(shortened.leftpad, shortened.length)
        self._give_back(shortened, -(-length // self.page_size))

    def free(self, sequence: int) -> None:
        """Removes a sequence. Its pages become free unless other sequences share them."""
        self.refuse_in_step("free")
        ended = self._get(sequence)
        self._give_back(ended, 0)
        self._rows.append(ended.row)
        del self._sequences[sequence]

    def reset(self) -> None:
        """Frees all sequences."""
        for sequence in self.sequences:
            self.free(sequence)

    def _get(self, sequence: int) -> _Sequence:
        if not isinstance(sequence, numbers.Integral) or isinstance(sequence, bool):
            raise TypeError(f"sequence: expected a number that allocate or fork returned, got {sequence!r}")
        found = self._sequences.get(sequence)
        if found is None:
            raise ValueError(
                f"sequence {sequence} " + ("was freed" if 0 <= sequence < self._next else "was never allocated")
            )
        return found

    def _select(self, sequences: Sequence[int]) -> dict[int, _Sequence]:
        if not isinstance(sequences, Sequence) or isinstance(sequences, str):
            raise TypeError(f"sequences: expected a list of numbers that allocate or fork returned, got {sequences!r}")
        selected = {sequence: self._get(sequence) for sequence in sequences}
        if len(selected) != len(sequences):
            repeated, times = Counter(sequences).most_common(1)[0]
            raise ValueError(f"sequences: expected each once, got sequence {repeated} {times} times")
        return selected

    def _add(self, sequence: _Sequence) -> int:
        name, self._next = self._next, self._next + 1
        self._sequences[name] = sequence
        return name

    def _take_row(self) -> int:
        if not self._rows:
            rows = len(self._table)
            table = self._new_table(2 * rows)
            table[:rows] = self._table
            self._table, self._rows = table, list(range(2 * rows - 1, rows - 1, -1))
        return self._rows.pop()

    def _shared_page(self, sequence: _Sequence) -> int | None:
        """The page of the next token, if the sequence has it already and shares it. Later pages are never shared."""
        pages = sequence.pages[sequence.length // self.page_size :]
        return pages[0] if pages and self._references[pages[0]] > 1 else None

    def _set(self, sequence: _Sequence, n: int, page: int) -> None:
        self._changed[sequence.row * self.max_pages + n] = page

    def _check_pages(self, needed: int, never: bool) -> None:
        missing = needed - len(self._free)
        if missing > 0:
            pages = "page" if needed == 1 else "pages"
            error = OutOfPages(
                f"needs {needed} more {pages}, {len(self._free)} are free of {self.pages}: {missing} missing"
                + ("; the whole pool is too small for this call" if never else "")
            )
            error.never = never
            raise error

    def _changes(self, selected: Iterable[_Sequence], seqlen_new: int, references) -> list[_Change]:
        """The pages to take for seqlen_new more tokens of every sequence, where every page has so many references."""
        changes: list[_Change] = []
        copied: Counter[int] = Counter()
        for sequence in selected:
            shared = self._shared_page(sequence)
            if shared is not None and references[shared] - copied[shared] > 1:
                copied[shared] += 1
                changes.append(_Change(sequence, sequence.length // self.page_size, shared))
            end = -(-(sequence.length + seqlen_new) // self.page_size)
            changes.extend(_Change(sequence, n, None) for n in range(len(sequence.pages), end))
        return changes

    def _reserve(self, selected: dict[int, _Sequence], seqlen_new: int) -> list[_Change]:
        """Gives every sequence the pages for seqlen_new more tokens, and a copy of the page that it shares."""
        if not seqlen_new:
            return []
        for name, sequence in selected.items() if self._limited else ():
            if sequence.length + seqlen_new > self.max_seqlen:
                raise ValueError(
                    f"sequence {name} has {sequence.length} of {self.max_seqlen} tokens: no room for {seqlen_new}"
                )
        # Longest last: if all holders of a page are in this call, the longest keeps the page, and writes behind the
        # tokens that the others have there. So a call that fails after writing can still be undone.
        order = sorted(selected.values(), key=lambda sequence: sequence.length)
        changes = self._changes(order, seqlen_new, self._references)
        if len(changes) > len(self._free):
            alone = Counter(page for sequence in order for page in sequence.pages)  # if no other sequence existed
            never = len(alone) + len(self._changes(order, seqlen_new, alone)) > self.pages
            self._check_pages(len(changes), never)
        taken = self._free[: -len(changes) - 1 : -1]
        copies = [(old, page) for (_, _, old), page in zip(changes, taken, strict=True) if old is not None]
        if copies:
            source, target = upload(tuple(zip(*copies, strict=True)), torch.int64, self.k.device)
            dimension = self.k.ndim - 4  # of pages
            for pool in (self.k, self.v, *(x for x in (self.k_scale, self.v_scale) if x is not None)):
                pool.index_copy_(dimension, target, pool.index_select(dimension, source))
        for (sequence, n, old), page in zip(changes, taken, strict=True):
            self._references[self._free.pop()] = 1
            if old is None:
                sequence.pages.append(page)
            else:
                self._references[old] -= 1
                sequence.pages[n] = page
            self._set(sequence, n, page)
        return changes

    def _begin(self, step: OpenStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        step.changes = self._reserve(step.selected, step.seqlen_new)
        try:
            return self._tables(step.selected, step.padding)
        except BaseException:
            self._undo(step)
            raise

    def _commit(self, step: OpenStep) -> None:
        for sequence, leftpad in zip(step.selected.values(), step.padding, strict=True):
            sequence.length += step.seqlen_new
            sequence.leftpad = leftpad

    def _undo(self, step: OpenStep) -> None:
        for sequence, n, old in reversed(step.changes):
            page = sequence.pages[n]
            self._references[page] = 0
            self._free.append(page)
            if old is None:
                sequence.pages.pop()
            else:
                self._references[old] += 1
                sequence.pages[n] = old
            self._set(sequence, n, UNUSED if old is None else old)

    def _give_back(self, sequence: _Sequence, kept: int) -> None:
        while len(sequence.pages) > kept:
            page = sequence.pages.pop()
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
            self._set(sequence, len(sequence.pages), UNUSED)

    def _tables(
        self, selected: dict[int, _Sequence], padding: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(seqlens, block_table, leftpad) for the kernels. Everything new is copied to the device at once."""
        rows = [sequence.row for sequence in selected.values()]
        lengths = [sequence.length for sequence in selected.values()]
        pads = padding if any(padding) else []
        values = [*rows, *lengths, *pads, *self._changed, *self._changed.values()]
        n, m = len(selected), len(self._changed)
        sizes = [n, n, len(pads), m, m]
        table_rows, seqlens, leftpad, entries, pages = upload(values, torch.int64, self.k.device).split_with_sizes(
            sizes
        )
        if m:
            self._table.view(-1).index_copy_(0, entries, pages.to(torch.int32))
            self._changed.clear()
        block_table = self._table.index_select(0, table_rows)
        return seqlens.to(torch.int32), block_table, leftpad.to(torch.int32) if pads else None

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(pages={self.pages}, page_size={self.page_size}, {describe(self)}, "
            f"max_seqlen={self.max_seqlen}; {self.free_pages} pages free, sequences {self.sequences}, "
            f"{self.nbytes:,} bytes)"
        )
