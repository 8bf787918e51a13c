"""Caches of raw keys and values for decoding: one row of slots per sequence, or pages that sequences share.

Lengths, page tables and reference counts are kept on the host: a full cache is an error, and no call waits for the
device.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import ops
from ..api import attention_with_cache
from ..checks import DTYPES
from ..backends import resolve_impl
from ..rotary import Rotary

__all__ = ["KVCache", "OutOfPages", "PagedKVCache"]

UNUSED = 2**31 - 1  # no page has this number: validate=True names the entry
FIRST_ROWS = 16


class OutOfPages(RuntimeError):
    """A call needs more pages than are free. It has changed nothing: free or truncate sequences and call again."""


class _Cache:
    k: torch.Tensor
    v: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of k and v."""
        return self.k.nbytes + self.v.nbytes


class KVCache(_Cache):
    """The raw keys and values of a batch of sequences, each with room for ``capacity`` tokens. One layer of a model.

    Args:
        batch: number of sequences.
        capacity: slots per sequence.
        heads_kv, head_dim: of k and v; head_dim is a multiple of 8 up to 256.
        dtype: float16, bfloat16, float32 or float64.
        device: default torch's.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim), not initialised beyond the lengths.
        seqlens: (batch,) int32 on the device, the slots in use. It stays the same tensor.

    A full cache raises ValueError. A call that raises leaves the cache as it was.

    In a CUDA graph nothing of the host is replayed. Capture ``attention_with_cache(q, cache.k, cache.v, rotary,
    cache.seqlens, k, v)``, and after every replay call ``cache.advance(k.shape[1])``; keys without room would be
    dropped, so look at ``lengths`` before. Compiled models do the same.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        heads_kv: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        self.batch, self.capacity = _integer("batch", batch, 1), _integer("capacity", capacity, 1)
        self.k, self.v = _storage((self.batch, self.capacity), heads_kv, head_dim, dtype, device)
        with torch.inference_mode(False):
            self.seqlens = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self._lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """The slots in use of every sequence."""
        return list(self._lengths)

    def append(self, k: torch.Tensor, v: torch.Tensor, impl: str | None = None) -> None:
        """Writes k, v (batch, seqlen_new, heads_kv, head_dim) behind every sequence.

        Where the sequences get different numbers of tokens, append the most and ``truncate`` the others.

        Raises:
            TypeError, ValueError: what was expected and what came; a sequence without room.
        """
        seqlen_new = _check_new(k, v, self.k, self.batch)
        self._check_room(seqlen_new)
        ops.append_to_cache(self.k, self.v, k, v, self.seqlens, None, resolve_impl(impl, k[:, :1], cached=True))
        self._count(seqlen_new)

    def attend(
        self, q: torch.Tensor, rotary: Rotary, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **options
    ):
        """Writes the new k, v behind every sequence, if given, then attends over the cache.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            k, v: (batch, seqlen_new, heads_kv, head_dim), or both None.
            rotary, options: as in ``attention_with_cache``: cache_leftpad, causal, softmax_scale, return_lse, impl,
                num_splits, validate.

        Returns:
            out, like q; with return_lse (out, lse), lse (batch, heads_q, seqlen_q).

        Raises:
            TypeError, ValueError: what was expected and what came; a sequence without room.
        """
        _check_queries(q, self.batch)
        seqlen_new = _check_new(k, v, self.k, self.batch) if k is not None or v is not None else 0
        self._check_room(seqlen_new)
        result = attention_with_cache(q, self.k, self.v, rotary, self.seqlens, k, v, block_table=None, **options)
        self._count(seqlen_new)
        return result

    def advance(self, seqlen_new: int) -> None:
        """Counts in seqlen_new tokens that a replayed CUDA graph wrote behind every sequence. Without room,
        ValueError."""
        seqlen_new = _integer("seqlen_new", seqlen_new)
        self._check_room(seqlen_new)
        self._count(seqlen_new)

    def _count(self, seqlen_new: int) -> None:
        if seqlen_new:
            self.seqlens.add_(seqlen_new)
            self._lengths = [length + seqlen_new for length in self._lengths]

    def truncate(self, sequence: int | None, length: int | Sequence[int]) -> None:
        """Drops the tokens from ``length`` on, such as those that speculative decoding rejects. More than there are:
        ValueError.

        Args:
            sequence: index in the batch; None for all, with one length or a list of them.
        """
        lengths: Any = length
        if sequence is not None:
            lengths = self.lengths
            lengths[_integer("sequence", sequence, 0, self.batch - 1)] = length
        elif isinstance(length, numbers.Integral):
            lengths = [length] * self.batch
        if not isinstance(lengths, Sequence) or len(lengths) != self.batch:
            raise ValueError(f"length: expected a number or {self.batch} of them, got {length!r}")
        self._lengths = [_integer(f"length of sequence {b}", new, 0, self._lengths[b]) for b, new in enumerate(lengths)]
        self.seqlens.copy_(_upload(self._lengths, torch.int32, self.seqlens.device))

    def reset(self, sequence: int | None = None) -> None:
        """Empties one sequence, by its index in the batch, or all."""
        self.truncate(sequence, 0)

    def _check_room(self, seqlen_new: int) -> None:
        longest = max(self._lengths)
        if longest + seqlen_new > self.capacity:
            raise ValueError(
                f"sequence {self._lengths.index(longest)} has {longest} of {self.capacity} slots in use: "
                f"no room for {seqlen_new}"
            )

    def __repr__(self) -> str:
        return (
            f"KVCache(batch={self.batch}, capacity={self.capacity}, {_described(self.k)}; {min(self._lengths)} to "
            f"{max(self._lengths)} slots in use, {self.nbytes:,} bytes)"
        )


@dataclasses.dataclass(slots=True)
class _Sequence:
    row: int  # in the device's table
    pages: list[int]
    length: int = 0


_Change = tuple[
    _Sequence, int, int | None
]  # entry n of a sequence has a new page: the shared one it had, None for one more


class PagedKVCache(_Cache):
    """The raw keys and values of sequences that come, fork and go, in pages from one pool. One layer of a model.

    Args:
        pages: number of pages.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        heads_kv, head_dim: of k and v; head_dim is a multiple of 8 up to 256.
        dtype: float16, bfloat16, float32 or float64.
        device: default torch's.
        max_seqlen: the most tokens a sequence may have, which sets the width of a block table; default the whole pool.

    Attributes:
        k, v: (pages, page_size, heads_kv, head_dim), not initialised where no token is.

    Sequences are named by the numbers that ``allocate`` and ``fork`` return. No number is given twice: unknown and
    freed ones, and one twice in a list, are a ValueError. A page that several sequences share is copied before one of
    them writes to it; the last that holds it writes in place.

    A call that raises leaves every sequence, its tokens and the count of free pages as they were. No call waits for the
    device.

    In a CUDA graph nothing of the host is replayed. Capture ``attention_with_cache(q, cache.k, cache.v, rotary,
    seqlens, k, v, block_table)`` with tensors of your own. Before every replay call ``cache.reserve(sequences,
    k.shape[1])``, copy ``cache.block_table(sequences)`` and ``cache.seqlens(sequences)`` into them, and after it
    ``cache.advance(sequences, k.shape[1])``.
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
    ):
        self.pages, self.page_size = _integer("pages", pages, 1), _integer("page_size", page_size, 16, 256)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size: expected 16, 32, 64, 128 or 256, got {page_size}")
        self.max_seqlen = pages * page_size if max_seqlen is None else _integer("max_seqlen", max_seqlen, 1)
        self.max_pages = -(-self.max_seqlen // page_size)
        self.k, self.v = _storage((self.pages, self.page_size), heads_kv, head_dim, dtype, device)
        self._next = 0
        self._sequences: dict[int, _Sequence] = {}
        self._references = [0] * self.pages
        self._free = list(range(self.pages - 1, -1, -1))  # taken from the end
        self._rows = list(range(FIRST_ROWS - 1, -1, -1))
        self._table = self._new_table(FIRST_ROWS)
        self._changed: dict[int, int] = {}  # entries of the flattened table that the device does not have yet

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

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        """The number of tokens of every sequence, from the host."""
        return [sequence.length for sequence in self._chosen(sequences).values()]

    def seqlens(self, sequences: Sequence[int]) -> torch.Tensor:
        """The number of tokens of every sequence, (n,) int32 on the device."""
        return _upload(self.lengths(sequences), torch.int32, self.k.device)

    def block_table(self, sequences: Sequence[int]) -> torch.Tensor:
        """The pages of every sequence, (n, ceil(max_seqlen / page_size)) int32 on the device.

        A copy: later calls do not change it. Entries without a page are 2**31 - 1, which validate=True refuses.
        """
        return self._tables(self._chosen(sequences))[0]

    def allocate(self, length: int = 0) -> int:
        """A new sequence without tokens, with room for ``length`` reserved, or OutOfPages. See ``reserve``."""
        length = _integer("length", length, 0, self.max_seqlen)
        self._check_pages(-(-length // self.page_size))
        name = self._add(_Sequence(self._take_row(), []))
        self._reserve({name: self._sequences[name]}, length)
        return name

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens. It shares their pages, so it needs none until one of the two is appended
        to."""
        parent = self._get(sequence)
        shared = parent.pages[: -(-parent.length // self.page_size)]  # those reserved beyond stay the parent's alone
        child = _Sequence(self._take_row(), shared, parent.length)
        for n, page in enumerate(shared):
            self._references[page] += 1
            self._set(child, n, page)
        return self._add(child)

    def reserve(self, sequences: Sequence[int], seqlen_new: int) -> None:
        """Makes room for seqlen_new more tokens of every sequence, so that appending as many cannot run out of pages.

        Reserved pages stay with their sequence until it is truncated or freed. A fork does not share them, and forking
        takes the room in the last page away again, as that is then shared.

        Raises:
            OutOfPages: how many pages are missing.
            ValueError: a sequence would exceed max_seqlen.
        """
        self._reserve(self._chosen(sequences), _integer("seqlen_new", seqlen_new))

    def append(self, sequences: Sequence[int], k: torch.Tensor, v: torch.Tensor, impl: str | None = None) -> None:
        """Writes k, v (n, seqlen_new, heads_kv, head_dim) behind n sequences. Raises what ``attend`` raises.

        Where the sequences get different numbers of tokens, append the most and ``truncate`` the others.
        """
        chosen = self._chosen(sequences)
        seqlen_new = _check_new(k, v, self.k, len(chosen))
        impl = resolve_impl(impl, k[:, :1], cached=True)
        with self._room(chosen, seqlen_new) as (block_table, seqlens):
            ops.append_to_cache(self.k, self.v, k, v, seqlens, block_table, impl)

    def attend(
        self,
        sequences: Sequence[int],
        q: torch.Tensor,
        rotary: Rotary,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        **options,
    ):
        """Writes the new k, v behind the sequences, if given, then attends over each.

        Args:
            sequences: n of them.
            q: (n, seqlen_q, heads_q, head_dim).
            k, v: (n, seqlen_new, heads_kv, head_dim), or both None.
            rotary, options: as in ``KVCache.attend``.

        Returns:
            out, like q; with return_lse (out, lse), lse (n, heads_q, seqlen_q).

        Raises:
            OutOfPages: how many pages are missing.
            TypeError, ValueError: what was expected and what came; a sequence would exceed max_seqlen.
        """
        chosen = self._chosen(sequences)
        _check_queries(q, len(chosen))
        seqlen_new = _check_new(k, v, self.k, len(chosen)) if k is not None or v is not None else 0
        with self._room(chosen, seqlen_new) as (block_table, seqlens):
            return attention_with_cache(q, self.k, self.v, rotary, seqlens, k, v, block_table=block_table, **options)

    def advance(self, sequences: Sequence[int], seqlen_new: int) -> None:
        """Counts in seqlen_new tokens that a replayed CUDA graph wrote behind every sequence. Not reserved,
        ValueError."""
        chosen, seqlen_new = self._chosen(sequences), _integer("seqlen_new", seqlen_new)
        for name, sequence in chosen.items():
            shared = self._shared(sequence)
            room = (
                0
                if shared is not None
                else min(len(sequence.pages) * self.page_size, self.max_seqlen) - sequence.length
            )
            if seqlen_new > room:
                raise ValueError(f"seqlen_new: expected at most {room}, reserved for sequence {name}, got {seqlen_new}")
        for sequence in chosen.values():
            sequence.length += seqlen_new

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens from ``length`` on, such as those that speculative decoding rejects, and gives back the
        pages behind it, reserved ones too. A length beyond the present one is a ValueError."""
        shortened = self._get(sequence)
        shortened.length = _integer(f"length of sequence {sequence}", length, 0, shortened.length)
        self._give_back(shortened, -(-length // self.page_size))

    def free(self, sequence: int) -> None:
        """Ends a sequence. Pages that no other one shares become free."""
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

    def _chosen(self, sequences: Sequence[int]) -> dict[int, _Sequence]:
        if not isinstance(sequences, Sequence) or isinstance(sequences, str):
            raise TypeError(f"sequences: expected a list of numbers that allocate or fork returned, got {sequences!r}")
        chosen = {sequence: self._get(sequence) for sequence in sequences}
        if len(chosen) != len(sequences):
            twice, _ = Counter(sequences).most_common(1)[0]
            raise ValueError(f"sequences: expected each once, got sequence {twice} {sequences.count(twice)} times")
        return chosen

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

    def _shared(self, sequence: _Sequence) -> int | None:
        """The page that the next token goes to, if there is one and others hold it too. All behind it are the
        sequence's own."""
        pages = sequence.pages[sequence.length // self.page_size :]
        return pages[0] if pages and self._references[pages[0]] > 1 else None

    def _set(self, sequence: _Sequence, n: int, page: int) -> None:
        self._changed[sequence.row * self.max_pages + n] = page

    def _check_pages(self, needed: int) -> None:
        missing = needed - len(self._free)
        if missing > 0:
            pages = "page" if needed == 1 else "pages"
            raise OutOfPages(
                f"needs {needed} more {pages}, {len(self._free)} are free of {self.pages}: {missing} missing"
            )

    def _reserve(self, chosen: dict[int, _Sequence], seqlen_new: int) -> list[_Change]:
        """Gives every sequence the pages that it needs to be written to, and copies those that it shares."""
        if not seqlen_new:
            return []
        changes: list[_Change] = []
        left: Counter[int] = Counter()
        # The longest last: should all holders of a page be among the chosen, it stays in place, and what it writes lies
        # behind what the others have there. So a call that fails later can still be undone.
        for name, sequence in sorted(chosen.items(), key=lambda item: item[1].length):
            end = sequence.length + seqlen_new
            if end > self.max_seqlen:
                raise ValueError(
                    f"sequence {name} has {sequence.length} of {self.max_seqlen} tokens: no room for {seqlen_new}"
                )
            shared = self._shared(sequence)
            if shared is not None and self._references[shared] - left[shared] > 1:
                left[shared] += 1
                changes.append((sequence, sequence.length // self.page_size, shared))
            changes.extend((sequence, n, None) for n in range(len(sequence.pages), -(-end // self.page_size)))
        self._check_pages(len(changes))
        taken = self._free[: -len(changes) - 1 : -1]
        copies = [(old, page) for (_, _, old), page in zip(changes, taken, strict=True) if old is not None]
        if copies:
            source, target = _upload(tuple(zip(*copies, strict=True)), torch.int64, self.k.device)
            for pool in (self.k, self.v):
                pool.index_copy_(0, target, pool.index_select(0, source))
        for (sequence, n, old), page in zip(changes, taken, strict=True):
            self._references[self._free.pop()] = 1
            if old is None:
                sequence.pages.append(page)
            else:
                self._references[old] -= 1
                sequence.pages[n] = page
            self._set(sequence, n, page)
        return changes

    def _undo(self, changes: list[_Change]) -> None:
        for sequence, n, old in reversed(changes):
            page = sequence.pages[n]
            self._references[page] = 0
            self._free.append(page)
            if old is None:
                sequence.pages.pop()
            else:
                self._references[old] += 1
                sequence.pages[n] = old
            self._set(sequence, n, UNUSED if old is None else old)

    @contextmanager
    def _room(self, chosen: dict[int, _Sequence], seqlen_new: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The block table and lengths for a call that writes; it counts as written unless it raises."""
        changes = self._reserve(chosen, seqlen_new)
        try:
            yield self._tables(chosen)
        except BaseException:
            self._undo(changes)
            raise
        for sequence in chosen.values():
            sequence.length += seqlen_new

    def _give_back(self, sequence: _Sequence, kept: int) -> None:
        while len(sequence.pages) > kept:
            page = sequence.pages.pop()
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
            self._set(sequence, len(sequence.pages), UNUSED)

    def _tables(self, chosen: dict[int, _Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """(block_table, seqlens) for the kernels. All that the device needs to know goes there in one copy."""
        rows, lengths = ([getattr(sequence, name) for sequence in chosen.values()] for name in ("row", "length"))
        values = [*rows, *lengths, *self._changed, *self._changed.values()]
        n, m = len(chosen), len(self._changed)
        at, seqlens, entries, pages = _upload(values, torch.int64, self.k.device).split_with_sizes([n, n, m, m])
        if m:
            self._table.view(-1).index_copy_(0, entries, pages.to(torch.int32))
            self._changed.clear()
        return self._table.index_select(0, at), seqlens.to(torch.int32)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(pages={self.pages}, page_size={self.page_size}, {_described(self.k)}, "
            f"max_seqlen={self.max_seqlen}; {self.free_pages} pages free, sequences {self.sequences}, {self.nbytes:,} bytes)"
        )


def _storage(shape: tuple[int, int], heads_kv, head_dim, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    heads_kv, head_dim = _integer("heads_kv", heads_kv, 1), _integer("head_dim", head_dim, 8, 256)
    if head_dim % 8:
        raise ValueError(f"head_dim: expected a multiple of 8 up to 256, got {head_dim}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype}")
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside it
        k, v = (torch.empty(*shape, heads_kv, head_dim, dtype=dtype, device=device) for _ in range(2))
    return k, v


def _described(k: torch.Tensor) -> str:
    return f"heads_kv={k.shape[2]}, head_dim={k.shape[3]}, dtype={k.dtype}, device={str(k.device)!r}"


def _upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers on the device; from pinned memory the host does not wait for the copy."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def _integer(name: str, value, least: int = 0, most: int | None = None) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(
            f"{name}: expected at least {least}{f' and at most {most}' if most is not None else ''}, got {value}"
        )
    return number


def _check_queries(q, batch: int) -> None:
    if isinstance(q, torch.Tensor) and (q.ndim != 4 or q.shape[0] != batch):
        raise ValueError(f"q: expected shape ({batch}, seqlen_q, heads_q, head_dim), got {tuple(q.shape)}")


def _check_new(k, v, cache: torch.Tensor, batch: int) -> int:
    heads_kv, head_dim = cache.shape[2:]
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads_kv, head_dim) or x.shape[1] != k.shape[1]:
            seqlen_new = "seqlen_new" if x is k else k.shape[1]
            raise ValueError(
                f"{name}: expected shape ({batch}, {seqlen_new}, {heads_kv}, {head_dim}), got {tuple(x.shape)}"
            )
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype} as the cache, got {x.dtype}")
        if x.device != cache.device:
            raise ValueError(f"{name}: expected device {cache.device} as the cache, got {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: expected no gradient to be asked for; use torch.no_grad(), or attention in training"
            )
    return k.shape[1]
