"""Tests the page of the experiments: it is small, it is written from results, and all its numbers come from results."""

import json
import re
from pathlib import Path

import jinja2
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


def test_the_folder_is_small_and_not_in_the_source_distribution():
    assert sum(path.stat().st_size for path in page.FOLDER.rglob("*") if path.is_file()) < LIMIT
    assert "prune docs/experiments" in (ROOT / "MANIFEST.in").read_text().splitlines()


def test_everything_in_the_folder_is_on_the_page():
    shown = (page.FOLDER / "README.md").read_text()
    for path in page.FOLDER.rglob("*"):
        name = path.relative_to(page.FOLDER).as_posix()
        if path.suffix == ".png" or path.is_dir():
            assert name in shown, name
        assert path.suffix in ("", ".png", ".csv", ".json", ".md") and path.name not in page.LEFT_OUT


def test_every_experiment_has_its_place_on_the_page():
    template = TEMPLATE.read_text()
    for name in EXPERIMENTS:
        assert re.search(rf'^{{% call when_run\("{name}"', template, re.MULTILINE), name
        assert re.search(rf"^##+ {name}$", template, re.MULTILINE), name


def test_every_claim_is_among_the_declared_differences():
    for claim in (claim for claims in page.CLAIMS.values() for claim in claims):
        is_asked = page.is_of(claim.pair, claim.second_multiple)
        declared = {
            each.multiple
            for each in filter(is_asked, EXPERIMENTS[claim.experiment].compares)
            if each.expected or page.tables.in_the_papers(claim.experiment, each)
        }
        assert set(claim.multiples) <= declared, claim.words


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


def test_the_figure_of_the_claims(tmp_path, monkeypatch):
    """The figure has a row for each difference, with its name and its number. A difference is drawn in units of half
    its interval, to the right if it agrees with the paper."""
    from experiments import claims_figure
    from experiments.statistics import Interval

    drawn = []
    monkeypatch.setattr(claims_figure, "finish", lambda figure, path, colours: drawn.append(figure))
    rows = [
        claims_figure.Row("has a lower loss", 2, Interval(-0.3, 0.1, 8), -1, "as expected"),
        claims_figure.Row("has a lower loss", 8, Interval(0.2, 0.1, 8), -1, "against expectation"),
        claims_figure.Row("copies more", 2, Interval(90.0, 1.0, 8), 1, "as expected"),
        claims_figure.Row("copies more", 4, Interval(0.0, 1.0, 8), 1, "no difference shown"),
    ]
    claims_figure.draw(tmp_path / "claims.png", {"HoPE": rows})
    (axes,) = drawn[0].axes
    means = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() not in ("", "None", None)]
    assert means == pytest.approx([3, -2, claims_figure.FURTHEST, 0])
    words = [text.get_text() for text in axes.texts]
    assert words[0] == "HoPE" and "has a lower loss, 2 L" in words and "8 L" in words
    assert "-0.30 (-0.40 to -0.20)" in words
    looks = [
        (line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() not in ("", "None", None)
    ]
    assert len({looks[0], looks[1], looks[3]}) == 3


def test_the_rows_of_the_figure_are_the_claims_differences(folder):
    published(folder, hope={2: 80, 4: 60}, rope={2: 50, 4: 20})
    rows = page.claims_rows()["HoPE"]
    assert [(row.multiple, round(row.found.mean), row.expected, row.outcome) for row in rows[:2]] == [
        (2, 30, 1, "as expected"),
        (4, 40, 1, "as expected"),
    ]


def test_fields(folder):
    published(folder, hope={1: 90, 2: 80}, rope={1: 90, 2: 50})
    assert page.mean("copying", "hope", "copying-by-length", "2") == "80.40"
    assert page.levels("copying", "copying-by-length", "rope", "hope").splitlines()[2:] == [
        "| RoPE | 90.40 ± 0.68 | 50.40 ± 0.68 |",
        "| HoPE | 90.40 ± 0.68 | 80.40 ± 0.68 |",
    ]
    (line,) = page.differences("copying", "copying-by-length:hope/rope").splitlines()[2:]
    assert line == "| HoPE − RoPE | +0.0 (+0.0 to +0.0) | **+30.0 (+30.0 to +30.0)** |"
    assert page.summary("copying") == (
        "The papers say of 2 declared differences which side is higher: 1 came out so and 1 shows no difference."
    )
    assert page.constant("copying.BETWEEN.1") == "10"
    assert page.sizes() == "99,000 parameters, trained on samples of 128 bytes or letters"
    with pytest.raises(KeyError, match="no declared difference copying-by-length:rope/hope"):
        page.differences("copying", "copying-by-length:rope/hope")
    with pytest.raises(KeyError, match="no copying-by-length of alibi at 256"):
        page.mean("copying", "alibi", "copying-by-length", "2")


def test_against_expectation_is_said(folder):
    published(folder, hope={2: 40, 4: 10}, rope={2: 50, 4: 20})
    assert page.summary("copying").endswith("The other way: HoPE and RoPE (copying-by-length) at 2 and 4.")
    (line,) = page.differences("copying", "copying-by-length:hope/rope").splitlines()[2:]
    assert line.count("**, against expectation") == 2


def test_sections_without_results_say_so(folder, tmp_path, monkeypatch):
    template, macro = tmp_path / "page.md", TEMPLATE.read_text().partition("# The papers")[0]
    template.write_text(
        macro + '{% call when_run("copying", "--preset copying") %}\n'
        'mean {{ mean("copying", "hope", "copying-by-length", "2") }}\n{% endcall %}\n'
    )
    monkeypatch.setattr(page.templating, "FOLDER", tmp_path)
    assert page.render() == "Not run yet: `python -m experiments copying --preset copying`.\n"
    published(folder, hope={2: 80})
    assert page.render() == "mean 80.40\n"
    template.write_text("{{ median }}")
    with pytest.raises(jinja2.UndefinedError, match="'median' is undefined"):
        page.render()


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
