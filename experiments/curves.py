"""Figures by context length that stay readable on a phone: few lines, named at their ends, with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flashrope.demo.figure import COLOURS, new_figure, save

from .statistics import interval, values_at

MAX_LINES = 8
ORANGE, BLUE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS
# One colour and marker for a scheme in all figures. A change of the factor or window keeps it.
LOOKS = {
    "rope": (BLACK, "o"),
    "hope": (ORANGE, "s"),
    "rerope": (BLUE, "^"),
    "rerope+dagger": (SKY, "v"),
    "yarn": (GREEN, "D"),
    "hope+yarn": (YELLOW, "P"),
    "pi": (PINK, "X"),
    "hope+pi": (PINK, "*"),
    "kerple": (GREEN, "p"),
    "alibi": ("0.55", "h"),
    "fire": ("0.35", "d"),
    "hope-ab1": (SKY, "v"),
    "hope-ab2": (GREEN, "D"),
    "hope-ab3": (PINK, "X"),
}
NAMES = {
    "rope": "RoPE",
    "hope": "HoPE",
    "rerope": "ReRoPE",
    "rerope+dagger": "ReRoPE, log n",
    "yarn": "YaRN",
    "hope+yarn": "HoPE + YaRN",
    "pi": "PI",
    "hope+pi": "HoPE + PI",
    "kerple": "KERPLE",
    "alibi": "ALiBi",
    "fire": "FIRE",
    "hope-ab1": "HoPE AB1",
    "hope-ab2": "HoPE AB2",
    "hope-ab3": "HoPE AB3",
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """A title, and the lines to draw: (scheme, task)."""

    title: str
    lines: Sequence[tuple[str, str]]


def family(scheme: str) -> str:
    """The name without windows and factors."""
    return "+".join(part.split("-w")[0].split("-s")[0] for part in scheme.split("+"))


def draw(path: Path, panels: Sequence[Panel], rows: Sequence[dict[str, str]], train_length: int, y_label: str) -> None:
    """Percentages by length in bytes, means over seeds with their 95% intervals. Raises ValueError for more than
    MAX_LINES lines in a panel."""
    figure = new_figure((4.6 * len(panels), 4.2))
    axes_of = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(axes_of, panels, strict=True):
        if len(panel.lines) > MAX_LINES:
            raise ValueError(f"{panel.title}: expected at most {MAX_LINES} lines, got {len(panel.lines)}")
        ends = []
        for scheme, task in panel.lines:
            at = sorted({float(row["at"]) for row in rows if (row["scheme"], row["task"]) == (scheme, task)})
            if not at:
                continue
            found = [interval(list(values_at(rows, scheme, task, x).values())) for x in at]
            colour, marker = LOOKS[family(scheme)]
            means = [each.mean for each in found]
            halves = [each.half or 0.0 for each in found]
            axes.errorbar(
                at, means, halves, color=colour, marker=marker, markersize=6, linewidth=1.8, capsize=3, elinewidth=1.2
            )
            ends.append((means[-1], at[-1], NAMES[family(scheme)], colour))
        _name(axes, ends)
        axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axes.annotate(
            "training length",
            (train_length, 0),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 4),
            textcoords="offset points",
            rotation=90,
            fontsize=9,
            color="0.4",
            ha="right",
        )
        axes.set_xscale("log", base=2)
        places = sorted({float(row["at"]) for row in rows for _, task in panel.lines if row["task"] == task})
        axes.set_xticks(places, [f"{x / train_length:g}" for x in places], fontsize=10)
        axes.minorticks_off()
        axes.set_ylim(-3, 103)
        axes.set_xlim(places[0] * 0.9, places[-1] * 4.2)  # room for the names
        axes.tick_params(axis="y", labelsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(panel.title, fontsize=11, loc="left", fontweight="bold")
        axes.set_xlabel("length / training length", fontsize=10)
    axes_of[0].set_ylabel(y_label, fontsize=10)
    save(figure, path)


def _name(axes, ends: list[tuple[float, float, str, str]], gap: float = 5.6) -> None:
    """Names at the right ends of the lines, moved apart where they would overlap."""
    ends = sorted(ends)
    heights = [value for value, *_ in ends]
    for _ in range(200):
        for n in range(1, len(heights)):
            if (short := gap - (heights[n] - heights[n - 1])) > 0:
                heights[n - 1] -= short / 2
                heights[n] += short / 2
        if heights and heights[0] < -1:
            heights[0] = -1
    for (_, x, name, colour), y in zip(ends, heights, strict=True):
        axes.annotate(name, (x, y), xytext=(8, 0), textcoords="offset points", color=colour, fontsize=10, va="center")
