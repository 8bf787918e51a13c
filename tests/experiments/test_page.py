"""Tests the page of the experiments: it is small, it is written from results, and all its numbers come from results."""

import json
import re
from pathlib import Path

import pytest

from experiments import page
from experiments.measuring import COLUMNS
from experiments.page import Claim
from experiments.registry import EXPERIMENTS
from experiments.runs import write_csv

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = page.templating.FOLDER / "page.md"
LIMIT = 2_000_000  # bytes of the folder
NUMBERS_OF_PAPERS = "|".join(
    (
        r"tables? \d(?:(?:, \d)* and \d)?",
        r"figures? \d(?:(?:, \d)* and \d)?",
        r"section \d(?:\.\d)*",
        r"archives/\d+",
        r"AB\d",
        "95%",
        "100 to 125 million",
        "SST-2",
        "Llama 2",
    )
)


def published(folder, **values):
    """Writes results of the experiment "copying" for five seeds. values: {scheme: {length: percentage of right
    letters}}."""
    sizes = {"width": 64, "layers": 2, "heads": 2, "mlp_width": 0, "vocab_size": 64, "train_length": 128, "steps": 1500}
    record = {"command": "python -m experiments copying", "settings": sizes, "seeds": [0, 1, 2, 3, 4]}
    record |= {"hardware": "a processor", "revision": "0123456789abcdef"}
    rows = [
        [scheme, scheme, 128, seed, "copying-by-length", 128 * at, value + seed % 2, 200]
        for scheme, by_length in values.items()
        for at, value in by_length.items()
        for seed in range(5)
    ]
    (folder / "copying").mkdir(parents=True)
    write_csv(folder / "copying" / "results.csv", COLUMNS, rows)
    (folder / "copying" / "results.json").write_text(json.dumps(record))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    page.results.cache_clear()
    yield tmp_path
    page.results.cache_clear()


def test_the_page_is_what_the_template_and_the_results_give():
    assert (page.FOLDER / "README.md").read_text() == page.render(), f"run {page.REBUILD}"


def test_the_tables_are_what_the_results_give(tmp_path):
    """For every experiment whose figures come only from results.csv, table.md equals the table made from this file."""
    for name in EXPERIMENTS:
        if page.has(name) and EXPERIMENTS[name].measures:
            shown = tmp_path / name
            shown.mkdir()
            (shown / "results.csv").write_bytes((page.FOLDER / name / "results.csv").read_bytes())
            text = page.tables.write(shown, name, page.unit(name), EXPERIMENTS[name].compares)
            assert (page.FOLDER / name / "table.md").read_text() == text, f"run {page.REBUILD}"


def test_the_template_has_no_numbers_of_measurements():
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", TEMPLATE.read_text(), flags=re.S)
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(NUMBERS_OF_PAPERS, "", text)
    assert not re.findall(r"[^\n]*\d[^\n]*", text)


@pytest.mark.parametrize(
    "hope, status, words",
    [
        ({2: 80, 4: 60}, "supported", "as expected at 2 and 4"),
        ({2: 80, 4: 20}, "supported in part", "as expected at 2; no difference shown at 4"),
        ({2: 50, 4: 20}, "not shown", "no difference shown at 2 and 4"),
        ({2: 50, 4: 10}, "contradicted", "no difference shown at 2; against expectation at 4"),
    ],
)
def test_claims(folder, hope, status, words):
    claim = Claim("copies", "copying", "copying-by-length:hope/rope", (2, 4))
    assert page.judged_claim(claim) == ("not measured", "copies (copying)")
    published(folder, hope=hope, rope={2: 50, 4: 20})
    assert page.judged_claim(claim) == (status, f"copies ([copying](#copying): {words})")


def test_results_of_a_run_are_published(folder, tmp_path):
    run = tmp_path / "run"
    published(run, hope={1: 90, 2: 80}, rope={1: 90, 2: 50})
    (run / "copying" / "curves.csv").write_text("not copied")
    (run / "copying" / "copying.png").write_text("drawn again")
    (run / "settings.json").write_text('{"preset": "copying"}')
    (folder / "copying").mkdir()
    (folder / "copying" / "old.png").write_text("of an earlier run")
    assert page.publish(run) == ["copying"]
    page.redraw()
    assert {path.name for path in (folder / "copying").iterdir()} == {
        "results.csv",
        "results.json",
        "table.md",
        "copying.png",
    }
