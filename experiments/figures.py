"""The figures that are no lines by length: frequency tables, position matrices, attention patterns. In the style of
``curves``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .curves import NORMAL, SMALL, canvas, finish, heading, name_ends, title_of
from .looks import label, look, scheme_of

KIND_COLOURS = {"high": "0.6", "activated": "#D55E00", "low": "#0072B2"}
KIND_NAMES = {"high": "θ ≥ 2π/L", "activated": "π/L < θ < 2π/L (activated)", "low": "θ ≤ π/L"}
ORDER = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of curves without a scheme


def frequencies(path: Path, panels: dict[str, dict[str, Sequence[float]]], train_length: int, base: float) -> None:
    """inv_freq by channel pair, with 2 pi / L and pi / L marked. Pairs without rotation are drawn at the bottom."""
    figure, all_axes = canvas(4.6 * len(panels), len(panels))
    tables = [table for panel in panels.values() for table in panel.values()]
    floor = min(f for table in tables for f in table if f > 0) / 4
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        ends = []
        for at, (name, table) in enumerate(panel.items()):  # later lines are thinner, so that those below stay visible
            thinner, (colour, marker) = at / len(panel), look(name)
            style = {
                "color": colour,
                "zorder": 2 + thinner,
                "marker": marker,
                "markersize": 9 - 4 * thinner,
                "linewidth": 3 - 2 * thinner,
            }
            axes.plot(range(len(table)), [f if f > 0 else math.nan for f in table], **style)
            axes.plot(range(len(table)), [math.nan if f > 0 else floor for f in table], **style)
            ends.append((table[-1] or floor, len(table) - 1, label(name), colour))
        for value, text in ((2 * math.pi / train_length, "2π/L"), (math.pi / train_length, "π/L"), (floor, "0")):
            axes.axhline(value, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate(
                text, (-0.8, value), xytext=(0, 2), textcoords="offset points", fontsize=SMALL, color="0.3", va="bottom"
            )
        axes.set_yscale("log")
        axes.set_ylim(floor / 2, 2)
        axes.set_xlim(-0.9, 1.42 * len(tables[0]))
        axes.set_xticks(range(0, len(tables[0]), 5))
        axes.minorticks_off()
        axes.set_ylabel("inv_freq, radians per position", fontsize=NORMAL)
        title_of(axes, title)
        name_ends(axes, ends, log=True, offset=0.8)
    all_axes[-1].set_xlabel("channel pair", fontsize=NORMAL)
    size = 2 * len(tables[0])
    heading(figure, "Frequency tables", f"head_dim {size}, base {base:g}, training length L = {train_length}")
    finish(figure, path)


def matrices(path: Path, seen: dict[str, Sequence[Sequence[float]]], train_length: int) -> None:
    """For every scheme, the distance at which a query (row) sees a key (column). Untrained distances are orange."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    columns = 2
    figure, panels = canvas(3.6 * -(-len(seen) // columns), -(-len(seen) // columns), columns)
    viridis = colormaps["viridis"]
    shades = ListedColormap([viridis(0.15 + 0.8 * at / 255) for at in range(256)]).with_extremes(
        over="#D55E00", bad="white"
    )
    for axes, (name, matrix) in zip(panels, seen.items(), strict=False):
        image = axes.imshow(matrix, cmap=shades, vmin=0, vmax=train_length - 1, interpolation="nearest")
        title_of(axes, label(name, numbers=True))
        axes.set_xlabel("key", fontsize=NORMAL)
        axes.set_ylabel("query", fontsize=NORMAL)
        size = len(matrix)
        for row, column in ((size - 1, 0), (size - 1, size // 2), (size // 2, 0)):
            value = matrix[row][column]
            axes.annotate(
                f"{value:.3g}", (column + size * 0.02, row - size * 0.02), fontsize=SMALL, color="white", va="bottom"
            )
    for axes in panels[len(seen) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels, extend="max", shrink=0.7)
    bar.set_label(f"distance seen (orange: {train_length} or more, never trained)", fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)
    finish(figure, path, colours=255)


def patterns(
    path: Path,
    title: str,
    note: str,
    panels: Sequence[tuple[str, dict[str, Sequence[float]]]],
    marks: Sequence[float] = (),
) -> None:
    """Panels of curves over the distance between query and key, by name of a scheme or other name, with dotted lines
    at ``marks``."""
    figure, all_axes = canvas(2.9 * len(panels) + 0.3, len(panels), sharey=True)
    for axes, (name_of_panel, curves) in zip(all_axes, panels, strict=False):
        ends = []
        longest = max(len(values) for values in curves.values())
        for at, (name, values) in enumerate(curves.items()):
            scheme = scheme_of(name)
            colour, named = (look(scheme)[0], label(scheme)) if scheme else (ORDER[at % len(ORDER)], name)
            axes.plot(range(len(values)), values, linewidth=1.6, color=colour)
            ends.append((values[-1], len(values) - 1, named, colour))
        for mark in marks:
            if mark < longest:
                axes.axvline(mark, color="0.6", linewidth=1, linestyle=":")
        axes.set_xlim(0, longest * 1.3)
        title_of(axes, name_of_panel)
        axes.set_ylabel("score", fontsize=NORMAL)
        name_ends(axes, ends, log=False, offset=longest * 0.03)
    all_axes[-1].set_xlabel("distance (bytes)", fontsize=NORMAL)
    heading(figure, title, note)
    finish(figure, path)


def components(
    path: Path,
    title: str,
    parts: Sequence[Sequence[float]],
    overall: Sequence[float],
    kinds: Sequence[str],
    frequencies: Sequence[float],
    train_length: int,
) -> None:
    """Top: the contribution of every pair by distance. Bottom: the sum of all pairs and of the activated pairs."""
    figure, (above, below) = canvas(6.6, 2)
    named = set()
    for part, kind in zip(parts, kinds, strict=False):
        above.plot(
            range(len(part)),
            part,
            color=KIND_COLOURS[kind],
            linewidth=2 if kind == "activated" else 1.1,
            label=None if kind in named else KIND_NAMES[kind],
            zorder=3 if kind == "activated" else 2,
        )
        named.add(kind)
    if len(parts) > len(frequencies):
        rest = parts[-1]
        above.plot(range(len(rest)), rest, color="black", linewidth=1.4, linestyle=":", label="without position")
    figure.legend(
        *above.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL
    )
    heading(figure, title, "averaged over layers, heads and samples")
    above.set_ylabel("score of a pair", fontsize=NORMAL)
    below.plot(range(len(overall)), overall, color="black", linewidth=1.8)
    ends = [(overall[-1], len(overall) - 1, "all pairs", "black")]
    activated = [part for part, kind in zip(parts, kinds, strict=False) if kind == "activated"]
    if activated:
        together = [sum(values) for values in zip(*activated, strict=True)]
        below.plot(range(len(overall)), together, color=KIND_COLOURS["activated"], linewidth=1.8)
        ends.append((together[-1], len(overall) - 1, "activated", KIND_COLOURS["activated"]))
    below.set_ylabel("score", fontsize=NORMAL)
    below.set_xlabel("distance (bytes)", fontsize=NORMAL)
    for axes in (above, below):
        axes.set_xlim(0, 1.2 * len(overall))
        if len(overall) > train_length:
            axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":")
    name_ends(below, ends, log=False, offset=0.02 * len(overall))
    finish(figure, path)


def vaf_over_training(
    path: Path,
    title: str,
    steps: Sequence[int],
    values: Sequence[Sequence[float]],
    kinds: Sequence[str],
    note: str,
) -> None:
    """Variance accounted for (percent) by every pair, one row per recorded step, with activated pairs framed."""
    figure, (axes,) = canvas(4.4)
    shown = [[max(min(v, 100.0), -100.0) for v in row] for row in values]
    image = axes.imshow(shown, aspect="auto", cmap="RdBu_r", vmin=-100, vmax=100, interpolation="nearest")
    for pair, kind in enumerate(kinds):
        if kind == "activated":
            axes.axvspan(pair - 0.5, pair + 0.5, facecolor="none", edgecolor="black", linewidth=1.5)
    axes.set_yticks(range(len(steps)), [f"{step:,}" for step in steps])
    axes.set_xticks(range(0, len(kinds), 2))
    axes.set_xlabel("channel pair (framed: activated)", fontsize=NORMAL)
    axes.set_ylabel("training step", fontsize=NORMAL)
    bar = figure.colorbar(image, ax=axes, extend="min")
    bar.set_label("variance accounted for (%)", fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)
    heading(figure, title, note)
    finish(figure, path)
