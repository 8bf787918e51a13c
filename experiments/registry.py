"""The experiments by name: which schemes they compare and what they measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from flashrope.demo.workers import Workers

from . import checkpoints
from .drawn import draw_frequencies, draw_patterns, draw_pictures, draw_positions
from .published import TABLES
from .presets import COPYING, TEXT
from .runs import Run
from .statistics import HIGHER, Comparison, schemes

Measures = tuple[tuple[str, tuple[float, ...] | None], ...]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Either schemes and what to measure on them, or a function that runs the whole experiment.

    Schemes may contain {w256} and {L2} as in ``published``. ``measures`` maps a task to multiples of the training
    length, None for the task's own. ``data``: what a preset must train on. ``compares``: the
    differences that are judged, chosen before the runs.
    """

    summary: str
    schemes: tuple[str, ...] = ()
    measures: Measures = ()
    function: Callable[[Run, Workers, Path], None] | None = None
    data: str = TEXT
    compares: tuple[Comparison, ...] = ()


def _published(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(template for table in TABLES[name] for _, template, _ in table.rows))


EXPERIMENTS = {
    "perplexity": Experiment(
        "perplexity by context length (HoPE, figure 4)",
        (
            "alibi",
            "kerple",
            "fire",
            "rope",
            "pi-s8",
            "yarn-s8",
            "hope",
            "hope+pi-s8",
            "hope+yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "nope",
        ),
        (("perplexity", None),),
    ),
    "zoo": Experiment(
        "perplexity by context length of every encoding",
        (
            "rope",
            "hope",
            "hope-ab1",
            "hope-ab2",
            "hope-ab3",
            "inv-leaky",
            "rerope",
            "leaky-rerope",
            "hfwa",
            "alibi",
            "kerple",
            "fire",
            "learned",
            "sinusoidal",
            "integer",
            "binary",
            "nope",
        ),
        (("perplexity", None),),
    ),
    "copying": Experiment(
        "in-context copying (HoPE, table 2)",
        (*_published("copying"), "rerope{w256}", "rerope{w256}+dagger"),
        (("copying", None),),
        data=COPYING,
        compares=(
            *schemes("hope", "rope", "copying-by-length", 1, 2, 4, 8, expected=HIGHER),
            *schemes("hope", "kerple", "copying-by-length", 2, 4, expected=HIGHER),
            *schemes("hope+yarn-s2", "yarn-s2", "copying-by-length", 2, expected=HIGHER),
            *schemes("rerope{w256}", "rope", "copying-by-length", 1),
            *schemes("rerope{w256}", "rope", "copying-by-length", 2, 4, 8, expected=HIGHER),
            *schemes("rerope{w256}+dagger", "rerope{w256}", "copying-by-length", 2, 4, 8, expected=HIGHER),
            *(
                Comparison((name, "copying-control"), (name, "copying-by-length"), 1)
                for name in ("rope", "hope", "rerope{w256}")
            ),
        ),
    ),
    "few-shot": Experiment("few-shot following (HoPE, table 3)", _published("few-shot"), (("few-shot", None),)),
    "ablation": Experiment(
        "HoPE's ablations (HoPE, table 4)",
        _published("ablation"),
        (("copying", None),),
        data=COPYING,
        compares=tuple(
            comparison
            for part in (1, 2, 3)
            for comparison in schemes("hope", f"hope-ab{part}", "copying-by-length", 2, 4, expected=HIGHER)
        ),
    ),
    "lengths": Experiment(
        "HoPE by training length (HoPE's first version, tables 5 and 6)",
        _published("lengths"),
        (("perplexity", (1, 2, 4, 8, 16, 32)), ("few-shot", (1, 2, 3, 4, 6, 8))),
    ),
    "rerope-schemes": Experiment(
        "accuracy of the schemes at 8 times the training length (ReRoPE, first table)",
        _published("rerope-schemes"),
        (("accuracy", None),),
    ),
    "rerope-windows": Experiment(
        "ReRoPE's windows (ReRoPE, second table)", _published("rerope-windows"), (("accuracy", None),)
    ),
    "rerope-leaky": Experiment(
        "Leaky ReRoPE's factors (ReRoPE, third table)", _published("rerope-leaky"), (("accuracy", None),)
    ),
    "passkey": Experiment(
        "passkey retrieval by length",
        (
            "rope",
            "pi-s8",
            "yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "rerope{w256}+logn",
            "hope",
            "hope+yarn-s8",
            "nope",
            "alibi",
        ),
        (("passkey", None),),
    ),
    "loss": Experiment(
        "loss by length of checkpoints, text and its repetition, under `flashrope loss` (ReRoPE)",
        measures=(("loss", None),),
        function=checkpoints.measure_checkpoints,
        compares=tuple(checkpoints.compares()),
    ),
    "patterns": Experiment(
        "attention patterns, contributions and variance accounted for (HoPE, figures 1, 2, 5, 6, 7)",
        function=draw_patterns,
    ),
    "positions": Experiment("the distances seen under each scheme; trains nothing", function=draw_positions),
    "frequencies": Experiment("the frequency tables of all schemes; trains nothing", function=draw_frequencies),
    "picture": Experiment("n-dimensional RoPE on small pictures", function=draw_pictures),
}
