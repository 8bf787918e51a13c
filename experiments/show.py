"""Makes the figures and tables of an experiment. It reads nothing but the experiment's results.csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import tables
from .encodings import ABSOLUTE, BIASES
from .figures import DASHED, DOTTED, Line, Panel, draw, points
from .looks import family, label
from .registry import EXPERIMENTS
from .runs import in_units, read_csv
from .statistics import interval, values_at
from .tasks import MULTIPLES

Rows = Sequence[dict[str, str]]
PERCENT = {
    "few-shot": "answers that are a label (%)",
    "passkey": "keys right (%)",
    "passkey-digits": "digits of the keys right (%)",
    "copying-by-length": "letters right (%)",
}
FINER = {"passkey": "passkey-digits"}  # the second measure of a task, which gives credit for partly correct answers
# The families of schemes whose lines a panel shows. Schemes that were not measured are left out.
AFTER_TRAINING = ("rope", "pi", "ntk-aware", "yarn", "rerope", "rerope+dagger", "rerope+logn", "leaky-rerope")
TRAINED_WITH = ("rope", "hope", "hope+pi", "hope+yarn", "alibi", "kerple", "fire", "nope")
ROTARY = ("rope", "hope", "p-rope", "randomized", "hfwa", "inv-leaky", "rerope", "leaky-rerope")
REST = ("rope", "hope-ab1", "hope-ab2", "hope-ab3", "cope", "gau", "nope", "rope+dagger")


def show(folder: Path, name: str, train_length: int) -> str:
    """Writes the figures and the table of one experiment, and returns the text of the table."""
    rows = read_csv(folder / "results.csv")
    for task, _ in EXPERIMENTS[name].measures:
        DRAWN.get(task, _draw_by_length)(folder, name, task, rows, train_length)
    return tables.write(folder, name, train_length, EXPERIMENTS[name].compares)


def _draw_by_length(folder: Path, name: str, task: str, rows: Rows, train_length: int) -> None:
    for drawn in (task, FINER[task]) if task in FINER else (task,):
        chosen = [row for row in rows if row["task"] == drawn]
        several = _by_training_length(chosen, drawn)
        panels, per, x_label = (
            (several, 1, "length (bytes)")
            if several
            else (_panels(name, chosen, drawn), train_length, "length / training length")
        )
        y_label, x_label = (in_units(text, folder) for text in (PERCENT.get(drawn, "perplexity per byte"), x_label))
        draw(folder / f"{drawn}.png", panels, chosen, per, y_label, drawn not in PERCENT, x_label)


def _by_training_length(rows: Rows, task: str) -> list[Panel]:
    """Returns one panel with all models if the models have several training lengths. Otherwise returns no panel."""
    found = sorted({(int(row["train_length"]), row["scheme"]) for row in rows})
    if len({length for length, _ in found}) < 2:
        return []
    styles = ("-", DASHED, DOTTED)
    return [
        Panel(
            "",
            [
                Line(name, task, f"trained on {length}", length, styles[at % len(styles)])
                for at, (length, name) in enumerate(found)
            ],
        )
    ]


def _panels(name: str, rows: Rows, task: str) -> list[Panel]:
    """Returns panels of at most eight lines. Each panel has a line for RoPE."""
    measured = {family(row["scheme"]): row["scheme"] for row in reversed(rows)}

    def panel(title: str, families: Sequence[str]) -> Panel:
        lines = [Line(measured[each], task) for each in families if each in measured]
        return Panel(title, lines, Line(measured["rope"], task) if "rope" in measured else None)

    if name == "zoo":
        groups = {
            "rotary": ROTARY,
            "ablations and others": REST,
            "biases": ("rope", *BIASES),
            "absolute": ("rope", "learned", *ABSOLUTE),
        }
    else:
        groups = {"changed after training": AFTER_TRAINING, "trained with": TRAINED_WITH}
    drawn = {each for families in groups.values() for each in families}
    others = ("rope", *(each for each in measured if each not in drawn))
    panels = [panel(title, families) for title, families in groups.items()]
    if len(others) > 1:
        panels.append(panel("others", others))
    kept = [each for each in panels if [line for line in each.lines if line.scheme != measured.get("rope")]]
    return kept or [Panel("", [Line(scheme, task) for scheme in measured.values()])]  # only RoPE was measured


def _draw_copying(folder: Path, name: str, task: str, rows: Rows, train_length: int) -> None:
    def panel(title: str, names: Sequence[str], task: str = "copying-by-length") -> Panel:
        lines = [Line(tables.resolve(name, train_length)[0], task) for name in names]
        return Panel(title, lines, lines[0])

    if name == "ablation":
        panels = [panel("HoPE and its ablations", ("rope", "hope", "hope-ab1", "hope-ab2", "hope-ab3"))]
    else:
        rectified = ("rerope{w256}", "rerope{w256}+dagger")
        panels = [
            panel("copying: RoPE and changes of it", ("rope", "hope", "pi-s2", "yarn-s2", *rectified, "hope+yarn-s2")),
            panel("copying: biases", ("rope", "hope", "kerple", "alibi", "fire")),
            panel("with letters between", ("rope", "hope", *rectified), "copying-control"),
        ]
    draw(folder / "copying.png", panels, rows, train_length, "letters right (%)")


def _draw_accuracy(folder: Path, name: str, task: str, rows: Rows, train_length: int) -> None:
    places = {
        "accuracy-repeat": "repeating",
        "accuracy-non-repeat": "not repeating",
    }
    at = MULTIPLES[-1] * train_length
    names = list(dict.fromkeys(row["scheme"] for row in rows))
    groups, levels = {}, {}
    for each, title in places.items():
        title = f"{title}, {MULTIPLES[-1]} L"
        found = {scheme: values_at(rows, scheme, each, at) for scheme in names}
        groups[title] = {scheme: interval(list(values.values())) for scheme, values in found.items() if values}
        trained = values_at(rows, names[0], "accuracy", train_length)
        if trained:
            levels[title] = interval(list(trained.values())).mean
    points(folder / "accuracy.png", groups, in_units("bytes right (%)", folder), levels)


def _draw_loss(folder: Path, name: str, task: str, rows: Rows, train_length: int) -> None:
    """Draws the losses on text by scheme, and for some schemes also on repeated text."""
    measured = {family(row["scheme"]): row["scheme"] for row in reversed(rows)}
    text = ("rope", "ntk-aware", "yarn", "rerope", "rerope+dagger", "leaky-rerope+dagger", "cope")
    mapped = ("rope", "rerope", "self-extend", "self-extend+dagger", "dual-chunk", "dual-chunk+dagger")
    repeated = ("rope", "ntk-aware", "yarn", "rerope+dagger")

    def lines(families: Sequence[str], task: str, words: str = "", **style) -> list[Line]:
        return [
            Line(measured[each], task, label(measured[each]) + words, **style) for each in families if each in measured
        ]

    level = lines(("rope",), "loss")[0]
    panels = [
        Panel("text", lines(text, "loss"), level),
        Panel(
            "text and its repetition",
            [*lines(repeated, "loss"), *lines(repeated, "loss-repeat", ", rep.", style=DASHED)],
            level,
        ),
    ]
    if any(each in measured for each in mapped[2:]):
        panels.insert(1, Panel("text: grouped positions and chunks", lines(mapped, "loss"), level))
    draw(folder / "loss.png", panels, rows, train_length, "loss (nats per byte)", log=True)


DRAWN: dict[str, Callable] = {"copying": _draw_copying, "accuracy": _draw_accuracy, "loss": _draw_loss}
