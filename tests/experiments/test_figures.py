"""Tests the figures: a scheme always looks the same, a panel has at most eight lines, names do not overlap, and files
are small."""

import pytest

from experiments import tables
from experiments.looks import LOOKS, NAMES, family, look
from experiments.registry import EXPERIMENTS
from experiments.show import show


def row(scheme, seed, value, task="copying-by-length", at=256, train_length=128):
    fields = {"scheme": scheme, "task": task, "at": at, "seed": seed, "value": value, "train_length": train_length}
    return {name: str(value) for name, value in fields.items()}


def test_every_scheme_that_is_measured_has_a_name_and_a_look_of_its_own():
    assert len(set(LOOKS.values())) == len(LOOKS)
    for experiment in EXPERIMENTS.values():
        for template in experiment.schemes:
            name = family(tables.resolve(template, 128)[0])
            assert all(part in NAMES for part in name.split("+")), name
            base = name.partition("+logn")[0].partition("+dagger")[0]
            assert look(name) == LOOKS.get(name, LOOKS[base])


@pytest.mark.parametrize("name", ["zoo", "copying", "lengths", "passkey", "rerope-schemes"])
def test_every_experiment_is_drawn_and_tabled(name, tmp_path):
    """Figures and tables of every experiment can be made, here from made-up numbers. Each scheme of an experiment is in
    at least one of its figures."""
    experiment, unit = EXPERIMENTS[name], 64
    tasks = {
        "copying": ("copying-by-length", "copying-control"),
        "accuracy": ("accuracy-repeat", "accuracy-non-repeat"),
    }
    tasks["passkey"] = ("passkey", "passkey-digits")
    columns = [field for field in row("", 0, 0)]
    rows = []
    for template in dict.fromkeys(experiment.schemes):
        scheme, length = tables.resolve(template, unit)
        for task in (each for kind, _ in experiment.measures for each in tasks.get(kind, (kind,))):
            rows += [
                list(row(scheme, seed, 10 + seed, task, multiple * unit, length).values())
                for seed in (0, 1)
                for multiple in (1, 2, 8)
            ]
    (tmp_path / "results.csv").write_text("\n".join(",".join(line) for line in [columns, *rows]))
    text = show(tmp_path, name, unit)
    assert list(tmp_path.glob("*.png")) and "half of its 95% interval over 2 seeds" in text
