"""Keeps steps, captured steps and copies of a cache while other operations change the cache, and uses them later.

``Outliving`` is driven by ``caches.Walk``. The oracle is ``paged_oracle.Held``: what every sequence should hold.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle

import pytest
import torch
from flashrope import CapturedStep, OutOfPages, Step, plan_cache
from paged_oracle import Counts, Held, Tokens

KINDS = ("make step", "enter step", "capture", "update", "replay", "advance", "discard", "pickle", "copy", "reset")


@dataclasses.dataclass
class LateStep:
    step: Step
    names: list[int]
    counts: Counts


@dataclasses.dataclass
class LateCapture:
    step: CapturedStep
    names: list[int]
    most: int  # new tokens of every sequence, or with a total the most of one sequence
    total: int | None  # rows of packed tensors
    padded: bool
    moved: bool
    counts: Counts = 0  # of the last update
    updated: list[Tokens] | None = None  # what its sequences held at the last update that was not advanced
    fresh: bool = False  # whether that update was the last operation of the walk


class Outliving:
    def __init__(self, held: Held):
        self.held = held
        self.steps: list[LateStep] = []
        self.captures: list[LateCapture] = []

    def operate(self, names: list[int], kind: str, which: int, number: int) -> None:
        """Does one operation of ``KINDS`` with the sequences `names`, or with an object that an earlier one made."""
        fresh = [x for x in self.captures if x.fresh]
        self.changed()
        if kind == "reset":
            self.held.cache.reset()
            self.held.tokens.clear()
            self.held.padding.clear()
        elif kind in ("pickle", "copy"):
            self.copy(pickled=kind == "pickle")
        elif kind == "make step":
            counts = ragged(names, which, number) if which % 2 else number
            self.steps.append(LateStep(self.held.cache.step(names, counts), names, counts))
        elif kind == "capture":
            most, total = number % 5 + 1, number % 7 + 1 if which % 2 else None
            step = self.held.cache.capture(names, most, total)
            flags = step.tables.leftpad is not None, step.tables.positions is not None
            self.captures.append(LateCapture(step, names, most, total, *flags))
        elif kind == "discard":
            self.discard(names, number)
        elif kind == "enter step" and self.steps:
            self.enter(self.steps[which % len(self.steps)])
        elif kind in ("update", "replay", "advance") and self.captures:
            late = self.captures[which % len(self.captures)]
            late.fresh = any(late is x for x in fresh)
            if kind == "update":
                self.update(late, number)
            else:
                getattr(self, kind)(late)

    def changed(self) -> None:
        """Notes that the walk does something else, so that a replay would no longer follow its update."""
        for late in self.captures:
            late.fresh = False

    def missing(self, names: list[int]) -> list[int]:
        return [name for name in names if name not in self.held.tokens]

    # ---- steps

    def enter(self, late: LateStep) -> None:
        held = self.held
        if gone := self.missing(late.names):
            with pytest.raises(ValueError, match=f"^sequence {gone[0]} was freed"), late.step:
                raise AssertionError("the step of a freed sequence was entered")
            return
        counts = late.counts
        k, v, given = held.new_keys(late.names, counts)
        q = held.new_rows(late.names, max(counts, 1) if isinstance(counts, int) else counts, held.heads[0])
        with late.step as step:
            results = [
                step.attend(q[n], x, k[n], given[n], layer=n, return_lse=True, impl=held.target.of_any_positions)
                for n, x in enumerate(held.schemes)
            ]
        held.written(late.names, k, v, counts=counts)
        held.compare(late.names, q, results, counts)

    def discard(self, names: list[int], number: int) -> None:
        """Opens a step, writes the first layer and abandons its with statement."""
        counts = ragged(names, number, number) if number % 2 else number
        held, step = self.held, self.held.cache.step(names, counts)
        step.__enter__()
        with pytest.raises(RuntimeError, match="discard_step"):
            held.cache.reset()
        k, _, given = held.new_keys(names, counts)
        step.append(k[0], given[0], layer=0)
        held.cache.discard_step()
        with pytest.raises(RuntimeError, match="^step: discarded"):
            step.__exit__(None, None, None)

    # ---- captured steps

    def update(self, late: LateCapture, number: int) -> None:
        held, given = self.held, ()
        late.counts = late.most
        if late.total is not None:
            late.counts = ragged(late.names, number, late.most)
            if sum(late.counts) > late.total:
                with pytest.raises(ValueError, match=f"^seqlen_new: expected at most {late.total} tokens in all"):
                    late.step.update(late.counts)
                late.counts = [0] * len(late.names)
            given = (late.counts,)
        refusals = [f"sequence {name} was freed" for name in self.missing(late.names)]
        if not refusals and not late.moved and any(held.cache._sequences[name].entries for name in late.names):
            refusals.append("positions: expected None")
        if not refusals and not late.padded and any(held.padding[name] for name in late.names):
            refusals.append("leftpad: expected None")
        late.updated = None
        if refusals:
            before = held.pages(), held.cache.free_pages
            with pytest.raises(ValueError, match=rf"^({'|'.join(refusals)}|sequence \d+ has \d+ of )"):
                with contextlib.suppress(OutOfPages):
                    late.step.update(*given)
                    raise AssertionError("update accepted what the graph does not read")
                raise ValueError(refusals[0])
            assert (held.pages(), held.cache.free_pages) == before
            return
        late.step.update(*given)
        late.updated, late.fresh = [held.tokens[name] for name in late.names], True

    def replay(self, late: LateCapture) -> None:
        """Does what a replayed graph does, if nothing happened since the update, and then calls ``advance``."""
        if not late.fresh:
            return self.advance(late)
        held, cache = self.held, self.held.cache
        counts, rows = late.counts, late.counts
        if late.total is not None:  # some rows belong to no sequence
            counts, rows = late.counts, [*late.counts, late.total - sum(late.counts)]
        k, v, given = held.new_keys(late.names, rows)
        q = held.new_rows(late.names, rows, held.heads[0])
        results = []
        for n, rotary in enumerate(held.schemes):
            plan = plan_cache(
                late.step.tables,
                like=cache.cache_layer(n),
                rotary=rotary,
                seqlen_q=late.total or late.most,
                heads_q=held.heads[0],
                dtype=held.target.dtype,
                impl=held.target.of_any_positions,
            )
            out, lse = plan.attend(q[n], cache.cache_layer(n), k[n], given[n], return_lse=True)
            if late.total is not None:
                assert not out[sum(counts) :].any(), "a row of no sequence attended"
                out, lse = out[: sum(counts)], lse[:, : sum(counts)]
            results.append((out, lse))
        late.step.advance()
        late.updated, late.fresh = None, False
        if late.total is not None:
            q, k, v = (x[:, : sum(counts)] for x in (q, k, v))
        held.written(late.names, k, v, counts=counts)
        held.compare(late.names, q, results, counts)
        self.advance(late)

    def advance(self, late: LateCapture) -> None:
        """Checks that ``advance`` is refused without an update, or if its sequences hold other tokens since."""
        if late.updated is None:
            with pytest.raises((RuntimeError, ValueError), match="^(advance: expected|sequence .* was freed)"):
                late.step.advance()
            return
        gone = self.missing(late.names)
        if gone or any(
            old.positions != self.held.tokens[name].positions
            for name, old in zip(late.names, late.updated, strict=True)
        ):
            with pytest.raises(ValueError, match="^(advance: expected sequence|sequence .* was freed)"):
                late.step.advance()

    # ---- copies

    def copy(self, pickled: bool) -> None:
        """Goes on with a copy of the cache and of everything that belongs to it. Ruins the original."""
        cache, held = self.held.cache, self.held
        everything = cache, [x.step for x in self.steps], [x.step for x in self.captures]
        everything = pickle.loads(pickle.dumps(everything)) if pickled else copy.deepcopy(everything)
        for x in cache._stored:
            x.fill_(99) if x.dtype.is_floating_point else x.zero_()
        held.cache, steps, captures = everything
        for late, step in zip((*self.steps, *self.captures), (*steps, *captures), strict=True):
            late.step = step
        for n in range(held.cache.layers):
            own = held.cache.k if held.cache.layers == 1 else held.cache.k[n]
            assert held.cache.layer(n)[0].data_ptr() == own.data_ptr(), "a layer has memory of its own"


def ragged(names: list[int], seed: int, most: int) -> list[int]:
    """Returns 0 to most new tokens for every sequence. About every third sequence gets none."""
    return [(seed + n) * 7 % (most + 1) if (seed + n) % 3 else 0 for n in range(len(names))]


# Operations whose oracle makes no tensors, so that they can run under another default device.
STRUCTURAL = {"fork", "free", "truncate", "reserve", "extend", "twice", "remove", "keep", "reset", "update", "advance"}


def around(kind: str, number: int) -> contextlib.AbstractContextManager:
    """Returns a context of the caller's program under which an operation must do the same."""
    other_device = torch.device("meta") if kind in STRUCTURAL else torch.no_grad()
    return (contextlib.nullcontext(), torch.inference_mode(), other_device)[number % 3]
