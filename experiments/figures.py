"""Draws the figures: lines by length and points by scheme, both with 95% intervals, frequency tables, position matrices
and attention patterns. They are readable at the width of a page on a phone."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flashrope.console.figure import new_figure
from flashrope.console.files import replacing

from .looks import label, look, scheme_of
from .statistics import Interval, interval, values_at

MAX_LINES, MAX_TICKS = 8, 7
WIDTH, DPI = 8.3, 150  # in inches; a page shows 100 pixels per inch, and the file has 150
COLOURS_OF_A_FILE = 64
DASHED, DOTTED = (0, (4, 2)), (0, (1, 1.2))
SMALL, NORMAL = 11, 12.5  # points
KIND_COLOURS = {"high": "0.6", "activated": "#D55E00", "low": "#0072B2"}
KIND_NAMES = {"high": "θ ≥ 2π/L", "activated": "π/L < θ < 2π/L (activated)", "low": "θ ≤ π/L"}
ORDER = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # for curves without a scheme
Rows = Sequence[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Line:
    """Describes a line: one measurement by length. ``name``: replaces the scheme's own name. ``train_length``: the
    training length of the line's model, if the rows contain models of several training lengths."""

    scheme: str
    task: str
    name: str = ""
    train_length: int | None = None
    style: str | tuple = "-"  # a matplotlib style; markers are hollow on lines that are not solid


@dataclasses.dataclass(frozen=True)
class Panel:
    """Describes a panel by its title and its lines. ``level``: a line whose value at the training length is marked."""

    title: str
    lines: Sequence[Line]
    level: Line | None = None


def canvas(height: float, rows: int = 1, columns: int = 1, **share):
    """Returns a figure of the page's width, and its axes, row by row."""
    figure = new_figure((WIDTH, height), DPI)
    panels = figure.subplots(rows, columns, squeeze=False, **share)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
    return figure, list(panels.flat)


def title_of(axes, text: str) -> None:
    axes.set_title(text, fontsize=NORMAL, loc="left", fontweight="bold")


def heading(figure, title: str, note: str) -> None:
    """Writes a heading above all panels."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontweight="bold", fontsize=NORMAL + 1)
    figure.text(0.01, 1 - 0.3 / figure.get_figheight(), note, fontsize=SMALL, color="0.35", va="top")


def finish(figure, path: Path, colours: int = COLOURS_OF_A_FILE) -> None:
    """Writes the figure as a PNG with a palette, which makes the file four times smaller. Figures with a colour scale
    need more ``colours``."""
    from PIL import Image  # comes with matplotlib

    whole = io.BytesIO()
    figure.savefig(whole, format="png")
    few = Image.open(whole).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    with replacing(path) as partial:
        few.save(partial, format="png", optimize=True)


def draw(
    path: Path,
    panels: Sequence[Panel],
    rows: Rows,
    train_length: int,
    y_label: str,
    log: bool = False,
    x_label: str = "length / training length",
) -> None:
    """Draws means over seeds with their 95% intervals by length in bytes, with two panels in a row.

    The y axis shows percentages from 0 to 100. With ``log`` it is logarithmic instead. Dotted lines mark the training
    length and ``Panel.level``. Raises ValueError for more than MAX_LINES lines in a panel.
    """
    panels = [
        dataclasses.replace(panel, lines=[line for line in panel.lines if _places(rows, line)]) for panel in panels
    ]
    panels = [panel for panel in panels if panel.lines]
    for panel in panels:
        if len(panel.lines) > MAX_LINES:
            raise ValueError(f"{panel.title}: expected at most {MAX_LINES} lines, got {len(panel.lines)}")
        looks = {scheme: look(scheme)[0] for scheme in dict.fromkeys(line.scheme for line in panel.lines)}
        for colour, times in Counter(looks.values()).items():
            if times > 1:
                same = [scheme for scheme, each in looks.items() if each == colour]
                raise ValueError(
                    f"{panel.title}: expected a colour for each scheme, got {colour} for {', '.join(same)}"
                )
    columns = min(len(panels), 2)
    stacked = -(-len(panels) // columns)
    figure, all_axes = canvas(4.4 * stacked + 0.2, stacked, columns, sharey="row")
    if len(panels) < len(all_axes):  # the last panel takes its whole row
        wide = all_axes[len(panels) - 1]
        wide.set_subplotspec(wide.get_gridspec()[stacked - 1, :])
        for empty in all_axes[len(panels) :]:
            empty.remove()
        all_axes = all_axes[: len(panels)]
    ends_of = []
    for axes, panel in zip(all_axes, panels, strict=False):
        ends_of.append(_panel(axes, panel, rows, train_length, log, x_label))
    for axes in all_axes:
        if log:
            _log_axis(axes)
        else:
            axes.set_ylim(-3, 103)
    for axes, ends in zip(all_axes, ends_of, strict=False):
        name_ends(axes, ends, log)
    for axes in all_axes[::columns]:
        axes.set_ylabel(y_label, fontsize=NORMAL)
    finish(figure, path)


def _own(rows: Rows, line: Line) -> Rows:
    return [
        row
        for row in rows
        if (row["scheme"], row["task"]) == (line.scheme, line.task)
        and line.train_length in (None, int(row["train_length"]))
    ]


def _places(rows: Rows, line: Line) -> list[float]:
    return sorted({float(row["at"]) for row in _own(rows, line)})


def _panel(axes, panel: Panel, rows: Rows, train_length: int, log: bool, x_label: str) -> list[tuple]:
    """Draws the lines of a panel. Returns the right end of every line: (value, length, name, colour)."""
    ends = []
    for line in panel.lines:
        own, at = _own(rows, line), _places(rows, line)
        found = [interval(list(values_at(own, line.scheme, line.task, x).values())) for x in at]
        colour, marker = look(line.scheme)
        means = [each.mean for each in found]
        axes.errorbar(
            at,
            means,
            [each.half or 0.0 for each in found],
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.8,
            capsize=3,
            elinewidth=1.2,
            linestyle=line.style,
            markerfacecolor=colour if line.style == "-" else "white",
        )
        ends.append((means[-1], at[-1], line.name or label(line.scheme), colour))
    several = len({line.train_length for line in panel.lines}) > 1
    if not several:
        axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
    if panel.level and (of := values_at(_own(rows, panel.level), panel.level.scheme, panel.level.task, train_length)):
        until = max(x for line in panel.lines for x in _places(rows, line))  # the level ends before the names
        axes.hlines(interval(list(of.values())).mean, 0, until, color="0.6", linewidth=1, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    places = sorted({x for line in panel.lines for x in _places(rows, line)})
    ticks = places
    if len(places) > MAX_TICKS:
        ticks = [x for x in places if math.log2(x / places[0]) % 1 == 0]
    axes.set_xticks(ticks, [f"{x / train_length:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlim(places[0] * 0.88, places[-1] * (places[-1] / places[0]) ** 0.55)  # room for the names
    title_of(axes, panel.title)
    axes.set_xlabel(x_label, fontsize=NORMAL)
    return ends


def _log_axis(axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8) if high < 20 * low else (1, 2, 5) if high < 500 * low else (1,)
    ticks = [tick for power in range(-3, 10) for step in steps if low <= (tick := step * 10**power) <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def name_ends(axes, ends: list[tuple[float, float, str, str]], log: bool, offset: float | None = None) -> None:
    """Writes the names of lines beyond their right ends. Names that would overlap are moved apart.

    ``ends``: (value, x, name, colour) of every line. ``offset``: how far the names are from the end of the longest
    line. Default: 13% of its x.
    """
    low, high = axes.get_ylim()
    place, back = (math.log, math.exp) if log else (float, float)
    low, high = place(low), place(high)
    points_high = axes.get_figure().get_figheight() * 72 * 0.78 / axes.get_gridspec().nrows
    gap = (SMALL + 2.5) / points_high * (high - low)
    ends = sorted(ends)
    heights = [place(value) for value, *_ in ends]
    for _ in range(400):
        for n in range(1, len(heights)):
            if (short := gap - (heights[n] - heights[n - 1])) > 1e-9:
                heights[n - 1] -= short / 2
                heights[n] += short / 2
        if heights and heights[0] < low + gap / 3:
            heights[0] = low + gap / 3
    right = max((x for _, x, *_ in ends), default=1.0)
    beside = right * 1.13 if offset is None else right + offset
    for (value, x, name, colour), y in zip(ends, heights, strict=True):
        axes.annotate(
            name,
            (x, value),
            xytext=(beside, back(y)),
            textcoords="data",
            color=colour,
            fontsize=SMALL,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def points(
    path: Path,
    groups: dict[str, dict[str, Interval]],
    x_label: str,
    levels: dict[str, float] | None = None,
) -> None:
    """Draws one panel per group and one row per scheme. A row shows the mean, its 95% interval, and the mean as a
    number. ``levels``: {group: a value to mark in its panel, such as the value at the training length}."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    columns = min(len(groups), 2)
    stacked = -(-len(groups) // columns)
    figure, all_axes = canvas((0.9 + 0.31 * len(names)) * stacked + 0.2, stacked, columns, sharey=True)
    for axes, (group, values) in zip(all_axes, groups.items(), strict=True):
        for y, name in enumerate(names):
            if name not in values:
                continue
            found, (colour, marker) = values[name], look(name)
            axes.errorbar(found.mean, y, xerr=found.half or 0.0, color=colour, marker=marker, markersize=7, capsize=3)
            axes.annotate(
                f"{found.mean:.1f}",
                (found.mean + (found.half or 0.0), y),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=SMALL,
                color=colour,
            )
        low = min(found.mean - (found.half or 0.0) for found in values.values())
        high = max(found.mean + (found.half or 0.0) for found in values.values())
        if levels and group in levels:
            axes.axvline(levels[group], color="0.6", linewidth=1, linestyle=":", zorder=0)
            low, high = min(low, levels[group]), max(high, levels[group])
        axes.set_xlim(low - 0.05 * (high - low) - 0.5, high + 0.28 * (high - low) + 0.5)
        title_of(axes, group)
        axes.set_yticks(range(len(names)), [label(name, numbers=True) for name in names], fontsize=SMALL)
        axes.grid(axis="y", color="0.93")
        axes.set_axisbelow(True)
    all_axes[0].invert_yaxis()
    for axes in all_axes[-columns:]:
        axes.set_xlabel(x_label, fontsize=NORMAL)
    finish(figure, path)


def frequencies(path: Path, panels: dict[str, dict[str, Sequence[float]]], train_length: int, base: float) -> None:
    """Draws inv_freq by channel pair, with 2 pi / L and pi / L marked. Pairs without rotation are drawn at the
    bottom."""
    figure, all_axes = canvas(4.6 * len(panels), len(panels))
    tables = [table for panel in panels.values() for table in panel.values()]
    floor = min(f for table in tables for f in table if f > 0) / 4
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        ends = []
        for at, (name, table) in enumerate(panel.items()):  # later lines are thinner: all stay visible
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
    """Draws for every scheme the distance at which a query (row) sees a key (column). Untrained distances are
    orange."""
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
    """Draws panels of curves by the distance between query and key. ``panels``: (title, {name of a scheme, or another
    name: curve}) for each panel. ``marks``: distances to mark with dotted lines."""
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
    """Draws two plots by distance: at the top the contribution of every pair, and at the bottom the sum of all pairs
    and the sum of the activated pairs."""
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
    """Draws the variance that every pair accounts for, in percent, with one row per recorded step. Activated pairs have
    a frame."""
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
