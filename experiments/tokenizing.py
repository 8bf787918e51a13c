"""``python -m experiments tokenize``: writes text files or a dataset as a token file, for ``--tokens``.

A token of the tokenizer separates the texts, as in nanoGPT's files. Long texts are tokenized in pieces of up to a
million characters. A piece ends at the end of a line.
"""

from __future__ import annotations

import argparse
import array
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashrope.console import files
from flashrope.console.options import BadInput, need
from flashrope.lab.small_models.data import TextError, read_texts

from .tokens import SMALL_VOCABULARY, description_path, width

SUMMARY = "write a token file: tokenize --text PATH --tokenizer FILE_OR_NAME --out FILE.bin"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # the first one in the vocabulary is used
PIECE = 1_000_000  # largest number of characters in a piece
EXTRA = "experiments"


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="PATH", nargs="+", help="text files, or folders of them")
    source.add_argument(
        "--dataset", metavar="NAME_OR_PATH", help="a dataset for the package datasets, on the hub or local"
    )
    parser.add_argument("--subset", metavar="NAME", help="configuration of the dataset")
    parser.add_argument("--split", default="train", help="part of the dataset (default: train)")
    parser.add_argument("--column", default="text", help="column of the dataset with the text (default: text)")
    parser.add_argument(
        "--tokenizer", metavar="FILE_OR_NAME", required=True, help="a tokenizer.json, or the name of a model on the hub"
    )
    parser.add_argument(
        "--separator",
        metavar="TOKEN",
        help=f"token between texts (default: the first of {', '.join(SEPARATORS)} in the vocabulary)",
    )
    parser.add_argument(
        "--out", metavar="FILE.bin", type=Path, required=True, help="the file to write; FILE.json describes it"
    )
    args = parser.parse_args(argv)
    if args.out.suffix != ".bin":
        raise BadInput(f"--out: expected a name that ends with .bin, got {args.out}")
    if args.text:
        for option in ("subset", "split", "column"):
            if getattr(args, option) != parser.get_default(option):
                raise BadInput(f"--{option}: supported only with --dataset, got --text")
    need("tokenizers", *(["datasets"] if args.dataset else []), extra=EXTRA)
    tokenizer = load(args.tokenizer)
    texts = _dataset(args) if args.dataset else read_texts(args.text).values()
    source_name = args.dataset or ", ".join(args.text)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = write(args.out, texts, tokenizer, separator_of(tokenizer, args.separator), source_name)
    except OSError as error:
        raise BadInput(f"--out: cannot write to {args.out} ({error.strerror})") from None
    print(
        f"written to {args.out}: {record['tokens']:,} tokens of {record['texts']:,} texts, a vocabulary of "
        f"{record['vocab_size']:,}, {record['bytes_per_token']} bytes of text per token"
    )


def load(name: str):
    """Returns a ``tokenizers.Tokenizer``. Raises BadInput."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(name) if Path(name).exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises Exception itself
        raise BadInput(f"--tokenizer: cannot load {name} ({str(error).splitlines()[0]})") from None


def separator_of(tokenizer, asked: str | None) -> int | None:
    """Returns the token that separates texts, or None if the tokenizer has none of SEPARATORS. asked: the separator
    that the user named. Raises BadInput if the tokenizer does not have it."""
    for name in [asked] if asked else SEPARATORS:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    if asked:
        raise BadInput(f"--separator: expected a token of the tokenizer, got {asked}")
    return None


def write(out: Path, texts: Iterable[str], tokenizer, separator: int | None, source: str) -> dict:
    """Writes FILE.bin, FILE.json and FILE.tokenizer.json, and returns the contents of FILE.json. Raises TextError if
    there are no tokens."""
    vocab_size = tokenizer.get_vocab_size()
    code, count, number, size = "H" if vocab_size <= SMALL_VOCABULARY else "I", 0, 0, 0
    with files.replacing(out) as partial, open(partial, "wb") as file:
        for text in texts:
            number, size = number + 1, size + len(text.encode())
            for piece in pieces(text):
                count += _append(file, code, tokenizer.encode(piece, add_special_tokens=False).ids)
            if separator is not None:
                count += _append(file, code, [separator])
        if not count:
            raise TextError(f"{source}: has no tokens")
    kept = out.with_suffix(".tokenizer.json")
    tokenizer.save(str(kept))
    record = {
        "vocab_size": vocab_size,
        "tokens": count,
        "texts": number,
        "bytes_per_token": round(size / count, 3),
        "bytes_of_a_token": width(vocab_size),
        "separator": separator,
        "source": source,
        "tokenizer": kept.name,
    }
    files.write(description_path(out), json.dumps(record, indent=1))
    return record


def pieces(text: str, most: int = PIECE) -> Iterator[str]:
    """Yields parts of the text with at most ``most`` characters. A part ends at the end of a line, if it contains
    one."""
    start = 0
    while len(text) - start > most:
        cut = text.rfind("\n", start, start + most) + 1
        cut = cut if cut > start else start + most
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _append(file, code: str, ids: list[int]) -> int:
    found = array.array(code, ids)
    if sys.byteorder != "little":
        found.byteswap()
    file.write(found.tobytes())
    return len(ids)


def _dataset(args: argparse.Namespace) -> Iterator[str]:
    from datasets import load_dataset, load_from_disk

    try:
        if (Path(args.dataset) / "dataset_info.json").exists() or (Path(args.dataset) / "dataset_dict.json").exists():
            found = load_from_disk(args.dataset)
            found = found[args.split] if isinstance(found, dict) else found
        else:
            found = load_dataset(args.dataset, args.subset, split=args.split, streaming=True)
    except Exception as error:  # datasets raises errors of a dozen kinds
        raise BadInput(f"--dataset: cannot load {args.dataset} ({str(error).splitlines()[0]})") from None
    for row in found:
        if args.column not in row:
            raise BadInput(f"--column: expected one of {', '.join(row)}, got {args.column}")
        yield row[args.column]
