"""The mutants of tests/mutants. Running them takes hours: ``python -m tests.mutants``."""

from collections import Counter

import pytest

from tests.mutants.__main__ import MUTANTS
from tests.mutants.breaks import ROOT


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_mutant_still_applies(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not [mutant.name for mutant in MUTANTS if mutant.file == file and text.count(mutant.old) != 1]


def test_names_are_unique_and_every_mutant_changes_something():
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    assert all(mutant.old != mutant.new for mutant in MUTANTS) and len(MUTANTS) >= 100


def test_the_tests_that_mutants_name_exist():
    named = {test for mutant in MUTANTS for test in mutant.tests if test.startswith("tests/")}
    assert not [test for test in named if not (ROOT / test).exists()]
