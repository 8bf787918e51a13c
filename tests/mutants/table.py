"""The mutants: areas/AREA.txt, blocks of lines with an empty line between them.

A mutant says what is wrong, then the text and what takes its place. The text occurs once in the file. A third part,
where there is one, says why the change changes no result. Such a mutant is equivalent: it is not run and not counted.

    a window reaches one key too far
    - if distance < stop:
    + if distance <= stop:
    = why no result changes

The other blocks hold for the mutants below them. `tests` is what pytest runs first, as its arguments; usually enough. A
name in capitals stands for tests that the file, or selections.txt, gives. With `cut` the tests run with and without the
mutant, so that less has to be compiled.

    NAME = tests/operators/test_accuracy.py -k "cpu and not compiled"

    cut: csrc/decode.cu
    - a line that only other tests need
    -

    file: triton_kernels/forward.py
    tests: tests/kernels/test_tiles.py NAME
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AREAS = {
    "schemes": "schemes, bands, what all backends share",
    "tables": "cos/sin tables, lowering",
    "scales": "sinks, factors by length",
    "launches": "launches of the Triton kernels",
    "tiles": "Triton: tiles of a band, rows, addresses",
    "softmax": "Triton: online softmax",
    "rotation": "Triton: rotation",
    "rotate": "Triton: rotated queries and keys",
    "forward": "Triton: forward",
    "backward": "Triton: backward",
    "decode": "Triton: decoding, pages",
    "placed": "Triton: positions of cached tokens",
    "maps": "position maps, all backends",
    "cpu": "CPU backend, its C++ kernels",
    "cuda": "CUDA C++ kernels, as PTX in the executor",
    "caches": "caches",
    "rotated_keys": "rotate, caches of rotated keys, all backends",
    "quantized": "quantized caches, all backends",
    "integrations": "Hugging Face, vLLM, torch.distributed",
}
Change = tuple[str, str, str]  # (file, text that occurs once, what takes its place)


class Mutant(NamedTuple):
    area: str
    file: str
    tests: tuple[str, ...]
    wrong: str
    old: str
    new: str
    equivalent: str
    cut: tuple[Change, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}: {self.wrong}"

    @property
    def changes(self) -> tuple[Change, ...]:
        return *self.cut, (self.file, self.old, self.new)


def replaced(text: str, old: str, new: str, where: str) -> str:
    """Raises ValueError unless ``old`` occurs once."""
    if (count := text.count(old)) != 1:
        raise ValueError(f"{where}: expected {old!r} once, got {count} times")
    return text.replace(old, new)


def mutants_of(area: str, text: str) -> list[Mutant]:
    """The mutants in the text of a file, which may begin with that of selections.txt."""
    mutants, selections, file, tests, cut = [], {}, "", (), ()

    def arguments(line: str) -> tuple[str, ...]:
        return tuple(word for x in shlex.split(line) for word in selections.get(x, (x,)))

    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        old, new, why = ("\n".join(line[2:] for line in lines if line[:2].strip() == mark) for mark in "-+=")
        for line in (line for line in lines if line[:2].strip() not in ("-", "+", "=", "#")):
            key, _, value = line.partition(": ")
            if named := re.fullmatch("([A-Z_]+) = (.+)", line):
                selections[named[1]] = arguments(named[2])
            elif key == "file":
                file = value
            elif key == "tests":
                tests = arguments(value)
            elif key == "cut":
                cut += ((value, old, new),)
            else:
                mutants.append(Mutant(area, file, tests, line, old, new, why, cut))
    return mutants


def _read() -> list[Mutant]:
    shared = (HERE / "selections.txt").read_text(encoding="utf-8")
    texts = {area: (HERE / f"areas/{area}.txt").read_text(encoding="utf-8") for area in AREAS}
    return [mutant for area, text in texts.items() for mutant in mutants_of(area, f"{shared}\n{text}")]


MUTANTS = _read()
