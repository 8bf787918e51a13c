"""Lists the sizes of ``flashrope demo``, and the files of its models."""

from __future__ import annotations

import dataclasses

COMPARED = ("rerope", "leaky", "cope", "self-extend", "dual-chunk")  # schemes to compare with RoPE and HoPE
CHECKPOINTS = {"rope": "rope.safetensors", "hope": "hope.safetensors"}

TIMES = {  # times of whole runs, including importing torch
    "tiny": "about 10 s on two cores of an AMD EPYC",
    "cpu": "about 2 minutes on two cores of an AMD EPYC",
    "gpu": "not timed, for lack of a GPU",
}


@dataclasses.dataclass(frozen=True)
class Preset:
    """The sizes of a run. ``windows`` is the number of unseen windows on which every context length is measured."""

    width: int
    layers: int
    heads: int
    train_length: int
    batch: int
    steps: int
    learning_rate: float
    windows: int


PRESETS = {
    "tiny": Preset(width=32, layers=1, heads=2, train_length=32, batch=8, steps=20, learning_rate=3e-3, windows=8),
    "cpu": Preset(width=128, layers=3, heads=4, train_length=256, batch=4, steps=850, learning_rate=3e-3, windows=32),
    "gpu": Preset(
        width=512, layers=8, heads=8, train_length=512, batch=64, steps=1500, learning_rate=1e-3, windows=128
    ),
}
