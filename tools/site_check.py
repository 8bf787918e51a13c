"""Checks three properties of the built site. Every local link leads to a file of the site, and to an anchor in it. A
page loads nothing from other sites. The sidebar of a page in `nav` has the page's title. A violation is a warning.
`mkdocs build --strict` turns warnings into errors.
"""

from __future__ import annotations

import functools
import logging
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig

log = logging.getLogger("mkdocs.hooks.site_check")
NAVIGATIONS = {"canonical", "prev", "next", "alternate"}  # values of <link rel> that load nothing


class Reader(HTMLParser):
    """Collects the anchors, the links, the loaded files and the sidebar labels of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.labels: set[str] = set()
        self._navs: list[bool] = []  # for every open <nav>: whether it lists pages, not headings
        self._link = False  # whether a link of the sidebar was opened last
        self._label: str | None = None  # the text so far of the label that is being read

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors.update(filter(None, (values.get("id"), values.get("name") if tag == "a" else None)))
        if (target := values.get("href")) is not None:
            loads = tag == "link" and values.get("rel") not in NAVIGATIONS
            (self.loads if loads else self.links).add(target)
        if (target := values.get("src")) is not None:
            self.loads.add(target)
        classes = (values.get("class") or "").split()
        if tag == "nav":
            self._navs.append("md-nav" in classes and "md-nav--secondary" not in classes)
        if tag == "a":
            self._link = "md-nav__link" in classes and bool(self._navs) and all(self._navs)
        if tag == "span" and "md-ellipsis" in classes and self._link:
            self._label = ""

    def handle_data(self, data: str) -> None:
        if self._label is not None:
            self._label += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav":
            self._navs.pop()
        if tag == "span" and self._label is not None:
            self.labels.add(self._label.strip())
            self._label = None


@functools.cache
def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text())
    return reader


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    read.cache_clear()
    for page in sorted(site.rglob("*.html")):
        for problem in problems(site, page):
            log.warning("%s: %s", page.relative_to(site), problem)
    for title, source in titles(config.nav or []):
        name = source.removesuffix(".md").removesuffix("README")
        page = site / name / "index.html"
        if title not in read(page).labels:
            log.warning('%s: the sidebar does not name "%s"', page.relative_to(site), title)


def titles(nav: list) -> list[tuple[str, str]]:
    """Returns (title, source file) of every page in the `nav` of mkdocs.yml, whatever its section."""
    found = []
    for entry in nav:
        for title, target in entry.items():
            found += titles(target) if isinstance(target, list) else [(title, target)]
    return found


def problems(site: Path, page: Path) -> list[str]:
    """Returns what is wrong with the links of a page of a site."""
    found = []
    for target in sorted(read(page).links | read(page).loads):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            if target in read(page).loads and parts.scheme != "data":
                found.append(f"loads {target} from elsewhere")
            continue
        path = unquote(parts.path)
        file = site / path[1:] if path.startswith("/") else Path(os.path.normpath(page.parent / path)) if path else page
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            found.append(f"links to {target}, which is not there")
        elif parts.fragment and file.suffix == ".html" and unquote(parts.fragment) not in read(file).anchors:
            found.append(f"links to {target}, which has no such anchor")
    return found
