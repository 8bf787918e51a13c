"""``flashrope demo``: trains two small language models, one with RoPE and one with HoPE, and measures their loss beyond
the training length.

Both models start from the same weights and see the same batches. For the measurement, only the scheme in the call of
``flashrope.attention`` changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ... import Rotary, __version__
from ...console import files, options, report
from ...console.hardware import hardware
from ...console.options import BadInput, cores, need
from ...console.progress import Bar
from ...schemes.catalogue import SCHEMES, Lengths, apply_options, describe_options
from . import data, table
from .evaluate import ContextLoss, loss_by_context
from .model import LanguageModel, ModelConfig, load_checkpoint, save_checkpoint
from .plot import plot_losses
from .presets import CHECKPOINTS, COMPARED, PRESETS, TIMES, Preset
from .train import TrainConfig, Trained, train
from .workers import Workers, steps_of_jobs

TIMED = 20.0  # seconds; in a shorter training, start-up affects the speed more than the scheme does
LEAKY_FACTOR = 16.0  # Leaky ReRoPE: beyond the window, each further token adds 1/16 to the distance
MULTIPLES = (1, 2, 4, 8)  # context lengths, as multiples of the training length
OUTPUTS = ("split.json", *CHECKPOINTS.values(), "losses.csv", "losses.md", "losses.png")


@dataclasses.dataclass(frozen=True)
class DemoScheme:
    """One row of the table. ``trained_with`` names the model on which the scheme runs. ``words`` describes its
    options."""

    name: str
    trained_with: str
    log_n: bool
    rotary: Rotary
    words: str = ""


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The settings that follow from the options: what to train and measure, and where."""

    config: ModelConfig
    training: TrainConfig
    windows: int
    schemes: tuple[DemoScheme, ...]
    left_out: dict[str, str]  # {scheme: reason} of schemes that are left out
    device: torch.device
    threads: int
    processes: int  # 0: the models are trained in this process, one after the other

    @property
    def context_lengths(self) -> list[int]:
        return [multiple * self.training.train_length for multiple in MULTIPLES]

    @property
    def targets(self) -> int:
        """Returns how many bytes of every window are compared by their loss, counted from its end: half the training
        length, as in the HoPE paper."""
        return self.training.train_length // 2


def run(args: argparse.Namespace) -> int:
    out, start = Path(args.out), time.perf_counter()
    try:
        _demo(args, out, start)
    except BadInput as error:
        print(f"flashrope demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for name in OUTPUTS:  # a worker that was ended does not remove its file
            (out / f"{name}.partial").unlink(missing_ok=True)
        raise
    return 0


def _demo(args: argparse.Namespace, out: Path, start: float) -> None:
    files.check_folder(args.out, OUTPUTS[1:], args.overwrite)  # an interrupted run leaves only the first of OUTPUTS
    settings = resolve(args)
    window = settings.context_lengths[-1] + 1
    corpus = data.from_path(args.text, window) if args.text else data.standard_library(window)
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.write(out / "split.json", json.dumps(corpus.record(), indent=1))
    except OSError as error:
        raise BadInput(f"--out: cannot write to {out} ({error.strerror})") from None
    facts = _facts(args, settings, corpus)
    print(report.lines(facts | {"time": expected_time(args, settings)}), flush=True)

    windows = data.unseen_windows(corpus.unseen, window, settings.windows, settings.training.seed)
    with Workers(settings.processes, max(settings.threads // max(settings.processes, 1), 1)) as workers:
        trained = _train(workers, settings, corpus.train, out)
        losses = _evaluate(workers, settings, windows, out)

    rows = [
        table.DemoRow(s.name, s.trained_with, s.log_n, tuple(of))
        for s, of in zip(settings.schemes, losses, strict=True)
    ]
    facts["trained"] = trained_text(trained, comparable=settings.device.type == "cuda" or settings.processes > 0)
    facts["losses"] = (
        f"mean over {len(windows)} windows of the last {settings.targets} bytes of each, "
        f"{len(windows) * settings.targets:,} bytes in total, the same at every context length"
    )
    print(f"\n{table.aligned(rows)}\n\n{report.lines(facts, 'trained', 'losses')}")
    files.write(out / "losses.csv", table.csv_text(rows))
    plot_losses(out / "losses.png", rows, settings.training.train_length)
    facts["time"] = (
        f"{time.perf_counter() - start:.0f} s without loading torch; "
        f"{sum(os.times()[:4]):.0f} s of CPU time in all processes"
    )
    files.write(out / "losses.md", table.markdown(rows, facts))
    print(f"written to {out}: {', '.join(OUTPUTS)}\n{report.lines(facts, 'time')}")
    print("\n".join(["", "next:", *(f"  {command}" for command in next_commands(out))]))


def next_commands(out: Path) -> list[str]:
    """Returns commands to run next with the models."""
    rope, hope = (shlex.quote(str(out / name)) for name in CHECKPOINTS.values())
    return [
        f"flashrope generate --model {rope} --scheme rerope --prompt TEXT",
        f"flashrope generate --model {hope} --prompt TEXT",
        f"flashrope loss --model {rope} --text YOUR_FILE --schemes stock rerope yarn",
    ]


def trained_text(trained: Sequence[Trained], comparable: bool) -> str:
    """Returns the loss at the end of each training, and the speeds if both trainings took long enough for a comparison.

    comparable: whether other processes slow down both trainings alike. On a CPU this needs trainings that run at the
        same time.
    """
    timed = comparable and min(each.seconds for each in trained) >= TIMED
    return "; ".join(
        f"{name} {each.loss:.3f} nats per byte over the last tenth"
        + (f", {each.tokens_per_second:,.0f} tokens/s" if timed else "")
        for name, each in zip(("RoPE", "HoPE"), trained, strict=True)
    ) + (" (1 token = 1 byte)" if timed else "")


def resolve(args: argparse.Namespace) -> DemoSettings:
    """Returns the settings for these options. Raises BadInput."""
    need("matplotlib", "safetensors")
    device = options.device(args.device)
    preset = PRESETS[preset_name(args, device)]
    preset = dataclasses.replace(
        preset,
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Preset) if hasattr(args, field.name)},
    )
    if preset.train_length < 16:
        raise BadInput(f"--train-length: expected at least 16, got {preset.train_length}")
    if not preset.learning_rate > 0:
        raise BadInput(f"--learning-rate: expected a positive number, got {preset.learning_rate}")
    window = args.window or preset.train_length // 2
    try:
        config = ModelConfig(preset.width, preset.layers, preset.heads)
        schemes, left_out = compared(config.head_dim, preset.train_length, window, args.schemes)
    except ValueError as error:
        raise BadInput(str(error)) from None
    threads = args.threads or min(cores(), len(CHECKPOINTS))
    training = TrainConfig(preset.steps, preset.batch, preset.train_length, preset.learning_rate, seed=args.seed)
    return DemoSettings(
        config,
        training,
        preset.windows,
        schemes,
        left_out,
        device,
        threads,
        processes=len(CHECKPOINTS) if device.type == "cpu" and threads > 1 else 0,
    )


def preset_name(args: argparse.Namespace, device: torch.device) -> str:
    return args.preset or ("gpu" if device.type == "cuda" else "cpu")


def expected_time(args: argparse.Namespace, settings: DemoSettings) -> str:
    """Returns a text that says how long the run takes, if the time is known in advance."""
    name = preset_name(args, settings.device)
    changed = [field.name for field in dataclasses.fields(Preset) if hasattr(args, field.name)]
    if changed:
        return f"preset {name} with other sizes; the time left is shown from the second step on"
    return f"preset {name}: {TIMES[name]}"


def compared(
    head_dim: int, train_length: int, window: int, names: Sequence[str] = COMPARED
) -> tuple[tuple[DemoScheme, ...], dict[str, str]]:
    """Returns the rows of the table, and {name: reason} for the schemes that cannot be fitted to these lengths.

    The rows are RoPE, HoPE, and the named schemes on RoPE's model. If ReRoPE is named, it is also run on HoPE's model.
    Each row appears twice: without log n, and with log n scaling, whose factor is at least 1.
    """
    rope, hope = Rotary.rope(head_dim), Rotary.hope(head_dim, train_length)
    lengths = Lengths(train_length, MULTIPLES[-1] * train_length, window, LEAKY_FACTOR)
    rotaries, words, left_out = {"RoPE": rope, "HoPE": hope}, {}, {}
    for scheme in {SCHEMES[name].method: SCHEMES[name] for name in names}.values():
        name = f"{scheme.method}-w{window}" if scheme.reads_window else scheme.method
        try:
            options = scheme.fit(lengths)
            rotaries[name], words[name] = apply_options(rope, options), describe_options(options)
            if scheme.method == SCHEMES["rerope"].method:
                rotaries[f"HoPE, {name}"] = apply_options(hope, options)
        except ValueError as error:
            left_out[name] = str(error)
    schemes = []
    for name, rotary in rotaries.items():
        trained_with = "hope" if name.startswith("HoPE") else "rope"
        schemes.append(DemoScheme(name, trained_with, False, rotary, words.get(name, "")))
        schemes.append(DemoScheme(f"{name} + log n", trained_with, True, rotary.log_n(train_length)))
    return tuple(schemes), left_out


def _train(workers: Workers, settings: DemoSettings, text: bytes, out: Path) -> list[Trained]:
    own = [scheme for scheme in settings.schemes if scheme.name in ("RoPE", "HoPE")]
    jobs = [(settings, scheme.rotary, text, out / CHECKPOINTS[scheme.trained_with]) for scheme in own]
    with Bar(len(jobs) * settings.training.steps).start("training with RoPE and HoPE") as bar:
        return workers.map(train_job, jobs, steps_of_jobs(bar))


def _evaluate(workers: Workers, settings: DemoSettings, windows: list[bytes], out: Path) -> list[list[ContextLoss]]:
    jobs = [(settings, scheme.rotary, windows, out / CHECKPOINTS[scheme.trained_with]) for scheme in settings.schemes]
    with Bar(len(jobs)).start("measuring on unseen files") as bar:
        return workers.map(evaluate_job, jobs, lambda job, message: bar.step())


def train_job(settings: DemoSettings, rotary: Rotary, text: bytes, path: Path, progress) -> Trained:
    """Trains one model and saves it to ``path``. The seed determines its weights and batches."""
    training = settings.training
    torch.manual_seed(training.seed)
    model = LanguageModel(settings.config).to(settings.device)
    batches = data.random_batches(text, training.batch_size, training.train_length, training.seed, settings.device)
    trained = train(model, rotary, batches, training, progress=lambda *message: progress(message))
    save_checkpoint(path, model, rotary, training.train_length)
    return trained


def evaluate_job(
    settings: DemoSettings, rotary: Rotary, windows: list[bytes], path: Path, progress
) -> list[ContextLoss]:
    """Returns the losses of the model saved at ``path`` under the scheme ``rotary``."""
    model, _ = load_checkpoint(path, settings.device)
    losses = loss_by_context(
        model,
        rotary,
        data.as_tokens(windows, settings.device),
        settings.context_lengths,
        settings.targets,
        1 << (18 if settings.device.type == "cuda" else 14),
    )
    progress("done")
    return losses


def _facts(args: argparse.Namespace, settings: DemoSettings, corpus: data.Corpus) -> dict[str, str]:
    config, training = settings.config, settings.training
    parameters = sum(p.numel() for p in LanguageModel(config).parameters())
    hope = next(scheme.rotary for scheme in settings.schemes if scheme.name == "HoPE")
    rotated = sum(f > 0 for f in hope.frequencies)
    processes = f"{settings.processes} processes, " if settings.processes else ""
    return {
        "command": args.command_line,
        "text": f"{corpus.name}; {len(corpus.train):,} bytes to train on ({len(corpus.train_files)} files), "
        f"{sum(map(len, corpus.unseen)):,} unseen ({len(corpus.unseen_files)} files)",
        "models": f"{parameters:,} parameters, layers {config.layers}, width {config.width}, heads {config.heads} of "
        f"{config.head_dim} channels; both start from the same weights and see the same batches",
        "schemes": f"HoPE rotates {rotated} of {config.head_dim // 2} pairs; rows without HoPE in their name run on "
        "the model that was trained with RoPE: "
        + "".join(f"{scheme.name}: {scheme.words}; " for scheme in settings.schemes if scheme.words)
        + f"log n scales the query by max(1, ln(i + 1) / ln({training.train_length})) at evaluation only",
        **({"left out": "; ".join(map(": ".join, settings.left_out.items()))} if settings.left_out else {}),
        "training": f"{training.steps:,} steps of {training.batch_size * training.train_length:,} bytes, training "
        f"length {training.train_length} bytes, peak learning rate {training.learning_rate:g}, seed {training.seed}",
        "machine": f"{hardware(settings.device)}, {processes}{settings.threads} thread"
        f"{'s' if settings.threads != 1 else ''} in total",
        "software": f"flashrope {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
