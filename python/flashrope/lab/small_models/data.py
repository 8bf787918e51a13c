"""Reads training text as bytes and splits it by file into a training part and an unseen part."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...console.options import BadInput

UNSEEN = 0.1  # share of the bytes that is unseen in training
MIN_WINDOWS = 8  # fewest windows of the longest context in each part
MAX_BYTES = 1 << 29  # the largest text in bytes; a text is held in memory
SEPARATOR = b"\0"  # stands between two files of the training part

# Folders that are not installed on every machine (tests, packages), or that hold tables.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}

Piece = TypeVar("Piece", bytes, list[int])  # a piece of a text: bytes, or token ids


class TextError(BadInput):
    """Raised if a text cannot be used. The message says why and what is needed."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The training text and the unseen pieces, with the sorted names of their files relative to the folder."""

    name: str
    train: bytes
    unseen: tuple[bytes, ...]
    train_files: tuple[str, ...]
    unseen_files: tuple[str, ...]

    def record(self) -> dict:
        """Returns the split for a JSON file: file names, sizes and SHA-256 of both parts."""
        unseen = b"".join(self.unseen)
        return {
            "text": self.name,
            "train": {
                "bytes": len(self.train),
                "sha256": hashlib.sha256(self.train).hexdigest(),
                "files": self.train_files,
            },
            "unseen": {"bytes": len(unseen), "sha256": hashlib.sha256(unseen).hexdigest(), "files": self.unseen_files},
        }


def standard_library(window: int) -> Corpus:
    """Returns the source code of the running interpreter's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    version = sysconfig.get_python_version()
    files = _read_folder(root, ".py")
    for name in [name for name in files if name.startswith("_sysconfigdata")]:  # contains paths of this machine
        del files[name]
    return split_by_file(f"the sources of Python {version}'s standard library", files, window)


def from_path(path: str | os.PathLike, window: int) -> Corpus:
    """Reads a user's file or folder. The unseen part of a single file is its last tenth. A folder is split by file.

    ``window`` is the size of an evaluation window in bytes: the longest context + 1. Raises TextError.
    """
    path = Path(path)
    files = _texts(path)
    if len(files) > 1:
        return split_by_file(path.name or str(path), files, window)
    ((name, text),) = files.items()
    return split_one(name, text, window)


def from_paths(paths: Sequence[str | os.PathLike], window: int) -> Corpus:
    """Reads one path as ``from_path`` does, or several files and folders, which are split by file. Raises TextError."""
    if len(paths) == 1:
        return from_path(paths[0], window)
    texts = {name: text.encode() for name, text in read_texts(paths).items()}
    return split_by_file(", ".join(Path(path).name or str(path) for path in paths), texts, window)


def read_texts(paths: Sequence[str | os.PathLike]) -> dict[str, str]:
    """Returns {path: text} of these files and of the files in these folders. Raises TextError."""
    return {
        str(path / name if path.is_dir() else path): text.decode()
        for path in map(Path, paths)
        for name, text in _texts(path).items()
    }


def split_one(name: str, text: bytes, window: int) -> Corpus:
    """Splits one text. The unseen part is the last tenth of the text, or MIN_WINDOWS windows if they are longer. Raises
    TextError."""
    needed = MIN_WINDOWS * window
    if len(text) < 2 * needed:
        raise TextError(
            f"{name}: expected at least {2 * needed:,} bytes for windows of {window:,} bytes, got {len(text):,}"
        )
    cut = len(text) - max(int(UNSEEN * len(text)), needed)
    return Corpus(
        name, text[:cut], (text[cut:],), (f"{name}, bytes 0 to {cut}",), (f"{name}, bytes {cut} to {len(text)}",)
    )


def split_by_file(name: str, files: dict[str, bytes], window: int) -> Corpus:
    """Splits a text by file. Files are added to the unseen part in the order of their names' SHA-256, until the unseen
    part has a tenth of the bytes and MIN_WINDOWS windows. A file that would make the unseen part larger than half of
    the text is skipped. Raises TextError."""
    total = sum(map(len, files.values()))
    unseen, size, windows = set(), 0, 0
    for file in sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest()):
        if size >= UNSEEN * total and windows >= MIN_WINDOWS:
            break
        if size + len(files[file]) <= total / 2:
            unseen.add(file)
            size += len(files[file])
            windows += len(files[file]) // window
    names = sorted(files)
    train = SEPARATOR.join(files[file] for file in names if file not in unseen)
    needed = MIN_WINDOWS * window
    if windows < MIN_WINDOWS or len(train) < needed:
        raise TextError(
            f"{name}: expected at least {needed:,} bytes to train on, and {MIN_WINDOWS} windows of {window:,} bytes in "
            f"other files, got {total:,} bytes in {len(files)} files"
        )
    return Corpus(
        name,
        train,
        tuple(files[file] for file in names if file in unseen),
        tuple(file for file in names if file not in unseen),
        tuple(file for file in names if file in unseen),
    )


def random_batches(
    text: bytes, batch_size: int, length: int, seed: int, device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """Yields endless batches, int64 (batch_size, length + 1), of windows at random places of the text. A seed always
    gives the same batches."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator)
        yield tokens[starts + offsets].to(device).long()


def unseen_windows(pieces: Sequence[Piece], window: int, count: int, seed: int) -> list[Piece]:
    """Returns up to ``count`` random windows that do not overlap, each within one piece. pieces: bytes or token ids."""
    places = [
        (index, start) for index, piece in enumerate(pieces) for start in range(0, len(piece) - window + 1, window)
    ]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()[:count]
    return [pieces[index][start : start + window] for index, start in (places[o] for o in sorted(order))]


def as_tokens(windows: Sequence[Any], device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns windows of equal size as int64 (count, window). windows: bytes or token ids."""
    if windows and not isinstance(windows[0], bytes):
        return torch.tensor(windows, device=device)
    flat = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8)
    return flat.view(len(windows), -1).to(device).long()


def _texts(path: Path) -> dict[str, bytes]:
    """Returns {name: text} of a file, or of every file in a folder. Raises TextError."""
    if path.is_dir():
        files = _read_folder(path, "")
        if not files:
            raise TextError(f"{path}: contains no text files (UTF-8, without NUL bytes)")
        return files
    if not path.exists():
        raise TextError(f"{path}: no such file or folder")
    text = _read(path)
    if text is None:
        raise TextError(f"{path}: not text (UTF-8, without NUL bytes)")
    return {path.name: text}


def _read_folder(root: Path, suffix: str) -> dict[str, bytes]:
    files, total = {}, 0
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(n for n in inner if not n.startswith(".") and (n not in SKIPPED or not suffix))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                text = _read(path)
                if text:
                    files[path.relative_to(root).as_posix()] = text
                    total += len(text)
                if total > MAX_BYTES:
                    raise TextError(f"{root}: has more than {MAX_BYTES:,} bytes of text; choose a smaller folder")
    return files


def _read(path: Path) -> bytes | None:
    """Returns the bytes of a text file, or None if the file is not text."""
    if path.stat().st_size > MAX_BYTES:
        raise TextError(f"{path}: larger than {MAX_BYTES:,} bytes; choose a smaller file")
    text = path.read_bytes()
    if b"\0" in text:
        return None
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return text
