"""Tests that every folder is installed, and the settings of the linters. (.ci/run builds the wheel and the sdist.)"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_the_package_is_installed():
    packages = re.search(r"packages=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    package, kernels = (set((ROOT / folder).rglob("*.py")) for folder in ("python", "triton_kernels"))
    folders = {".".join(path.parent.relative_to(ROOT / "python").parts) for path in package}
    folders |= {".".join(("flashrope", *path.parent.relative_to(ROOT).parts)) for path in kernels}
    assert set(re.findall(r'"(.+?)"', packages)) == folders


def test_formatter_and_line_limit_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (ruff,) = (need for need in project["project"]["optional-dependencies"]["lint"] if need.startswith("ruff"))
    assert f"rev: v{ruff.removeprefix('ruff==')}" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert project["tool"]["ruff"]["line-length"] == 120 and "E501" in project["tool"]["ruff"]["lint"]["select"]
    script = (ROOT / ".ci" / "run").read_text()
    assert "ruff check ." in script and "ruff format --check ." in script
