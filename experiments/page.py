"""docs/experiments/README.md: written from a template, page.md, and the results in that folder.

A field {{name argument ...}} of the template is replaced by what the function of that name in ``FIELDS`` returns. Lines
between <!-- if NAME --> and <!-- end --> stay if experiment NAME has results, those after <!-- else --> if not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashrope.demo import files
from flashrope.demo.model import LanguageModel, ModelConfig

from . import tables
from .looks import label
from .registry import EXPERIMENTS
from .runs import read_csv
from .show import show
from .statistics import (
    AGAINST,
    HIGHER,
    LOWER,
    SHOWN,
    UNJUDGED,
    UNSHOWN,
    Interval,
    interval,
    outcome,
    values_at,
    verdict,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "experiments"
TEMPLATE = Path(__file__).with_name("page.md")
REBUILD = "python tools/experiments_page.py"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of two measurements; those at ``multiples`` are among the experiment's declared differences."""

    words: str
    experiment: str
    first: tuple[str, str]
    second: tuple[str, str]
    sign: int
    multiples: tuple[float, ...]


def _claim(words: str, experiment: str, first: str, second: str, task: str, sign: int, *multiples: float) -> Claim:
    return Claim(words, experiment, (first, task), (second, task), sign, multiples)


CLAIMS = {
    "HoPE": (
        _claim("copies more than RoPE", "copying", "hope", "rope", "copying-by-length", HIGHER, 1, 2, 4, 8),
        _claim("copies more than KERPLE", "copying", "hope", "kerple", "copying-by-length", HIGHER, 2, 4),
        _claim(
            "with YaRN copies more than RoPE with YaRN",
            "copying",
            "hope+yarn-s2",
            "yarn-s2",
            "copying-by-length",
            HIGHER,
            2,
        ),
        *(
            _claim(
                f"copies more than its ablation {part}",
                "ablation",
                "hope",
                f"hope-ab{part}",
                "copying-by-length",
                HIGHER,
                2,
                4,
            )
            for part in (1, 2, 3)
        ),
        _claim("has a lower perplexity than RoPE", "perplexity", "hope", "rope", "perplexity", LOWER, 2, 4, 8),
        _claim(
            "answers with a label more often than RoPE", "few-shot", "hope", "rope", "few-shot", HIGHER, 1.5, 2, 2.5
        ),
    ),
    "ReRoPE": (
        _claim("copies more than RoPE", "copying", "rerope{w256}", "rope", "copying-by-length", HIGHER, 2, 4, 8),
        _claim(
            "copies more with log n than without",
            "copying",
            "rerope{w256}+dagger",
            "rerope{w256}",
            "copying-by-length",
            HIGHER,
            2,
            4,
            8,
        ),
        _claim("has a lower perplexity than RoPE", "perplexity", "rerope{w256}", "rope", "perplexity", LOWER, 2, 4, 8),
        _claim("has a lower loss than RoPE", "loss", "rerope{w256}", "rope", "loss", LOWER, 2, 4, 8),
        _claim("has a lower loss than YaRN", "loss", "rerope{w256}+dagger", "yarn-s8", "loss", LOWER, 2, 4, 8),
        Claim(
            "with log n uses far context: its loss is lower on repeated text",
            "loss",
            ("rerope{w256}+dagger", "loss-repeat"),
            ("rerope{w256}+dagger", "loss"),
            LOWER,
            (2, 4, 8),
        ),
    ),
}


# ---- the results


@functools.cache
def results(name: str) -> tuple[list[dict[str, str]], dict]:
    """(rows, results.json) of an experiment."""
    return read_csv(FOLDER / name / "results.csv"), json.loads((FOLDER / name / "results.json").read_text())


def has(name: str) -> bool:
    return (FOLDER / name / "results.csv").exists()


def unit(name: str) -> int:
    return results(name)[1]["settings"]["train_length"]


def at_multiple(name: str, multiple: float, task: str) -> float:
    return multiple if task in tables.BY_COUNT else multiple * unit(name)


def measured(name: str, scheme: str, task: str, multiple: str) -> Interval:
    at = at_multiple(name, float(multiple), task)
    found = values_at(results(name)[0], tables.resolve(scheme, unit(name))[0], task, at)
    if not found:
        raise KeyError(f"{name}: no {task} of {scheme} at {at:g}")
    return interval(list(found.values()))


def declared(name: str, first: tuple[str, str], second: tuple[str, str]) -> list[tuple[float, Interval]]:
    """(multiple, difference) of the declared differences of two measurements."""
    wanted = [each for each in EXPERIMENTS[name].compares if (each.first, each.second) == (first, second)]
    return [(each.multiple, found) for each, found in tables.judge(name, wanted, results(name)[0], unit(name))]


# ---- fields


def mean(name: str, scheme: str, task: str, multiple: str) -> str:
    return measured(name, scheme, task, multiple).level.partition(" ")[0]


def level(name: str, scheme: str, task: str, multiple: str) -> str:
    return measured(name, scheme, task, multiple).level


def levels(name: str, scheme: str, task: str) -> str:
    """By length, from the training length on: 92.1 ± 0.3, 80 ± 1, 2 ± 1 and 1 ± 1."""
    rows, length = results(name)[0], unit(name)
    scheme = tables.resolve(scheme, length)[0]
    places = sorted({float(row["at"]) for row in rows if (row["scheme"], row["task"]) == (scheme, task)})
    return _and([interval(list(values_at(rows, scheme, task, at).values())).level for at in places if at >= length])


def differences(name: str, first: str, second: str, task: str, other: str = "") -> str:
    """+5.2 (+1.0 to +9.4) at 2 times the training length; ... in words, by length."""
    found = declared(name, (first, task), (second, other or task))
    if not found:
        raise KeyError(f"{name}: no declared difference of {first} and {second} by {task}")
    parts = [f"{each} at {multiple:g} ({verdict(each)})" for multiple, each in found]
    return "; ".join(parts)


def said(name: str, first: str, second: str, task: str, other: str = "") -> str:
    """The verdicts of the declared differences by length: higher at 2 and 4, no difference shown at 8."""
    found: dict[str, list[str]] = {}
    for multiple, each in declared(name, (first, task), (second, other or task)):
        found.setdefault(verdict(each), []).append(f"{multiple:g}")
    return "; ".join(f"{words} at {_and(multiples)}" for words, multiples in found.items())


def summary(name: str) -> str:
    """How many of the declared differences came out how, and the list of those against expectation."""
    found = tables.judge(name, EXPERIMENTS[name].compares, results(name)[0], unit(name))
    parts = []
    if expected := [(each, outcome(value, each.expected)) for each, value in found if each.expected]:
        counts = _counts([said for _, said in expected], (SHOWN, UNSHOWN, AGAINST, UNJUDGED))
        parts.append(f"Of the {len(expected)} declared differences of which the papers say the direction: {counts}.")
    if against := [each for each, said in expected if said == AGAINST]:
        listed = "; ".join(
            f"{_shown(name, each.first)} and {_shown(name, each.second)} at {each.multiple:g}" for each in against
        )
        parts.append(f"Against expectation: {listed}.")
    if others := [verdict(value).partition(":")[0] for each, value in found if not each.expected]:
        counts = _counts(others, ("higher", "lower", UNSHOWN, UNJUDGED))
        parts.append(f"Of the {len(others)} others the first is: {counts}.")
    return " ".join(parts)


def _counts(said: Sequence[str], words: Sequence[str]) -> str:
    return _and([f"{said.count(each)} {each}" for each in words if each in said])


def _shown(name: str, place: tuple[str, str]) -> str:
    return f"{label(tables.resolve(place[0], unit(name))[0], numbers=True)} ({place[1]})"


def made(name: str) -> str:
    """The line under a figure: the command, and where and when it ran."""
    record = results(name)[1]
    seeds = record["seeds"]
    preset = record["settings"]
    return (
        f"`{record['command']}` · {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} · {preset['layers']} layers of "
        f"{preset['width']}, {preset['steps']:,} steps, training length {preset['train_length']} · "
        f"{record['hardware']} · revision {record['revision'][:10]} · [results]({name}/results.csv)"
    )


def parameters(name: str) -> str:
    """Of a model, in millions."""
    sizes = results(name)[1]["settings"]
    config = ModelConfig(*(sizes[field] for field in ("width", "layers", "heads", "mlp_width", "vocab_size")))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
    return f"{count / 1e6:.1g}"


def setting(name: str, field: str) -> str:
    value = results(name)[1]["settings"][field]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def constant(path: str) -> str:
    """A number of the code: copying.SHORTEST, or copying.BETWEEN.0."""
    module, *names = path.split(".")
    value = importlib.import_module(f"experiments.{module}")
    for name in names:
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def rebuild() -> str:
    return REBUILD


def claims() -> str:
    """Which claims are supported, in one paragraph per paper's method, and at what size."""
    return "\n\n".join(_claims_of(method, every) for method, every in CLAIMS.items())


def _claims_of(method: str, every: Sequence[Claim]) -> str:
    found: dict[str, list[str]] = {}
    for claim in every:
        status, words = judged_claim(claim)
        found.setdefault(status, []).append(words)
    heads = ("supported", "supported in part", "not shown", "contradicted", "not judged", "not measured")
    parts = [f"**{head}**: {'; '.join(found[head])}" for head in heads if head in found]
    return f"**{method}**. " + ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def judged_claim(claim: Claim) -> tuple[str, str]:
    """("supported", "copies more than RoPE (copying, at 2 and 4 times the training length)"), for example."""
    if not has(claim.experiment):
        return "not measured", f"{claim.words} ({claim.experiment})"
    by_outcome: dict[str, list[str]] = {}
    for multiple, found in declared(claim.experiment, claim.first, claim.second):
        if multiple in claim.multiples:
            by_outcome.setdefault(outcome(found, claim.sign), []).append(f"{multiple:g}")
    if not by_outcome:
        return "not measured", f"{claim.words} ({claim.experiment})"
    at = "; ".join(f"{words} at {_and(multiples)}" for words, multiples in by_outcome.items())
    link = f"[{claim.experiment}](#{claim.experiment})"
    if by_outcome.keys() == {SHOWN}:
        return "supported", f"{claim.words} ({link}, at {_and(by_outcome[SHOWN])} times the training length)"
    status = "contradicted" if AGAINST in by_outcome else "supported in part" if SHOWN in by_outcome else "not shown"
    if UNJUDGED in by_outcome:
        status = "not judged"
    return status, f"{claim.words} ({link}, {at} times the training length)"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


FIELDS: dict[str, Callable[..., str]] = {
    field.__name__: field
    for field in (mean, level, levels, differences, said, summary, made, parameters, setting, constant, claims, rebuild)
}


# ---- the page


def render() -> str:
    """The page's text."""
    results.cache_clear()
    text = re.sub(r"<!-- if (\S+) -->\n(.*?)<!-- end -->\n", _chosen, TEMPLATE.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\{\{(.+?)\}\}", lambda match: _field(match[1]), text, flags=re.S)


def _chosen(match: re.Match) -> str:
    present, _, absent = match[2].partition("<!-- else -->\n")
    return present if has(match[1]) else absent


def _field(text: str) -> str:
    name, *arguments = text.split()
    return FIELDS[name](*arguments)


def publish(run: Path) -> list[str]:
    """Copy the results of a run directory to the page's folder; returns the names of its experiments."""
    found = [name for name in EXPERIMENTS if (run / name / "results.json").exists()]
    for name in found:
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        drawn = () if EXPERIMENTS[name].measures else ("*.png",)
        for pattern in ("*.csv", "results.json", *drawn):
            for path in (run / name).glob(pattern):
                shutil.copy(path, target)
    if found and (run / "split.json").exists():
        preset = json.loads((run / "settings.json").read_text())["preset"]
        shutil.copy(run / "split.json", FOLDER / f"split-{preset}.json")
    return found


def redraw() -> None:
    """Write the tables and figures of all published results again."""
    for name in EXPERIMENTS:
        if has(name) and EXPERIMENTS[name].measures:
            results.cache_clear()
            show(FOLDER / name, name, unit(name))


def write() -> None:
    files.write(FOLDER / "README.md", render())
