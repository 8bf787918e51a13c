"""Checks the bounds of dependencies, that no file is read with pickle, that files are written as a whole, and the
licences."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch
from flashrope.lab.small_models import state
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
    if not text.startswith("flashrope")
]
ROOMS = ("python", "triton_kernels", "bench", "experiments", "tools", "examples")
PATHS = [ROOT / "setup.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.AST]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PATHS}


# ---- versions


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda x: x.name)
def test_dependencies_have_both_bounds(requirement):
    operators = {spec.operator for spec in requirement.specifier}
    assert operators == {"=="} or operators == {">=", "<"}, requirement


def test_the_bounds_hold_what_ci_runs():
    """The bounds of a dependency include every version that .ci/run or README.md pins, and the oldest allowed version
    is one of them."""
    pinned: dict[str, set[Version]] = {}
    text = (ROOT / ".ci" / "run").read_text() + (ROOT / "README.md").read_text()
    text = text.replace("==$oldest", "==" + re.search(r"^oldest=(\S+)$", text, re.MULTILINE)[1])
    for name, version in re.findall(r"\b(\w+)==(\d[\w.]*)", text):
        pinned.setdefault(name, set()).add(Version(version))
    for requirement in REQUIREMENTS:
        for version in pinned.get(requirement.name, ()):
            assert version in requirement.specifier, f"{requirement}, but CI runs {version}"
    assert Version("3.6.0") in pinned["triton"] and len(pinned["transformers"]) > 2 and pinned["torch"]
    assert "'triton>=3.6,<4'" in text and "triton>=3.6,<4;" in "".join(PROJECT["dependencies"])


# ---- what is read

CODE_IN_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}
READERS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}


def imported(tree: ast.AST) -> list[str]:
    """Returns the full names of the imported modules."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]


def unsafe(tree: ast.AST) -> list[str]:
    """Returns the imports and calls in a source that read objects or code from data, such as pickle."""
    found = [f"import {name}" for name in imported(tree) if name.split(".")[0] in CODE_IN_DATA]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append(node.arg)
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("eval", "exec"):
            found.append(function.id)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            if (function.value.id, function.attr) in READERS:
                found.append(f"{function.value.id}.{function.attr}")
    return found


def test_nothing_reads_pickles_or_runs_data(sources):
    assert len(sources) > 150
    found = {path: unsafe(tree) for path, tree in sources.items()}
    assert not {path: what for path, what in found.items() if what}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from joblib import load", "torch.load(f, weights_only=True)", "np.load(f, allow_pickle=True)"]
    + ["eval(text)", "AutoModel.from_pretrained(f, trust_remote_code=trusted)", "import pandas as pd"],
)
def test_what_reads_pickles_is_found(code):
    assert unsafe(ast.parse(code))


# ---- what is written

# Files that may be written in place: locks, files in a temporary or new folder, files of the checkout.
IN_PLACE = {
    "setup.py",  # in the build folder
    "python/flashrope/backends/tuned_tiles.py",  # a lock; the file itself is moved into place
    "python/flashrope/lab/evaluation/journal.py",  # appends a line, which a reader drops if it was cut off
    "bench/machine_code/gate_cuda.py",  # in a temporary folder
    "bench/speed/cpu.py",  # /proc
    "experiments/export.py",  # in a new folder
    "experiments/figures.py",  # writes to memory
    "tools/migration_diff.py",
    "tools/loss_model.py",
    "examples/train_fsdp.py",  # writes a log line by line
}
WRITERS = {"write_text", "write_bytes", "savefig", "save_file", "to_csv", "tofile"}


def writes(tree: ast.AST) -> list[int]:
    """Returns the lines that write a file outside `with replacing(...)`."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "replacing(" in ast.unparse(node.items[0]):
            inside |= {id(child) for child in ast.walk(node)}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in inside:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [x.value for x in [*node.args, *(k.value for k in node.keywords)] if isinstance(x, ast.Constant)]
        opens = name == "open" and any(isinstance(m, str) and re.fullmatch("[wax]b?t?\\+?", m) for m in modes)
        if opens or name in WRITERS:
            lines.append(node.lineno)
    return lines


def test_files_are_written_whole(sources):
    """Files are written under a temporary name and then moved. An interrupted command leaves either the old file or the
    new file."""
    found = {path: lines for path, tree in sources.items() if (lines := writes(tree))}
    assert found.keys() <= IN_PLACE, found
    assert found.keys() >= IN_PLACE - {"bench/speed/cpu.py"}, "an entry of IN_PLACE is no longer needed"
    assert writes(ast.parse("with open(path, 'w') as file:\n  pass")) and writes(ast.parse("path.write_text('')"))


# ---- the state of a run


def test_a_state_is_what_was_saved(tmp_path):
    weight = torch.randn(3, 4).to(torch.bfloat16)
    tree = {"a": {0: weight, "tied": weight, 7: [1, 2.5e-300, None, True, "x"]}, "b": (torch.tensor(3), (), {})}
    state.save(tmp_path / "run.state", tree)
    got = state.load(tmp_path / "run.state", torch.device("cpu"))
    assert torch.equal(got["a"][0], weight) and torch.equal(got["a"]["tied"], weight) and got["b"][0] == 3
    assert got["a"][7] == tree["a"][7] and got["b"][1:] == ((), {}) and list(got["a"]) == [0, "tied", 7]
    with pytest.raises(TypeError, match="expected tensors and plain values, got function"):
        state.save(tmp_path / "run.state", {"f": unsafe})
    assert [path.name for path in tmp_path.iterdir()] == ["run.state"]


@pytest.mark.parametrize("what", ["torch", "text", "other"])
def test_another_file_in_the_place_of_a_state(tmp_path, what):
    path = tmp_path / "run.state"
    if what == "torch":
        torch.save({"losses": torch.zeros(2)}, path)
    elif what == "text":
        path.write_text("losses")
    else:
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"run\.state: expected the state of an interrupted run.* remove it to train"):
        state.load(path, torch.device("cpu"))


# ---- licences


def test_what_is_shipped_is_under_one_licence():
    """All shipped files are under one licence, the one that pyproject.toml names. No folder contains third-party
    code."""
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    shipped = [path for room in ("python", "triton_kernels", "csrc") for path in (ROOT / room).rglob("*")]
    shipped = [path for path in shipped if path.name != "build.json"]  # the installation writes build.json
    kinds = {path.suffix for path in shipped if path.is_file() and "__pycache__" not in path.parts}
    assert kinds - {".pyc"} <= {".py", ".typed", ".cpp", ".cu", ".h", ".cuh", ".so", ".md"} | {""}
    foreign = re.compile(r"SPDX-License-Identifier: (?!Apache-2\.0)|Copyright (\(c\)|©) |All rights reserved", re.I)
    assert not [
        path
        for path in shipped
        if path.suffix in (".py", ".h", ".cu", ".cuh", ".cpp") and foreign.search(path.read_text())
    ]
