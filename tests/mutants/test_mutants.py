"""Tests the tool of tests/mutants: what it finds in small sources, and that its lists fit the checkout. ``python -m
tests.mutants`` runs the mutants."""

import pytest

from tests.mutants import native_sites, page, python_sites, sites
from tests.mutants.__main__ import drawn, everything
from tests.mutants.judges import JUDGES, judges
from tests.mutants.results import RESULTS, SURVIVED, read


def made(text, changes) -> dict[str, list[str]]:
    """Returns, for every kind of mutation, the lines that its changes write into the text."""
    found: dict[str, list[str]] = {}
    for change in sorted(changes, key=lambda change: change.start):
        new = text[: change.start] + change.new + text[change.end :]
        lines = [line.strip() for line in new.splitlines() if line not in text.splitlines()]
        found.setdefault(change.kind, []).extend(lines or ["(nothing)"])
    return found


PYTHON = {
    "a < b": {"comparison shifted": ["((a) <= (b))"], "comparison flipped": ["((a) >= (b))"]},
    "a is None": {"comparison flipped": ["((a) is not (None))"]},
    "0 < a <= b": {"comparison shifted": ["0 <= a <= b", "0 < a < b"], "constant": ["1 < a <= b"]},
    "a - b": {"term dropped": ["(a)"], "operands exchanged": ["((b) - (a))"]},
    "a * b": {"term dropped": ["(a)"], "first term dropped": ["(b)"]},
    "a and b": {"condition dropped": ["((b))", "((a))"]},
    "-a": {"sign dropped": ["(a)"]},
    "tl.minimum(a, b)": {"min for max": ["tl.maximum(a, b)"], "clamp dropped": ["(a)", "(b)"]},
    "a.clamp(min=0)": {"clamp dropped": ["(a)"], "argument dropped": ["a.clamp()"], "constant": ["a.clamp(min=1)"]},
    "f(a, b, *c)": {"arguments exchanged": ["f(b, a, *c)"]},
    "b if a else c": {"condition flipped": ["b if (not (a)) else c"]},
    'f"{a + 1}"': {},
    "tl.multiple_of(a, 16)": {},
}


@pytest.mark.parametrize("line", PYTHON)
def test_python(line):
    text = f"def f(a: int = None, b: 'int | None' = None):\n    é = {line}\n"
    found = python_sites.changes(text)
    expected = {kind: [f"é = {new}" for new in lines] for kind, lines in PYTHON[line].items()}
    assert made(text, found) == expected
    assert all(change.function == "f" for change in found)


NATIVE = {
    "x = a < b;": {"comparison shifted": ["x = a <= b;"], "comparison flipped": ["x = a >= b;"]},
    "x = a + b * c[1];": {
        "operator exchanged": ["x = a - b * c[1];", "x = a + b + c[1];"],
        "term dropped": ["x = a;", "x = a + b;"],
        "constant": ["x = a + b * c[2];"],
    },
    "x = std::max(a, 0);": {
        "min for max": ["x = std::min(a, 0);"],
        "clamp dropped": ["x = (a);", "x = (0);"],
        "constant": ["x = std::max(a, 1);"],
    },
    "f(a, g(b));": {"arguments exchanged": ["f(g(b), a);"]},
    "x = 0.5f;": {"constant": ["x = 1.5f;"]},
    "static_assert(sizeof(x) == 4);": {},
    "x = a;  // a - b": {},
}


@pytest.mark.parametrize("line", NATIVE)
def test_native(line):
    head = "namespace n {\ntemplate <int N = 3>\nstruct S {\n  int y = 7;\n  void g(int a) const {\n"
    text = f"{head}    {line}\n  }}\n}};\n}}\n"
    found = native_sites.changes(text)
    assert made(text, found) == NATIVE[line]
    assert all(change.function == "g" for change in found)


def test_a_seed_draws_every_kind_in_turn():
    mutants = everything(("schemes",))
    order = drawn(mutants, "a")
    assert sorted(order) == sorted(mutants) and order == drawn(mutants, "a") != drawn(mutants, "b")
    kinds = {mutant.kind for mutant in mutants}
    assert {mutant.kind for mutant in order[: len(kinds)]} == kinds


def test_every_file_has_judges_that_exist():
    files = sites.files()
    assert len(files) > 80
    named = {word.partition("::")[0] for file in files for run in judges(file) for word in run if word[:6] == "tests/"}
    assert not [name for name in named if not (sites.ROOT / name).exists()]
    first = {next(pattern for pattern in JUDGES if sites.fnmatch(file, pattern)) for file in files}
    assert first == set(JUDGES), "patterns that no file needs"


def test_the_page_is_that_of_the_results():
    """``python -m tests.mutants --publish CSV`` writes the page and the results. Results of code that has changed since
    are not used."""
    results = read(RESULTS)
    assert page.PAGE.read_text(encoding="utf-8").endswith(page.tables(results))
    assert not [row.mutant for row in results.values() if row.verdict == SURVIVED and not row.why]
