"""The mutants of tests/mutants and the page about them. Running them: ``python -m tests.mutants``."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import page
from tests.mutants.__main__ import exists
from tests.mutants.areas import AREAS, MUTANTS
from tests.mutants.breaks import ROOT
from tests.mutants.results import RESULTS, read


@pytest.mark.parametrize("file", sorted({file for mutant in MUTANTS for file, *_ in mutant.changes}))
def test_every_mutant_still_applies(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    changes = [(mutant.name, old) for mutant in MUTANTS for where, old, _ in mutant.changes if where == file]
    assert not [name for name, old in changes if text.count(old) != 1]


def test_names_are_unique_and_every_mutant_changes_something():
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    assert all(mutant.old != mutant.new for mutant in MUTANTS) and len(MUTANTS) >= 200
    assert {mutant.area for mutant in MUTANTS} == set(page.AREAS)


def test_every_file_of_mutants_is_listed():
    files = {path.stem for path in (Path(page.__file__).parent / "areas").glob("*.py")} - {"__init__"}
    assert files == {area.__name__.split(".")[-1] for area in AREAS}


def test_the_tests_that_mutants_name_exist():
    named = {test for mutant in MUTANTS for test in mutant.tests if test.startswith("tests/")}
    assert not [test for test in named if not (ROOT / test.split("::")[0]).exists()]


def test_the_page_is_that_of_the_results():
    """python -m tests.mutants --publish CSV"""
    results = read(RESULTS)
    assert page.PAGE.read_text(encoding="utf-8") == page.text()
    counted = {mutant.name for mutant in MUTANTS if not mutant.equivalent}
    assert set(results) <= counted, "results of mutants that are not in the list"
    killed = [row for row in results.values() if row.killed == "yes"]
    assert not [row.by for row in killed if not exists(row.by)], "tests that were renamed: run their mutants again"
