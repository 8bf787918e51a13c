"""A run directory: one configuration, its trained models, and the measurements on them. Existing files are kept.

settings.json                       the configuration of everything in the directory
split.json                          which files were trained on and which were not
models/<encoding>-L<length>-s<seed>.safetensors     and .losses.csv; .state during training
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

from flashrope import __version__, attention
from flashrope.demo import data, files, report
from flashrope.demo.files import replacing
from flashrope.demo.model import ModelConfig
from flashrope.demo.options import BadInput
from flashrope.demo.train import TrainConfig, train
from flashrope.demo.workers import Workers
from flashrope.info import hardware

from . import copying, tasks
from .patterns import pattern, vaf
from .tasks import Result, Subject
from .zoo import Defaults, ZooModel, scheme

LONGEST = 32  # longest window in training lengths of the preset; one value, so that all experiments share one split
COLUMNS = ("scheme", "trained_with", "train_length", "seed", "task", "at", "value", "samples")
STATES = 20  # number of times that a training run saves its state
CURVE = 100  # points of a training curve
MEASURES: dict[str, Callable[..., list[Result]]] = {**tasks.MEASURES, "copying": copying.measure}
TEXT, COPYING = "text", "copying"  # what models are trained on
OBSERVED = ("rope", "hope")  # encodings whose variance accounted for is recorded during training


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one run. Lengths are in bytes.

    Attributes:
        batch: windows of ``train_length`` per step.
        practice: share of the batch that is practice for the tasks; models this small learn none of them without it.
        samples: number of unseen samples of every measurement.
        seeds: number of models per encoding.
        data: what the models are trained on: TEXT, or COPYING alone.
        base: of the rotary frequencies.
        vocab_size: 256, bytes, for models that read text.
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
    data: str = TEXT
    base: float = 10_000.0
    vocab_size: int = 256

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.width, self.layers, self.heads, self.mlp_width, self.vocab_size)

    def training(self, length: int, seed: int) -> TrainConfig:
        """The training of a model at this length, with as many bytes per step as at the preset's."""
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
    "copying": Preset(
        width=64,
        layers=2,
        heads=2,
        train_length=128,
        batch=32,
        steps=1500,
        learning_rate=4e-3,
        warmup=0.05,
        practice=0.0,
        samples=200,
        seeds=5,
        beta2=0.98,
        data=COPYING,
        base=200.0,
        vocab_size=copying.LETTERS,
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
    corpus: data.Corpus | None  # None: the models read no text
    device: torch.device
    impl: str | None
    processes: int  # 0: jobs run in this process, one after the other
    threads: int  # of each process
    first_seed: int = 0

    @property
    def defaults(self) -> Defaults:
        return Defaults(base=self.preset.base)

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.preset.seeds)

    @property
    def unit(self) -> int:
        return self.preset.train_length

    def model_path(self, trained: str, length: int, seed: int) -> Path:
        return self.out / "models" / f"{trained}-L{length}-s{seed}.safetensors"

    def identity(self) -> dict:
        """The configuration that must be the same each time the directory is used."""
        text = None
        if self.corpus:
            record = self.corpus.record()
            text = {"name": record["text"], **{part: record[part]["sha256"] for part in ("train", "unseen")}}
        sizes = {key: value for key, value in dataclasses.asdict(self.preset).items() if key != "seeds"}
        return {"preset": self.preset_name, **sizes, "text": text, "device": self.device.type}

    def open(self) -> None:
        """Create the directory, or check that it has this configuration. Raises BadInput."""
        path, identity = self.out / "settings.json", self.identity()
        try:
            if path.exists():
                existing = json.loads(path.read_text(encoding="utf-8"))
                differences = [
                    f"{key} is {existing.get(key)!r}, not {identity.get(key)!r}"
                    for key in {**existing, **identity}
                    if existing.get(key) != identity.get(key)
                ]
                if differences:
                    raise BadInput(
                        f"--out: {self.out} has another configuration ({'; '.join(differences)}); choose another "
                        "directory"
                    )
                return
            if self.out.exists() and any(self.out.iterdir()):
                raise BadInput(f"--out: {self.out} has other files and no settings.json; choose another directory")
            (self.out / "models").mkdir(parents=True, exist_ok=True)
            if self.corpus:
                files.write(self.out / "split.json", json.dumps(self.corpus.record(), indent=1))
            files.write(path, json.dumps(identity, indent=1))
        except json.JSONDecodeError:
            raise BadInput(f"--out: {path} is not JSON; choose another directory") from None
        except OSError as error:
            raise BadInput(f"--out: cannot write to {self.out} ({error.strerror})") from None

    def provenance(self) -> dict:
        """Configuration, revision, hardware and versions, for results.json."""
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
    """The commit of the checkout, with -dirty if files differ from it; "unknown" outside a checkout."""
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
    """Train those of the models (encoding, training length) that are missing, for every seed."""
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
    """Train one model, with weights and batches from the seed. Resumes if it was interrupted."""
    path, preset = run.model_path(trained, length, seed), run.preset
    model, rotary = untrained(run, trained, length, seed), scheme(trained, preset.config, length, run.defaults).training
    training = preset.training(length, seed)
    if preset.data == COPYING:
        size = training.batch_size * length
        batches = functools.partial(copying.batches, size, length, seed, preset.steps, run.device)
    else:
        batches = functools.partial(
            tasks.batches, run.corpus, training.batch_size, length, seed, preset.practice, run.device
        )
    state, observe = path.with_suffix(".state"), observer(run, trained, length, seed, model)

    def report_and_observe(step, loss):
        progress((step, loss))
        observe(step, loss)

    result = train(
        model,
        rotary,
        lambda done: batches(start=done),
        training,
        functools.partial(attention, impl=run.impl),
        report_and_observe,
        state,
        max(preset.steps // STATES, 1),
    )
    write_csv(path.with_suffix(".losses.csv"), ("step", "loss"), curve(result.losses))
    save_model(path, model, trained, length)
    state.unlink(missing_ok=True)


def curve(losses: Sequence[float]) -> list[tuple[int, float]]:
    """At most CURVE points of a training curve: the last step of each part, and the mean loss of the part."""
    size = -(-len(losses) // CURVE)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [(min((at + 1) * size, len(losses)), sum(part) / len(part)) for at, part in enumerate(parts)]


def observer(run: Run, trained: str, length: int, seed: int, model: ZooModel) -> Callable[[int, float], None]:
    """A function of (step, loss) that saves the variance accounted for next to the model, at about ten steps."""
    if trained not in OBSERVED or run.preset.data != TEXT:
        return lambda step, loss: None
    path = _observed_path(run, trained, length, seed)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    steps = {max(run.preset.steps * tenth // 10, 1) for tenth in range(11)}
    rotary = scheme(trained, run.preset.config, length, run.defaults).training

    def observe(step: int, loss: float) -> None:
        if step in steps:
            measured = pattern(
                model, rotary, length, min(run.preset.samples, 64), seed, functools.partial(attention, impl=run.impl)
            )
            found[str(step)] = vaf(measured.mean_components, measured.mean_overall).tolist()
            files.write(path, json.dumps(found))

    return observe


def observed(run: Run, trained: str, length: int) -> dict[int, list[float]]:
    """Variance accounted for by every component, by training step, for the model of the first seed."""
    found = json.loads(_observed_path(run, trained, length, run.first_seed).read_text(encoding="utf-8"))
    return {int(step): found[step] for step in sorted(found, key=int)}


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
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is not a mapping
    model = ZooModel(ModelConfig(**json.loads(metadata["config"])), metadata["trained"], int(metadata["train_length"]))
    model.to(device).load_state_dict(weights)
    return model


# ---- measuring
@dataclasses.dataclass(frozen=True)
class Cell:
    """One measuring job: a scheme on the model of one training length and seed. ``measures`` are pairs of a task and
    the multiples of the preset's training length to measure it at, None for the task's own."""

    scheme: str
    length: int
    seed: int
    measures: tuple[tuple[str, tuple[float, ...] | None], ...]

    @property
    def name(self) -> str:
        return f"{self.scheme}-L{self.length}-s{self.seed}.json"


def measure_cells(run: Run, workers: Workers, folder: Path, cells: Sequence[Cell]) -> list[list]:
    """Measure the cells that are missing. Returns the rows (COLUMNS) of all cells, in their order."""
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
        run.corpus.unseen if run.corpus else (),
        run.unit,
        run.preset.samples,
        cell.seed,
        run.device,
        functools.partial(attention, impl=run.impl),
        1 << (18 if run.device.type == "cuda" else 14),
    )
    rows = []
    for task, multiples in cell.measures:
        results: list[Result] = MEASURES[task](subject, *([multiples] if multiples else []))
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
