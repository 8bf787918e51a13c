"""The Python blocks of README.md and docs/ run as they stand, those of a page one after another in one namespace."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = ("transformers", "peft")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    for package in OPTIONAL:
        if any(f"import {package}" in block or f"from {package}" in block for block in blocks(page)):
            pytest.importorskip(package, reason=f"the page's code needs {package}")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith(("https://", "http://")) or (page.parent / target).exists(), target
