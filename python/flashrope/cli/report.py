"""Output of the demo: progress bars, the table of losses in the terminal, and as Markdown and CSV."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Sequence

from ..small_models.evaluate import ContextLoss
from . import files
from .progress import duration, seconds_left


@dataclasses.dataclass(frozen=True)
class Row:
    """One scheme on one model. ``trained_with`` is the encoding the model was trained with."""

    name: str
    trained_with: str
    log_n: bool
    losses: tuple[ContextLoss, ...]


class Bars:
    """One progress bar of ``total`` steps per name, with the time left. Where stderr is not a terminal, a line is
    printed at the first step and at every quarter instead."""

    def __init__(self, names: Sequence[str], total: int):
        from tqdm import tqdm

        self._names, self._total, self._steps = names, total, [0] * len(names)
        self._began = [0.0] * len(names)  # when the first step was done, which compiles
        self._bars = [
            tqdm(total=total, desc=name, position=at, disable=None, dynamic_ncols=True) for at, name in enumerate(names)
        ]

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_) -> None:
        for bar in self._bars:
            bar.close()

    def update(self, bar: int, step: int, loss: float | None = None) -> None:
        """Set bar number ``bar`` to ``step``."""
        shown, before = self._bars[bar], self._steps[bar]
        self._steps[bar] = step
        if before < 1 <= step:
            self._began[bar] = time.monotonic()
        if not shown.disable:
            if loss is not None:
                shown.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            shown.update(step - shown.n)
        elif before < 1 <= step or any(before < self._total * quarter // 4 <= step for quarter in (1, 2, 3, 4)):
            print(
                f"{self._names[bar]}: {step} of {self._total}"
                + (f", loss {loss:.3f}" if loss is not None else "")
                + self._left(bar),
                flush=True,
            )

    def _left(self, bar: int) -> str:
        done = self._steps[bar] - 1
        left = seconds_left(time.monotonic() - self._began[bar], done, self._total - 1) if done > 0 else None
        return f", about {duration(left)} left" if left else ""


def lines(facts: dict[str, str], *names: str) -> str:
    """The named facts (by default all), wrapped to 110 columns."""
    return "\n".join(
        textwrap.fill(
            facts[name], 110, initial_indent=f"{name + ':':11}", subsequent_indent=" " * 11, break_long_words=False
        )
        for name in names or facts
    )


def table(rows: Sequence[Row]) -> str:
    """Aligned text: the loss on the shared target bytes by context length."""
    cells = [["context length, bytes", *(f"{loss.context_length:,}" for loss in rows[0].losses)]]
    cells += [[row.name, *(f"{loss.last:.3f}" for loss in row.losses)] for row in rows]
    wide = max(len(line[0]) for line in cells)
    text = [line[0].ljust(wide) + "".join(cell.rjust(9) for cell in line[1:]) for line in cells]
    return "\n".join(["loss on unseen files, nats per byte", text[0], "-" * len(text[0]), *text[1:]])


def markdown(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """Markdown: both losses by context length, and how they were measured."""
    train_length = rows[0].losses[0].context_length
    lengths = [f"{loss.context_length:,} ({loss.context_length // train_length}x)" for loss in rows[0].losses]

    def section(title, note, pick):
        head = ["| scheme | model trained with | " + " | ".join(lengths) + " |", "|---|---|" + "---:|" * len(lengths)]
        best = [
            min(column) for column in zip(*([f"{pick(loss):.3f}" for loss in row.losses] for row in rows), strict=True)
        ]
        for row in rows:
            values = [f"{pick(loss):.3f}" for loss in row.losses]
            shown = [f"**{value}**" if value == least else value for value, least in zip(values, best, strict=True)]
            head.append(f"| {row.name} | {ENCODINGS[row.trained_with]} | " + " | ".join(shown) + " |")
        return [f"## {title}", "", note, "", *head, ""]

    spread = [loss.last_stderr for row in rows for loss in row.losses]
    text = ["# Loss against context length", ""]
    text += section(
        "Same target bytes at every context length",
        f"Nats per byte: {facts['losses']}. Standard error over the "
        f"windows {min(spread):.3f} to {max(spread):.3f}; all rows read the same windows.",
        lambda loss: loss.last,
    )
    text += section(
        "All bytes of every window",
        "Nats per byte. Longer contexts add other target bytes, so only rows of one column are strictly comparable.",
        lambda loss: loss.mean,
    )
    text += [
        "## How",
        "",
        *(f"- {name}: {'`' + fact + '`' if name == 'command' else fact}" for name, fact in facts.items()),
        "- windows: each lies in one unseen file; a shorter context is the end of the window, with positions from 0.",
        "- ReRoPE's window: its author found a quarter to a half of the training length best "
        "(https://kexue.fm/archives/9708).",
        "",
    ]
    return "\n".join(text)


ENCODINGS = {"rope": "RoPE", "hope": "HoPE"}


def csv_text(rows: Sequence[Row]) -> str:
    """CSV: one line per scheme and context length, losses in nats per byte."""
    columns = ["scheme", "trained_with", "log_n", "context_length", "loss", "loss_stderr", "loss_all_bytes"]
    return files.csv_text(
        columns,
        [
            [
                row.name,
                row.trained_with,
                int(row.log_n),
                loss.context_length,
                f"{loss.last:.6f}",
                f"{loss.last_stderr:.6f}",
                f"{loss.mean:.6f}",
            ]
            for row in rows
            for loss in row.losses
        ],
    )
