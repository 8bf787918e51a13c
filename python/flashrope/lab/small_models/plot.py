"""Draws the figure of ``flashrope demo``: the loss by context length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...console.figure import COLOURS, MARKERS, new_figure, save
from .table import DemoRow

CURVES = 6  # readers cannot distinguish more curves, above all without colour


def plot_losses(path: Path, rows: Sequence[DemoRow], train_length: int) -> None:
    """Writes the figure as a PNG of 1600 x 1000 pixels."""
    save(losses_figure(rows, train_length), path)


def losses_figure(rows: Sequence[DemoRow], train_length: int):
    """Draws the first ``CURVES`` rows. Each scheme has a colour, a marker, and a label at the end of its line. Lines of
    schemes with log n are dashed."""
    from matplotlib.ticker import FixedLocator, NullLocator

    note = "the same target bytes at every context length; dashed: with log n at evaluation"
    if len(rows) > CURVES:
        note += f"; all {len(rows)} rows: losses.md"
        rows = rows[:CURVES]
    figure = new_figure((8, 5))
    axes = figure.add_subplot()
    lengths = [loss.context_length for loss in rows[0].losses]
    for at, row in enumerate(rows):
        colour, marker = COLOURS[at // 2], MARKERS[at // 2]
        axes.plot(
            lengths,
            [loss.last for loss in row.losses],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8,
            linestyle=(0, (4, 2)) if row.log_n else "-",
            markerfacecolor="white" if row.log_n else colour,
            zorder=3 - at / 10,
        )
    axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(
        lengths,
        [
            f"{length:,}\n{'training length' if length == train_length else f'{length // train_length}x'}"
            for length in lengths
        ],
    )
    axes.set_xlim(lengths[0] * 0.93, lengths[-1] * 1.04)
    axes.set_xlabel("context length (bytes, log scale)")
    axes.set_ylabel("loss on unseen files (nats per byte)")
    axes.set_title("Reading beyond the training length", loc="left", fontweight="bold", pad=24)
    axes.annotate(
        note,
        xy=(0, 1),
        xytext=(0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color="0.35",
    )
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    _label_ends(axes, rows, lengths[-1])
    return figure


def _label_ends(axes, rows: Sequence[DemoRow], last: float) -> None:
    """Labels each line at its right end. Labels that would overlap are moved apart."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055
    order = sorted(range(len(rows)), key=lambda at: rows[at].losses[-1].last)
    heights: list[float] = []
    for at in order:
        wanted = rows[at].losses[-1].last
        heights.append(max(wanted, heights[-1] + gap) if heights else wanted)
    excess = max(heights[-1] - high, 0)
    for at, height in zip(order, heights, strict=True):
        loss, colour = rows[at].losses[-1].last, COLOURS[at // 2]
        axes.annotate(
            f"{rows[at].name}  {loss:.2f}",
            xy=(last, loss),
            xytext=(last * 1.12, height - excess),
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 4,
            },
        )
