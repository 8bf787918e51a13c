"""Measures the loss of Hugging Face checkpoints by length. The experiment trains models on text only and exports them
as checkpoints, which ``flashrope loss`` then measures.

The task "loss" measures windows of unseen text as they are. The task "loss-repeat" fills the window with repetitions of
its last tokens. If repetition lowers the loss, the model uses distant context (ReRoPE, kexue.fm/archives/9708).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flashrope.console import files
from flashrope.console.progress import Bar
from flashrope.lab.small_models.workers import Workers
from flashrope.schemes.catalogue import SCHEMES

from .export import export
from .measuring import COLUMNS
from .runs import Run, write_csv
from .statistics import LOWER, Comparison, schemes
from .tables import resolve
from .tasks import MULTIPLES
from .training import train_models

TRAINED = "rope"
COMMANDS = {  # {scheme of ``flashrope loss``: its name here}. growth: the longest context in training lengths
    "stock": "rope",
    "log-n": "rope+dagger",
    "ntk": "ntk-aware-s{growth}",
    "yarn": "yarn-s{growth}",
    "rerope-plain": "rerope{{w256}}",
    "rerope": "rerope{{w256}}+dagger",
    "leaky": "leaky-rerope{{w256}}-k30+dagger",  # the factor that ``flashrope loss`` chooses for 8 training lengths
    "cope": "cope",
    "self-extend": "self-extend{{w256}}-g16",  # the group that ``flashrope loss`` chooses for 8 training lengths
    "self-extend-log-n": "self-extend{{w256}}-g16+dagger",
    "dual-chunk": "dual-chunk",
    "dual-chunk-log-n": "dual-chunk+dagger",
}
MEASURED = tuple(name.format(growth=MULTIPLES[-1]) for name in COMMANDS.values())
BEYOND = MULTIPLES[1:]
TEXT, REPEATED = "loss", "loss-repeat"


def compares() -> Iterator[Comparison]:
    """Yields the comparisons that are judged. They ask three things: whether a scheme's loss beyond the training length
    is below RoPE's, whether its loss at the longest length is below RoPE's loss at the training length, and whether it
    uses distant context."""
    rope, _, ntk, yarn, rerope, rerope_log_n, leaky, cope, *mapped = MEASURED
    self_extend, self_extend_log_n, dual_chunk, dual_chunk_log_n = mapped
    for name in (ntk, yarn, rerope, rerope_log_n, leaky, cope, *mapped):
        yield from schemes(name, rope, TEXT, *BEYOND, expected=LOWER)
    yield from schemes(rerope_log_n, rerope, TEXT, *BEYOND, expected=LOWER)
    yield from schemes(leaky, rerope_log_n, TEXT, *BEYOND)
    for name, without in ((self_extend_log_n, self_extend), (dual_chunk_log_n, dual_chunk)):
        yield from schemes(name, without, TEXT, *BEYOND)
    for name in (self_extend, dual_chunk):
        yield from schemes(name, rerope, TEXT, *BEYOND)
    for name in (rerope_log_n, leaky):
        yield Comparison((name, TEXT), (rope, TEXT), BEYOND[-1], LOWER, second_multiple=1)
    for name in MEASURED:
        for multiple in BEYOND:
            yield Comparison((name, REPEATED), (name, TEXT), multiple, LOWER)


def measure_checkpoints(run: Run, workers: Workers, folder: Path) -> None:
    """Trains and measures the models, and writes results.csv."""
    train_models(run, workers, [(TRAINED, run.unit)])
    unseen = folder / "unseen"
    unseen.mkdir(exist_ok=True)
    for n, piece in enumerate(run.corpus.unseen):
        files.write(unseen / f"{n:03}.txt", piece.decode())
    missing = [(seed, commands) for seed in run.seeds if (commands := unmeasured(folder, seed))]
    if missing:
        with Bar(len(missing)).start("measuring models") as bar:
            jobs = [(run, seed, str(folder), commands) for seed, commands in missing]
            workers.map(measure_job, jobs, lambda job, message: bar.step())
    rows = [row for seed in run.seeds for path in measured(folder, seed) for row in rows_of(path, seed)]
    write_csv(folder / "results.csv", COLUMNS, rows)


def measured(folder: Path, seed: int) -> list[Path]:
    """Returns the results of ``flashrope loss`` on one model, oldest first. There are several if schemes were added to
    COMMANDS after the first run."""
    folders = [folder / f"s{seed}", *sorted(folder.glob(f"s{seed}-*"), key=lambda path: int(path.name.split("-")[1]))]
    return [path / "loss.json" for path in folders if (path / "loss.json").exists()]


def unmeasured(folder: Path, seed: int) -> list[str]:
    """Returns the schemes in COMMANDS that were neither measured nor refused for this model."""
    seen: set[str] = set()
    for path in measured(folder, seed):
        found = json.loads(path.read_text(encoding="utf-8"))
        seen |= {row["scheme"] for row in found["rows"]} | set(found.get("left_out", ()))
    return [command for command in COMMANDS if SCHEMES[command].label not in seen]


def measure_job(run: Run, seed: int, folder: str, commands: Sequence[str], progress: Callable) -> None:
    """Runs ``flashrope loss`` with the schemes in ``commands`` on one model, in a separate process."""
    checkpoint = Path(folder, "checkpoints", f"s{seed}")
    shutil.rmtree(checkpoint, ignore_errors=True)  # an interrupted run may have left it
    checkpoint.parent.mkdir(exist_ok=True)
    export(run.model_path(TRAINED, run.unit, seed), checkpoint)
    lengths = [str(multiple * run.unit) for multiple in MULTIPLES]
    arguments = ["--model", str(checkpoint), "--text", f"{folder}/unseen", "--lengths", *lengths, "--repeat"]
    arguments += ["--schemes", *commands, "--train-length", str(run.unit), "--windows", str(run.preset.samples)]
    arguments += ["--seed", str(seed), "--batch", "4", "--threads", "1", "--device", str(run.device)]
    earlier = len(measured(Path(folder), seed))
    out = Path(folder, f"s{seed}-{earlier + 1}" if earlier else f"s{seed}")
    done = subprocess.run(
        [sys.executable, "-m", "flashrope", "loss", *arguments, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"flashrope loss, seed {seed}: {done.stderr.strip()[-2000:]}")
    progress("done")


def rows_of(path: Path, seed: int) -> list[list]:
    """Returns the rows of one loss.json. A row has the columns COLUMNS."""
    found = json.loads(path.read_text(encoding="utf-8"))
    length = found["train_length"]
    names = {
        SCHEMES[command].label: resolve(name.format(growth=MULTIPLES[-1]), length)[0]
        for command, name in COMMANDS.items()
    }
    rows = []
    for row in found["rows"]:
        windows, repeats = row["windows"], row["context"] == "repeated"
        if repeats and row["length"] == length:
            continue  # nothing is repeated at the shortest length
        value = math.fsum(windows) / len(windows)
        task = REPEATED if repeats else TEXT
        rows.append([names[row["scheme"]], TRAINED, length, seed, task, row["length"], value, len(windows)])
    return rows
