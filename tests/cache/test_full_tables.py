"""Tests sequences that fill their row of the block table. Tokens that do not fit are refused, and no other sequence is
affected."""

import pytest
import support
import torch
from flashrope import OutOfPages, Rotary
from paged_oracle import UNUSED, Held

PAGE, D = 16, 8
ROTARY = Rotary.rope(D)


def filled_with(pages: int, max_seqlen: int | None = None) -> Held:
    target = support.Target("cpu", torch.float32, "cpu")
    return Held(target, pages, PAGE, (1, 1), [ROTARY], queries=1, max_seqlen=max_seqlen)


def split(max_seqlen: int | None, empty: int = 0) -> tuple[Held, int, int]:
    """Returns a sequence of three pages in four block-table entries, and a fork from before the split. empty: the
    number of sequences made first."""
    filled = filled_with(4, max_seqlen)
    for _ in range(empty):
        filled.allocate()
    a = filled.sequence(48)
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
    """All four entries are in use. The next row of the table belongs to another sequence, or does not exist."""
    filled, a, b = split(max_seqlen, empty)
    message = f"sequence {a} has 4 of 4 block-table entries: no room for 1"
    filled.refused(message, lambda: NEW[call](filled.cache, a))
    filled.truncate(a, 44)  # the two tokens that follow fit into the last page, or into a copy of it
    filled.write([a], 2)
    filled.look()
    filled.refused(message, lambda: NEW[call](filled.cache, a))


def test_a_table_that_is_full_to_the_entry():
    """remove and append can use the last entry, but no further entry."""
    filled = filled_with(9, 64)
    a = filled.sequence(40)
    filled.sequence(20)
    filled.remove(a, 2, 4)
    filled.look()
    message = "start, stop: sequence 0 has 4 of 4 block-table entries: no room for 1"
    filled.refused(message, lambda: filled.cache.remove(a, 20, 21))
    filled.remove(a, 12, 14)  # at the end of an entry
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 1", lambda: filled.cache.reserve([a], 9))
    filled.write([a], 8)
    filled.look()
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 2", lambda: filled.write([a], 17))


def test_extend_to_the_entry():
    """With ten short sequences, entries run out before tokens do, at exactly max_pages."""
    filled = filled_with(12, 4 * PAGE)
    short = filled.sequence(3)
    target, neighbour = filled.sequence(3), filled.sequence(30)
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
    filled = filled_with(6, 20)
    a, b = (filled.sequence(count) for count in tokens)
    message = f"other: sequence 0 has {tokens[0]} of 20 tokens: no room for {tokens[1]}"
    filled.refused(message, lambda: filled.cache.extend(a, b))


def test_max_seqlen_counts_tokens():
    """max_seqlen limits tokens, not slots. Hidden rows of a page do not count."""
    filled = filled_with(6, 20)
    a, b = filled.sequence(9), filled.sequence(9)
    filled.extend(a, b)
    assert filled.cache.lengths[a] == 18  # the 18 tokens take 25 slots
    filled.refused("sequence 0 has 18 of 20 tokens: no room for 3", lambda: filled.write([a], 3))
    filled.cache.reserve([a], 2)
    message = f"seqlen_new: expected at most 2, the tokens reserved for sequence {a}, got 3"
    filled.refused(message, lambda: filled.cache.advance([a], 3))
    filled.write([a], 2)
    filled.look()
    filled.refused("sequence 0 has 20 of 20 tokens: no room for 1", lambda: filled.write([a], 1))


def test_a_sequence_that_holds_its_pages_twice():
    filled = filled_with(4)
    a, b = filled.sequence(20), filled.sequence(20)
    filled.extend(a, a)
    filled.look()
    filled.refused("other: sequence 0 has 4 of 4 block-table entries: no room for 4", lambda: filled.cache.extend(a, a))
    with pytest.raises(OutOfPages) as caught:
        filled.write([a], 1)  # the sequence holds its last page twice
    assert not caught.value.never
    filled.look()
    filled.free(b)
    filled.write([a], 12)
    filled.look()
    filled.refused("sequence 0 has 4 of 4 block-table entries: no room for 1", lambda: filled.write([a], 1))


def test_a_moved_sequence_without_repeated_pages_runs_out_of_pages():
    """A moved sequence without repeated pages raises OutOfPages, as a sequence that was not moved does. Only a larger
    pool would help."""
    filled = filled_with(3)
    a = filled.sequence(40)
    filled.remove(a, 0, 3)
    with pytest.raises(OutOfPages) as caught:
        filled.write([a], 9)
    assert caught.value.never
    filled.look()


def test_the_table_is_whole():
    """The oracle notices a wrong entry in a row that belongs to no sequence, and in the row of another sequence."""
    filled, _, b = split(64)
    pool = filled.cache._pool
    for row, n in ((5, 0), (filled.cache._sequences[b].row, 3)):
        pool.table[row, n] = 0
        with pytest.raises(AssertionError, match=f"row {row} of the block table"):
            filled.look()
        pool.table[row, n] = UNUSED
    filled.look()
