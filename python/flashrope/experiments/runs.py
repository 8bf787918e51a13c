"""A run directory: one configuration, its trained models, and what was measured on them. Whatever is there already is
kept.

settings.json                       the configuration that everything in the directory belongs to
split.json                          which files were trained on and which were not
models/<encoding>-L<length>-s<seed>.safetensors     and .state while it is trained
<experiment>/cells/*.json           one per scheme, training length and seed
<experiment>/results.csv, results.json, *.png, table.md
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import __version__, attention
from ..info import hardware
from . import data, files, report, tasks
from .files import replacing
from .model import ModelConfig
from .options import BadInput
from .patterns import pattern, vaf
from .tasks import Result, Subject
from .train import TrainConfig, train
from .workers import Workers
from .zoo import Defaults, ZooModel, scheme

LONGEST = 32  # times the preset's training length: what the text must hold, so that all experiments share one split
COLUMNS = ("scheme", "trained_with", "train_length", "seed", "task", "at", "value", "samples")
STATES = 20  # times that a training run is kept on the way
OBSERVED = ("rope", "hope")  # encodings whose variance accounted for is kept over training


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one run. Lengths are in bytes; ``batch`` counts windows of ``train_length``.

    practice is the share of the batch that is practice for the tasks, without which models this small learn none of
    them; samples is the number of unseen samples of every measurement, seeds that of models per encoding.
    """

    width: int
    layers: int
    heads: int
    train_length: int
    batch: int
    steps: int
    learning_rate: float
    warmup: float
    practice: float
    samples: int
    seeds: int
    mlp_width: int = 0
    micro_batch: int = 0
    beta2: float = 0.95

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.width, self.layers, self.heads, self.mlp_width)

    def training(self, length: int, seed: int) -> TrainConfig:
        """Of a model read at another length than the preset's, with as many bytes per step."""
        batch = max(self.batch * self.train_length // length, 1)
        micro = max(self.micro_batch * self.train_length // length, 1) if self.micro_batch else 0
        return TrainConfig(
            self.steps,
            batch,
            length,
            self.learning_rate,
            warmup=self.warmup,
            betas=(0.9, self.beta2),
            seed=seed,
            micro_batch=micro,
        )


PRESETS = {
    "tiny": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=64,
        batch=16,
        steps=500,
        learning_rate=5e-3,
        warmup=0.1,
        practice=0.5,
        samples=32,
        seeds=1,
    ),
    "cpu": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=64,
        batch=16,
        steps=1600,
        learning_rate=5e-3,
        warmup=0.1,
        practice=0.75,
        samples=200,
        seeds=3,
    ),
    "small": Preset(
        width=320,
        layers=8,
        heads=5,
        train_length=512,
        batch=64,
        steps=20_000,
        learning_rate=1e-3,
        warmup=0.05,
        practice=0.0,
        samples=500,
        seeds=3,
    ),
    # HoPE's appendix A; bytes instead of its 32,000 tokens, bfloat16 instead of float16
    "125m": Preset(
        width=768,
        layers=12,
        heads=12,
        train_length=512,
        batch=512,
        steps=50_000,
        learning_rate=3e-4,
        warmup=0.04,
        practice=0.0,
        samples=1000,
        seeds=3,
        mlp_width=2688,
        micro_batch=64,
        beta2=0.999,
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A preset on a text, in a directory."""

    out: Path
    preset: Preset
    preset_name: str
    corpus: data.Corpus
    device: torch.device
    impl: str | None
    processes: int  # 0 works here, one job after the other
    threads: int  # of each
    first_seed: int = 0
    defaults: Defaults = Defaults()

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.preset.seeds)

    @property
    def unit(self) -> int:
        return self.preset.train_length

    def model_path(self, trained: str, length: int, seed: int) -> Path:
        return self.out / "models" / f"{trained}-L{length}-s{seed}.safetensors"

    def identity(self) -> dict:
        """What may not change from one use of the directory to the next."""
        record = self.corpus.record()
        text = {"name": record["text"], **{part: record[part]["sha256"] for part in ("train", "unseen")}}
        sizes = {key: value for key, value in dataclasses.asdict(self.preset).items() if key != "seeds"}
        return {
            "preset": self.preset_name,
            **sizes,
            "base": self.defaults.base,
            "text": text,
            "device": self.device.type,
        }

    def open(self) -> None:
        """Makes the directory, or checks that it holds this configuration. Raises BadInput."""
        path, identity = self.out / "settings.json", self.identity()
        try:
            if path.exists():
                there = json.loads(path.read_text(encoding="utf-8"))
                differing = [
                    f"{key} {there.get(key)!r} there, {identity.get(key)!r} here"
                    for key in {**there, **identity}
                    if there.get(key) != identity.get(key)
                ]
                if differing:
                    raise BadInput(
                        f"--out: {self.out} holds another configuration ({'; '.join(differing)}); choose another "
                        "directory"
                    )
                return
            if self.out.exists() and any(self.out.iterdir()):
                raise BadInput(f"--out: {self.out} holds other files and no settings.json; choose another directory")
            (self.out / "models").mkdir(parents=True, exist_ok=True)
            files.write(self.out / "split.json", json.dumps(self.corpus.record(), indent=1))
            files.write(path, json.dumps(identity, indent=1))
        except json.JSONDecodeError:
            raise BadInput(f"--out: {path} is not JSON; choose another directory") from None
        except OSError as error:
            raise BadInput(f"--out: cannot write to {self.out} ({error.strerror})") from None

    def provenance(self) -> dict:
        """Where the figures of one use of the directory come from."""
        return {
            "settings": self.identity(),
            "seeds": list(self.seeds),
            "revision": revision(),
            "hardware": hardware(self.device),
            "impl": self.impl,
            "flashrope": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def workers(self) -> Workers:
        return Workers(self.processes, self.threads)


def revision() -> str:
    """The checkout's commit, with -dirty where files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- training
def train_models(run: Run, workers: Workers, wanted: Sequence[tuple[str, int]]) -> None:
    """Trains what is missing of the models (encoding, training length), for every seed."""
    missing = [
        (trained, length, seed)
        for trained, length in dict.fromkeys(wanted)
        for seed in run.seeds
        if not run.model_path(trained, length, seed).exists()
    ]
    if not missing:
        return
    jobs = [(run, trained, length, seed) for trained, length, seed in missing]
    steps = [0] * len(jobs)

    def progress(job, message):
        steps[job] = message[0]
        bars.update(0, sum(steps), message[1])

    with report.Bars([f"training {len(jobs)} models, steps"], len(jobs) * run.preset.steps) as bars:
        workers.map(train_job, jobs, progress)


def train_job(run: Run, trained: str, length: int, seed: int, progress: Callable) -> None:
    """One model from the seed's weights on the seed's batches. It goes on from where it was interrupted."""
    path, preset = run.model_path(trained, length, seed), run.preset
    model, rotary = untrained(run, trained, length, seed), scheme(trained, preset.config, length, run.defaults).training
    training = preset.training(length, seed)
    batches = functools.partial(
        tasks.batches, run.corpus, training.batch_size, length, seed, preset.practice, run.device
    )
    state, observe = path.with_suffix(".state"), observer(run, trained, length, seed, model)

    def report_and_observe(step, loss):
        progress((step, loss))
        observe(step, loss)

    train(
        model,
        rotary,
        lambda done: batches(start=done),
        training,
        functools.partial(attention, impl=run.impl),
        report_and_observe,
        state,
        max(preset.steps // STATES, 1),
    )
    save_model(path, model, trained, length)
    state.unlink(missing_ok=True)


def observer(run: Run, trained: str, length: int, seed: int, model: ZooModel) -> Callable[[int, float], None]:
    """A function of (step, loss) that keeps the model's variance accounted for at some ten steps beside its weights."""
    if trained not in OBSERVED:
        return lambda step, loss: None
    path = _observed_path(run, trained, length, seed)
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    steps = {max(run.preset.steps * tenth // 10, 1) for tenth in range(11)}
    rotary = scheme(trained, run.preset.config, length, run.defaults).training

    def observe(step: int, loss: float) -> None:
        if step in steps:
            it = pattern(
                model, rotary, length, min(run.preset.samples, 64), seed, functools.partial(attention, impl=run.impl)
            )
            kept[str(step)] = vaf(it.mean_components, it.mean_overall).tolist()
            files.write(path, json.dumps(kept))

    return observe


def observed(run: Run, trained: str, length: int) -> dict[int, list[float]]:
    """Variance accounted for of every component by step, of the first seed's model."""
    kept = json.loads(_observed_path(run, trained, length, run.first_seed).read_text(encoding="utf-8"))
    return {int(step): kept[step] for step in sorted(kept, key=int)}


def _observed_path(run: Run, trained: str, length: int, seed: int) -> Path:
    return run.model_path(trained, length, seed).with_suffix(".vaf.json")


def untrained(run: Run, trained: str, length: int, seed: int) -> ZooModel:
    torch.manual_seed(seed)
    return ZooModel(run.preset.config, trained, length).to(run.device)


def save_model(path: Path, model: ZooModel, trained: str, length: int) -> None:
    from safetensors.torch import save_file

    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(path) as partial:
        save_file(
            weights,
            partial,
            metadata={
                "config": json.dumps(dataclasses.asdict(model.config)),
                "trained": trained,
                "train_length": str(length),
                "revision": revision(),
            },
        )


def load_model(path: Path, device: torch.device | str = "cpu") -> ZooModel:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        metadata, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    model = ZooModel(ModelConfig(**json.loads(metadata["config"])), metadata["trained"], int(metadata["train_length"]))
    model.to(device).load_state_dict(weights)
    return model


# ---- measuring
@dataclasses.dataclass(frozen=True)
class Cell:
    """What one job measures: a scheme on the model of one training length and seed. measures maps a task to the
    multiples of the preset's training length it is measured at, or None for the task's own."""

    scheme: str
    length: int
    seed: int
    measures: tuple[tuple[str, tuple[float, ...] | None], ...]

    @property
    def name(self) -> str:
        return f"{self.scheme}-L{self.length}-s{self.seed}.json"


def measure_cells(run: Run, workers: Workers, folder: Path, cells: Sequence[Cell]) -> list[list]:
    """Measures what is missing; returns the rows of all cells, in their order, as COLUMNS."""
    store = folder / "cells"
    store.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not (store / cell.name).exists()]
    done = [0]

    def count(job, message):
        done[0] += 1
        bars.update(0, done[0])

    if missing:
        with report.Bars(["measuring, schemes"], len(missing)) as bars:
            workers.map(measure_job, [(run, cell, str(store / cell.name)) for cell in missing], count)
    return [row for cell in cells for row in json.loads((store / cell.name).read_text(encoding="utf-8"))]


def measure_job(run: Run, cell: Cell, path: str, progress: Callable) -> None:
    used = scheme(cell.scheme, run.preset.config, cell.length, run.defaults)
    model = load_model(run.model_path(used.trained, cell.length, cell.seed), run.device).eval()
    subject = Subject(
        model,
        used,
        run.corpus.unseen,
        run.unit,
        run.preset.samples,
        cell.seed,
        run.device,
        functools.partial(attention, impl=run.impl),
        1 << (18 if run.device.type == "cuda" else 14),
    )
    rows = []
    for task, multiples in cell.measures:
        results: list[Result] = tasks.MEASURES[task](subject, *([multiples] if multiples else []))
        rows += [
            [cell.scheme, used.trained, cell.length, cell.seed, *dataclasses.astuple(result)] for result in results
        ]
    files.write(Path(path), json.dumps(rows))
    progress("done")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    shown = ([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    files.write(path, files.csv_text(columns, shown))


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
