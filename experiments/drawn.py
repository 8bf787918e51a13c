"""Runs the experiments that draw special figures: patterns, positions and frequencies."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from flashrope import Rotary, attention
from flashrope.lab.small_models.data import as_tokens, unseen_windows
from flashrope.lab.small_models.workers import Workers

from . import figures, tables
from .measuring import COLUMNS
from .patterns import REPEATED, TEXT, Pattern, frequent, kinds, pattern, repeated, ripple, swing
from .runs import Run, write_csv
from .statistics import LOWER, schemes
from .tables import resolve
from .training import OBSERVED, load_model, observed, train_models
from .zoo import scheme

WINDOWS_PER_SAMPLE = 10  # a pattern is measured on this many windows of unseen text per sample of the preset
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


def seen_distances(rotary: Rotary, queries: torch.Tensor, keys: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Returns the distance at which each query sees each key, (queries, keys) in float64. It is NaN for future keys and
    outside all bands. ``scale``: the factor by which the scheme divides the frequencies."""
    i, j = queries.double()[:, None], keys.double()[None]
    seen = torch.full((len(queries), len(keys)), math.nan, dtype=torch.float64)
    for band in rotary.bands:
        inside = band.holds(i, j) & (j <= i)
        seen = torch.where(inside, (band.queries.of(i) - band.keys.of(j)) / scale, seen)
    return seen


def draw_positions(run: Run, workers: Workers, folder: Path) -> None:
    length, seen = 2 * run.unit, {}
    positions = torch.arange(length)
    for template in POSITION_SCHEMES:
        name, _ = resolve(template, run.unit)
        rotary = scheme(name, run.preset.config, run.unit, run.defaults).rotary
        plain = Rotary.rope(run.preset.config.head_dim, run.defaults.base)
        seen[name] = seen_distances(rotary, positions, positions, plain.frequencies[0] / rotary.frequencies[0]).tolist()
    rows = [[name, i, 0, matrix[i][0]] for name, matrix in seen.items() for i in range(length)]
    write_csv(folder / "results.csv", ("scheme", "query", "key", "distance"), rows)
    figures.matrices(folder / "positions.png", seen, run.unit)


# ---- patterns
SEVERAL = ("rope", "hope", "kerple")  # encodings measured with all seeds; others are measured with the first seed only
PATTERN_NAMES = {"learned": "learned", "rope": "RoPE", "kerple": "KERPLE", "hope": "HoPE"}
# The paper says that HoPE fluctuates less than RoPE, within the training length and beyond it. So HoPE's swing is
# expected to be lower than RoPE's. The paper does not mention the ripple.
PATTERN_COMPARES = tuple(
    comparison
    for measure, expected in (("swing", LOWER), ("ripple", 0))
    for inputs in (REPEATED, TEXT)
    for comparison in schemes("hope", "rope", f"{measure}-{inputs}", 1, 2, expected=expected)
)
Found = dict[tuple[str, int, int, str, int], Pattern]  # key: encoding, training length, context, inputs, seed


def draw_patterns(run: Run, workers: Workers, folder: Path) -> None:
    """Draws figures 1, 2, 5, 6 and 7 of the HoPE paper.

    The training length is the preset's, or twice the preset's for figures 6 and 7. The curves are from the first seed.
    results.csv has the swing and ripple of all seeds, and table.md compares them.
    """
    unit, double = run.unit, 2 * run.unit
    wanted = [("learned", unit), ("rope", unit), ("kerple", unit), ("hope", unit), ("rope", double)]
    train_models(run, workers, [(trained, unit) for trained in SEVERAL])
    train_models(dataclasses.replace(run, preset=dataclasses.replace(run.preset, seeds=1)), workers, wanted)
    known = frequent(run.corpus.train)
    write_csv(folder / "inputs.csv", ("byte", "share"), [[byte, share] for byte, share in known.items()])
    found = _measure_patterns(run, wanted, list(known))
    pairs = max(len(curves.components[0]) for curves in found.values())
    columns = ("encoding", "train_length", "context", "inputs", "distance", "score", "first_layer")
    write_csv(
        folder / "curves.csv", (*columns, *(f"component_{at}" for at in range(pairs))), _pattern_rows(run, found, pairs)
    )
    write_csv(folder / "results.csv", COLUMNS, _swing_rows(run, found))
    tables.write(folder, folder.name, unit, PATTERN_COMPARES)

    def panel(title: str, names: Sequence[str], context: int, inputs: str) -> tuple[str, dict[str, list[float]]]:
        curves = {name: found[name, unit, context, inputs, run.first_seed].mean_overall for name in names}
        sizes = ", ".join(f"{PATTERN_NAMES[name]} {swing(curve):.2f}" for name, curve in curves.items())
        return f"{title}; swing {sizes}", {PATTERN_NAMES[name]: curve.tolist() for name, curve in curves.items()}

    note = f"trained on {unit} bytes; mean of layers, heads and samples; first seed"
    titles = {REPEATED: "one byte repeated", TEXT: "unseen text"}
    figures.patterns(
        folder / "figure-1.png",
        "Position-related attention patterns",
        note,
        [panel(title, ("learned", "rope", "kerple"), unit, inputs) for inputs, title in titles.items()],
    )
    places = {unit: "in the training length", double: "beyond it"}
    figures.patterns(
        folder / "figure-5.png",
        "Attention patterns of HoPE and RoPE",
        note + "; dotted: that length",
        [
            panel(f"{title}, {place}", ("hope", "rope"), context, inputs)
            for inputs, title in titles.items()
            for context, place in places.items()
        ],
        [unit],
    )
    first = {key[:3]: value for key, value in found.items() if key[3:] == (REPEATED, run.first_seed)}
    _rope_figures(run, folder, first, unit, ("figure-2a.png", "figure-2b.png", "figure-2c.png"))
    _rope_figures(run, folder, first, double, ("figure-7.png", "figure-6.png", None))
    frequencies = scheme("hope", run.preset.config, unit, run.defaults).rotary.frequencies
    beyond = first["hope", unit, double]
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


def _measure_patterns(run: Run, wanted: list[tuple[str, int]], known: Sequence[int]) -> Found:
    """Returns the patterns on both kinds of inputs, within the training length and, where the encoding allows it,
    beyond it."""
    found, attend = {}, functools.partial(attention, impl=run.impl)
    windows = {
        context: as_tokens(
            unseen_windows(run.corpus.unseen, context, WINDOWS_PER_SAMPLE * run.preset.samples, run.first_seed)
        )
        for context in (run.unit, 2 * run.unit, 4 * run.unit)
    }
    for trained, length in wanted:
        used = scheme(trained, run.preset.config, length, run.defaults)
        for seed in run.seeds if trained in SEVERAL and length == run.unit else run.seeds[:1]:
            model = load_model(run.model_path(trained, length, seed), run.device).eval()
            for context in [length] if used.longest else [length, 2 * length]:
                key = (trained, length, context)
                found[*key, REPEATED, seed] = pattern(model, used.rotary, repeated(known, context), attend)
                found[*key, TEXT, seed] = pattern(model, used.rotary, windows[context], attend, average_first=True)
    return found


def _pattern_rows(run: Run, found: Found, pairs: int) -> list[list]:
    """Returns the curves of the first seed, with one row per distance. The contributions of the pairs are included only
    for REPEATED inputs and the encodings in OBSERVED."""
    rows = []
    for (trained, length, context, inputs, seed), measured in found.items():
        if seed != run.first_seed:
            continue
        parts = measured.mean_components.T.tolist() if trained in OBSERVED and inputs == REPEATED else None
        curves = zip(measured.mean_overall.tolist(), measured.overall[0].tolist(), strict=True)
        rows += [
            [trained, length, context, inputs, distance]
            + [f"{value:.4g}" for value in (*values, *(parts[distance] if parts else ()))]
            + [""] * (pairs - len(parts[distance]) if parts else pairs)
            for distance, values in enumerate(curves)
        ]
    return rows


def _swing_rows(run: Run, found: Found) -> list[list]:
    """Returns rows (COLUMNS) with the swing, the ripple and the ripple's period of the patterns. They are from models
    that were trained at the preset's training length."""
    rows = []
    for (trained, length, context, inputs, seed), measured in found.items():
        if length != run.unit:
            continue
        curve = measured.mean_overall
        size, period = ripple(curve)
        values = {"swing": swing(curve), "ripple": size} | ({} if math.isnan(period) else {"ripple-period": period})
        rows += [
            [trained, trained, length, seed, f"{measure}-{inputs}", context, value, 1]
            for measure, value in values.items()
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
