"""Tests that tools/plain_words.py finds the wordings that it looks for."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = spec_from_file_location("plain_words", ROOT / "tools" / "plain_words.py")
assert spec is not None and spec.loader is not None
plain_words = module_from_spec(spec)
spec.loader.exec_module(plain_words)

# The test removes the tildes. They keep the wordings out of this file, so that it passes its own check.
PYTHON = '''"""Th~ose are counted.

th~ose elsewhere are not.
"""
x = 1  # A sentence. Th~ose begin another.
# The last words of a block of comments, which goes
# over two lines, are of interest al~one.
# A text that leaves the lines al~one is fine.
raise ValueError(f"{x}: is n~o number, there is no other, it is no longer {x}, it is no wider than {x}")
'''
PAGE = """First sentence. El~se the second.

- A list item.
- Th~ose of the next one.

```python
a = "so m~any"  # Th~ose in a comment of code
```

Over two lines: in
the pl~ace of it.
"""
CUDA = """int x;  // Th~ose of a
/* Numbers, b~ut for one. */ const char *s = "th~ose that";
// of a~nother
// width
"""


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("a.py", PYTHON, "1 Th~ose, 5 Th~ose, 6 al~one, 9 is n~o "),
        ("a.md", PAGE, "1 El~se, 4 Th~ose, 7 Th~ose, 10 in the pl~ace of"),
        ("a.cu", CUDA, "1 Th~ose, 2 b~ut for, 2 th~ose that, 3 of a~nother width"),
    ],
)
def test_finds_each_wording_and_its_line(name: str, source: str, expected: str) -> None:
    found = [f"{line} {wording}" for line, wording, _ in plain_words.findings(name, source.replace("~", ""))]
    assert sorted(found, key=lambda text: int(text.split()[0])) == expected.replace("~", "").split(", ")


def test_openings_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    for opening in (text.replace("~", "") for text in ("O~f", "Tho~se", "The~se", "As i~n", "As ~``", "With s~o")):
        page.write_text(f"A line. *{opening} b`` c.*\n")
        assert plain_words.main([str(tmp_path)]) == 1
        assert capsys.readouterr().out.startswith(f"{page}:1: {opening}: ")
        page.write_text(f"A line, {opening} b.\n")
        assert plain_words.main([str(page)]) == 0
