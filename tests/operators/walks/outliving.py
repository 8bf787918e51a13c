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
from paged_oracle import Held, Tokens

KINDS = ("make step", "enter step", "capture", "update", "replay", "advance", "discard", "pickle", "copy", "reset")


@dataclasses.dataclass
class LateStep:
    step: Step
    names: list[int]
    count: int


@dataclasses.dataclass
class LateCapture:
    step: CapturedStep
    names: list[int]
    count: int
    padded: bool
    moved: bool
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
            self.steps.append(LateStep(self.held.cache.step(names, number), names, number))
        elif kind == "capture":
            step = self.held.cache.capture(names, number % 5 + 1)
            flags = step.tables.leftpad is not None, step.tables.positions is not None
            self.captures.append(LateCapture(step, names, number % 5 + 1, *flags))
        elif kind == "discard":
            self.discard(names, number)
        elif kind == "enter step" and self.steps:
            self.enter(self.steps[which % len(self.steps)])
        elif kind in ("update", "replay", "advance") and self.captures:
            late = self.captures[which % len(self.captures)]
            late.fresh = any(late is x for x in fresh)
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
        k, v = (held.new(len(late.names), late.count, held.heads[1]) for _ in "kv")
        q = held.new(len(late.names), max(late.count, 1), held.heads[0])
        with late.step as step:
            results = [
                step.attend(q[n], x, k[n], v[n], layer=n, return_lse=True, impl=held.target.of_any_positions)
                for n, x in enumerate(held.schemes)
            ]
        held.written(late.names, k, v)
        held.compare(late.names, q, results)

    def discard(self, names: list[int], number: int) -> None:
        """Opens a step, writes the first layer and abandons its with statement."""
        held, step = self.held, self.held.cache.step(names, number)
        step.__enter__()
        with pytest.raises(RuntimeError, match="discard_step"):
            held.cache.reset()
        step.append(*(held.new(len(names), number, held.heads[1])[0] for _ in "kv"), layer=0)
        held.cache.discard_step()
        with pytest.raises(RuntimeError, match="^step: discarded"):
            step.__exit__(None, None, None)

    # ---- captured steps

    def update(self, late: LateCapture) -> None:
        held = self.held
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
                    late.step.update()
                    raise AssertionError("update accepted what the graph does not read")
                raise ValueError(refusals[0])
            assert (held.pages(), held.cache.free_pages) == before
            return
        late.step.update()
        late.updated, late.fresh = [held.tokens[name] for name in late.names], True

    def replay(self, late: LateCapture) -> None:
        """Does what a replayed graph does, if nothing happened since the update, and then calls ``advance``."""
        if not late.fresh:
            return self.advance(late)
        held, cache = self.held, self.held.cache
        k, v = (held.new(len(late.names), late.count, held.heads[1]) for _ in "kv")
        q = held.new(len(late.names), late.count, held.heads[0])
        results = []
        for n, rotary in enumerate(held.schemes):
            plan = plan_cache(
                late.step.tables,
                like=cache.cache_layer(n),
                rotary=rotary,
                seqlen_q=late.count,
                heads_q=held.heads[0],
                dtype=held.target.dtype,
                impl=held.target.of_any_positions,
            )
            results.append(plan.attend(q[n], cache.cache_layer(n), k[n], v[n], return_lse=True))
        late.step.advance()
        late.updated, late.fresh = None, False
        held.written(late.names, k, v)
        held.compare(late.names, q, results)
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


# Operations whose oracle makes no tensors, so that they can run under another default device.
STRUCTURAL = {"fork", "free", "truncate", "reserve", "extend", "twice", "remove", "keep", "reset", "update", "advance"}


def around(kind: str, number: int) -> contextlib.AbstractContextManager:
    """Returns a context of the caller's program under which an operation must do the same."""
    other_device = torch.device("meta") if kind in STRUCTURAL else torch.no_grad()
    return (contextlib.nullcontext(), torch.inference_mode(), other_device)[number % 3]
