"""Formats the demo's table of losses: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...console import files, report
from .evaluate import ContextLoss


@dataclasses.dataclass(frozen=True)
class DemoRow:
    """One scheme on one model. ``trained_with`` is the encoding with which the model was trained."""

    name: str
    trained_with: str
    log_n: bool
    losses: tuple[ContextLoss, ...]


def aligned(rows: Sequence[DemoRow]) -> str:
    """Returns text columns: the loss by context length, on target bytes that are the same at every length."""
    cells = [["context length, bytes", *(f"{loss.context_length:,}" for loss in rows[0].losses)]]
    cells += [[row.name, *(f"{loss.last:.3f}" for loss in row.losses)] for row in rows]
    return report.aligned("loss on unseen files, nats per byte", cells, 9)


def markdown(rows: Sequence[DemoRow], facts: dict[str, str]) -> str:
    """Returns Markdown with two tables by context length, and a list of how the losses were measured. The first table
    has the losses on the target bytes, which are the same at every length, and the second has the losses on all bytes.
    """
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
        "Nats per byte. Longer contexts add other target bytes, so only numbers of one column are strictly comparable.",
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


def csv_text(rows: Sequence[DemoRow]) -> str:
    """Returns CSV: one line per scheme and context length, losses in nats per byte."""
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
