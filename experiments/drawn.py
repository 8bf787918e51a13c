"""The experiments with figures of their own kind: patterns, positions, frequencies, pictures."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

from flashrope import Rotary, attention
from flashrope.demo import files, report
from flashrope.demo.train import TrainConfig
from flashrope.demo.workers import Workers

from . import curves, figures, picture
from .patterns import Pattern, kinds, pattern
from .measuring import COLUMNS
from .runs import Run, write_csv
from .statistics import interval
from .training import OBSERVED, load_model, observed, train_models
from .tables import resolve
from .zoo import scheme

PATTERN_SAMPLES = 5000  # as in the paper; if the preset has fewer, its own number, but at least 64
FREQUENCY_PANELS = {
    "trained with": ("rope", "hope", "hope-ab1", "hope-ab2", "hope-ab3"),
    "changed after training, for 8 times the training length": (
        "rope",
        "pi-s8",
        "ntk-old-s8",
        "ntk-aware-s8",
        "ntk-fixed-s8",
        "ntk-mixed-s8",
        "yarn-s8",
        "hope+pi-s8",
        "hope+yarn-s8",
    ),
}
POSITION_SCHEMES = ("rope", "pi-s8", "rerope{w256}", "leaky-rerope{w256}-k16")


def draw_frequencies(run: Run, workers: Workers, folder: Path) -> None:
    names = dict.fromkeys(name for panel in FREQUENCY_PANELS.values() for name in panel)
    used = {name: scheme(name, run.preset.config, run.unit, run.defaults).rotary for name in names}
    rows = [
        [name, pair, f, kind]
        for name, rotary in used.items()
        for pair, (f, kind) in enumerate(zip(rotary.frequencies, kinds(rotary.frequencies, run.unit), strict=True))
    ]
    write_csv(folder / "results.csv", ("scheme", "pair", "inv_freq", "kind"), rows)
    panels = {panel: {name: used[name].frequencies for name in names} for panel, names in FREQUENCY_PANELS.items()}
    figures.frequencies(folder / "frequencies.png", panels, run.unit, run.defaults.base)


def seen_distances(rotary: Rotary, length: int, scale: float = 1.0) -> list[list[float]]:
    """Row i, column j: the distance at which query i sees key j; NaN for future keys and outside all bands. ``scale``
    is what the frequencies were divided by."""

    def seen(d: int) -> float:
        band = next((band for band in rotary.bands if band.start <= d < band.stop), None)
        return math.nan if band is None else (band.slope * d + band.offset) / scale

    return [[seen(i - j) for j in range(length)] for i in range(length)]


def draw_positions(run: Run, workers: Workers, folder: Path) -> None:
    length, seen = 2 * run.unit, {}
    for template in POSITION_SCHEMES:
        name, _ = resolve(template, run.unit)
        rotary = scheme(name, run.preset.config, run.unit, run.defaults).rotary
        plain = Rotary.rope(run.preset.config.head_dim, run.defaults.base)
        seen[name] = seen_distances(rotary, length, plain.frequencies[0] / rotary.frequencies[0])
    rows = [[name, i, 0, matrix[i][0]] for name, matrix in seen.items() for i in range(length)]
    write_csv(folder / "results.csv", ("scheme", "query", "key", "distance"), rows)
    figures.matrices(folder / "positions.png", seen, run.unit)


def draw_pictures(run: Run, workers: Workers, folder: Path) -> None:
    preset = run.preset
    steps = min(picture.MAX_STEPS, preset.steps)
    trainings = [
        TrainConfig(steps, picture.BATCH, picture.SIDE**2, preset.learning_rate, warmup=preset.warmup, seed=seed)
        for seed in run.seeds
    ]
    jobs = [
        (name, preset.config, training, picture.SAMPLES, str(run.device), run.impl)
        for name in picture.ENCODINGS
        for training in trainings
    ]
    done = [0] * len(jobs)

    def progress(job, message):
        done[job] = message[0]
        bars.update(0, sum(done), message[1])

    stored = folder / "cells.json"
    asked = [[job[0], job[2].seed, steps] for job in jobs]
    kept = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    if kept.get("asked") != asked:
        with report.Bars([f"training {len(jobs)} picture models, steps"], len(jobs) * steps) as bars:
            found = workers.map(picture.job, jobs, progress)
        rows = [
            [job[0], job[0], picture.SIDE**2, job[2].seed, *dataclasses.astuple(result)]
            for job, results in zip(jobs, found, strict=True)
            for result in results
        ]
        kept = {"asked": asked, "rows": rows}
        files.write(stored, json.dumps(kept))
    write_csv(folder / "results.csv", COLUMNS, kept["rows"])
    groups = {}
    for rows_, columns in picture.SHAPES:
        task = f"picture-{rows_}x{columns}"
        groups[f"{rows_} x {columns}" + (", trained" if rows_ == columns == picture.SIDE else "")] = {
            name: interval([row[6] for row in kept["rows"] if row[0] == name and row[4] == task])
            for name in picture.ENCODINGS
        }
    curves.points(folder / "picture.png", groups, "pixels right (%)")


# ---- patterns
def draw_patterns(run: Run, workers: Workers, folder: Path) -> None:
    """Figures 1, 2, 5, 6 and 7 of the HoPE paper, with the models of the first seed. The training length is the
    preset's, and twice that for figures 6 and 7."""
    unit, double = run.unit, 2 * run.unit
    wanted = [("learned", unit), ("rope", unit), ("kerple", unit), ("hope", unit), ("rope", double)]
    train_models(dataclasses.replace(run, preset=dataclasses.replace(run.preset, seeds=1)), workers, wanted)
    samples = min(PATTERN_SAMPLES, max(run.preset.samples, 64))
    found = _measure_patterns(run, wanted, samples)
    columns = ("encoding", "train_length", "context", "layer", "component", "distance", "score")
    write_csv(folder / "results.csv", columns, _pattern_rows(found))

    def overall(trained, length, context):
        return found[trained, length, context].mean_overall.tolist()

    note = f"trained on {unit} bytes; scores of the last query, averaged over layers, heads and {samples} samples"
    names = {"learned": "learned", "rope": "RoPE", "kerple": "KERPLE"}
    figures.patterns(
        folder / "figure-1.png",
        "Position-related attention patterns",
        note,
        [(name, {name: overall(trained, unit, unit)}) for trained, name in names.items()],
    )
    figures.patterns(
        folder / "figure-5.png",
        "Attention patterns of HoPE and RoPE",
        note + "; dotted: training length",
        [
            ("in the training length", {"HoPE": overall("hope", unit, unit), "RoPE": overall("rope", unit, unit)}),
            ("beyond it", {"HoPE": overall("hope", unit, double), "RoPE": overall("rope", unit, double)}),
        ],
        [unit],
    )
    _rope_figures(run, folder, found, unit, ("figure-2a.png", "figure-2b.png", "figure-2c.png"))
    _rope_figures(run, folder, found, double, ("figure-7.png", "figure-6.png", None))
    frequencies = scheme("hope", run.preset.config, unit, run.defaults).rotary.frequencies
    beyond = found["hope", unit, double]
    figures.components(
        folder / "hope-components.png",
        f"HoPE's pairs, in and beyond the training length {unit}",
        beyond.mean_components.tolist(),
        beyond.mean_overall.tolist(),
        kinds(frequencies, unit),
        frequencies,
        unit,
    )
    write_csv(
        folder / "vaf.csv",
        ("encoding", "train_length", "step", "component", "vaf"),
        [
            [trained, length, step, part, value]
            for trained, length in wanted
            if trained in OBSERVED
            for step, values in observed(run, trained, length).items()
            for part, value in enumerate(values)
        ],
    )


def _measure_patterns(run: Run, wanted: list[tuple[str, int]], samples: int) -> dict[tuple[str, int, int], Pattern]:
    """{(encoding, training length, context length): pattern}, in and beyond the training length where possible."""
    found = {}
    for trained, length in wanted:
        used = scheme(trained, run.preset.config, length, run.defaults)
        model = load_model(run.model_path(trained, length, run.first_seed), run.device).eval()
        attend = functools.partial(attention, impl=run.impl)
        for context in [length] if used.longest else [length, 2 * length]:
            found[trained, length, context] = pattern(model, used.rotary, context, samples, run.first_seed, attend)
    return found


def _pattern_rows(found: dict[tuple[str, int, int], Pattern]) -> list[list]:
    rows = []
    for (trained, length, context), measured in found.items():
        curves = [("all", "overall", measured.mean_overall), ("0", "overall", measured.overall[0])]
        if trained in OBSERVED:
            curves += [("all", str(part), values) for part, values in enumerate(measured.mean_components)]
        rows += [
            [trained, length, context, layer, part, distance, value]
            for layer, part, values in curves
            for distance, value in enumerate(values.tolist())
        ]
    return rows


def _rope_figures(run: Run, folder: Path, found: dict, length: int, names: tuple[str, str, str | None]) -> None:
    frequencies = Rotary.rope(run.preset.config.head_dim, run.defaults.base).frequencies
    pair_kinds = kinds(frequencies, length)
    inside, beyond = found["rope", length, length], found["rope", length, 2 * length]
    figures.components(
        folder / names[0],
        f"RoPE's pairs, trained on {length} bytes",
        inside.mean_components.tolist(),
        inside.mean_overall.tolist(),
        pair_kinds,
        frequencies,
        length,
    )
    steps = observed(run, "rope", length)
    figures.vaf_over_training(
        folder / names[1],
        f"Variance accounted for over training, training length {length}",
        list(steps),
        list(steps.values()),
        pair_kinds,
        "RoPE; patterns averaged over layers, heads and samples",
    )
    if names[2]:
        activated = [at for at, kind in enumerate(pair_kinds) if kind == "activated"]
        others = {f"layer {layer}": beyond.overall[layer].tolist() for layer in range(1, len(beyond.overall))}
        figures.patterns(
            folder / names[2],
            "RoPE beyond its training length",
            f"trained on {length} bytes (dotted)",
            [
                ("first layer", {"all pairs": beyond.overall[0].tolist()}),
                (
                    "first layer, activated pairs",
                    {f"pair {at}": beyond.components[0, at].tolist() for at in activated}
                    or {"none in this table": [0.0] * (2 * length - 1)},
                ),
                ("later layers", others or {"none": [0.0]}),
            ],
            [length],
        )
