"""The figures of the experiments, drawn from their CSV files as PNG at 200 dots per inch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from flashrope.demo.figure import COLOURS, new_figure, save

# Further series repeat the colours with another line style.
STYLES = ("-", (0, (4, 2)), (0, (1, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
KIND_COLOURS = {"high": "0.6", "activated": "#D55E00", "low": "#0072B2"}
KIND_NAMES = {"high": "θ ≥ 2π/L", "activated": "π/L < θ < 2π/L (activated)", "low": "θ ≤ π/L"}


@dataclasses.dataclass(frozen=True)
class Series:
    """One line: its name, and the mean, minimum and maximum over seeds at each x."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def lines(
    path: Path,
    title: str,
    note: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    train_length: float | None = None,
    percent: bool = False,
    log_x: bool = True,
) -> None:
    """Lines, with the legend in the order of their right ends and ``train_length`` marked. The y axis is logarithmic
    except for percentages."""
    figure, axes = _figure((9, 5))
    ends = sorted(range(len(series)), key=lambda at: (-series[at].x[-1], -series[at].mean[-1]))
    for at in ends:
        line, colour = series[at], COLOURS[at % len(COLOURS)]
        axes.plot(
            line.x,
            line.mean,
            color=colour,
            linestyle=STYLES[at // len(COLOURS) % len(STYLES)],
            linewidth=1.5,
            marker=MARKERS[at % len(MARKERS)],
            markersize=4,
            label=f"{line.name}  {line.mean[-1]:.3g}",
        )
        if list(line.low) != list(line.high):
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    if train_length is not None:
        axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axes.annotate(
            "training length",
            (train_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3),
            fontsize=8,
            textcoords="offset points",
            va="top",
            color="0.4",
        )
    places = sorted({x for line in series for x in line.x})
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.minorticks_off()
    if percent:
        axes.set_ylim(-3, 108)  # room for the label of the mark
    else:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        steps = (1, 1.5, 2, 3, 4, 5, 6, 7, 8) if high < 50 * low else (1,)
        axes.set_yticks(
            [tick for power in range(-3, 10) for step in steps if low <= (tick := step * 10**power) <= high]
        )
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=8,
        title="at the right end",
        title_fontsize=8,
    )
    _title(axes, title, note)
    save(figure, path)


def bars(path: Path, title: str, note: str, names: Sequence[str], groups: dict[str, Sequence[Series]]) -> None:
    """One panel per group, with one horizontal bar per name. Each Series has one point."""
    figure = new_figure((9, 1.4 + 0.27 * len(names)))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (group, values), colour in zip(panels, groups.items(), COLOURS[1:], strict=False):
        at = range(len(names))
        axes.barh(
            at,
            [v.mean[0] for v in values],
            color=colour,
            height=0.65,
            alpha=0.85,
            xerr=[[v.mean[0] - v.low[0] for v in values], [v.high[0] - v.mean[0] for v in values]],
            error_kw={"elinewidth": 1, "ecolor": "0.25"},
        )
        for y, value in zip(at, values, strict=True):
            axes.annotate(
                f"{value.mean[0]:.1f}",
                (value.high[0], y),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        axes.set_xlim(0, max(v.high[0] for v in values) * 1.18 + 1e-9)
        axes.set_title(group, fontsize=9, loc="left")
        axes.set_yticks(at, names, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    panels[0].invert_yaxis()
    _suptitle(figure, title, note)
    save(figure, path)


def frequencies(path: Path, panels: dict[str, dict[str, Sequence[float]]], train_length: int, base: float) -> None:
    """inv_freq by channel pair, with 2 pi / L and pi / L marked. Pairs without rotation are drawn at the bottom."""
    figure, all_axes = _figure((11, 5), columns=len(panels))
    tables = [table for panel in panels.values() for table in panel.values()]
    floor = min(f for table in tables for f in table if f > 0) / 4
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        for at, (label, table) in enumerate(panel.items()):  # later lines are thinner, so that those below stay visible
            thinner = at / len(panel)
            look = dict(
                color=COLOURS[at % len(COLOURS)],
                linestyle=STYLES[at // len(COLOURS) % len(STYLES)],
                zorder=2 + thinner,
                marker=MARKERS[at % len(MARKERS)],
                markersize=6.5 - 4 * thinner,
                linewidth=3 - 2.2 * thinner,
            )
            axes.plot(range(len(table)), [f if f > 0 else math.nan for f in table], label=label, **look)
            axes.plot(range(len(table)), [math.nan if f > 0 else floor for f in table], **look)
        for value, label in ((2 * math.pi / train_length, "2π/L"), (math.pi / train_length, "π/L")):
            axes.axhline(value, color="0.4", linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate(
                label,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(2, 0),
                textcoords="offset points",
                fontsize=8,
                color="0.3",
                va="center",
            )
        axes.axhline(floor, color="0.8", linewidth=0.8, zorder=0)
        axes.annotate(
            "0: no rotation", (0, floor), xytext=(0, -11), textcoords="offset points", fontsize=8, color="0.3"
        )
        axes.set_yscale("log")
        axes.set_ylim(floor / 3, 2)
        axes.set_xlabel("channel pair")
        axes.set_title(name, fontsize=9, loc="left")
        axes.legend(loc="lower left", bbox_to_anchor=(0.01, 0.11), frameon=False, fontsize=8)
    all_axes[0].set_ylabel("inv_freq (radians per position, log scale)")
    _suptitle(
        figure, "Frequency tables", f"head_dim {2 * len(tables[0])}, base {base:g}, training length L = {train_length}"
    )
    save(figure, path)


def matrices(path: Path, seen: dict[str, Sequence[Sequence[float]]], train_length: int) -> None:
    """For every scheme, the distance at which a query (row) sees a key (column). Untrained distances are orange."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    figure, panels = _figure((2.6 * len(seen) + 1, 3.3), columns=len(seen))
    viridis = colormaps["viridis"]
    shades = ListedColormap([viridis(0.15 + 0.8 * at / 255) for at in range(256)]).with_extremes(
        over="#D55E00", bad="white"
    )
    for axes, (name, matrix) in zip(panels, seen.items(), strict=True):
        image = axes.imshow(matrix, cmap=shades, vmin=0, vmax=train_length - 1, interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("key", fontsize=8)
        axes.tick_params(labelsize=7)
        size = len(matrix)
        for row, column in ((size - 1, 0), (size - 1, size // 2), (size // 2, 0)):
            value = matrix[row][column]
            axes.annotate(
                f"{value:.3g}", (column + size * 0.02, row - size * 0.02), fontsize=7, color="white", va="bottom"
            )
    panels[0].set_ylabel("query", fontsize=8)
    bar = figure.colorbar(image, ax=panels, extend="max", shrink=0.85)
    bar.set_label(f"distance seen\n(orange: {train_length} or more, never trained)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    save(figure, path)


def patterns(
    path: Path,
    title: str,
    note: str,
    panels: Sequence[tuple[str, dict[str, Sequence[float]]]],
    marks: Sequence[float] = (),
) -> None:
    """Panels of curves over the distance between query and key, with dotted lines at ``marks``."""
    figure, all_axes = _figure((4.2 * len(panels), 3.4), columns=len(panels))
    for axes, (name, curves) in zip(all_axes, panels, strict=False):
        for at, (label, values) in enumerate(curves.items()):
            axes.plot(range(len(values)), values, label=label, linewidth=1.3, color=COLOURS[at % len(COLOURS)])
        for mark in marks:
            if mark < max(len(values) for values in curves.values()):
                axes.axvline(mark, color="0.6", linewidth=1, linestyle=":")
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("distance (bytes)", fontsize=8)
        axes.tick_params(labelsize=8)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=7)
    all_axes[0].set_ylabel("score before the softmax", fontsize=8)
    _suptitle(figure, title, note)
    save(figure, path)


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
    figure, (above, below) = _figure((9, 6), rows=2)
    named = set()
    for part, kind in zip(parts, kinds, strict=False):
        above.plot(
            range(len(part)),
            part,
            color=KIND_COLOURS[kind],
            linewidth=1.6 if kind == "activated" else 1.0,
            label=None if kind in named else KIND_NAMES[kind],
            zorder=3 if kind == "activated" else 2,
        )
        named.add(kind)
    if len(parts) > len(frequencies):
        above.plot(
            range(len(parts[-1])),
            parts[-1],
            color="black",
            linewidth=1,
            linestyle=":",
            label="channels without position",
        )
    above.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    above.set_ylabel("contribution of a pair")
    below.plot(range(len(overall)), overall, color="black", linewidth=1.6, label="all pairs")
    activated = [part for part, kind in zip(parts, kinds, strict=False) if kind == "activated"]
    if activated:
        below.plot(
            range(len(overall)),
            [sum(values) for values in zip(*activated, strict=True)],
            color=KIND_COLOURS["activated"],
            linewidth=1.6,
            label="activated pairs",
        )
    below.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    below.set_ylabel("score before the softmax")
    below.set_xlabel("distance (bytes)")
    for axes in (above, below):
        if len(overall) > train_length:
            axes.axvline(train_length, color="0.6", linewidth=1, linestyle=":")
    dotted = "; dotted: training length" if len(overall) > train_length else ""
    _title(above, title, f"averaged over layers, heads and samples{dotted}")
    save(figure, path)


def vaf_over_training(
    path: Path,
    title: str,
    steps: Sequence[int],
    values: Sequence[Sequence[float]],
    kinds: Sequence[str],
    learning_rate_note: str,
) -> None:
    """Variance accounted for (percent) by every pair, one row per recorded step, with activated pairs framed."""
    figure, axes = _figure((9, 4.5))
    shown = [[max(min(v, 100.0), -100.0) for v in row] for row in values]
    image = axes.imshow(shown, aspect="auto", cmap="RdBu_r", vmin=-100, vmax=100, interpolation="nearest")
    for pair, kind in enumerate(kinds):
        if kind == "activated":
            axes.axvspan(pair - 0.5, pair + 0.5, facecolor="none", edgecolor="black", linewidth=1.5)
    axes.set_yticks(range(len(steps)), [f"{step:,}" for step in steps], fontsize=8)
    axes.set_xticks(range(len(kinds)))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("channel pair (framed: activated, π/L < θ < 2π/L)")
    axes.set_ylabel("training step")
    figure.colorbar(image, ax=axes, extend="min").set_label("variance accounted for (%), clipped at -100")
    _title(axes, title, learning_rate_note)
    save(figure, path)


def _figure(size: tuple[float, float], columns: int = 1, rows: int = 1):
    figure = new_figure(size)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels.flat[0] if rows * columns == 1 else list(panels.flat)


def _title(axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=20 if note else 8)
    axes.annotate(
        note, xy=(0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=8, color="0.35"
    )


def _suptitle(figure, title: str, note: str) -> None:
    """Title and note above several panels."""
    figure.suptitle(f"{title}\n\n", x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.text(0.01, 0.99 - 0.32 / figure.get_figheight(), note, fontsize=8, color="0.35", va="top")
