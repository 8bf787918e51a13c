"""Writes docs/experiments/README.md from a jinja2 template, templates/page.md, and the results in docs/experiments.

The template calls the functions in ``FIELDS``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from flashrope.console import files
from flashrope.lab.small_models.model import LanguageModel, ModelConfig

from . import claims_figure, tables, templating
from .looks import label
from .registry import EXPERIMENTS
from .runs import read_csv
from .show import show
from .statistics import AGAINST, SHOWN, UNJUDGED, UNSHOWN, Comparison, Interval, interval, outcome, values_at, verdict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "experiments"
# Files with the points of figures. They have several megabytes and are not published, because the commands can write
# them again.
LEFT_OUT = ("curves.csv", "training.csv")
TRAINING = "training.png"
CLAIMS_FIGURE = "claims.png"
REBUILD = "python tools/experiments_page.py"


@dataclasses.dataclass(frozen=True)
class Claim:
    """Describes what a paper claims about two measurements.

    Attributes:
        pair: the measurements, in the notation of the function ``measurements``.
        multiples: the lengths at which to compare the measurements, as multiples of the training length. The experiment
            must declare the differences at these lengths, with the direction that the paper claims.
    """

    words: str
    experiment: str
    pair: str
    multiples: tuple[float, ...]
    second_multiple: float | None = None


PARTS = ("hope-ab1", "hope-ab2", "hope-ab3")
CLAIMS = {
    "HoPE": (
        Claim("copies more than RoPE", "copying", "copying-by-length:hope/rope", (1, 2, 4, 8)),
        Claim("copies more than KERPLE", "copying", "copying-by-length:hope/kerple", (2, 4)),
        Claim("with YaRN copies more than RoPE with YaRN", "copying", "copying-by-length:hope+yarn-s2/yarn-s2", (2,)),
        *(
            Claim(f"copies more than its ablation {part[-1]}", "ablation", f"copying-by-length:hope/{part}", (2, 4))
            for part in PARTS
        ),
        Claim("has a lower perplexity than RoPE", "perplexity", "perplexity:hope/rope", (2, 4, 8)),
        Claim("answers with a label more often than RoPE", "few-shot", "few-shot:hope/rope", (1.5, 2, 2.5)),
    ),
    "ReRoPE": (
        Claim("copies more than RoPE", "copying", "copying-by-length:rerope{w256}/rope", (2, 4, 8)),
        Claim(
            "copies more with log n than without",
            "copying",
            "copying-by-length:rerope{w256}+dagger/rerope{w256}",
            (2, 4, 8),
        ),
        Claim("has a lower perplexity than RoPE", "perplexity", "perplexity:rerope{w256}/rope", (2, 4, 8)),
        Claim("has a lower loss than RoPE", "loss", "loss:rerope{w256}/rope", (2, 4, 8)),
        *(
            Claim(
                f"predicts more bytes right than {other}",
                "rerope-schemes",
                f"accuracy-non-repeat:rerope{{w256}}/{scheme}",
                (8,),
            )
            for other, scheme in (("RoPE", "rope"), ("NTK, mixed", "ntk-mixed-s8"))
        ),
        Claim(
            "predicts more bytes right of repeated text than of other text",
            "rerope-schemes",
            "accuracy-repeat/accuracy-non-repeat:rerope{w256}/rerope{w256}",
            (8,),
        ),
        Claim(
            "with log n has a lower loss on more text than RoPE at the training length",
            "loss",
            "loss:rerope{w256}+dagger/rope",
            (8,),
            second_multiple=1,
        ),
        Claim(
            "with log n uses far context: its loss is lower on repeated text",
            "loss",
            "loss-repeat/loss:rerope{w256}+dagger/rerope{w256}+dagger",
            (2, 4, 8),
        ),
    ),
    "Self-Extend": (Claim("has a lower loss than RoPE", "loss", "loss:self-extend{w256}-g16/rope", (2, 4, 8)),),
    "Dual chunk attention": (Claim("has a lower loss than RoPE", "loss", "loss:dual-chunk/rope", (2, 4, 8)),),
}


VERDICTS = (SHOWN, UNSHOWN, AGAINST, UNJUDGED)
STATUSES = {SHOWN: "supported", UNSHOWN: "not shown", AGAINST: "contradicted", UNJUDGED: "not judged"}
SAID = {  # {outcome: the words for one declared difference, and for several}
    SHOWN: ("came out so", "came out so"),
    UNSHOWN: ("shows no difference", "show no difference"),
    AGAINST: ("came out the other way", "came out the other way"),
    UNJUDGED: ("is not judged", "are not judged"),
}
HEADS = ("supported", "supported in part", "not shown", "contradicted", "not judged", "not measured")


# ---- the results


@functools.cache
def results(name: str) -> tuple[list[dict[str, str]], dict]:
    """Returns (rows of results.csv, contents of results.json) of an experiment."""
    return read_csv(FOLDER / name / "results.csv"), json.loads((FOLDER / name / "results.json").read_text())


def has(name: str) -> bool:
    return (FOLDER / name / "results.csv").exists()


def unit(name: str) -> int:
    return results(name)[1]["settings"]["train_length"]


def measured(name: str, scheme: str, task: str, multiple: str) -> Interval:
    at = float(multiple) * (1 if task in tables.BY_COUNT else unit(name))
    found = values_at(results(name)[0], tables.resolve(scheme, unit(name))[0], task, at)
    if not found:
        raise KeyError(f"{name}: no {task} of {scheme} at {at:g}")
    return interval(list(found.values()))


def measurements(pair: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the two (scheme, task) that a pair names. A pair is written as "task:scheme/scheme", or as
    "task/task:scheme/scheme" if the tasks differ."""
    tasks, _, schemes = pair.partition(":")
    (task, _, other), (first, _, second) = tasks.partition("/"), schemes.partition("/")
    return (first, task), (second, other or task)


def is_of(pair: str, second_multiple: float | None = None) -> Callable[[Comparison], bool]:
    asked = (*measurements(pair), second_multiple)
    return lambda each: (each.first, each.second, each.second_multiple) == asked


def declared(name: str, pair: str, second_multiple: float | None = None) -> dict[float, tuple[Comparison, Interval]]:
    """Returns {multiple: (comparison, difference)} of the declared differences between two measurements. Raises
    KeyError if there are none."""
    wanted = list(filter(is_of(pair, second_multiple), EXPERIMENTS[name].compares))
    if not wanted:
        raise KeyError(f"{name}: no declared difference {pair}")
    found = tables.judge(wanted, results(name)[0], unit(name), name)
    return {each.multiple: (each, value) for each, value in sorted(found, key=lambda found: found[0].multiple)}


# ---- fields


def mean(name: str, scheme: str, task: str, multiple: str) -> str:
    return measured(name, scheme, task, multiple).level.partition(" ")[0]


def level(name: str, scheme: str, task: str, multiple: str) -> str:
    return measured(name, scheme, task, multiple).level


def levels(name: str, task: str, *schemes: str) -> str:
    """Returns a table of means and intervals by length, with one row per scheme."""
    rows, length = results(name)[0], unit(name)
    names = [tables.resolve(scheme, length)[0] for scheme in schemes]
    places = sorted({float(row["at"]) for row in rows if row["task"] == task and row["scheme"] in names})
    cells = {}
    for scheme in names:
        values = [list(values_at(rows, scheme, task, at).values()) for at in places]
        cells[label(scheme)] = [interval(value).level if value else "–" for value in values]
    return _by_length([at / length for at in places], cells)


def differences(name: str, *pairs: str) -> str:
    """Returns a table of declared differences by length. A difference is bold if its interval excludes zero. A cell is
    empty if no difference is declared there."""
    found = {}
    for pair in pairs:
        (first, _), (second, _) = measurements(pair)
        words = f"{_name(name, first)} − {_name(name, second)}" if first != second else _name(name, first)
        if by_length := declared(name, pair):
            found[words] = by_length
    places = sorted({multiple for by_length in found.values() for multiple in by_length})
    cells = {
        words: [_difference(*by_length[at]) if at in by_length else "" for at in places]
        for words, by_length in found.items()
    }
    return _by_length(places, cells)


def _by_length(multiples: Sequence[float], cells: dict[str, list[str]]) -> str:
    heads = ["length / L", *(f"{at:g}" for at in multiples)]
    lines = [f"| {' | '.join(row)} |" for row in (heads, *([words, *row] for words, row in cells.items()))]
    return "\n".join([lines[0], "|---|" + "---:|" * len(multiples), *lines[1:]])


def _difference(each: Comparison, found: Interval) -> str:
    against = ", against expectation" if each.expected and outcome(found, each.expected) == AGAINST else ""
    return f"**{found}**{against}" if found.excludes_zero else str(found)


def _name(name: str, scheme: str, numbers: bool = False) -> str:
    return label(tables.resolve(scheme, unit(name))[0], numbers)


def summary(name: str) -> str:
    """Returns sentences that say how many declared differences had each outcome, and which went against expectation."""
    found = tables.judge(EXPERIMENTS[name].compares, results(name)[0], unit(name), name)
    parts = []
    expected = [(each, outcome(value, each.expected)) for each, value in found if each.expected]
    if expected:
        said = _and(_said(Counter(said for _, said in expected)))
        parts.append(f"The papers say of {len(expected)} declared differences which side is higher: {said}.")
    against = [each for each, said in expected if said == AGAINST]
    if against:
        parts.append(f"The other way: {_listed(name, against)}.")
    others = Counter(verdict(value).partition(":")[0] for each, value in found if not each.expected)
    if others:
        signs = [f"{sign} in {others[sign]}" for sign in ("higher", "lower") if others[sign]]
        said = [*([f"the first is {_and(signs)}"] if signs else []), *_said(others)]
        count = f"{others.total()} {'more' if expected else 'declared differences'}"
        subject = "they" if expected else "the papers"
        parts.append(f"For {count} {subject} do not say which side is higher: {'; '.join(said)}.")
    return " ".join(parts)


def _said(outcomes: Counter[str]) -> list[str]:
    return [f"{outcomes[each]} {SAID[each][outcomes[each] > 1]}" for each in VERDICTS if outcomes[each]]


def _listed(name: str, compares: Sequence[Comparison]) -> str:
    """Returns the comparisons as a list in words, for example "HoPE and RoPE (copying) at 2 and 4". Windows and factors
    are named only if the schemes differ in nothing else."""
    for numbers in (False, True):
        found: dict[str, dict[tuple, str]] = {}
        for each in compares:
            pair = _pair(name, each, numbers)
            found.setdefault(pair, {})[each.first, each.second, each.multiple] = f"{each.multiple:g}"
        if all(len({key[:2] for key in each}) == 1 for each in found.values()):
            break
    return "; ".join(f"{pair} at {_and(list(each.values()))}" for pair, each in found.items())


def _pair(name: str, each: Comparison, numbers: bool) -> str:
    (first, task), (second, other) = (
        (_name(name, scheme, numbers), task) for scheme, task in (each.first, each.second)
    )
    return f"{first}, {task} and {other}" if task != other else f"{first} and {second} ({task})"


def made(name: str) -> str:
    """Returns the line under a figure: the command, and the machine that it ran on."""
    record, preset = results(name)[1], results(name)[1]["settings"]
    seeds = len(record["seeds"])
    facts = [
        f"`{record['command']}`",
        "one seed" if seeds == 1 else f"{seeds} seeds",
        f"{preset['layers']} layers of {preset['width']}, {preset['steps']:,} steps, training length "
        f"{preset['train_length']}",
        record["hardware"],
        f"revision {record['revision'][:10]}",
        f"[results]({name}/results.csv)",
    ]
    if (FOLDER / name / TRAINING).exists():
        facts.append(f"[training curves]({name}/{TRAINING})")
    return " · ".join(facts)


def sizes() -> str:
    """Describes the models of all claims, such as "110,000 to 450,000 parameters, trained on samples of 64 to 256 bytes
    or letters"."""
    names = {claim.experiment for every in CLAIMS.values() for claim in every if has(claim.experiment)}
    counts, lengths = [parameters(name) for name in names], [unit(name) for name in names]
    return f"{_span(counts)} parameters, trained on samples of {_span(lengths)} bytes or letters"


def _span(values: Sequence[int]) -> str:
    low, high = (min(values), max(values)) if values else (0, 0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def parameters(name: str) -> int:
    """Returns how many parameters the experiment's RoPE model has, rounded to two significant digits."""
    settings = results(name)[1]["settings"]
    config = ModelConfig(*(settings[field] for field in ("width", "layers", "heads", "mlp_width", "vocab_size")))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
    return int(float(f"{count:.2g}"))


def constant(path: str) -> str:
    """Returns a number in the code, such as copying.SHORTEST or copying.BETWEEN.0."""
    module, *names = path.split(".")
    value = importlib.import_module(f"experiments.{module}")
    for name in names:
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def minutes(cores: str = "1") -> str:
    """Returns the total CPU time in times.csv, in minutes and divided by `cores`, as text. If only part of an
    experiment was timed, its time is scaled up to the whole experiment."""
    seconds = sum(float(row["cpu_seconds"]) / float(row["share"]) for row in read_csv(FOLDER / "times.csv"))
    return f"{seconds / 60 / int(cores):.0f}"


def claims() -> str:
    """Returns text that says which claims are supported, with one list per method."""
    return "\n\n".join(_claims_of(method, every) for method, every in CLAIMS.items())


def claims_rows() -> dict[str, list[claims_figure.Row]]:
    """Returns {method: the measured differences of its claims}."""
    groups = {}
    for method, every in CLAIMS.items():
        groups[method] = [
            claims_figure.Row(
                f"{claim.words} ({claim.experiment})", multiple, found, each.expected, outcome(found, each.expected)
            )
            for claim in every
            if has(claim.experiment)
            for multiple, (each, found) in declared(claim.experiment, claim.pair, claim.second_multiple).items()
            if multiple in claim.multiples
        ]
    return {method: rows for method, rows in groups.items() if rows}


def _claims_of(method: str, every: Sequence[Claim]) -> str:
    found: dict[str, list[str]] = {}
    for claim in every:
        status, words = judged_claim(claim)
        found.setdefault(status, []).append(words)
    lines = [f"- {method}, {head}: {'; '.join(found[head])}." for head in HEADS if head in found]
    return "\n".join(lines)


def judged_claim(claim: Claim) -> tuple[str, str]:
    """Returns the verdict on a claim and the words for it, for example ("supported", "copies more than RoPE (copying:
    as expected at 2 and 4)")."""
    if not has(claim.experiment):
        return "not measured", f"{claim.words} ({claim.experiment})"
    by_outcome: dict[str, list[str]] = {}
    for multiple, (each, found) in declared(claim.experiment, claim.pair, claim.second_multiple).items():
        if multiple in claim.multiples:
            by_outcome.setdefault(outcome(found, each.expected), []).append(f"{multiple:g}")
    if not by_outcome:
        return "not measured", f"{claim.words} ([{claim.experiment}](#{claim.experiment}))"
    at = "; ".join(f"{words} at {_and(by_outcome[words])}" for words in VERDICTS if words in by_outcome)
    words = f"{claim.words} ([{claim.experiment}](#{claim.experiment}): {at})"
    if UNJUDGED in by_outcome:
        return "not judged", words
    if SHOWN in by_outcome and len(by_outcome) > 1:
        return "supported in part", words
    return next(STATUSES[each] for each in (AGAINST, UNSHOWN, SHOWN) if each in by_outcome), words


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


FIELDS: dict[str, Callable] = {
    field.__name__: field
    for field in (has, mean, level, levels, differences, summary, made, sizes, constant, claims, minutes)
}


# ---- the page


def render() -> str:
    """Returns the page's text."""
    results.cache_clear()
    return templating.render("page.md", **FIELDS)


def publish(run: Path) -> list[str]:
    """Copies the results of a run directory to the page's folder, and returns the names of the experiments in it."""
    found = [name for name in EXPERIMENTS if (run / name / "results.json").exists()]
    for name in found:
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        drawn = (TRAINING,) if EXPERIMENTS[name].measures else ("*.png", "table.md")
        for pattern in ("*.csv", "results.json", *drawn):
            for path in (run / name).glob(pattern):
                if path.name not in LEFT_OUT:
                    shutil.copy(path, target)
    if found and (run / "split.json").exists():  # one file for all runs on the same text
        text = json.loads((run / "settings.json").read_text())["text"]
        shutil.copy(run / "split.json", FOLDER / f"split-{text['train'][:10]}.json")
    return found


def redraw() -> None:
    """Writes the tables and figures of all published results again."""
    for name in EXPERIMENTS:
        if has(name) and EXPERIMENTS[name].measures:
            results.cache_clear()
            show(FOLDER / name, name, unit(name))
    if groups := claims_rows():
        claims_figure.draw(FOLDER / CLAIMS_FIGURE, groups)


def write() -> None:
    files.write(FOLDER / "README.md", render())
