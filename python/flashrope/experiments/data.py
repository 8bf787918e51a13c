"""Text for the experiments: real bytes, split by file into a training part and an unseen part."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

UNSEEN = 0.1  # of the bytes
LEAST_WINDOWS = 8  # of the longest context, in either part
LARGEST = 1 << 29  # bytes; the corpus is held in memory
SEPARATOR = b"\0"  # between files of the training part

# Tests and packages are not on every machine, tables are not prose; build settings hold a machine's own paths.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}


class TextError(ValueError):
    """The text cannot serve; the message says why and what is needed."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and pieces never trained on. The names are relative to the folder, sorted."""

    name: str
    train: bytes
    unseen: tuple[bytes, ...]
    train_files: tuple[str, ...]
    unseen_files: tuple[str, ...]

    def record(self) -> dict:
        """The split, for a JSON file: names, sizes, and a digest of either part."""
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
    """The Python sources of the running interpreter's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    version = sysconfig.get_python_version()
    files = {name: text for name, text in _read_folder(root, ".py").items() if not name.startswith("_sysconfigdata")}
    return split_by_file(f"the sources of Python {version}'s standard library", files, window)


def from_path(path: str | os.PathLike, window: int) -> Corpus:
    """A file or folder of the user's. Of a single file the last tenth is unseen; a folder is split by file.

    window is the longest context + 1, the bytes that one evaluation window takes. Raises TextError.
    """
    path = Path(path)
    if not path.exists():
        raise TextError(f"{path}: no such file or folder")
    if path.is_dir():
        files = _read_folder(path, "")
        if not files:
            raise TextError(f"{path}: holds no text files (UTF-8, without NUL bytes)")
        if len(files) > 1:
            return split_by_file(path.name or str(path), files, window)
        ((name, text),) = files.items()
    else:
        name, text = path.name, _read(path)
        if text is None:
            raise TextError(f"{path}: not text (UTF-8, without NUL bytes)")
    return split_one(name, text, window)


def split_one(name: str, text: bytes, window: int) -> Corpus:
    least = LEAST_WINDOWS * window
    if len(text) < 2 * least:
        raise TextError(
            f"{name}: holds {len(text):,} bytes, at least {2 * least:,} are needed for windows of {window:,} bytes"
        )
    cut = len(text) - max(int(UNSEEN * len(text)), least)
    return Corpus(
        name, text[:cut], (text[cut:],), (f"{name}, bytes 0 to {cut}",), (f"{name}, bytes {cut} to {len(text)}",)
    )


def split_by_file(name: str, files: dict[str, bytes], window: int) -> Corpus:
    """Files go to the unseen part in the order of their name's SHA-256 until it holds a tenth of the bytes and enough
    windows; a file that would take the unseen part beyond half of all bytes stays in the training part."""
    total = sum(map(len, files.values()))
    unseen, size, windows = set(), 0, 0
    for file in sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest()):
        if size >= UNSEEN * total and windows >= LEAST_WINDOWS:
            break
        if size + len(files[file]) <= total / 2:
            unseen.add(file)
            size += len(files[file])
            windows += len(files[file]) // window
    names = sorted(files)
    train = SEPARATOR.join(files[file] for file in names if file not in unseen)
    least = LEAST_WINDOWS * window
    if windows < LEAST_WINDOWS or len(train) < least:
        raise TextError(
            f"{name}: holds {total:,} bytes in {len(files)} files, too little for windows of {window:,} bytes: "
            f"at least {least:,} bytes to train on are needed, and other files that hold {LEAST_WINDOWS} windows"
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
    """Endless int64 (batch_size, length + 1) of windows at random places; the same seed gives the same windows."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator)
        yield tokens[starts + offsets].to(device).long()


def unseen_windows(pieces: Sequence[bytes], window: int, count: int, seed: int) -> list[bytes]:
    """Up to count windows that do not overlap and each lie in one piece, drawn at random."""
    places = [
        (index, start) for index, piece in enumerate(pieces) for start in range(0, len(piece) - window + 1, window)
    ]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()[:count]
    return [pieces[index][start : start + window] for index, start in (places[o] for o in sorted(order))]


def as_tokens(windows: Sequence[bytes], device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 (count, window)."""
    flat = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8)
    return flat.view(len(windows), -1).to(device).long()


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
                if total > LARGEST:
                    raise TextError(f"{root}: holds more than {LARGEST:,} bytes of text; choose a smaller folder")
    return files


def _read(path: Path) -> bytes | None:
    """The file's bytes, or None where it is not text."""
    if path.stat().st_size > LARGEST:
        raise TextError(f"{path}: larger than {LARGEST:,} bytes; choose a smaller file")
    text = path.read_bytes()
    if b"\0" in text:
        return None
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return text
