"""Trains the models of a run and writes their files."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from flashrope import Rotary, attention
from flashrope.console import files
from flashrope.console.files import replacing
from flashrope.console.progress import Bar
from flashrope.lab.small_models.model import ModelConfig
from flashrope.lab.small_models.train import train
from flashrope.lab.small_models.workers import Workers, steps_of_jobs

from . import copying, few_shot, passkey, tasks
from .distributed import first_says
from .patterns import frequent, pattern, repeated, vaf
from .presets import COPYING, FEW_SHOT, PASSKEY, TEXT
from .runs import Run, revision, write_csv
from .tokens import TokenCorpus
from .training_curves import log_of
from .zoo import LLAMA, Defaults, ZooModel, scheme

STATES = 20  # how often a training run saves its state
CURVE = 100  # number of points of a training curve
OBSERVED = ("rope", "hope")  # encodings for which training records the variance that each pair accounts for


def batches_of(run: Run, rows: int, length: int, seed: int) -> Callable:
    """Returns a function that takes start=step and yields the batches of the preset's text or task from that step
    on."""
    if run.preset.data == TEXT:
        return functools.partial(tasks.batches, run.corpus, rows, length, seed, run.device)
    sizes = rows * length, length, seed, run.preset.steps, run.device
    if run.preset.data == COPYING:
        return functools.partial(copying.batches, *sizes)
    task = {FEW_SHOT: few_shot, PASSKEY: passkey}[run.preset.data]
    return functools.partial(task.batches, run.corpus, *sizes)


def train_models(run: Run, workers: Workers, wanted: Sequence[tuple[str, int]]) -> None:
    """Trains those of the wanted models that do not exist yet, for every seed. wanted: (encoding, training length) of
    each model."""
    missing = first_says(
        [
            (trained, length, seed)
            for trained, length in dict.fromkeys(wanted)
            for seed in run.seeds
            if not run.model_path(trained, length, seed).exists()
        ]
    )
    if not missing:
        return
    jobs = [(run, trained, length, seed) for trained, length, seed in missing]
    if run.ranks.rank:
        for job in jobs:
            train_job(*job, lambda message: None)
        return

    with Bar(len(jobs) * run.preset.steps).start(f"training {len(jobs)} models") as bar:
        workers.map(train_job, jobs, steps_of_jobs(bar))


def train_job(run: Run, trained: str, length: int, seed: int, progress: Callable) -> None:
    """Trains one model, with initial weights and batches from the seed. Resumes an interrupted training. With several
    ranks, all ranks call this function, and the first rank writes the files."""
    path, preset = run.model_path(trained, length, seed), run.preset
    model, rotary = untrained(run, trained, length, seed), scheme(trained, preset.config, length, run.defaults).training
    training = dataclasses.replace(preset.training(length, seed), compile=run.compile)
    batches = batches_of(run, training.batch_size, length, seed)
    state, observe = path.with_suffix(".state"), observer(run, trained, length, seed, model)
    log = log_of(run, path, training)

    def report_and_observe(step, loss):
        progress((step, loss))
        observe(step, loss)
        if log:
            log(step, loss)

    result = train(
        model,
        rotary,
        lambda done: batches(start=done),
        training,
        functools.partial(attention, impl=run.impl),
        report_and_observe,
        state,
        max(preset.steps // STATES, 1),
        *([run.ranks] if run.ranks.world > 1 else []),
    )
    if log:
        log.close()
    if run.ranks.rank:
        return
    write_csv(path.with_suffix(".losses.csv"), ("step", "loss"), curve(result.losses))
    save_model(path, model, trained, length, run.defaults)
    state.unlink(missing_ok=True)


def curve(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Returns the training curve as at most CURVE points (step, loss). The steps are divided into equal parts. Each
    point has the last step of a part and the mean loss of the part."""
    size = -(-len(losses) // CURVE)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [(min((at + 1) * size, len(losses)), sum(part) / len(part)) for at, part in enumerate(parts)]


def observer(run: Run, trained: str, length: int, seed: int, model: ZooModel) -> Callable[[int, float], None]:
    """Returns a function of (step, loss), to be called after every step. At about ten of the steps it measures the
    variance that each pair accounts for, and saves it next to the model."""
    if trained not in OBSERVED or run.preset.data != TEXT or isinstance(run.corpus, TokenCorpus) or run.ranks.rank:
        return lambda step, loss: None
    path = _observed_path(run, trained, length, seed)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    steps = {max(run.preset.steps * tenth // 10, 1) for tenth in range(11)}
    rotary = scheme(trained, run.preset.config, length, run.defaults).training
    tokens = repeated(list(frequent(run.corpus.train)), length)

    def observe(step: int, loss: float) -> None:
        if step in steps:
            measured = pattern(model, rotary, tokens, functools.partial(attention, impl=run.impl))
            found[str(step)] = vaf(measured.mean_components, measured.mean_overall).tolist()
            files.write(path, json.dumps(found))

    return observe


def observed(run: Run, trained: str, length: int) -> dict[int, list[float]]:
    """Returns {training step: the variance that every component accounts for}, for the model of the first seed."""
    found = json.loads(_observed_path(run, trained, length, run.first_seed).read_text(encoding="utf-8"))
    return {int(step): found[step] for step in sorted(found, key=int)}


def _observed_path(run: Run, trained: str, length: int, seed: int) -> Path:
    return run.model_path(trained, length, seed).with_suffix(".vaf.json")


def untrained(run: Run, trained: str, length: int, seed: int) -> ZooModel:
    torch.manual_seed(seed)
    return ZooModel(run.preset.config, trained, length, run.preset.architecture).to(run.device)


def save_model(path: Path, model: ZooModel, trained: str, length: int, defaults: Defaults) -> None:
    from safetensors.torch import save_file

    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    rotary = rotary_of(model, trained, length, defaults)
    with replacing(path) as partial:
        save_file(
            weights,
            partial,
            metadata={
                "config": json.dumps(dataclasses.asdict(model.config)),
                "trained": trained,
                "architecture": model.architecture,
                "train_length": str(length),
                "revision": revision(),
                "base": repr(defaults.base),
                **({"rotary": rotary.text} if rotary else {}),
            },
        )


def rotary_of(model: ZooModel, trained: str, length: int, defaults: Defaults) -> Rotary | None:
    """Returns the scheme to use a Llama model with. Returns None for other architectures, for encodings that do not
    rotate, and if layers have different schemes."""
    rotary = scheme(trained, model.config, length, defaults).rotary
    only = model.absolute is model.biases is model.positions is None and model.architecture == LLAMA
    return rotary if only and isinstance(rotary, Rotary) else None


def load_model(path: Path, device: torch.device | str = "cpu") -> ZooModel:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is not a mapping
    model = ZooModel(
        ModelConfig(**json.loads(metadata["config"])),
        metadata["trained"],
        int(metadata["train_length"]),
        metadata.get("architecture", LLAMA),
    )
    model.to(device).load_state_dict(weights)
    return model
