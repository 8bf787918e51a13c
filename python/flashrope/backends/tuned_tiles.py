"""Reads and writes the file of tuned tiles. The file holds the tiles of all of a user's devices. A process reads the
file once.

The file is ``flashrope/tiles.json`` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache). Writing replaces the
file atomically. A tile is used only on the device on which it was measured, and with the same versions of Triton and
flashrope. A file that cannot be read is ignored with one warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

FORMAT = "flashrope tiles 3"
MAX_KEYS = (1024, 8192)  # three classes of length: up to 1024 keys, up to 8192 keys, and more keys
CACHES = ("", "contiguous", "paged")


class Setup(NamedTuple):
    """The conditions under which a measurement is valid. capability: for example 90, or "gfx942"."""

    device: str
    capability: int | str
    triton: str
    flashrope: str


class ShapeClass(NamedTuple):
    """A class of calls that share a tile.

    block_d: head_dim rounded up to a power of two. banded: the scheme has several bands. grouped: there are fewer key
    heads than query heads. max_keys: one of ``MAX_KEYS``, or 0 for longer sequences. For calls over a cache, the
    capacity of the cache counts as the length.
    """

    direction: str
    block_d: int
    itemsize: int
    banded: bool
    cache: str
    grouped: bool
    max_keys: int

    def __str__(self) -> str:
        where = f"{self.cache} cache" if self.cache else "no cache"
        length = f"up to {self.max_keys:,} keys" if self.max_keys else f"more than {MAX_KEYS[-1]:,} keys"
        return (
            f"{self.direction}, head_dim {self.block_d}, {8 * self.itemsize} bit, "
            f"{'several bands' if self.banded else 'one band'}, {where}, "
            f"{'grouped' if self.grouped else 'equal'} heads, {length}"
        )


class Winner(NamedTuple):
    """The fastest correct candidate of a class.

    tile: the fields of ``configs.Tile``. milliseconds: time of one call with this tile. default_milliseconds:
    time with the tile that is used without tuning.
    """

    tile: tuple[int, int, int, int, bool]
    milliseconds: float
    default_milliseconds: float


Winners = dict[ShapeClass, Winner]


def max_keys(keys: int) -> int:
    """Returns ``ShapeClass.max_keys`` for this number of keys."""
    return next((bound for bound in MAX_KEYS if keys <= bound), 0)


def path() -> Path:
    """Returns the path of the file, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flashrope" / "tiles.json"


@cache
def tuned() -> Mapping[Setup, Winners]:
    """Returns the winners in the file. The first call reads the file. Returns an empty mapping if there is no file.
    Warns and returns an empty mapping if the file cannot be read."""
    try:
        return read(path())
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{path()}: ignored, the default tiles are used ({error}); flashrope tune --reset removes this file",
            stacklevel=2,
        )
        return {}


def read(file: Path) -> dict[Setup, Winners]:
    """Returns the winners of every setup in a file, or an empty dict if the file does not exist.

    Raises:
        ValueError: the file is not one that ``update`` wrote.
        OSError: the file cannot be read.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return {_setup(*entry["setup"]): dict(map(_winner, entry["winners"])) for entry in content["setups"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a file of {FORMAT}: {type(error).__name__}: {str(error)[:80]}") from None


def update(setup: Setup, winners: Winners) -> Path:
    """Merges winners into the file. New winners replace earlier winners of the same class. The write is atomic.

    Raises OSError if the cache folder cannot be written.
    """
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.with_suffix(".lock")):
        try:
            known = read(file)
        except ValueError:  # tuned() has warned already
            known = {}
        known[setup] = known.get(setup, {}) | winners
        handle, temporary = tempfile.mkstemp(prefix=file.name, dir=file.parent)
        try:
            with open(handle, "w") as out:
                out.write(_text(known))
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    tuned.cache_clear()
    return file


def reset() -> bool:
    """Removes the file. Returns whether there was one."""
    tuned.cache_clear()
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lets only one process at a time enter the context, if the platform has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _text(known: Mapping[Setup, Winners]) -> str:
    """Returns the text of the file, with a line for every winner."""
    entries = []
    for setup, winners in known.items():
        lines = ",\n".join(f"   {json.dumps([*shape, *winner])}" for shape, winner in sorted(winners.items()))
        entries.append(f'  {{"setup": {json.dumps(setup)}, "winners": [\n{lines}\n  ]}}')
    return f'{{"format": {json.dumps(FORMAT)}, "setups": [\n' + ",\n".join(entries) + "\n]}\n"


def _checked(value, kind: type):
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value


def _setup(device, capability, triton, flashrope) -> Setup:
    if not (isinstance(capability, str) and capability.startswith("gfx")):
        _checked(capability, int)
    return Setup(_checked(device, str), capability, _checked(triton, str), _checked(flashrope, str))


def _winner(row: list) -> tuple[ShapeClass, Winner]:
    shape = ShapeClass(*map(_checked, row[:7], (str, int, int, bool, str, bool, int)))
    tile, *milliseconds = row[7:]
    *numbers, lagged = tile
    block_m, block_n, num_warps, num_stages = (_checked(number, int) for number in numbers)
    # The bounds only reject absurd tiles. Tuning has already checked that the tile fits and computes correct results.
    powers_of_two = all(number > 0 and number & (number - 1) == 0 for number in (block_m, block_n, num_warps))
    if not (powers_of_two and 16 <= block_m <= 256 and 16 <= block_n <= 256 and num_warps <= 16):
        raise ValueError(f"tile {tile}")
    if not 1 <= num_stages <= 8 or shape.cache not in CACHES or shape.max_keys not in (*MAX_KEYS, 0):
        raise ValueError(f"winner {row}")
    times = [_checked(number, float) for number in milliseconds]
    return shape, Winner((block_m, block_n, num_warps, num_stages, _checked(lagged, bool)), *times)
