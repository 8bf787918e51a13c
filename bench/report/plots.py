"""Draws the figures of one run: speed and ratio by length, one row per pass. A figure shows one version on one
device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from flashrope.console.figure import new_figure, save

from .records import Record, Run

# The first six colours are from the palette of Okabe and Ito. flashrope's lines are black and thick, so they stand out
# in greyscale too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#888888", "#8C510A", "#5E3C99", "#01665E")
MARKERS = "os^Dv<>pPX"
CEILINGS = {"product_tflops": "large product", "copy_gbs": "copy, read and written", "read_gbs": "read-only probe"}
RATIOS = (
    *(0.0625, 0.125, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8),
    *(2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
)
OWN_STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))


def draw(run: Run, path: Path) -> bool:
    """Writes a PNG of the run's speeds and ratios. Returns False if there is nothing to draw."""
    records = [record for record in run.records if record.tflops is not None or record.gbs is not None]
    ours = next((record.contestant for record in reversed(records) if record.ours), None)
    if not records:
        return False
    rows = [backward for backward in (False, True) if any(record.backward == backward for record in records)]
    figure, all_axes = _figure(len(rows), 2, height=3.4)
    styles = _styles(records)
    bandwidth = any(record.gbs is not None for record in records)
    for axes, backward in zip(all_axes, rows, strict=True):
        chosen = [record for record in records if record.backward == backward]
        unit = "GB/s" if bandwidth else "TFLOP/s"
        _lines(axes[0], chosen, styles, lambda record: record.gbs if bandwidth else record.tflops)
        passes = (
            "one token"
            if chosen[0].sizes["decoding"]
            else "rotation only"
            if bandwidth
            else "forward + backward"
            if backward
            else "forward"
        )
        axes[0].set_title(f"{passes}: {unit}", loc="left", fontsize=10)
        _ceiling(axes[0], run, next(record.ceiling for record in chosen if (record.gbs is not None) == bandwidth))
        axes[0].set_ylim(bottom=0)
        _lines(axes[1], chosen, styles, lambda record: 1.0 if record.contestant == ours else record.ratios.get(ours))
        meaning = "" if run.command == "rotation" else f" (above 1: {ours} is faster)"
        axes[1].set_title(f"time / {ours}'s{meaning}" if ours else "", loc="left", fontsize=10)
        _ratio_axis(axes[1])
        for each in axes:
            _length_axis(
                each,
                sorted({record.seqlen for record in chosen}),
                "keys in the cache" if chosen[0].sizes["decoding"] else "seqlen",
            )
    _finish(figure, run, records, path)
    return True


CPU_SERIES = {  # {contestant: (words in the legend, look of the line)} for draw_cpu; no panel shows all of them
    "HoPE, compiled": ("flashrope HoPE", {"color": "#0072B2", "marker": "s", "linewidth": 2.4}),
    "ReRoPE, compiled": ("flashrope ReRoPE", {"color": "#009E73", "marker": "^", "linewidth": 2.4}),
    "compiled RoPE + SDPA": ("compiled RoPE + SDPA", {"color": "#000000", "marker": "o", "linewidth": 1.3}),
    "eager RoPE + SDPA": ("eager RoPE + SDPA", {"color": "#D55E00", "marker": "X", "linestyle": (0, (4, 2))}),
    "SDPA": ("SDPA, no rotation", {"color": "#888888", "marker": ".", "linestyle": (0, (1, 1.2))}),
    "ReRoPE, two dense matrices": ("ReRoPE, two score matrices", {"color": "#CC79A7", "marker": "D"}),
    "rotate the cache, then SDPA": ("ReRoPE, rotated cache + SDPA", {"color": "#E69F00", "marker": "v"}),
    "compiled rotation, then SDPA": (
        "ReRoPE, rotated cache + SDPA, rotation compiled",
        {"color": "#56B4E9", "marker": "P", "linestyle": "--"},
    ),
}
CPU_PANELS = {"forward, ": "forward", "forward + backward, ": "forward + backward", "decoding, ": "decoding one token"}


def draw_cpu(run: Run, path: Path) -> bool:
    """Writes a PNG of ``python -m bench cpu``: time by length for prefill, training and decoding, in float32.

    If a length was measured with several windows, the chart shows the window nearest to min(1,024, length / 4).
    Returns False if there is nothing to draw.
    """
    panels = {
        title: [record for record in run.records if of_panel(record, start)] for start, title in CPU_PANELS.items()
    }
    panels = {title: records for title, records in panels.items() if records}
    if not panels:
        return False
    figure = new_figure((3.8 * len(panels) + 0.4, 4.3), dpi=150)
    handles: dict[str, object] = {}
    for axes, (title, records) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, (words, look) in CPU_SERIES.items():
            points = _by_window([record for record in records if record.contestant == name])
            if points:
                (handles[words],) = axes.plot(list(points), list(points.values()), markersize=5, label=words, **look)
        _decades(axes)
        _length_axis(axes, sorted({record.seqlen for record in records}), "keys" if "decoding" in title else "seqlen")
        axes.set_title(f"{title}: ms", loc="left", fontsize=10)
    sizes = run.records[0].sizes
    figure.suptitle(
        f"CPU, float32, batch {sizes['batch']}, {sizes['heads']} heads of {sizes['head_dim']} channels\n{_origin(run)}",
        fontsize=8,
        x=0.01,
        ha="left",
    )
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path)
    return True


def of_panel(record: Record, start: str) -> bool:
    """Whether ``draw_cpu`` draws the record in the panel for tables whose titles start with `start`."""
    quiet = "busy" not in record.table and record.sizes["dtype"] == "float32"
    return quiet and record.table.startswith(start) and record.contestant in CPU_SERIES


def _by_window(records: Sequence[Record]) -> dict[int, float]:
    """Returns {length: milliseconds} in order of length. For each length it takes the window that the chart shows."""
    chosen: dict[int, Record] = {}
    for record in records:
        wanted = min(1024, record.seqlen // 4)
        before = chosen.get(record.seqlen)
        if before is None or abs(record.sizes["window"] - wanted) <= abs(before.sizes["window"] - wanted):
            chosen[record.seqlen] = record
    return {length: chosen[length].milliseconds for length in sorted(chosen)}


def draw_scaling(run: Run, path: Path, panels: Sequence[tuple[str, str, str, dict[str, dict[float, float]]]]) -> bool:
    """Writes a PNG with two panels per row and logarithmic axes. A panel is (title, x label, y label, {series: {x:
    y}}). Returns False if there is nothing to draw."""
    panels = [panel for panel in panels if any(panel[3].values())]
    if not panels:
        return False
    count = -(-len(panels) // 2)
    figure, all_axes = _figure(count, 2, height=2.9)
    flat = [axes for row in all_axes for axes in row]
    styles = _styles(run.records)
    for axes, (title, x_label, y_label, series) in zip(flat, panels, strict=False):
        for name, points in series.items():
            if points:
                axes.plot(list(points), list(points.values()), label=name, **styles[name])
        _decades(axes)
        _length_axis(axes, sorted({x for points in series.values() for x in points}), x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False, handlelength=3.5)
    for axes in flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(_origin(run), fontsize=9, x=0.01, ha="left")
    save(figure, path)
    return True


def _figure(rows: int, columns: int, height: float):
    figure = new_figure((11, height * rows + 0.9), dpi=150)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _styles(records: Sequence[Record]) -> dict[str, dict]:
    ours = list(dict.fromkeys(record.contestant for record in records if record.ours))
    peers = list(dict.fromkeys(record.contestant for record in records if not record.ours))
    styles = {
        name: {
            "color": COLOURS[at % len(COLOURS)],
            "marker": MARKERS[at % len(MARKERS)],
            "linewidth": 1.3,
            "markersize": 4,
        }
        for at, name in enumerate(peers)
    }
    return styles | {
        name: {
            "color": "black",
            "linestyle": OWN_STYLES[at % len(OWN_STYLES)],
            "linewidth": 2.4,
            "marker": ".",
            "markersize": 7,
        }
        for at, name in enumerate(reversed(ours))
    }


def _lines(axes, records: Sequence[Record], styles: dict[str, dict], value: Callable[[Record], float | None]) -> None:
    for name in dict.fromkeys(record.contestant for record in records):
        points = [
            (record.seqlen, value(record))
            for record in records
            if record.contestant == name and value(record) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **styles[name])


def _ceiling(axes, run: Run, name: str) -> None:
    """Draws a line at the measured ceiling of this name. The shares in the tables refer to this ceiling."""
    axes.axhline(run.ceilings[name], color="0.6", linewidth=1, linestyle=":")
    axes.annotate(
        CEILINGS[name],
        xy=(1, run.ceilings[name]),
        xycoords=("axes fraction", "data"),
        fontsize=7,
        color="0.4",
        ha="right",
        va="bottom",
    )


def _length_axis(axes, lengths: Sequence[float], x_label: str = "seqlen") -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{int(x) // 1024}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}" for x in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _ratio_axis(axes) -> None:
    """Makes the y axis logarithmic. It spans at least a factor of 2, so that noise does not fill it."""
    from matplotlib.ticker import NullLocator

    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    low, high = min(low, 0.7), max(high, 1.4)
    axes.set_ylim(low, high)
    ticks = [tick for tick in RATIOS if low <= tick <= high and (high < 6 * low or math.log2(tick).is_integer())]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())


def _decades(axes) -> None:
    """Makes the axis logarithmic, with plain numbers at 1, 2 and 5 of each decade. If there are many decades, only
    their starts have numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=20))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _origin(run: Run) -> str:
    command = run.shown_command if len(run.shown_command) < 150 else run.shown_command[:147] + "..."
    return f"{run.device['name']}, {run.shown_versions}\n{command}"


def _finish(figure, run: Run, records: Sequence[Record], path: Path) -> None:
    sizes = records[0].sizes
    figure.suptitle(
        f"{run.command}: head_dim {sizes['head_dim']}, {sizes['heads']} query and {sizes['heads_kv']} key heads, "
        f"{sizes['dtype']}, {'causal' if sizes['causal'] else 'not causal'}\n{_origin(run)}",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    handles, labels = {}, []
    for axes in figure.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = list(handles)
    figure.legend(
        handles.values(), labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False, handlelength=3.5
    )
    save(figure, path)
