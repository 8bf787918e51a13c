"""Tests the project as a Hugging Face kernel, and the settings of the linters. (.ci/run builds the wheel and the
sdist.)"""

import ast
import importlib.util
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from flashrope import Rotary, attention
from test_supply_chain import imported

ROOT = Path(__file__).resolve().parents[2]
# The builder's documented keys of edition 5. It refuses all other keys.
GENERAL = {"name", "version", "edition", "license", "backends", "upstream", "source", "minver", "cuda", "hub"}
GENERAL |= {"kernel-depends", "python-depends"}
NOARCH = {"pyext", "cuda_capabilities", "rocm_archs"}
OPS = """
import torch
_NAME = {name!r}
ops = getattr(torch.ops, _NAME)
def add_op_namespace_prefix(op_name):
    return f"{{_NAME}}::{{op_name}}"
"""


@pytest.fixture(scope="module")
def lay_out():
    return runpy.run_path(str(ROOT / "tools" / "hub_kernel.py"))["lay_out"]


def load(package: Path, name: str):
    """Loads a package as the kernels library does: from a path, under another name."""
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_build_file_is_in_the_documented_form():
    build = tomllib.loads((ROOT / "build.toml").read_text())
    assert set(build) == {"general", "torch-noarch"}
    assert {"name", "version", "edition", "license", "backends"} <= set(build["general"]) <= GENERAL
    assert set(build["torch-noarch"]) <= NOARCH
    assert build["general"]["name"] == "flashrope" and set(build["general"]["backends"]) <= {"cpu", "cuda"}
    assert isinstance(build["general"]["version"], int) and build["general"]["edition"] == 5


def test_two_builds_load_beside_the_installed_package(lay_out, tmp_path):
    """Two builds can be loaded together with the installed package. A hub kernel has no compiled CPU kernels."""
    q, k, v = (torch.randn(1, 40, heads, 16) for heads in (4, 2, 2))
    q.requires_grad_()
    expected = attention(q, k, v, Rotary.rope(16).rectify(8), impl="sdpa")
    (grad,) = torch.autograd.grad(expected.sum(), q)
    for n in range(2):
        package = lay_out(tmp_path / str(n))
        (package / "_ops.py").write_text(OPS.format(name=f"_flashrope_cpu_test{n}"))
        kernel = load(package, f"flashrope_build{n}")
        out = kernel.attention(q, k, v, kernel.Rotary.rope(16).rectify(8))
        assert torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], grad)
        assert f"_flashrope_cpu_test{n}" == kernel.operators.library.NAMESPACE
        assert hasattr(getattr(torch.ops, kernel.operators.library.NAMESPACE), "attention_with_cache")
        compiled = torch.compile(kernel.attention, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, k, v, kernel.Rotary.rope(16).rectify(8)), expected)


# torch-ops-check-hook.py and kernel-layout-check-hook.sh of huggingface/kernels, nix-builder/pkgs, at 8ac69fc5.
REGISTRATIONS = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap"}
REGISTRATIONS |= {"register_torch_dispatch"}


def called(node: ast.AST) -> str | None:
    """Returns the name of the function that a call calls."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", None))


def fixed_namespaces(package: Path) -> list[str]:
    """Returns the registrations of operators whose name lacks the builder's namespace."""
    return [
        f"{path.name}:{call.lineno}"
        for path in package.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and called(call) in REGISTRATIONS and called(call.args[0]) != NAMESPACED
    ]


NAMESPACED = "add_op_namespace_prefix"


def test_the_copy_passes_the_checks_of_the_builder(lay_out, tmp_path):
    package = lay_out(tmp_path / "kernel")
    root = package.parents[1]
    assert (package / "__init__.py").exists() and not (package / "flashrope").exists()
    assert {"CARD.md", "build.toml", "flake.nix", "tests", "benchmarks", "torch-ext", "LICENSE"} == set(
        os.listdir(root)
    )
    assert not fixed_namespaces(package)
    (package / "wrong.py").write_text('@torch.library.custom_op("flashrope::wrong")\ndef wrong(): ...\n')
    assert fixed_namespaces(package) == ["wrong.py:1"]
    trees = (ast.parse(path.read_text()) for path in package.rglob("*.py"))
    libraries = {name.split(".")[0] for tree in trees for name in imported(tree)} - sys.stdlib_module_names
    # the hub's own examples import torch and triton too; each other library is imported only in its integration
    assert libraries == {"torch", "triton", "transformers", "peft", "vllm", "torchtitan", "megatron"}
    repository = tomllib.loads((root / "build.toml").read_text())["general"]["hub"]["repo-id"]
    assert f'get_kernel("{repository}", version=0)' in (root / "tests/test_flashrope.py").read_text()


def test_a_folder_that_is_there_is_not_overwritten(lay_out, tmp_path):
    lay_out(tmp_path / "kernel")
    with pytest.raises(FileExistsError):
        lay_out(tmp_path / "kernel")


def test_every_folder_of_the_package_is_installed():
    packages = re.search(r"packages=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    source = ROOT / "python"
    folders = {".".join(path.parent.relative_to(source).parts) for path in source.rglob("*.py")}
    assert set(re.findall(r'"(.+?)"', packages)) == folders | {"flashrope.triton_kernels"}


def test_formatter_and_line_limit_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (ruff,) = (need for need in project["project"]["optional-dependencies"]["lint"] if need.startswith("ruff"))
    assert f"rev: v{ruff.removeprefix('ruff==')}" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert project["tool"]["ruff"]["line-length"] == 120 and "E501" in project["tool"]["ruff"]["lint"]["select"]
    script = (ROOT / ".ci" / "run").read_text()
    assert "ruff check ." in script and "ruff format --check ." in script
