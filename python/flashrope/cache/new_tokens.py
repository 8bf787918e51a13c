"""Checks the arguments of both caches. ``NewTokens`` says how many new tokens each sequence of a call gets."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..calls.autocast import autocast_hint
from ..calls.cache_tables import Packed
from ..calls.checks import check_no_gradient, check_tensor


class NewTokens(NamedTuple):
    """How many new tokens every sequence gets, and how their keys and values are laid out.

    counts: the number of new tokens of every sequence.
    rows: the leading dimensions of k and v: (sequences, seqlen_new), or (total_new,) if they are packed.
    longest: upper bound of the counts.
    """

    counts: list[int]
    rows: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, seqlen_new, names: Iterable[int], most: int | None = None) -> NewTokens:
        """Checks the argument seqlen_new: one number for all sequences, or a list with one number per sequence.

        names: the numbers of the sequences. most: the largest number of tokens of a sequence.
        """
        names = list(names)
        if isinstance(seqlen_new, Sequence) and not isinstance(seqlen_new, str):
            if len(seqlen_new) != len(names):
                raise ValueError(
                    f"seqlen_new: expected a number, or a list of {len(names)} numbers, one per sequence, "
                    f"got {seqlen_new!r}"
                )
            each = zip(names, seqlen_new, strict=True)
            counts = [check_integer(f"seqlen_new of sequence {name}", count, 0, most) for name, count in each]
            return cls(counts, (sum(counts),), max(counts, default=0))
        count = check_integer("seqlen_new", seqlen_new)
        return cls([count] * len(names), (len(names), count), count)

    @property
    def packed(self) -> bool:
        return len(self.rows) == 1

    @property
    def starts(self) -> list[int]:
        """Returns the first row of every sequence in packed tensors, then the total. Empty if they are not packed."""
        return list(accumulate(self.counts, initial=0)) if self.packed else []

    @property
    def given(self) -> int | list[int]:
        """Returns the argument seqlen_new, for errors."""
        return self.counts if self.packed else self.longest

    def in_tables(self, starts: torch.Tensor | None, appends: bool = True) -> int | Packed:
        """Returns ``CacheTables.new``. starts: ``self.starts`` on the device, int32. appends: whether the call brings
        new keys."""
        if self.packed:
            assert starts is not None
            return Packed(starts, self.longest, appends=appends)
        return self.longest if appends else 0


def check_integer(name: str, value, minimum: int = 0, maximum: int | None = None) -> int:
    if type(value) is not int and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        limit = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name}: expected at least {minimum}{limit}, got {value}")
    return number


def check_padding(leftpad, padding: list[int], lengths: list[int], new: NewTokens) -> list[int]:
    """Checks leftpad and returns it as a list, one number per sequence. padding: the left padding before the step."""
    if leftpad is None:
        return padding
    if not isinstance(leftpad, Sequence) or isinstance(leftpad, str) or len(leftpad) != len(padding):
        raise ValueError(f"leftpad: expected a list of {len(padding)} numbers, one per sequence, got {leftpad!r}")
    return [  # slots of tokens cannot become padding, and padding cannot become tokens
        check_integer(f"leftpad of entry {b}", pad, old, length + count if length == old else old)
        for b, (pad, old, length, count) in enumerate(zip(leftpad, padding, lengths, new.counts, strict=True))
    ]


def check_queries(q, new: NewTokens) -> None:
    check_tensor("q", q)
    if q.ndim != len(new.rows) + 2 or q.shape[0] != new.rows[0]:
        rows = f"{new.rows[0]}" if new.packed else f"{new.rows[0]}, seqlen_q"
        raise ValueError(f"q: expected shape ({rows}, heads_q, head_dim), got {tuple(q.shape)}")


def new_tensors(k, v, cache) -> list[tuple[str, Any]]:
    """Returns (name, tensor) of each tensor that the cache stores for new tokens: of k and v, or only of k if values
    are channels of keys."""
    if cache.values is None:
        return [("k", k), ("v", v)]
    if v is not None:
        raise ValueError("v: expected None, because the values of this cache are channels of its keys, got a tensor")
    return [("k", k)]


def count_new(k, v, cache, batch: int) -> int:
    """Checks the first dimension of new k, v (batch, seqlen_new, heads_kv, head_dim) and returns seqlen_new. The step
    checks the rest."""
    for name, x in new_tensors(k, v, cache):
        check_tensor(name, x)
    if k.ndim != 4 or k.shape[0] != batch:
        hint = "; packed k and v need the list seqlen_new" if k.ndim == 3 else ""
        row = f"{cache.heads_kv}, {cache.head_dim}"
        raise ValueError(f"k: expected shape ({batch}, seqlen_new, {row}), got {tuple(k.shape)}{hint}")
    return k.shape[1]


def check_rows(k, v, cache, new: NewTokens) -> None:
    """Checks the leading dimensions of new keys in a step. The plan checks the rest."""
    for name, x in new_tensors(k, v, cache):
        check_tensor(name, x)
    if k.ndim != len(new.rows) + 2 or tuple(k.shape[:-2]) != new.rows:
        if not new.packed and k.ndim == 4 and k.shape[0] == new.rows[0]:
            raise ValueError(f"k: expected seqlen_new {new.longest}, as in the call of step(), got {k.shape[1]}")
        expected = *new.rows, cache.heads_kv, cache.head_dim
        why = f", because seqlen_new is {new.counts}" if new.packed else ""
        raise ValueError(f"k: expected shape {expected}{why}, got {tuple(k.shape)}")


def check_new(k, v, cache, new: NewTokens) -> None:
    """Checks new k, v (*new.rows, heads_kv, head_dim) against the cache."""
    check_rows(k, v, cache, new)
    for name, x in new_tensors(k, v, cache):
        expected = (*new.rows, cache.heads_kv, cache.head_dim if name == "k" else cache.head_dim_v)
        if x.shape != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype}, the dtype of the cache, got {x.dtype}{autocast_hint(x)}")
        if x.device != cache.k.device:
            raise ValueError(f"{name}: expected device {cache.k.device}, the device of the cache, got {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
        check_no_gradient(name, x)
