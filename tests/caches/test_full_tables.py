"""Sequences that fill their row of the block table: what does not fit is refused, and no other sequence notices."""

import itertools

import pytest
import torch
from flashrope import OutOfPages, PagedKVCache, Rotary
from paged_oracle import UNUSED, Tokens, look

PAGE, D = 16, 8
ROTARY = Rotary.rope(D)


class Filled:
    """A cache of one head whose tokens are numbered, and what each sequence holds."""

    def __init__(self, pages: int, max_seqlen: int | None = None):
        self.cache = PagedKVCache(pages, PAGE, 1, D, torch.float32, "cpu", max_seqlen=max_seqlen)
        self.numbers = itertools.count()
        self.held: dict[int, list[tuple[int, int]]] = {}  # (number, position) of every token

    def write(self, name: int | None, count: int) -> int:
        """Appends tokens to a sequence, a new one for None. Returns its name."""
        if name is None:
            name = self.cache.allocate()
            self.held[name] = []
        numbers = list(itertools.islice(self.numbers, count))
        k, v = self.rows(numbers)
        self.cache.append([name], k[None], v[None])
        start = self.held[name][-1][1] + 1 if self.held[name] else 0
        self.held[name] += [(number, start + n) for n, number in enumerate(numbers)]
        return name

    def rows(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.tensor(numbers, dtype=torch.float32)[:, None, None].repeat(1, 1, D)
        return k, -k

    def fork(self, name: int) -> int:
        child = self.cache.fork(name)
        self.held[child] = list(self.held[name])
        return child

    def remove(self, name: int, start: int, stop: int) -> None:
        self.cache.remove(name, start, stop)
        kept = self.held[name]
        self.held[name] = kept[:start] + [(number, place - stop + start) for number, place in kept[stop:]]

    def extend(self, name: int, other: int) -> None:
        added = list(self.held[other])
        self.cache.extend(name, other)
        by = self.held[name][-1][1] + 1 - added[0][1] if self.held[name] else 0
        self.held[name] += [(number, place + by) for number, place in added]

    def look(self) -> None:
        look(
            self.cache,
            {
                name: Tokens([place for _, place in tokens], *self.rows([number for number, _ in tokens]))
                for name, tokens in self.held.items()
            },
        )

    def refused(self, message: str, call) -> None:
        """The call raises ValueError, and every sequence and page is what it was."""
        before = self.cache.lengths, self.cache.free_pages, [list(x.pages) for x in self.cache._sequences.values()]
        with pytest.raises(ValueError, match=message):
            call()
        after = self.cache.lengths, self.cache.free_pages, [list(x.pages) for x in self.cache._sequences.values()]
        assert after == before
        self.look()


def split(max_seqlen: int | None, empty: int = 0) -> tuple[Filled, int, int]:
    """A sequence of three pages in four block-table entries, and a fork of it before. empty: sequences made first."""
    filled = Filled(4, max_seqlen)
    for _ in range(empty):
        filled.write(None, 0)
    a = filled.write(None, 48)
    b = filled.fork(a)
    filled.remove(a, 2, 4)
    filled.look()
    return filled, a, b


NEW = {
    "append": lambda c, a: c.append([a], *torch.zeros(2, 1, 1, 1, D)),
    "attend": lambda c, a: c.attend([a], torch.zeros(1, 1, 1, D), ROTARY, *torch.zeros(2, 1, 1, 1, D)),
    "step": lambda c, a: c.step([a], 1).__enter__(),
    "reserve": lambda c, a: c.reserve([a], 1),
    "together": lambda c, a: c.append([a + 1, a], *torch.zeros(2, 2, 1, 1, D)),
}


@pytest.mark.parametrize("empty", [0, 14, 15], ids=["first row", "last rows", "last row"])
@pytest.mark.parametrize("max_seqlen", [None, 64])
@pytest.mark.parametrize("call", NEW)
def test_no_entry_for_another_token(call, max_seqlen, empty):
    """Four entries of four are in use. The next row of the table is another sequence's, or there is none."""
    filled, a, b = split(max_seqlen, empty)
    message = f"sequence {a} has 4 of 4 block-table entries: no room for 1"
    filled.refused(message, lambda: NEW[call](filled.cache, a))
    filled.cache.truncate(a, 44)  # two tokens fewer: room for them in the last page, or in a copy of it
    del filled.held[a][44:]
    filled.write(a, 2)
    filled.look()
    filled.refused(message, lambda: NEW[call](filled.cache, a))


def test_a_table_that_is_full_to_the_entry():
    """remove and append take the last entry, and not one more."""
    filled = Filled(9, 64)
    a = filled.write(None, 40)
    filled.write(None, 20)
    filled.remove(a, 2, 4)
    filled.look()
    message = "start, stop: sequence 0 has 4 of 4 block-table entries: no room for 1"
    filled.refused(message, lambda: filled.cache.remove(a, 20, 21))
    filled.remove(a, 12, 14)  # at the end of an entry
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 1", lambda: filled.cache.reserve([a], 9))
    filled.write(a, 8)
    filled.look()
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 2", lambda: filled.write(a, 17))


def test_extend_to_the_entry():
    """Ten short sequences: entries run out before tokens do, at exactly max_pages."""
    filled = Filled(12, 4 * PAGE)
    short = filled.write(None, 3)
    target, neighbour = filled.write(None, 3), filled.write(None, 30)
    for _ in range(3):
        filled.extend(target, short)
        filled.look()
    message = "other: sequence 1 has 4 of 4 block-table entries: no room for 1"
    filled.refused(message, lambda: filled.cache.extend(target, short))
    message = "other: sequence 0 has 1 of 4 block-table entries: no room for 4"
    filled.refused(message, lambda: filled.cache.extend(short, target))
    filled.refused("other: sequence 1 has 4 of 4 block", lambda: filled.cache.extend(target, target))
    assert filled.cache.lengths == {short: 3, target: 12, neighbour: 30}


@pytest.mark.parametrize("tokens", [(16, 16), (16, 5), (5, 16)], ids=str)
def test_extend_beyond_max_seqlen(tokens):
    filled = Filled(6, 20)
    a, b = (filled.write(None, count) for count in tokens)
    message = f"other: sequence 0 has {tokens[0]} of 20 tokens: no room for {tokens[1]}"
    filled.refused(message, lambda: filled.cache.extend(a, b))


def test_max_seqlen_counts_tokens():
    """Hidden rows of a page do not count; the tokens do, to the last one."""
    filled = Filled(6, 20)
    a, b = filled.write(None, 9), filled.write(None, 9)
    filled.extend(a, b)
    assert filled.cache.lengths[a] == 18  # in 25 slots
    filled.refused("sequence 0 has 18 of 20 tokens: no room for 3", lambda: filled.write(a, 3))
    filled.cache.reserve([a], 2)
    message = f"seqlen_new: expected at most 2, reserved for sequence {a}, got 3"
    filled.refused(message, lambda: filled.cache.advance([a], 3))
    filled.write(a, 2)
    filled.look()
    filled.refused("sequence 0 has 20 of 20 tokens: no room for 1", lambda: filled.write(a, 1))


def test_a_sequence_that_holds_its_pages_twice():
    filled = Filled(4)
    a, b = filled.write(None, 20), filled.write(None, 20)
    filled.extend(a, a)
    filled.look()
    filled.refused("other: sequence 0 has 4 of 4 block-table entries: no room for 4", lambda: filled.cache.extend(a, a))
    with pytest.raises(OutOfPages) as caught:
        filled.write(a, 1)  # its last page is shared with itself
    assert not caught.value.never
    filled.look()
    filled.cache.free(b)
    del filled.held[b]
    filled.write(a, 12)
    filled.look()
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 1", lambda: filled.write(a, 1))


def test_a_moved_sequence_without_repeated_pages_runs_out_of_pages():
    """As one that was not moved: a larger pool would do."""
    filled = Filled(3)
    a = filled.write(None, 40)
    filled.remove(a, 0, 3)
    with pytest.raises(OutOfPages) as caught:
        filled.write(a, 9)
    assert caught.value.never
    filled.look()


def test_the_table_is_whole():
    """The oracle notices an entry in a row of no sequence, and in another one's."""
    filled, _, b = split(64)
    pool = filled.cache._pool
    for row, n in ((5, 0), (filled.cache._sequences[b].row, 3)):
        pool.table[row, n] = 0
        with pytest.raises(AssertionError, match=f"row {row} of the block table"):
            filled.look()
        pool.table[row, n] = UNUSED
    filled.look()
