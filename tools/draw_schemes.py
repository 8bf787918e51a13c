"""Draws the figures of docs/schemes.md.

python tools/draw_schemes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from flashrope import Rotary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # experiments is not part of the installed package

from experiments import figures
from experiments.drawn import seen_distances

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemes"
TRAIN_LENGTH, HEAD_DIM, FACTOR = 64, 64, 8.0


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    rope = Rotary.rope(HEAD_DIM)
    seen = {
        "RoPE": (rope, 1.0),
        f"PI, factor {FACTOR:g}": (rope, FACTOR),
        "ReRoPE, window 32": (rope.rectify(32), 1.0),
        "Leaky ReRoPE, window 32, factor 16": (rope.rectify(32, factor=16.0), 1.0),
    }
    figures.matrices(
        FOLDER / "positions.png",
        {name: seen_distances(rotary, 2 * TRAIN_LENGTH, scale) for name, (rotary, scale) in seen.items()},
        TRAIN_LENGTH,
    )
    tables = {
        "RoPE": rope,
        "HoPE": Rotary.hope(HEAD_DIM, TRAIN_LENGTH),
        "PI": rope.interpolate(FACTOR),
        "NTK-aware": rope.ntk(FACTOR),
        "YaRN": rope.yarn(FACTOR, TRAIN_LENGTH),
    }
    figures.frequencies(
        FOLDER / "frequencies.png",
        {name: rotary.frequencies for name, rotary in tables.items()},
        TRAIN_LENGTH,
        10_000.0,
    )


if __name__ == "__main__":
    main()
