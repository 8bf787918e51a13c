"""Finds wordings that have to be read twice, in docstrings, comments, string literals and pages.

    python tools/plain_words.py [PATH...]

Prints ``path:line: wording: the sentence`` for each of them, and exits with 1 if there are any. PATH is a file or a
folder. Without one, the whole project is read.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCOPE = (
    *("python", "triton_kernels", "csrc", "bench", "experiments", "tests", "tools", "docs", "examples"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
)
OPENINGS = r"\b(?:Of|Those|These|With so|Else|As in)\b|As ``"
# The patterns are written so that this file does not contain the wordings that it looks for.
PHRASES = r"so[ ]many|but[ ]for|in[ ]the place of|of[ ]another width|those[ ]that"
NO_NOUN = r"(?<!there )is[ ]no (?!longer|more|less|\w+er than)"
ODD = re.compile(rf"^[\W_]*(?P<opening>{OPENINGS})|\b(?P<phrase>(?i:{PHRASES}|{NO_NOUN}))|\b(?P<ending>alone)\W*$")
C_TEXT = re.compile(r'(?P<comment>(?://[^\n]*\n?\s*)+|/\*.*?\*/)|"(?P<string>(?:\\.|[^"\\\n])*)"', re.DOTALL)
# A sentence ends at a full stop, at an empty line, and before a list item, a table cell and the name of an argument.
END = re.compile(r"(?<=[.!?])[\"'`*)]*\s+|\n\s*\n|\n\s*(?:[-*#]|\d+\.)\s+|\s\|\s|\n\s*(?=[\w*, ]+: )")


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of every string literal and of every block of comments."""
    inner = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner |= set(map(id, ast.walk(node)))
            values = [value.value if isinstance(value, ast.Constant) else "{}" for value in node.values]
            yield node.lineno, "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            follows = block and (token.start[0] - 1, token.start[1]) == block[-1].start
            if block and not follows:
                yield block[0].start[0], "\n".join(comment.string.lstrip("#: ") for comment in block)
            block = [*block, token] if follows else [token]
    if block:
        yield block[0].start[0], "\n".join(comment.string.lstrip("#: ") for comment in block)


def texts(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yields every piece of prose in a file with its first line number. name: the file name, whose suffix gives the
    language."""
    if name.endswith((".py", ".pyi")):
        yield from python_texts(source)
    elif name.endswith(".md"):
        fenced = False
        lines = source.split("\n")
        for number, line in enumerate(lines):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            if fence or fenced:  # only the comments of code are prose
                lines[number] = line.partition("# ")[2]
        yield 1, "\n".join(lines)
    elif name.endswith((".cpp", ".h", ".cu", ".cuh")):
        for match in C_TEXT.finditer(source):
            text = match["comment"] or match["string"] or ""
            yield source.count("\n", 0, match.start()) + 1, re.sub(r"(?m)^\s*(?://|/?\*+)/? ?", "", text)


def findings(name: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the wording and the sentence of every odd wording of a file."""
    for first, text in texts(name, source):
        start = 0
        for end in [*END.finditer(text), None]:
            sentence = text[start : end.start() if end else len(text)]
            words = sentence.strip("| \n").split()
            for found in ODD.finditer(" ".join(words)) if len(words) > 1 else ():  # a single word is a name
                line = first + text.count("\n", 0, start + len(sentence) - len(sentence.lstrip()))
                yield line, found[found.lastgroup or 0], " ".join(words)
            start = end.end() if end else len(text)


def main(paths: list[str]) -> int:
    roots = [Path(path) for path in paths] or [ROOT / name for name in SCOPE]
    files = sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.*")))
    found = 0
    for file in files:
        if file.suffix in {".py", ".pyi", ".md", ".cpp", ".h", ".cu", ".cuh"} and "__pycache__" not in file.parts:
            for line, wording, sentence in findings(file.name, file.read_text()):
                found += 1
                place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                print(f"{place}:{line}: {wording}: {sentence}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
