"""Draws the figure of docs/experiments/README.md that shows which of the papers' claims hold: one row for each claim
and length, with the measured difference and its interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .figures import SMALL, canvas, finish
from .statistics import AGAINST, SHOWN, UNJUDGED, UNSHOWN, Interval

LOOKS = {  # {outcome: colour, marker and filling}; they differ in greyscale too
    SHOWN: ("#0072B2", "o", True),
    UNSHOWN: ("0.45", "o", False),
    AGAINST: ("#D55E00", "X", True),
    UNJUDGED: ("0.45", "x", False),
}
FURTHEST = 6.0  # in half widths of the interval; a larger difference is drawn as an arrow at this value


@dataclasses.dataclass(frozen=True)
class Row:
    """Holds a difference that a claim is about. ``expected``: the sign that the paper claims."""

    words: str
    multiple: float
    found: Interval
    expected: int
    outcome: str


def draw(path: Path, groups: dict[str, Sequence[Row]]) -> None:
    """Draws every difference in units of half its 95% interval. Positive numbers agree with the paper. If the bar of an
    interval does not reach zero, the measurement shows a difference. The number next to the bar is the difference in
    its own unit."""
    count = sum(1 + len(rows) for rows in groups.values())
    figure, (axes,) = canvas(0.235 * count + 1.5)
    y, named = 0, set()
    for method, rows in groups.items():
        axes.text(-0.02, y, method, fontsize=SMALL, fontweight="bold", va="center", ha="right", transform=_beside(axes))
        y += 1
        for n, row in enumerate(rows):
            colour, marker, filled = LOOKS[row.outcome]
            if row.found.half:
                place = row.expected * row.found.mean / row.found.half
                shown = min(max(place, -FURTHEST), FURTHEST)
                axes.plot([max(shown - 1, -FURTHEST), min(shown + 1, FURTHEST)], [y, y], color=colour, linewidth=1.4)
                if shown != place:
                    marker = ">" if place > 0 else "<"
                axes.plot(
                    shown,
                    y,
                    marker=marker,
                    markersize=6,
                    color=colour,
                    markerfacecolor=colour if filled else "white",
                    linestyle="",
                    label=None if row.outcome in named or shown != place else row.outcome,
                )
                named |= {row.outcome} if shown == place else set()
            first = not n or rows[n - 1].words != row.words
            words = f"{row.words}, {row.multiple:g} L" if first else f"{row.multiple:g} L"
            for x, text, side in ((-0.02, words, "right"), (1.02, str(row.found), "left")):
                axes.text(x, y, text, fontsize=8, va="center", ha=side, color="0.1", transform=_beside(axes))
            y += 1
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_xlim(-FURTHEST - 0.4, FURTHEST + 0.4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("← against · as the paper says →\n(halves of the 95% interval)", fontsize=SMALL - 2)
    figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=SMALL - 1)
    finish(figure, path, colours=255)


def _beside(axes):
    """Returns a transform for points (x, y): x is a fraction of the width of the axes, and y is a row of the chart."""
    return axes.get_yaxis_transform()
