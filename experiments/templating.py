"""Fills the jinja2 templates in templates/, from which pages are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """Returns the text of a template after filling in the values. A name in the template without a value is an
    error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(template).render(values)
