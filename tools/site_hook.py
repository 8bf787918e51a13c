"""Chooses the pages of the site for mkdocs.yml: the repository's own pages, each at its own path, so that a relative
link works on GitHub and on the site. README.md is the front page. A source file or a folder that a page links to
becomes a page too. The page of the API is made from the docstrings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FOLDERS = ("docs", "bench/results")
KINDS = (".md", ".png", ".csv", ".css")
SHOWN = {".py": "python", ".md": "markdown", ".cu": "cpp", ".sh": "bash"}
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs_dir by the repository's own pages, and by pages that show its sources."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    paths = [ROOT / page for page in PAGES]
    paths += [x for folder in FOLDERS for x in sorted((ROOT / folder).rglob("*")) if x.suffix in KINDS]
    for path in paths:
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    files.append(File.generated(config, "docs/api.md", content=api_reference()))
    waiting = [source for path in paths if path.suffix == ".md" for source in linked_sources(path)]
    while waiting:
        source = waiting.pop()
        if files.get_file_from_path(shown_at(source)) is None:
            files.append(File.generated(config, shown_at(source), content=shown(source)))
            waiting += listed(source) if source.is_dir() else []
    return files


def api_reference() -> str:
    """Returns the page that tools/api_reference.py makes of the docstrings of this checkout."""
    command = [sys.executable, str(ROOT / "tools" / "api_reference.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes links to sources into links to the pages that show them."""
    folder = (ROOT / page.file.src_uri).parent

    def changed(match: re.Match) -> str:
        source = linked_source(folder, match[2])
        return match[0] if source is None else match[1] + os.path.relpath(ROOT / shown_at(source), folder)

    return LINK.sub(changed, markdown)


def linked_sources(page: Path) -> list[Path]:
    """Returns the source files and folders that a page links to."""
    targets = (linked_source(page.parent, target) for _, target in LINK.findall(page.read_text()))
    return [target for target in targets if target is not None]


def linked_source(folder: Path, target: str) -> Path | None:
    """Returns the file or folder of the repository that a link names. Returns None for any other link, and for a file
    that is part of the site anyway."""
    path = Path(os.path.normpath(folder / target))
    if "://" in target or not path.exists() or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    part = name in PAGES or (path.suffix in KINDS and name.startswith(tuple(f"{x}/" for x in FOLDERS)))
    return None if part else path


def listed(folder: Path) -> list[Path]:
    """Returns the paths that the page of a folder lists."""
    return [path for path in sorted(folder.iterdir()) if path.suffix in SHOWN]


def shown_at(source: Path) -> str:
    path = PurePosixPath(source.relative_to(ROOT).as_posix())
    return str(path / "index.md") if source.is_dir() else f"{path}.md"


def shown(source: Path) -> str:
    """Returns the page of a source file, or of a folder."""
    name = source.relative_to(ROOT).as_posix()
    title = f"---\ntitle: {name}\nhide: [navigation, toc]\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n"
    if source.is_dir():
        return title + "".join(f"- [{path.name}]({path.name})\n" for path in sorted(source.iterdir()) if path.is_file())
    return f"{title}````{SHOWN.get(source.suffix, 'text')}\n{source.read_text()}````\n"
