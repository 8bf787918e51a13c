"""Draws the pictures of docs/schemes.md: one for each scheme, and one with the frequency tables of several schemes.

python tools/draw_schemes.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from flashrope import Rotary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # experiments is not part of the installed package

from flashrope.console.figure import new_figure

from experiments import figures
from experiments.drawn import seen_distances
from experiments.figures import finish

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemes"
TRAIN_LENGTH, LENGTH, HEAD_DIM, BASE = 256, 1024, 64, 10_000.0
STEP = 4  # every fourth query and key is drawn
SIZE, DPI, FONT = (6.2, 2.9), 120, 13  # inches, points; capitals are 8 pixels high if the picture is 390 wide
TRAINED, BEYOND, PLAIN = "#0072B2", "#D55E00", "0.55"
AXIS_COLOURS = ("#0072B2", "#E69F00", "#009E73")
ROPE = Rotary.rope(HEAD_DIM, BASE)

DISTANCES = {  # file: (title, scheme, the number by which its frequencies were divided)
    "rope": ("RoPE", ROPE, 1.0),
    "interpolate": ("PI, factor 4", ROPE, 4.0),
    "rectify": ("ReRoPE, window 128", ROPE.rectify(128), 1.0),
    "leaky": ("Leaky ReRoPE, window 128, factor 8", ROPE.rectify(128, 8.0), 1.0),
    "local": ("sliding window, 192", ROPE.local(192), 1.0),
    "self_extend": ("Self-Extend, window 128, group 16", ROPE.self_extend(128, 16), 1.0),
    "dual_chunk": ("dual chunk attention, 256 and 128", ROPE.dual_chunk(256, 128), 1.0),
}
TABLES = {
    "hope": ("HoPE", Rotary.hope(HEAD_DIM, TRAIN_LENGTH, BASE)),
    "cope": ("CoPE", ROPE.cope(TRAIN_LENGTH)),
    "ntk": ("NTK-aware, factor 4", ROPE.ntk(4.0)),
    "yarn": ("YaRN, factor 4", ROPE.yarn(4.0, TRAIN_LENGTH)),
}
AXES = {
    "FLUX.1: Rotary.axial(128, [8, 28, 28])": Rotary.axial(128, [8, 28, 28], BASE),
    "Qwen3-VL: .mrope([24, 20, 20], True)": Rotary.rope(128, 5e6).mrope([24, 20, 20], interleaved=True),
}


def panels(columns: int, title: str, **share):
    figure = new_figure(SIZE, DPI)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=FONT + 1)
    found = figure.subplots(1, columns, squeeze=False, **share)[0]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=FONT - 1)
    return figure, found


def draw_distances(path: Path, title: str, rotary: Rotary, scale: float) -> None:
    """Draws the distance at which queries see keys. The left panel shades this distance by query (row) and key
    (column). Distances of at least the training length have one colour of their own. The right panel plots the distance
    that the last query sees against the true distance."""
    from matplotlib.colors import ListedColormap

    figure, (left, right) = panels(2, title, width_ratios=(1, 1.25))
    rows = torch.arange(0, LENGTH, STEP)
    light, dark = torch.tensor([0.87, 0.93, 0.98]), torch.tensor([0.0, 0.27, 0.48])
    levels = [(light + (dark - light) * at / 15).tolist() for at in range(16)]
    shades = ListedColormap(levels).with_extremes(over=BEYOND, bad="white")
    matrix = seen_distances(rotary, rows, rows, scale)
    extent = (0, LENGTH, LENGTH, 0)
    left.imshow(matrix, cmap=shades, vmin=0, vmax=TRAIN_LENGTH - 1, interpolation="nearest", extent=extent)
    left.set_xlabel("key", fontsize=FONT)
    left.set_ylabel("query", fontsize=FONT)
    left.set_xticks((0, LENGTH // 2, LENGTH))
    left.set_yticks((0, LENGTH // 2, LENGTH))

    distances = torch.arange(LENGTH)
    (seen,) = seen_distances(rotary, torch.tensor([LENGTH - 1]), LENGTH - 1 - distances, scale)
    right.plot(distances, distances, color=PLAIN, linewidth=1, linestyle=(0, (2, 2)))
    for colour, part in ((TRAINED, seen < TRAIN_LENGTH), (BEYOND, seen >= TRAIN_LENGTH)):
        right.plot(distances, torch.where(part, seen, math.nan), color=colour, linewidth=2.6)
    right.axhline(TRAIN_LENGTH, color=PLAIN, linewidth=1)
    right.annotate("trained below", (LENGTH, TRAIN_LENGTH), ha="right", va="bottom", fontsize=FONT - 1, color="0.35")
    right.set_xlim(0, LENGTH)
    right.set_ylim(0, 2 * TRAIN_LENGTH)
    right.set_xticks((0, LENGTH // 2, LENGTH))
    right.set_yticks((0, TRAIN_LENGTH, 2 * TRAIN_LENGTH))
    right.set_xlabel("true distance", fontsize=FONT)
    right.set_ylabel("distance seen", fontsize=FONT)
    finish(figure, path)


def draw_table(path: Path, title: str, rotary: Rotary) -> None:
    """Draws every pair's frequency as a share of RoPE's, and the cut at 2 pi / L."""
    figure, (axes,) = panels(1, title)
    share = [f / plain for f, plain in zip(rotary.frequencies, ROPE.frequencies, strict=True)]
    cut = sum(f >= 2 * math.pi / TRAIN_LENGTH for f in ROPE.frequencies) - 0.5
    axes.bar(range(len(share)), [1.0] * len(share), color="0.9", width=0.8)
    axes.bar(range(len(share)), share, color=TRAINED, width=0.8)
    axes.axvline(cut, color=BEYOND, linewidth=1.5)
    for text, align, at in (("full turn within L ", "right", cut), (" less than a turn", "left", cut)):
        axes.annotate(text, (at, 1.04), ha=align, va="bottom", fontsize=FONT - 1, color=BEYOND)
    axes.set_ylim(0, 1.25)
    axes.set_yticks((0, 0.5, 1))
    axes.set_xlabel("channel pair, fastest first", fontsize=FONT)
    axes.set_ylabel("times RoPE's\ninv_freq", fontsize=FONT)
    finish(figure, path)


def draw_axes(path: Path) -> None:
    """Draws the frequency and the axis of every pair."""
    figure, both = panels(2, "which coordinate each pair rotates with", sharey=True)
    for axes, (title, rotary) in zip(both, AXES.items(), strict=True):
        model, _, builder = title.partition(": ")
        for pair, (f, axis) in enumerate(zip(rotary.frequencies, rotary.axis, strict=True)):
            axes.plot([pair, pair], [1e-7, f], color=AXIS_COLOURS[axis], linewidth=2.2, solid_capstyle="butt")
        axes.set_yscale("log")
        axes.set_ylim(1e-7, 300)
        axes.set_yticks((1e-6, 1e-3, 1))
        axes.minorticks_off()
        for at, (name, colour) in enumerate(zip(("time", "row", "column"), AXIS_COLOURS, strict=True)):
            axes.annotate(name, (20 * at, 8), fontsize=FONT - 1, color=colour, va="bottom", fontweight="bold")
        axes.set_title(f"{model}\n{builder}", fontsize=FONT - 2, loc="left")
        axes.set_xlabel("channel pair", fontsize=FONT)
    both[0].set_ylabel("inv_freq", fontsize=FONT)
    finish(figure, path)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (title, rotary, scale) in DISTANCES.items():
        draw_distances(FOLDER / f"{name}.png", title, rotary, scale)
    for name, (title, rotary) in TABLES.items():
        draw_table(FOLDER / f"{name}.png", title, rotary)
    draw_axes(FOLDER / "axes.png")
    several = {"rope": ROPE, "pi": ROPE.interpolate(4.0), "ntk-aware": ROPE.ntk(4.0), "yarn": TABLES["yarn"][1]}
    several |= {"cope": TABLES["cope"][1], "hope": TABLES["hope"][1]}
    figures.frequencies(
        FOLDER / "frequencies.png",
        {"": {name: rotary.frequencies for name, rotary in several.items()}},
        TRAIN_LENGTH,
        BASE,
    )


if __name__ == "__main__":
    main()
