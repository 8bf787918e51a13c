"""Tests that the parts of the package ("rooms") form layers: imports go only to lower layers, and never in a circle.

Imports inside functions count, and so do those by ``import_module("name", __package__)``.
"""

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {  # from the lowest layer up; a room (a file or a folder) imports from itself and from lower layers
    "flashrope": (
        "schemes console",
        "triton_kernels calls",
        "backends",
        "operators",
        "cache",
        "integrations",
        "lab",
        "cli",
    ),
    "bench": (
        "machine progress",
        "machine_code report",
        "speed",
        "results_page sanitize model correct other_package",
        "device",
        "__main__",
    ),
    "experiments": (
        "tokens templating gau encodings statistics published distributed looks zoo tokenizing figures patterns tasks "
        "passkey copying few_shot presets reused_loss switch_loss fetch real_codes "
        "real_reuse real_speed",
        "estimate runs training_curves tables training export measuring real_training",
        "long_context digits picture over_length drawn checkpoints",
        "registry",
        "show arguments claims_figure page __main__",
    ),
}
LIBRARIES = (".megatron.", ".torchtitan.", ".transformers.", ".vllm.", "triton")
FOLDERS = {"flashrope": "python/flashrope", "flashrope.triton_kernels": "triton_kernels"}
FOLDERS |= {"bench": "bench", "experiments": "experiments"}


def modules() -> dict[str, Path]:
    """Returns {dotted name: module}. The __init__ files of packages are left out, because they only list public
    names."""
    return {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)): path
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }


MODULES = modules()


def imported(name: str, source: str) -> set[str]:
    """Returns the modules of this repository that a module with this source imports, by their dotted names."""
    package, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            names = [start, *(f"{start}.{each}" for each in names)]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                names = [resolve_name(node.args[0].value, ".".join(package))]
        found.update(names)
    return (found & MODULES.keys()) - {name}


IMPORTS = {name: imported(name, path.read_text()) for name, path in MODULES.items()}


def floor(name: str) -> int:
    """Returns the layer of a module, or -1 for __main__ and _version, which belong to no room."""
    package, room, *_ = name.split(".")
    floors = [n for n, rooms in enumerate(FLOORS[package]) if room in rooms.split()]
    assert floors or name in ("flashrope.__main__", "flashrope._version"), f"{name} has no floor"
    return floors[0] if floors else -1


def test_no_module_imports_itself_through_others():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(
    "source",
    [
        "from ..integrations import distributed",
        "def f():\n    from ..integrations.distributed import FIELD",
        "def f():\n    import flashrope.integrations.distributed",
        "def f():\n    return import_module('..integrations.distributed', __package__)",
        "import importlib\nimportlib.import_module('flashrope.integrations.distributed')",
    ],
)
def test_every_way_to_import_is_seen(source):
    assert imported("flashrope.schemes.rotary", source) == {"flashrope.integrations.distributed"}


@pytest.mark.parametrize("package", FLOORS)
def test_imports_run_downward(package):
    for name in (name for name in MODULES if name.startswith(f"{package}.") and floor(name) >= 0):
        for other in IMPORTS[name]:
            ours = other.startswith(f"{package}.")
            assert ours or package != "flashrope" and other.startswith("flashrope."), f"{name} imports {other}"
            # the experiments are in one folder, whose layers have several files each
            same = other.split(".")[1] == name.split(".")[1] or package == "experiments" and floor(other) == floor(name)
            assert not ours or same or floor(other) < floor(name), f"{name} imports {other}, which is not below it"


def test_every_module_is_imported_by_its_dotted_name():
    """Modules of integrations are left out where their library is not installed, and so are all modules with Triton."""
    missing = [x for x in LIBRARIES if not find_spec(x.strip("."))]
    for name in (name for name in MODULES if not name.endswith("__main__")):
        if not any(library in f"{name}." for library in missing):
            assert import_module(name).__name__ == name


OURS = [path for name, path in MODULES.items() if name.startswith("flashrope.")]
BY_BACKEND = {"attention", "cached", "decode", "plan", "rotated"}  # the same work, in several backends
DICTATED = {"Config"}  # torchtitan looks the name up


def test_few_file_names_stand_twice():
    twice = {name for name, number in Counter(path.stem for path in OURS).items() if number > 1}
    assert twice == BY_BACKEND


def test_benchmarks_import_no_tests():
    for path in (ROOT / "bench").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tests\b|\"tests\"\)?\)", path.read_text(), re.MULTILINE), path


def test_no_class_name_stands_twice():
    trees = [ast.walk(ast.parse(path.read_text())) for path in OURS]
    names = Counter(node.name for tree in trees for node in tree if isinstance(node, ast.ClassDef))
    assert {name for name, number in names.items() if number > 1} == DICTATED


def test_the_ptx_machine_knows_nothing_of_the_package():
    for path in (ROOT / "tests/executor/machine").glob("*.py"):
        found = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert "flashrope" not in " ".join(map(ast.unparse, found)), path.name


def test_the_training_kernel_is_the_entrance():
    """The training kernel is short and has no arguments for a cache, because readers who know FlashAttention-2 start
    there."""
    [kernel] = (
        node
        for node in ast.parse(MODULES["flashrope.triton_kernels.attention.forward"].read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "attention_forward"
    )
    arguments = [argument.arg for argument in kernel.args.args]
    assert arguments.pop() == "VARIANT" and len(arguments) <= 13, arguments
    assert kernel.end_lineno - kernel.lineno < 70
    assert not [name for node in ast.walk(kernel) if "page" in (name := getattr(node, "attr", ""))]
    assert not {"cache", "k_cache", "v_cache"} & set(arguments)
