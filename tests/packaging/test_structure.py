"""The rooms of the package: imports run downward only, and never in a circle. Imports inside functions count."""

import ast
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (  # from the ground up; a room imports from itself and from floors below
    ("rotary", "cli"),
    ("lowering",),
    ("triton_kernels",),
    ("backends",),
    ("operators",),
    ("cache", "tuning"),
    ("integrations", "small_models"),
    ("evaluation",),
    ("commands",),
)
FOLDERS = {"flashrope": "python/flashrope", "flashrope.triton_kernels": "triton_kernels"}
FOLDERS |= {"bench": "bench", "experiments": "experiments"}


def modules() -> dict[str, Path]:
    """Every module by its dotted name; packages without their __init__, which names what is public."""
    return {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)): path
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }


MODULES = modules()


def imported(name: str) -> set[str]:
    """The modules of this repository that a module imports, by their dotted names."""
    package, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            names = [start, *(f"{start}.{each}" for each in names)]
        found.update(names)
    return (found & MODULES.keys()) - {name}


IMPORTS = {name: imported(name) for name in MODULES}


def floor(name: str) -> int | None:
    """None for the files beside the rooms: __main__, _version."""
    room = name.split(".")[1]
    return next((n for n, rooms in enumerate(FLOORS) if room in rooms), None)


def test_no_module_imports_itself_through_others():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_run_downward():
    for name, found in IMPORTS.items():
        if not name.startswith("flashrope.") or floor(name) is None:
            assert name.split(".")[0] != "flashrope" or name.split(".")[1] in ("__main__", "_version"), name
            continue
        room = name.split(".")[1]
        for other in found:
            assert other.startswith("flashrope."), f"{name} imports {other}"
            below = floor(other) is None or floor(other) < floor(name)
            assert below or other.split(".")[1] == room, f"{name} imports {other}, which is not below it"


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_is_imported_by_its_dotted_name(name):
    outside = next((library for library in ("transformers", "vllm") if f".{library}." in name), None)
    if outside and not find_spec(outside) or "triton" in name and not find_spec("triton"):
        pytest.skip(f"{outside or 'triton'} is not installed")
    assert import_module(name).__name__ == name


def test_bench_and_experiments_do_not_use_one_another():
    for name, found in IMPORTS.items():
        others = {"bench": "experiments.", "experiments": "bench."}.get(name.split(".")[0])
        assert others is None or not any(other.startswith(others) for other in found), name
