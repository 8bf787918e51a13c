"""The mutants of tests/mutants and the page about them. Running them: ``python -m tests.mutants``."""

from collections import Counter

import pytest

from tests.mutants import page
from tests.mutants.__main__ import exists
from tests.mutants.results import RESULTS, read
from tests.mutants.table import AREAS, HERE, MUTANTS, ROOT, mutants_of


def test_the_form_of_the_files():
    text = """
# what they are of
FEW = tests/test_a.py -k "b or c"

cut: csrc/a.cu
- two

file: a/b.py
tests: tests/test_d.py FEW

-inf becomes 0
-     two
- lines
-
+     two

tests: FEW

b: one text goes
- c
= nobody reads it"""
    few, cut = ("tests/test_a.py", "-k", "b or c"), (("csrc/a.cu", "two", ""),)
    assert mutants_of("area", text) == [
        ("area", "a/b.py", ("tests/test_d.py", *few), "-inf becomes 0", "    two\nlines\n", "    two", "", cut),
        ("area", "a/b.py", few, "b: one text goes", "c", "", "nobody reads it", cut),
    ]


@pytest.mark.parametrize("file", sorted({file for mutant in MUTANTS for file, *_ in mutant.changes}))
def test_every_mutant_still_applies(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    changes = [(mutant.name, old) for mutant in MUTANTS for where, old, _ in mutant.changes if where == file]
    assert not [name for name, old in changes if text.count(old) != 1]


def test_names_are_unique_and_every_mutant_changes_something():
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    assert all(mutant.old != mutant.new for mutant in MUTANTS) and len(MUTANTS) >= 200
    assert {mutant.area for mutant in MUTANTS} == set(AREAS)


def test_every_file_of_mutants_is_read():
    assert {path.stem for path in (HERE / "areas").glob("*.txt")} == set(AREAS)


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
