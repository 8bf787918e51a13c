"""Writes the project in the layout that Hugging Face's kernel-builder expects.

    python tools/hub_kernel.py DIR

DIR gets build.toml, the contents of hub/ (flake.nix, CARD.md, tests, benchmarks) and, under torch-ext/flashrope, the
package with its kernels. The commands are left out, because they cannot run in a kernel that is loaded under another
name. The builder adds _ops.py, from which flashrope.operators.library takes its namespace. The copy has no other
namespace as a fallback, because the builder's documentation forbids it.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"": "python/flashrope", "triton_kernels": "triton_kernels"}
NAMESPACE = re.compile(
    r"^try:  # Hugging Face.*?\n    (from \.\._ops import \w+\n).*?\n\n\n(?=NAMESPACE = )", re.DOTALL | re.MULTILINE
)
LEFT_OUT = {"__main__.py", "cli", "commands", "evaluation", "small_models"}


def lay_out(target: Path) -> Path:
    """Writes the project to target, which must not exist. Returns the folder of the package."""
    package = target / "torch-ext" / "flashrope"
    package.mkdir(parents=True)
    for name, source in SOURCES.items():
        for path in sorted((ROOT / source).rglob("*.py")):
            relative = path.relative_to(ROOT / source)
            if relative.parts[0] not in LEFT_OUT:
                (package / name / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, package / name / relative)
    library = package / "operators" / "library.py"
    text, replaced = NAMESPACE.subn(r"\1\n", library.read_text())
    if replaced != 1:
        raise RuntimeError(f"{library.name}: expected one namespace of the builder, got {replaced}")
    library.write_text(text)
    shutil.copytree(ROOT / "hub", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", "LICENSE"):
        shutil.copyfile(ROOT / name, target / name)
    return package


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(lay_out(Path(sys.argv[1])))
