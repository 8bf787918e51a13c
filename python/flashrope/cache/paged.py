"""``PagedKVCache``: stores sequences in pages of one pool. A forked sequence shares a page with its origin until one of
the two writes to the page."""

from __future__ import annotations

import contextlib
import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..calls.cache_tables import CacheTables
from ..schemes.rotary import Rotary
from . import entries, pool
from .capture import CapturedStep
from .new_tokens import NewTokens, check_integer, check_padding, check_queries
from .pool import PagePool
from .step import Step
from .storage import Cache, OpenStep, describe, upload


class _OfSequences(dict[int, int]):
    """One number per sequence. A sequence that does not exist raises the cache's error."""

    def __init__(self, cache: PagedKVCache, values: dict[int, int]):
        super().__init__(values)
        self._cache = cache

    def __missing__(self, sequence):
        self._cache._get(sequence)  # raises ValueError or TypeError if the sequence does not exist
        raise KeyError(sequence)


def _padding_after(selected: dict[int, pool.Sequence], leftpad: Sequence[int] | None, new: NewTokens) -> list[int]:
    """Returns the left padding of every sequence after a step. Checks the argument leftpad of the step."""
    now = [(sequence.leftpad, sequence.length) for sequence in selected.values()]
    return check_padding(leftpad, [pad for pad, _ in now], [length for _, length in now], new)


class PagedKVCache(Cache):
    """Holds the keys and values of sequences that are allocated, forked and freed, for one layer or for all.

    Use it in a server: sequences take pages from one pool, forks share a prefix, and ``extend``, ``remove`` and
    ``keep`` move cached tokens to other positions. For a fixed batch ``KVCache`` is simpler.

    Example:
        cache = PagedKVCache(pages=64, page_size=16, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu")
        q, k, v = (torch.randn(1, 40, heads, 64) for heads in (8, 2, 2))
        prompt = cache.allocate()
        cache.attend([prompt], q[:, :39], Rotary.rope(64), k[:, :39], v[:, :39])
        answer = cache.fork(prompt)  # shares the pages of the prompt
        out = cache.attend([answer], q[:, 39:], Rotary.rope(64), k[:, 39:], v[:, 39:])

    Args:
        pages: number of pages.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        heads_kv, head_dim: the number of key heads, and the channels per head of k and v. head_dim is a multiple of 8
            up to 512, or up to 256 with cache_dtype or rotated_keys.
        dtype: float16, bfloat16, float32 or float64.
        device: None: torch's default device.
        max_seqlen: largest number of tokens of a sequence. The block table has ceil(max_seqlen / page_size) entries for
            each sequence. ``extend``, ``remove`` and ``keep`` leave pages that are not full, and each of these pages
            takes an entry. So sequences that use these calls need a larger max_seqlen. None: a sequence may hold as
            many tokens as the pool has slots, and as many block-table entries as the pool has pages.
        layers: number of layers. All layers share one block table: page n exists in every layer.
        rotated_keys: as in ``KVCache``. Forks can share rotated keys, because forking does not move positions.
        cache_dtype: as in ``KVCache``: None or "int8".
        head_dim_v: the head_dim of v, as in ``KVCache``.
        values: the channels of stored keys that are the values, as in ``KVCache``.

    Attributes:
        k, v: (pages, page_size, heads_kv, head_dim or head_dim_v), with several layers (layers, pages, ...). Slots
            without a token are uninitialized. On the CPU, k and v are views of heads-first storage, which is faster
            to read there if the cache is long. ``layer(i)`` returns k and v of one layer.
        k_scale, v_scale: as in ``KVCache``.
        rotated_keys: the Rotary of every layer, or None.
        nbytes: bytes of k and v, and of their scales.

    With several layers new tokens are written in steps. ``with cache.step(sequences, seqlen_new) as step`` takes the
    pages once, and every layer calls ``step.attend(q, rotary, k, v, layer=i)``. When the block ends, the new tokens are
    counted in all layers. If the block raises, no layer counts them. ``allocate``, ``fork``, ``truncate`` and ``free``
    apply to all layers at once.

    Prompts of different lengths are padded on the left. ``leftpad`` of the first step gives the number of padding
    tokens of every sequence. The cache remembers the padding, and forks inherit it. Positions count from the first
    token after the padding. Lengths include the padding.

    ``allocate`` and ``fork`` return the number of a new sequence, and no number is used twice. An unknown or freed
    number, or a repeated number in a list, raises ValueError. A page that several sequences share is copied before one
    of them writes to it. The last sequence that holds the page writes in place.

    A call that raises leaves every sequence, its tokens and the number of free pages unchanged. No call waits for the
    device. Under torch.autocast float32 q, k and v become the autocast type, as in ``attention``, so make the cache in
    that type.

    A CUDA graph does not replay what the host does. Capture ``attention_with_cache(q, *cache.layer(i), rotary, seqlens,
    k=k, v=v, block_table=block_table)`` of every layer with your own tensors seqlens and block_table. Before every
    replay call ``cache.reserve(sequences, k.shape[1])`` and copy ``cache.seqlens(sequences)`` and
    ``cache.block_table(sequences)`` into your tensors. After the replay call ``cache.advance(sequences, k.shape[1])``.
    For sequences with left padding, also pass a tensor ``cache_leftpad`` and copy ``cache.leftpad(sequences)`` into it.
    For a quantized cache or one of rotated keys, capture ``plan.refresh()`` and then ``plan.attend`` of every layer
    ``cache.cache_layer(i)``, with a plan of ``plan_cache`` over your tensors; rotated keys need ``rotated_keys=True``.
    For sequences that ``extend``, ``remove`` or ``keep`` changed, use ``capture``. ``seqlens`` and ``block_table``
    raise an error for them, because the positions of their tokens do not follow from the slots.
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
        head_dim_v: int | None = None,
        values: slice | None = None,
    ):
        self.pages, self.page_size = check_integer("pages", pages, 1), check_integer("page_size", page_size, 16, 256)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size: expected 16, 32, 64, 128 or 256, got {page_size}")
        self.max_seqlen = pages * page_size if max_seqlen is None else check_integer("max_seqlen", max_seqlen, 1)
        self._limited = max_seqlen is not None
        self.max_pages = -(-self.max_seqlen // page_size)
        self._allocate(
            (self.pages, self.page_size),
            heads_kv,
            head_dim,
            dtype,
            device,
            layers,
            rotated_keys,
            cache_dtype,
            head_dim_v,
            values,
        )
        self._next = 0
        self._sequences: dict[int, pool.Sequence] = {}
        self._pool = PagePool(
            self.pages,
            self.page_size,
            self.max_pages,
            self.k.device,
            self._copy_pages,
            self.max_seqlen if self._limited else None,
        )

    def _copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        dimension = self.k.ndim - 4  # the dimension of pages
        for pages in self._stored:
            pages.index_copy_(dimension, target, pages.index_select(dimension, source))

    @property
    def sequences(self) -> list[int]:
        """Returns the sequences that exist, oldest first."""
        return list(self._sequences)

    @property
    def free_pages(self) -> int:
        """Returns the number of pages that no sequence holds."""
        return len(self._pool.free)

    @property
    def lengths(self) -> dict[int, int]:
        """Returns the number of tokens of every sequence, left padding included. Does not wait for the device.

        ``extend``, ``remove`` and ``keep`` drop a sequence's padding.
        """
        return _OfSequences(self, {name: sequence.tokens for name, sequence in self._sequences.items()})

    @property
    def padding(self) -> dict[int, int]:
        """Returns the left padding of every sequence. Does not wait for the device."""
        return _OfSequences(self, {name: sequence.leftpad for name, sequence in self._sequences.items()})

    def seqlens(self, sequences: Sequence[int]) -> torch.Tensor:
        """Returns the slots in use of every sequence, (n,) int32 on the device.

        Raises:
            ValueError: ``extend``, ``remove`` or ``keep`` changed a sequence.
        """
        selected = self._select_unmoved("seqlens", sequences)
        return upload([each.length for each in selected], torch.int32, self.k.device)

    def leftpad(self, sequences: Sequence[int]) -> torch.Tensor:
        """Returns the left padding of every sequence, (n,) int32 on the device."""
        return upload([each.leftpad for each in self._select(sequences).values()], torch.int32, self.k.device)

    def block_table(self, sequences: Sequence[int]) -> torch.Tensor:
        """Returns the pages of every sequence, (n, ceil(max_seqlen / page_size)) int32 on the device.

        The result is a copy, which later calls do not change. Entries without a page are 2**31 - 1, for which
        validate=True raises an error.

        Raises:
            ValueError: ``extend``, ``remove`` or ``keep`` changed a sequence.
        """
        table = self._pool.tables(self._select_unmoved("block_table", sequences), []).block_table
        assert table is not None
        return table

    def allocate(self, length: int = 0) -> int:
        """Returns a new, empty sequence, with pages reserved for ``length`` tokens as ``reserve`` does.

        Raises:
            OutOfPages: too few pages are free. The message says how many are missing.
            ValueError: length exceeds max_seqlen.
        """
        self.refuse_in_step("allocate")
        length = check_integer("length", length, 0, self.max_seqlen if self._limited else None)
        needed = -(-length // self.page_size)
        self._pool.check(needed, never=needed > self.pages)
        name = self._add(self._pool.new_sequence())
        self._reserve({name: self._sequences[name]}, NewTokens.of(length, [name]))
        return name

    def fork(self, sequence: int) -> int:
        """Returns a new sequence with the same tokens and left padding, in all layers.

        Both sequences share their pages. The first of the two that appends a token gets its own copy of the page that
        the token goes to.
        """
        self.refuse_in_step("fork")
        return self._add(self._pool.fork(self._get(sequence)))

    def reserve(self, sequences: Sequence[int], seqlen_new: int | Sequence[int]) -> None:
        """Reserves pages for seqlen_new more tokens of every sequence, so that appending them cannot fail. A list gives
        every sequence its own number.

        Reserved pages stay with their sequence until the sequence is truncated or freed. A fork does not share reserved
        pages. After a fork, free slots in the last page that holds tokens are no longer reserved, because that page is
        then shared.

        Raises:
            OutOfPages: too few pages are free. The message says how many are missing.
            ValueError: a sequence would exceed max_seqlen or its block-table entries.
        """
        self.refuse_in_step("reserve")
        selected = self._select(sequences)
        self._reserve(selected, NewTokens.of(seqlen_new, selected))

    def step(
        self, sequences: Sequence[int], seqlen_new: int | Sequence[int], leftpad: Sequence[int] | None = None
    ) -> Step:
        """Returns the step in which every layer gets seqlen_new tokens of every one of these sequences.

        Args:
            sequences: the numbers of n sequences, as returned by ``allocate`` and ``fork``.
            seqlen_new: number of new tokens of every sequence. A list, with one number per sequence: q, k and v of the
                step are packed, (total_new, heads, head_dim), in the order of the sequences.
            leftpad: the number of padding tokens at the start of each sequence, for sequences that hold nothing but
                padding. None: the padding does not change.

        Raises:
            OutOfPages: too few pages are free when the step is entered. The message says how many are missing.
            TypeError, ValueError: an argument is invalid, or a sequence would exceed max_seqlen. The message names the
                argument or the sequence.
            RuntimeError: a step of this cache is open.
        """
        selected = self._select(sequences)
        new = NewTokens.of(seqlen_new, selected)
        _padding_after(selected, leftpad, new)
        return Step(self, [*selected], new, leftpad)

    def append(
        self,
        sequences: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        impl: str | None = None,
        leftpad: Sequence[int] | None = None,
        seqlen_new: Sequence[int] | None = None,
    ) -> None:
        """Appends k, v (n, seqlen_new, heads_kv, head_dim) to n sequences. Raises the errors that ``attend`` raises.

        With several layers, k and v have a leading dimension of layers. leftpad: as in ``step``. seqlen_new: as in
        ``attend``, for packed k and v.
        """
        if self.layers == 1:
            self.refuse_new("append")
        new = self._new_of(k, v, seqlen_new, len(self._select(sequences)))
        self._append(self.step(sequences, new, leftpad), k, v, impl)

    def attend(
        self,
        sequences: Sequence[int],
        q: torch.Tensor,
        rotary: Rotary,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: int | None = None,
        leftpad: Sequence[int] | None = None,
        seqlen_new: Sequence[int] | None = None,
        **options,
    ):
        """Appends k, v to the sequences, if given, then attends to all their keys.

        Args:
            sequences: the numbers of n sequences, as returned by ``allocate`` and ``fork``.
            q: (n, seqlen_q, heads_q, head_dim).
            k, v: (n, seqlen_new, heads_kv, head_dim), or both None. k and v must be None if the cache has several
                layers, whose new keys and values are written in a ``step``.
            layer: 0 to layers - 1, the layer whose keys are read. None is allowed if the cache has one layer.
            leftpad: as in ``step``.
            seqlen_new: None, or for packed q, k and v (total_new, heads, head_dim) a list: the number of rows of every
                sequence.
            rotary, options: as in ``KVCache.attend``.

        Returns:
            out, like q. With return_lse: (out, lse). lse is (n, heads_q, seqlen_q), or packed (heads_q, total_new).

        Raises:
            OutOfPages: too few pages are free. The message says how many are missing.
            TypeError, ValueError: an argument is invalid, or a sequence would exceed max_seqlen. The message names the
                argument or the sequence.
        """
        selected = self._select(sequences)
        if k is None and v is None and leftpad is None:
            new = NewTokens.of(seqlen_new or 0, selected)
            check_queries(q, new)
            records = [*selected.values()]
            tables = self._pool.tables(records, [x.leftpad for x in records], new, appends=False)
            return self.attend_planned({}, tables, q, rotary, k, v, layer, options)
        self.refuse_new("attend")
        with self.step(sequences, self._new_of(k, v, seqlen_new, len(selected)), leftpad) as step:
            return step.attend(q, rotary, k, v, layer, **options)

    def advance(self, sequences: Sequence[int], seqlen_new: int | Sequence[int]) -> None:
        """Counts seqlen_new tokens that a replayed CUDA graph has written to every sequence, or to each sequence its
        number in a list.

        Raises:
            ValueError: the tokens were not reserved.
        """
        self.refuse_in_step("advance")
        selected = self._select(sequences)
        growing = list(zip(selected.items(), NewTokens.of(seqlen_new, selected).counts, strict=True))
        for (name, sequence), count in growing:
            room = min(len(sequence.pages) * self.page_size - sequence.length, self.max_seqlen - sequence.tokens)
            if self._pool.shared_page(sequence) is not None:
                room = 0
            if count > room:
                raise ValueError(
                    f"seqlen_new: expected at most {room}, the tokens reserved for sequence {name}, got {count}"
                )
        for (_, sequence), count in growing:
            self._pool.grow(sequence, count)

    def capture(self, sequences: Sequence[int], seqlen_new: int, total_new: int | None = None) -> CapturedStep:
        """Returns a step over static tables, for a CUDA graph of all layers that is replayed for every token.

        Unlike the methods ``seqlens`` and ``block_table``, the step also supports sequences that ``extend``, ``remove``
        or ``keep`` changed. For every token call the step's ``update``, replay the graph, and call the step's
        ``advance``. Call nothing else that changes these sequences between ``update`` and ``advance``.

        Example:
            cache = PagedKVCache(64, 16, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu", layers=4)
            step = cache.capture([cache.allocate()], 1)
            layers = [cache.cache_layer(i) for i in range(cache.layers)]
            plan = plan_cache(step.tables, like=layers[0], rotary=Rotary.rope(64), seqlen_q=1, heads_q=8)
            q, k, v = (torch.randn(1, 1, heads, 64) for heads in (8, 2, 2))
            step.update()
            plan.refresh()  # a CUDA graph captures this line
            outs = [plan.attend(q, layer, k, v) for layer in layers]  # and this one
            step.advance()

        Args:
            sequences: the numbers of n sequences, as returned by ``allocate`` and ``fork``.
            seqlen_new: number of new tokens of every sequence at each replay.
            total_new: None. Or, for another number of tokens of each sequence at each replay, the number of rows of
                packed q, k and v: at most total_new tokens in all and at most seqlen_new of one sequence, as the list
                in ``update`` says. Plan with seqlen_q=total_new. Rows beyond the tokens of the list are ignored.

        Raises:
            OutOfPages, ValueError: as in ``reserve``.
        """
        self.refuse_in_step("capture")
        seqlen_new = check_integer("seqlen_new", seqlen_new, 1)
        total_new = None if total_new is None else check_integer("total_new", total_new, 1)
        return CapturedStep(self, list(self._select(sequences)), seqlen_new, total_new)

    @contextlib.contextmanager
    def tables_of(self, sequences: list[int], new: NewTokens, positioned: bool) -> Iterator[CacheTables]:
        """Reserves pages for the new tokens and yields the tables for ``plan_cache``. Gives the pages back if the with
        block raises.

        positioned: yield explicit positions even if no sequence was changed by ``extend``, ``remove`` or ``keep``.
        """
        selected = self._select(sequences)
        with self._reserving(selected, new):
            records = [*selected.values()]
            yield self._pool.tables(records, [x.leftpad for x in records], new, positioned=positioned)

    def slots_of(self, sequences: list[int]) -> list[tuple[Any, ...]]:
        """Returns (slots in use, left padding, entries, pages) of every sequence: what decides where its next tokens
        go."""
        selected = self._select(sequences).values()
        return [(x.length, x.leftpad, x.entries and tuple(x.entries), tuple(x.pages)) for x in selected]

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens from ``length`` on, in all layers: for example guesses that speculative decoding rejects.

        Pages without tokens are given back, reserved pages included. length includes left padding. If it exceeds the
        current length, ValueError is raised.
        """
        self.refuse_in_step("truncate")
        shortened = self._get(sequence)
        length = check_integer(f"length of sequence {sequence}", length, 0, shortened.tokens)
        if shortened.entries is not None:
            return self._show(shortened, entries.without(shortened.entries, length, shortened.tokens, False))
        shortened.length = length
        shortened.leftpad = min(shortened.leftpad, shortened.length)
        self._pool.give_back(shortened, -(-length // self.page_size))

    def extend(self, sequence: int, other: int) -> None:
        """Appends the tokens of another sequence, in all layers, by reference: no key is copied or computed again.

        The positions of the appended tokens continue after the last token of ``sequence``. The distances between the
        appended tokens do not change. ``other`` does not change, and its padding is not appended. A page that is not
        full is shared, too. It is copied when tokens are appended to one of its sequences. Pages reserved for
        ``sequence`` are given back.

        Keys and values of ``other`` were computed without the tokens that now come before them. Except in the first
        layer, the result therefore only approximates one prefill of both sequences, unless ``sequence`` was empty.
        docs/caches.md shows how to compute the first tokens of ``other`` again. bench/results/reused/README.md says
        what the approximation costs.

        Raises:
            ValueError: both sequences together exceed max_seqlen or the width of the block table, or the cache holds
                rotated keys.
        """
        self.refuse_in_step("extend")
        self._refuse_rotated("extend")
        target, source = self._get(sequence), self._get(other)
        own, added = self._pool.entries_of(target), self._pool.entries_of(source)
        kept, more = [entry for _, entry in own], [entry for _, entry in added]
        tokens = entries.tokens(kept), entries.tokens(more)
        self._pool.check_fits(f"other: sequence {sequence}", tokens, (len(own), len(added)))
        pages = [target.pages[n] for n, _ in own] + [source.pages[n] for n, _ in added]
        self._pool.show(target, pages, entries.joined(kept, more))

    def remove(self, sequence: int, start: int, stop: int, close: bool = True) -> None:
        """Removes the tokens start to stop - 1, in all layers. Pages that lose all their tokens are given back.

        Args:
            start, stop: token numbers, counted from the first token after the padding. start is at most stop. If a
                token is removed, the padding is removed, too.
            close: True: the tokens from stop on move down by stop - start positions. False: the tokens from stop on
                keep their positions, so distances across the gap do not change.

        Raises:
            TypeError, ValueError: an argument is invalid; or the cache holds rotated keys; or a page has to be split
                into two block-table entries, and the sequence has no free entry.
        """
        self.refuse_in_step("remove")
        self._refuse_rotated("remove")
        shortened = self._get(sequence)
        own = self._pool.entries_of(shortened)
        held = entries.tokens([entry for _, entry in own])
        stop = check_integer("stop", stop, 0, held)
        start = check_integer("start", start, 0, stop)
        if not isinstance(close, bool):
            raise TypeError(f"close: expected True or False, got {close!r}")
        if start == stop:
            return
        kept = entries.without([entry for _, entry in own], start, stop, close)
        self._pool.check_fits(f"start, stop: sequence {sequence}", (held, 0), (len(own), len(kept) - len(own)))
        self._show(shortened, [(own[n][0], entry) for n, entry in kept])

    def keep(self, sequence: int, first: int, last: int) -> None:
        """Removes all but the first ``first`` and the last ``last`` tokens and closes the gap, for attention sinks and
        a rolling window (StreamingLLM, section 3.2). Does nothing if the sequence has at most first + last tokens.
        Raises the errors that ``remove`` raises."""
        self.refuse_in_step("keep")
        first, last = check_integer("first", first), check_integer("last", last)
        shortened = self._get(sequence)
        held = shortened.tokens - (shortened.leftpad if shortened.entries is None else 0)
        if held > first + last:
            self.remove(sequence, first, held - last)

    def free(self, sequence: int) -> None:
        """Removes a sequence. Its pages become free unless other sequences share them."""
        self.refuse_in_step("free")
        self._pool.end(self._get(sequence))
        del self._sequences[sequence]

    def reset(self) -> None:
        """Frees all sequences."""
        for sequence in self.sequences:
            self.free(sequence)

    def _refuse_rotated(self, call: str) -> None:
        if self.rotated_keys is not None:
            raise ValueError(f"{call}: not supported with rotated_keys (the positions of rotated keys cannot change)")

    def _show(self, sequence: pool.Sequence, kept: entries.Kept) -> None:
        """Makes only the tokens of ``kept`` visible."""
        self._pool.show(sequence, [sequence.pages[n] for n, _ in kept], [entry for _, entry in kept])

    def _get(self, sequence: int) -> pool.Sequence:
        if not isinstance(sequence, numbers.Integral) or isinstance(sequence, bool):
            raise TypeError(f"sequence: expected a number that allocate or fork returned, got {sequence!r}")
        found = self._sequences.get(sequence)
        if found is None:
            raise ValueError(
                f"sequence {sequence} " + ("was freed" if 0 <= sequence < self._next else "was never allocated")
            )
        return found

    def _select(self, sequences: Sequence[int]) -> dict[int, pool.Sequence]:
        if not isinstance(sequences, Sequence) or isinstance(sequences, str):
            raise TypeError(f"sequences: expected a list of numbers that allocate or fork returned, got {sequences!r}")
        selected = {sequence: self._get(sequence) for sequence in sequences}
        if len(selected) != len(sequences):
            repeated, times = Counter(sequences).most_common(1)[0]
            raise ValueError(f"sequences: expected each sequence once, got sequence {repeated} {times} times")
        return selected

    def _select_unmoved(self, call: str, sequences: Sequence[int]) -> list[pool.Sequence]:
        """Returns the sequences, after a check that the positions of their tokens follow from the slots."""
        selected = self._select(sequences)
        for name, sequence in selected.items():
            if sequence.entries is not None:
                raise ValueError(
                    f"{call}: not supported for sequences that extend, remove or keep changed (their positions do not "
                    f"follow from the slots), got sequence {name}; use attend, step or capture"
                )
        return list(selected.values())

    def _add(self, sequence: pool.Sequence) -> int:
        name, self._next = self._next, self._next + 1
        self._sequences[name] = sequence
        return name

    def _reserve(self, selected: dict[int, pool.Sequence], new: NewTokens) -> list[pool.Change]:
        for (name, sequence), count in zip(selected.items(), new.counts, strict=True):
            self._pool.check_room(name, sequence, count)
        return self._pool.reserve(selected.values(), new.counts)

    @contextlib.contextmanager
    def _reserving(self, selected: dict[int, pool.Sequence], new: NewTokens) -> Iterator[list[pool.Change]]:
        """Reserves pages for the new tokens of every sequence. Gives them back if the with block raises."""
        changes = self._reserve(selected, new)
        try:
            yield changes
        except BaseException:
            self._pool.undo(changes)
            raise

    def _begin(self, step: OpenStep) -> CacheTables:
        assert step.sequences is not None
        step.selected = selected = self._select(step.sequences)
        step.padding = _padding_after(selected, step.given_leftpad, step.new)
        with self._reserving(selected, step.new) as step.changes:
            return self._pool.tables([*selected.values()], step.padding, step.new)

    def _commit(self, step: OpenStep) -> None:
        for sequence, leftpad, count in zip(step.selected.values(), step.padding, step.new.counts, strict=True):
            self._pool.grow(sequence, count)
            sequence.leftpad = leftpad

    def _undo(self, step: OpenStep) -> None:
        self._pool.undo(step.changes)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(pages={self.pages}, page_size={self.page_size}, {describe(self)}, "
            f"max_seqlen={self.max_seqlen}; {self.free_pages} pages free, sequences {self.sequences}, "
            f"{self.nbytes:,} bytes)"
        )
