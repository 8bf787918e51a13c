"""Writes the training curves of an experiment's models to training.csv, training.png and tensorboard."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from flashrope.lab.small_models.train import TrainConfig, learning_rate_fraction

from .figures import MAX_LINES, NORMAL, Rows, canvas, finish, heading, name_ends, title_of
from .looks import label, look
from .runs import Run, read_csv, write_csv

COLUMNS = ("trained_with", "train_length", "seed", "step", "loss")


def collect(run: Run, folder: Path, models: Iterable[tuple[str, int]]) -> None:
    """Writes training.csv and training.png for all seeds of the run. models: (encoding, training length) of each model.
    Models without saved losses are left out."""
    rows = []
    for trained, length in dict.fromkeys(models):
        for seed in run.seeds:
            path = run.model_path(trained, length, seed).with_suffix(".losses.csv")
            if path.exists():
                rows += [[trained, length, seed, int(row["step"]), float(row["loss"])] for row in read_csv(path)]
    if rows:
        write_csv(folder / "training.csv", COLUMNS, rows)
        draw(folder / "training.png", read_csv(folder / "training.csv"))


def draw(path: Path, rows: Rows) -> None:
    """Draws means over seeds by step, with at most MAX_LINES lines in a panel. A point is the mean loss over a
    hundredth of the steps."""
    lengths = {row["train_length"] for row in rows}
    models = list(dict.fromkeys((row["trained_with"], row["train_length"]) for row in rows))
    stacked = -(-len(models) // MAX_LINES)
    figure, panels = canvas(3.9 * stacked + 0.6, stacked, sharey=True)
    ends_of = []
    for axes, start in zip(panels, range(0, len(models), MAX_LINES), strict=True):
        ends = []
        for model in models[start : start + MAX_LINES]:
            by_step: dict[int, list[float]] = {}
            for row in rows:
                if (row["trained_with"], row["train_length"]) == model:
                    by_step.setdefault(int(row["step"]), []).append(float(row["loss"]))
            steps = sorted(by_step)
            means = [math.fsum(by_step[step]) / len(by_step[step]) for step in steps]
            colour, name = look(model[0])[0], label(model[0])
            style = "--" if model[0].endswith("+logn") else "-"
            axes.plot(steps, means, color=colour, linewidth=1.6, linestyle=style)
            ends.append((means[-1], steps[-1], name if len(lengths) == 1 else f"{name}, {model[1]}", colour))
        axes.set_ylabel("loss, nats per token", fontsize=NORMAL)
        axes.set_xlim(0, 1.3 * max(x for _, x, *_ in ends))
        ends_of.append((axes, ends))
    for axes, ends in ends_of:
        name_ends(axes, ends, log=False, offset=0.02 * ends[0][1])
    panels[-1].set_xlabel("step", fontsize=NORMAL)
    seeds = len({row["seed"] for row in rows})
    title_of(panels[0], "")
    heading(figure, "Training", "one seed" if seeds == 1 else f"mean of {seeds} seeds")
    finish(figure, path)


class Log:
    """Logs loss, learning rate and speed of one model's training for tensorboard. A resumed training replaces the log
    of the interrupted training from the step at which it resumes."""

    def __init__(self, folder: Path, training: TrainConfig):
        self._folder, self._training = folder, training
        self._writer, self._before = None, None

    def __call__(self, step: int, loss: float) -> None:
        from torch.utils.tensorboard import SummaryWriter

        training, now = self._training, time.perf_counter()
        self._writer = self._writer or SummaryWriter(str(self._folder), purge_step=step)
        values = {"loss": loss, "learning rate": training.learning_rate * learning_rate_fraction(step - 1, training)}
        if self._before:
            tokens = (step - self._before[0]) * training.batch_size * training.train_length
            values["tokens per second"] = tokens / max(now - self._before[1], 1e-9)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._before = step, now

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def log_of(run: Run, path: Path, training: TrainConfig) -> Log | None:
    """Returns the log for the model in ``path``, or None without --tensorboard and on every rank except the first."""
    return Log(run.out / "tensorboard" / path.stem, training) if run.tensorboard and not run.ranks.rank else None
