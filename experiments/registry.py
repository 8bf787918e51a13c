"""Lists the experiments by name: which schemes they compare and what they measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from flashrope.lab.small_models.workers import Workers

from . import checkpoints, over_length
from .digits import draw_digits
from .drawn import PATTERN_COMPARES, draw_frequencies, draw_patterns, draw_positions
from .over_length import draw_over_length
from .picture import draw_pictures
from .presets import COPYING, FEW_SHOT, PASSKEY, TEXT, Preset
from .published import TABLES
from .runs import Run
from .statistics import HIGHER, LOWER, Comparison, schemes
from .zoo import GAU, LLAMA

Measures = tuple[tuple[str, tuple[float, ...] | None], ...]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Describes an experiment: either by schemes and what to measure on them, or by a function that runs it.

    schemes: names of schemes. A name may contain {w256} and {L2} as in ``published``. measures: pairs of a task and the
    multiples of the training length at which to measure it. None instead of multiples: the task's own multiples. data:
    the data that a preset must train on. architecture: the architecture that its models must have. None: any. compares:
    the differences that are judged. They were chosen before the runs.
    """

    summary: str
    schemes: tuple[str, ...] = ()
    measures: Measures = ()
    function: Callable[[Run, Workers, Path], None] | None = None
    data: str = TEXT
    compares: tuple[Comparison, ...] = ()
    architecture: str | None = None

    def fits(self, preset: Preset) -> bool:
        return self.data == preset.data and self.architecture in (None, preset.architecture)


def _published(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(template for table in TABLES[name] for _, template, _ in table.rows))


def _beyond(first: str, second: str, expected: int = 0) -> tuple[Comparison, ...]:
    """Returns the comparisons of two schemes by their accuracy at 8 times the training length, one for repeated text
    and one for other text."""
    tasks = ("accuracy-repeat", "accuracy-non-repeat")
    return tuple(c for task in tasks for c in schemes(first, second, task, 8, expected=expected))


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
        compares=(
            *schemes("hope", "rope", "perplexity", 1),
            *schemes("hope", "rope", "perplexity", 2, 4, 8, expected=LOWER),
            *schemes("hope+yarn-s8", "yarn-s8", "perplexity", 2, 4, 8, expected=LOWER),
            *schemes("hope", "kerple", "perplexity", 8),
            *schemes("rerope{w256}", "rope", "perplexity", 1),
            *schemes("rerope{w256}", "rope", "perplexity", 2, 4, 8, expected=LOWER),
            *schemes("rerope{w256}+dagger", "rerope{w256}", "perplexity", 2, 4, 8, expected=LOWER),
        ),
    ),
    "zoo": Experiment(
        "perplexity by context length of every encoding",
        (
            "rope",
            "hope",
            "hope-ab1",
            "hope-ab2",
            "hope-ab3",
            "p-rope",
            "inv-leaky",
            "rerope",
            "leaky-rerope",
            "hfwa",
            "randomized",
            "alibi",
            "kerple",
            "fire",
            "t5",
            "sandwich",
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
    "few-shot": Experiment(
        "few-shot following (HoPE, tables 3 and 6)",
        (*_published("few-shot"), "rerope{w256}", "rerope{w256}+dagger"),
        (("few-shot", None),),
        data=FEW_SHOT,
        compares=(
            *schemes("hope", "rope", "few-shot", 0.5, 1, 1.5, 2, 2.5),
            *schemes("hope+yarn-s2.5", "yarn-s2.5", "few-shot", 1.5, 2, 2.5),
            *schemes("hope", "kerple", "few-shot", 2, 2.5),
            *schemes("rerope{w256}", "rope", "few-shot", 1, 2, 2.5),
            *(Comparison((name, "few-shot"), (name, "few-shot-control"), 1) for name in ("rope", "hope")),
        ),
    ),
    "few-shot-lengths": Experiment(
        "HoPE's few-shot following by training length (HoPE's first version, table 6)",
        _published("few-shot-lengths"),
        (("few-shot", (1, 2, 3, 4, 6, 8)),),
        data=FEW_SHOT,
    ),
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
        "HoPE's perplexity by training length (HoPE's first version, table 5)",
        _published("lengths"),
        (("perplexity", (1, 2, 4, 8, 16, 32)),),
    ),
    "rerope-schemes": Experiment(
        "accuracy of the schemes at 8 times the training length (ReRoPE, first table)",
        _published("rerope-schemes"),
        (("accuracy", None),),
        compares=(
            *_beyond("rerope{w256}", "rope"),
            *_beyond("rerope{w256}", "ntk-mixed-s8"),
            *_beyond("rerope{w256}", "hfwa"),
            *_beyond("ntk-mixed-s8", "rope"),
            *_beyond("pi-s8", "rope"),
            *_beyond("rerope{w256}+dagger", "rerope{w256}"),
            *_beyond("rerope{w256}+logn", "rerope{w256}+dagger"),
            *(
                Comparison((name, "accuracy-repeat"), (name, "accuracy-non-repeat"), 8)
                for name in ("rope", "rerope{w256}", "rerope{w256}+logn")
            ),
        ),
    ),
    "rerope-windows": Experiment(
        "ReRoPE's windows (ReRoPE, second table)",
        _published("rerope-windows"),
        (("accuracy", None),),
        compares=(
            *(c for window in (64, 128, 384, 512) for c in _beyond("rerope{w256}", f"rerope{{w{window}}}")),
            *_beyond("rerope{w512}+dagger", "rerope{w512}"),
        ),
    ),
    "rerope-leaky": Experiment(
        "Leaky ReRoPE's factors (ReRoPE, third table)",
        _published("rerope-leaky"),
        (("accuracy", None),),
        compares=tuple(
            c
            for window in (128, 256)
            for leak in (64, 16, 8)
            for c in _beyond(f"leaky-rerope{{w{window}}}-k{leak}+logn", f"rerope{{w{window}}}+logn")
        ),
    ),
    "passkey": Experiment(
        "passkey retrieval by length",
        (
            "rope",
            "pi-s8",
            "yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "hope",
            "hope+yarn-s8",
            "alibi",
        ),
        (("passkey", None),),
        data=PASSKEY,
        compares=(
            *schemes("hope", "rope", "passkey", 1, 2, 4, 8),
            *schemes("rerope{w256}", "rope", "passkey", 1, 2, 4, 8),
            *schemes("rerope{w256}+dagger", "rerope{w256}", "passkey", 2, 4, 8),
            *schemes("yarn-s8", "rope", "passkey", 2, 4, 8),
            *schemes("hope+yarn-s8", "hope", "passkey", 2, 4, 8),
            *(
                Comparison((name, "passkey-digits"), (name, "passkey-control"), 1)
                for name in ("rope", "hope", "rerope{w256}")
            ),
        ),
    ),
    "loss": Experiment(
        "loss by length of checkpoints, text and its repetition, under `flashrope loss` (ReRoPE)",
        measures=(("loss", None),),
        function=checkpoints.measure_checkpoints,
        compares=tuple(checkpoints.compares()),
        architecture=LLAMA,
    ),
    "gau": Experiment(
        "accuracy of the schemes on gated attention units, as in ReRoPE's tables; needs the preset gau",
        ("rope", "pi-s8", "ntk-old-s8", "ntk-mixed-s8", "rerope{w256}", "rerope{w256}+dagger"),
        (("accuracy", None),),
        compares=(
            *_beyond("rerope{w256}", "rope", HIGHER),
            *_beyond("rerope{w256}", "ntk-mixed-s8", HIGHER),
            *_beyond("ntk-mixed-s8", "ntk-old-s8", HIGHER),
            *_beyond("ntk-old-s8", "rope", HIGHER),
            *_beyond("pi-s8", "rope", LOWER),
            *_beyond("rerope{w256}+dagger", "rerope{w256}", HIGHER),
            Comparison(("rerope{w256}", "accuracy-repeat"), ("rerope{w256}", "accuracy-non-repeat"), 8, HIGHER),
        ),
        architecture=GAU,
    ),
    "patterns": Experiment(
        "attention patterns, contributions and variance accounted for (HoPE, figures 1, 2, 5, 6, 7)",
        function=draw_patterns,
        compares=PATTERN_COMPARES,
        architecture=LLAMA,
    ),
    "positions-over-length": Experiment(
        "loss by position in windows of 8 times the training length",
        function=draw_over_length,
        compares=over_length.COMPARES,
    ),
    "digits": Experiment("numbers by their digits, extrapolated, interpolated, in a larger base", function=draw_digits),
    "positions": Experiment("the distances seen under each scheme; trains nothing", function=draw_positions),
    "frequencies": Experiment("the frequency tables of all schemes; trains nothing", function=draw_frequencies),
    "picture": Experiment("n-dimensional RoPE on small pictures", function=draw_pictures),
}
