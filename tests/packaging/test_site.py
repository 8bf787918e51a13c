"""Tests the style sheet of the documentation site. tools/site_check.py checks the built pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rules() -> dict[str, dict[str, str]]:
    """Returns {selector: {property: value}} of docs/site.css."""
    sheet = re.sub(r"/\*.*?\*/", "", (ROOT / "docs" / "site.css").read_text(), flags=re.DOTALL)
    found = {}
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet):
        pairs = (pair.split(":", 1) for pair in body.split(";") if pair.strip())
        found[selector.strip()] = {name.strip(): value.strip() for name, value in pairs}
    return found


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        (".md-typeset :is(th, td) code", {"overflow-wrap": "normal", "word-break": "normal"}),  # no break inside a name
        (".md-typeset pre > code", {"white-space": "pre-wrap", "overflow-wrap": "anywhere"}),  # no line is cut
        (
            ".md-typeset .drawing pre > code",
            {"white-space": "pre", "overflow-wrap": "normal"},
        ),  # a wide drawing scrolls
    ],
)
def test_code_on_the_site_is_readable(selector, wanted):
    """The style sheet keeps code readable. Without it, the theme breaks code anywhere in a table cell and cuts long
    lines of a block at the column's edge."""
    assert rules().get(selector) == wanted
