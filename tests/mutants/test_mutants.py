"""Tests the tool of tests/mutants: what it finds in small sources, and that its lists fit the checkout. ``python -m
tests.mutants`` runs the mutants."""

import platform
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from tests.mutants import __main__ as main
from tests.mutants import native_build, native_sites, page, python_sites, sites
from tests.mutants.__main__ import drawn, everything, examine
from tests.mutants.judges import JUDGES, judges
from tests.mutants.results import KILLED, RESULTS, SURVIVED, Row, add, read
from tests.mutants.runs import Copy, Ended, Run, Watch


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


def test_statements_of_python():
    text = "class A:\n    def f(self, a):\n        a += 1\n        g(a)\n        raise ValueError(a - 1)\n"
    found = [(change.function, change.kind, change.new) for change in python_sites.changes(text)]
    assert sorted(found) == [("A.f", "constant", "2"), *[("A.f", "statement dropped", "pass")] * 2]
    assert python_sites.compiles(text) and not python_sites.compiles("f(")


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


def test_addresses_count_by_function_and_kind():
    mutants = sites.mutants_of("triton_kernels/softmax.py")
    assert len({mutant.address for mutant in mutants}) == len(mutants)
    first = next(mutant for mutant in mutants if mutant.kind == "term dropped")
    assert first.address.startswith("triton_kernels/softmax.py ") and first.address.endswith(" term dropped 1")
    assert first.room == "kernels" and first.applied() != first.source() and len(first.digest) == 8


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


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.mutants.runs.copy_checkout", lambda to: to.mkdir())
    copy = Copy(tmp_path)
    mutant = sites.mutants_of("triton_kernels/softmax.py")[0]
    (copy.root / mutant.file).parent.mkdir()
    (copy.root / mutant.file).write_text(mutant.source(), encoding="utf-8")
    return copy, mutant


def test_a_mutant_is_examined(copy):
    """A mutant is examined up to the first test that fails. This test must pass without the mutant."""
    copy, mutant = copy
    at, sound = copy.root / mutant.file, set()
    run = examine(mutant, copy, [("a",), ("b",)], sound)
    assert next(run) == ("a",) and at.read_text(encoding="utf-8") == mutant.applied()
    assert run.send(Ended()) == ("b",)
    assert run.send(Ended("b::t")) == ("b::t",) and at.read_text(encoding="utf-8") == mutant.source()
    with pytest.raises(StopIteration) as stop:
        run.send(Ended())
    assert stop.value.value == Ended("b::t") and sound == {"b::t"}
    run = examine(mutant, copy, [("a",)], set())
    next(run), run.send(Ended("a::t"))
    with pytest.raises(RuntimeError, match="a::t: fails without a mutant"):
        run.send(Ended("a::t"))
    assert at.read_text(encoding="utf-8") == mutant.source()


def test_patience(copy, tmp_path, monkeypatch):
    """No further run starts once the earlier runs have used up the patience. A run ends after the test that exceeds the
    limit."""
    copy, mutant = copy
    run = examine(mutant, copy, [("a",), ("b",), ("c",)], set(), patience=30)
    assert next(run) == ("a",) and run.send(Ended(seconds=20)) == ("b",)
    with pytest.raises(StopIteration) as stop:
        run.send(Ended(seconds=15))
    assert stop.value.value == Ended("", "35 s of its tests")
    left = []
    monkeypatch.setattr("os._exit", left.append)
    for seconds in (1e9, 0):
        Watch(tmp_path / "seen", seconds).pytest_runtest_logfinish("a::t", None)
    assert left == [0]


@pytest.mark.parametrize(
    "file, target",
    [("decode_chunk.h", None), ("bf16/decode_vdpbf16.h", "x86-64-v4-bf16"), ("bf16/decode_amx.h", "x86-64-v4-amx")],
)
def test_the_kernels_that_are_built_are_tested(file, target):
    """Otherwise the tests would load the kernels of the processor's best target, which may not have the change."""
    target = target or native_build.TARGETS[platform.machine()]
    assert native_build.target_of(Path("csrc/cpu", file)) == target
    assert all(run[:2] == ("--cpu-target", target) for run in judges(f"csrc/cpu/{file}"))


@pytest.mark.parametrize(
    "seen, ended", [("", ("", "no test began within 0 s")), ("running a::t", ("a::t", "more than 0 s"))]
)
def test_only_a_test_that_stalls_notices_a_mutant(copy, monkeypatch, seen, ended):
    """A machine can be so slow that no test begins before the limit. This says nothing about the mutant."""
    copy, mutant = copy
    monkeypatch.setattr("tests.mutants.runs.STALLED", 0)
    monkeypatch.setattr(Run, "_start", lambda run: subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    run = Run(copy, ("a",))
    copy.seen.write_text(seen, encoding="utf-8")
    assert run.ended() == Ended(*ended)
    if not ended[0]:
        steps = examine(mutant, copy, [("a",), ("b",)], set())
        next(steps), steps.send(Ended())
        with pytest.raises(RuntimeError, match="no test ran: no test began"):
            steps.send(Ended(*ended))


def test_a_sample_of_known_mutants(monkeypatch):
    """The sample has only mutants that were noticed and that still make the same change."""
    first, second, third = sites.mutants_of("triton_kernels/softmax.py")[:3]
    rows = [Row(m.address, m.digest, KILLED, "t", "", "5") for m in (first, second)]
    rows = [rows[0], rows[1]._replace(digest="other"), Row(third.address, third.digest, SURVIVED, "", "", "9")]
    monkeypatch.setattr(main, "read", lambda path: {row.mutant: row for row in rows})
    args = Namespace(rooms="kernels", without="", site=None, known=True, only="", seed="0")
    assert main.chosen(args, None) == [first]


def test_results_can_go_on_and_keep_their_reasons(tmp_path):
    rows = [
        Row("triton_kernels/a.py f constant 1", "1", KILLED, "t", "", "5"),
        Row("triton_kernels/a.py f constant 2", "2", SURVIVED, "", "", "9", "equivalent: it is multiplied by 0"),
        Row("triton_kernels/a.py f constant 3", "3", SURVIVED, "", "", "9", "performance"),
    ]
    for row in rows:
        add(tmp_path / "rows.csv", row)
    old = read(tmp_path / "rows.csv")
    assert list(old.values()) == rows and [row.counts for row in rows] == [True, False, True]
    again = {row.mutant: row._replace(why="") for row in rows}
    assert page.merged(old, again) == old
    again[rows[1].mutant] = rows[1]._replace(digest="other", why="")
    assert not page.merged(old, again)[rows[1].mutant].why
    assert "| Triton kernels | 1 | 2 | 50 | 1 | 8 |" in page.tables(old)


def test_the_page_is_that_of_the_results():
    """``python -m tests.mutants --publish CSV`` writes the page and the results. Results of code that has changed since
    are not used."""
    results = read(RESULTS)
    assert page.PAGE.read_text(encoding="utf-8").endswith(page.tables(results))
    assert not [row.mutant for row in results.values() if row.verdict == SURVIVED and not row.why]
