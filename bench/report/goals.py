"""Judges the performance goals on GPUs.

The figure of a goal is a ratio of two times in one run, or a share of a measured ceiling. A ratio above 1 means that
flashrope is faster. flashrope's time includes the rotation. Goals are for bf16, head_dim 128, causal, seqlen 2048 and
above, unless they say otherwise. The worst figure over the lengths that a goal covers decides. The aim of a goal may
depend on the length. A goal without a measurement is listed as not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .records import Record, Run


@dataclasses.dataclass(frozen=True)
class Goal:
    """Describes a goal for the ratio of a peer's time to flashrope's time. Without a peer, it is a goal for the share
    of a ceiling that flashrope reaches.

    aim: one figure, or {length: the figure that is aimed at from this length on}.
    """

    device: str  # a part of the device's name
    command: str
    ours: str
    peer: str
    floor: float
    aim: float | Mapping[int, float] | None = None
    backward: bool = False
    seqlens: Sequence[int] = ()  # the lengths that the goal covers; empty: all
    min_seqlen: int = 2048
    min_bytes: int = 0  # smallest cache that the goal covers
    window: int = 0  # the window that the goal covers; 0: all
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        what = (
            f"{self.ours} against {self.peer}"
            if self.peer
            else f"{self.ours}, share of the read-only probe's bandwidth"
        )
        where = (
            f", seqlen {'/'.join(map(str, self.seqlens))}"
            if self.seqlens
            else f", seqlen >= {self.min_seqlen}"
            if self.min_seqlen > 2048
            else ""
        )
        return f"{self.device}: {what}" + ("" if self.command == "decode" else f", {passes}") + where

    def covers(self, run: Run, record: Record) -> bool:
        sizes = record.sizes
        size = 2 * sizes["batch"] * sizes["seqlen"] * sizes["heads_kv"] * sizes["head_dim"] * 2
        return (
            self.device.lower() in run.device["name"].lower()
            and run.command == self.command
            and sizes["causal"]
            and record.backward == self.backward
            and sizes["head_dim"] == self.head_dim
            and sizes["dtype"] == self.dtype
            and sizes["seqlen"] >= self.min_seqlen
            and (not self.seqlens or sizes["seqlen"] in self.seqlens)
            and size >= self.min_bytes
            and self.window in (0, sizes["window"])
        )

    def figure(self, record: Record) -> float | None:
        """Returns the goal's figure from a record of the peer. Without a peer, record is flashrope's."""
        if not self.peer:
            return record.share if record.contestant == self.ours else None
        return record.ratios.get(self.ours) if record.contestant == self.peer else None

    def aim_at(self, seqlen: int) -> float | None:
        if not isinstance(self.aim, Mapping):
            return self.aim
        return max((length, aim) for length, aim in self.aim.items() if length <= seqlen)[1]


HOPE, REROPE_WINDOW = "flashrope HoPE", 512
REROPE = "flashrope ReRoPE"
CACHE = 256 * 2**20
ROTATE_CACHE = "fused rotation of the cache + SDPA flash"
GOALS = (
    Goal("H200", "hope", HOPE, "fused RoPE + SDPA flash", 1.15, 1.6),
    Goal("H200", "hope", HOPE, "fused RoPE + SDPA cuDNN", 0.75, {2048: 1.1, 8192: 1.0}),
    Goal("H200", "hope", HOPE, "fused RoPE + FlexAttention", 1.05, 1.4),
    Goal("H200", "hope", HOPE, "fused RoPE + SDPA flash", 1.0, 1.35, backward=True),
    Goal("H200", "hope", HOPE, "fused RoPE + SDPA cuDNN", 0.65, 0.9, backward=True),
    Goal("H200", "rerope", REROPE, HOPE, 0.92, 0.97, min_seqlen=8192, window=REROPE_WINDOW),
    Goal("H200", "rerope", REROPE, "two FlexAttention passes", 1.25, 1.8),
    Goal("H200", "rerope", REROPE, "two dense matrices", 5, 10, seqlens=(8192,)),
    Goal("H200", "decode", REROPE, "", 0.85, 0.92, min_bytes=CACHE),
    Goal("H200", "decode", REROPE, ROTATE_CACHE, 1.8, 2, min_bytes=CACHE),
    Goal("A100", "hope", HOPE, "fused RoPE + SDPA flash", 1.0, seqlens=(8192,)),
    Goal("A100", "hope", HOPE, "fused RoPE + SDPA flash", 1.1, seqlens=(2048,)),
    Goal("A100", "decode", REROPE, "", 0.85, min_bytes=CACHE),
)


def evaluate(run: Run, goals: Sequence[Goal] = GOALS) -> list[dict]:
    """Returns a dict for every goal: its name, floor and aim, the measured {seqlen: figure}, the worst figure, and a
    verdict."""
    return [
        _judge(
            goal,
            {
                record.seqlen: figure
                for record in run.records
                if goal.covers(run, record) and (figure := goal.figure(record)) is not None
            },
        )
        for goal in goals
    ]


def _judge(goal: Goal, measured: dict[int, float]) -> dict:
    aims = {seqlen: goal.aim_at(seqlen) for seqlen in measured}
    if not measured:
        verdict = "not run"
    elif min(measured.values()) < goal.floor:
        verdict = "MISSED"
    else:
        aimed = [figure >= aims[seqlen] for seqlen, figure in measured.items() if aims[seqlen] is not None]
        verdict = "met" if all(aimed) else "floor met"
    aim = {str(seqlen): figure for seqlen, figure in goal.aim.items()} if isinstance(goal.aim, Mapping) else goal.aim
    return {
        "goal": goal.name,
        "floor": goal.floor,
        "aim": aim,
        "measured": {str(seqlen): figure for seqlen, figure in measured.items()},
        "worst": min(measured.values(), default=None),
        "verdict": verdict,
    }


def text(judged: Sequence[dict]) -> str:
    """Returns one line for every goal that the run has measured."""
    run = [goal for goal in judged if goal["measured"]]
    if not run:
        return f"goals: none of the {len(judged)} applies to this run"
    lines = ["goals (peer's time / ours; above 1 flashrope is faster)"]
    for goal in run:
        lines.append(
            f"{goal['verdict']:<10}{goal['goal']}: {goal['worst']:.2f} at worst; floor {goal['floor']:g}, "
            f"aim {aim_text(goal) or 'none'}"
        )
    return "\n".join(lines)


def aim_text(goal: Mapping) -> str:
    """Returns the aim of a judged goal as text, which is empty if it has no aim."""
    if isinstance(aim := goal["aim"], Mapping):
        return ", ".join(f"{figure:g} from {seqlen}" for seqlen, figure in aim.items())
    return "" if aim is None else f"{aim:g}"
