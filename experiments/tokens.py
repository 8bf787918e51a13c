"""Reads token files through a memory map. A token file holds text that was tokenized beforehand.

FILE.bin has only token ids, without a header. Each id is an unsigned little-endian integer. It has 16 bits if the
vocabulary has at most 65,536 tokens, and 32 bits otherwise. nanoGPT's train.bin and val.bin are such files.

FILE.json in the same folder describes the ids:
{"vocab_size": 50257, "tokens": 1234, "tokenizer": "FILE.tokenizer.json", ...}. ``python -m experiments tokenize``
writes it. Without it, --vocab-size is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path

import torch
from flashrope.console.options import BadInput
from flashrope.lab.small_models.data import MIN_WINDOWS, UNSEEN, TextError

SMALL_VOCABULARY = 1 << 16  # the largest vocabulary whose ids have 16 bits
BLOCKS, BLOCK = 64, 1 << 16  # number of blocks that the fingerprint reads, bytes of a block


def width(vocab_size: int) -> int:
    """Returns the bytes of one token."""
    return 2 if vocab_size <= SMALL_VOCABULARY else 4


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Represents the tokens ``start`` to ``stop`` of a file. They are read from disk on access. A slice is a list of
    ints."""

    path: Path
    width: int  # bytes of a token
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, where: slice) -> list[int]:
        start, stop, step = where.indices(len(self))
        return self.at(torch.arange(start, stop, step)).tolist()

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the tokens at the indices ``places``, int64 of the same shape. places: int64, counted from
        ``start``."""
        mapped = _mapped(self.path, self.width)
        return mapped[places + self.start].long() & ((1 << 8 * self.width) - 1)  # the map is signed, ids are not


@functools.lru_cache(8)
def _mapped(path: Path, width: int) -> torch.Tensor:
    """Returns the whole file as a memory map of a signed type, because torch cannot index most unsigned types."""
    dtype = torch.int16 if width == 2 else torch.int32
    return torch.from_file(str(path), shared=False, size=path.stat().st_size // width, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Holds the training part and the unseen part of token files. It corresponds to ``data.Corpus`` for texts."""

    name: str
    train: TokenFile
    unseen: tuple[TokenFile, ...]
    vocab_size: int
    tokenizer: Path | None = None  # a tokenizer.json

    def record(self) -> dict:
        """Returns files, numbers of tokens and fingerprints of both parts, and the vocabulary."""
        parts = {"train": (self.train,), "unseen": self.unseen}
        return {
            "text": self.name,
            "vocab_size": self.vocab_size,
            **{
                part: {
                    "tokens": sum(map(len, pieces)),
                    "sha256": hashlib.sha256("".join(map(fingerprint, pieces)).encode()).hexdigest(),
                    "files": [f"{piece.path.name}, tokens {piece.start} to {piece.stop}" for piece in pieces],
                }
                for part, pieces in parts.items()
            },
        }


def from_files(paths: list[str], vocab_size: int | None, window: int) -> TokenCorpus:
    """Returns the corpus of one or two token files. The last tenth of a single file is held out. If there are two
    files, the first is for training and the second is held out.

    vocab_size: the size of the vocabulary, for files without FILE.json. window: the longest context + 1, in tokens.
    Raises BadInput, TextError.
    """
    if len(paths) > 2:
        raise BadInput(f"--tokens: expected a file, or two (to train on, and unseen), got {len(paths)}")
    if sys.byteorder != "little":
        raise BadInput("--tokens: expected a little-endian machine, because the files are little-endian")
    files = [Path(path) for path in paths]
    known = [_description(path) for path in files]
    sizes = {each["vocab_size"] for each in known if each} | ({vocab_size} if vocab_size else set())
    if not sizes:
        raise BadInput(
            f"--vocab-size: expected the number of tokens in the vocabulary, because {paths[0]} has no .json"
        )
    if len(sizes) > 1:
        raise BadInput(f"--vocab-size: expected one size for all files, got {', '.join(map(str, sorted(sizes)))}")
    (size,) = sizes
    whole = [_whole(path, size) for path in files]
    if len(whole) == 2:
        train, unseen = whole
    else:
        needed = MIN_WINDOWS * window
        cut = len(whole[0]) - max(int(UNSEEN * len(whole[0])), needed)
        train, unseen = (dataclasses.replace(whole[0], stop=cut), dataclasses.replace(whole[0], start=max(cut, 0)))
    for part, words in ((train, "to train on"), (unseen, "unseen")):
        if len(part) < MIN_WINDOWS * window:
            raise TextError(
                f"{part.path}: expected at least {MIN_WINDOWS * window:,} tokens {words}, for windows of {window:,} "
                f"tokens, got {max(len(part), 0):,}"
            )
    for part in (train, unseen):
        if (largest := max(part[: BLOCK * 4])) >= size:
            raise BadInput(f"--vocab-size: expected more than {largest}, a token of {part.path}, got {size}")
    named = known[0] and known[0].get("tokenizer")
    tokenizer = files[0].with_name(named) if named and files[0].with_name(named).exists() else None
    return TokenCorpus(", ".join(path.name for path in files), train, (unseen,), size, tokenizer)


def fingerprint(piece: TokenFile) -> str:
    """Returns a SHA-256 over the part's place in the file, the file's size, and BLOCKS blocks spread evenly over the
    file."""
    size = piece.path.stat().st_size
    found = hashlib.sha256(f"{size} {piece.start} {piece.stop}".encode())
    with open(piece.path, "rb") as file:
        for n in range(BLOCKS):
            file.seek(max(size - BLOCK, 0) * n // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return found.hexdigest()


def description_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _description(path: Path) -> dict | None:
    beside = description_path(path)
    if not path.is_file():
        raise BadInput(f"--tokens: no file {path}; python -m experiments tokenize makes one")
    if not beside.exists():
        return None
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        return found | {"vocab_size": int(found["vocab_size"])}
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"--tokens: expected vocab_size in {beside}, which tokenize writes") from None


def _whole(path: Path, vocab_size: int) -> TokenFile:
    size = path.stat().st_size
    if size % width(vocab_size):
        raise BadInput(f"--tokens: expected {width(vocab_size)} bytes per token, got {path} of {size:,} bytes")
    return TokenFile(path.resolve(), width(vocab_size), 0, size // width(vocab_size))
