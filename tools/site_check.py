"""Reads the built site: every local link of every page leads to a file of it and to an anchor there, and a page loads
nothing from elsewhere. What is wrong is a warning, which `mkdocs build --strict` makes an error.
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
NAVIGATIONS = {"canonical", "prev", "next", "alternate"}  # of <link rel>: they load nothing


class Reader(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors.update(filter(None, (values.get("id"), values.get("name") if tag == "a" else None)))
        if (target := values.get("href")) is not None:
            loads = tag == "link" and values.get("rel") not in NAVIGATIONS
            (self.loads if loads else self.links).add(target)
        if (target := values.get("src")) is not None:
            self.loads.add(target)


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


def problems(site: Path, page: Path) -> list[str]:
    """What is wrong with the links of a page of a site."""
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
