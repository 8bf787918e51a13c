"""``python -m experiments speed``: measures how fast a pretrained model reads, decodes and trains, as it is and
converted.

A "way" is the model as it is, or converted to a scheme. Every round measures every way once, so that all ways see the
same state of the machine. Reading is one pass over ``--length`` tokens that computes the logits of the last token.
Decoding continues the text one token at a time. A training step is forward, backward and AdamW over ``--train-tokens``
tokens. Times are on the CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from flashrope.backends.cpu import loader
from flashrope.console import files
from flashrope.console.hardware import hardware
from flashrope.console.options import cores, need, positive
from flashrope.console.progress import Bar
from flashrope.lab.evaluation.checkpoint import describe, keep_logits, load, training_length
from flashrope.lab.evaluation.losses import text_windows
from flashrope.lab.evaluation.readings import applicable
from flashrope.schemes.catalogue import SCHEMES

SUMMARY = "how fast a pretrained model reads, decodes and trains: speed --model FILE --text PATH --out DIR"
BASE, CONVERTED = "the model as it is", "converted"
RESULT = "speed.json"
DECODED = 16  # how many tokens are decoded
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Way(NamedTuple):
    """Describes a scheme to measure the model under. apply: converts the model to this scheme."""

    label: str
    apply: Callable[[], object]


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--text", metavar="PATH", required=True, help="a text file")
    parser.add_argument("--length", type=positive, default=8192, help="tokens to read (default 8192)")
    parser.add_argument("--train-tokens", type=positive, help="also time training steps of this many tokens")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=[], help="schemes to measure besides the model's own"
    )
    parser.add_argument(
        "--window", type=positive, help="window of the schemes that have one (default: half the training length)"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    args = parse(parser, argv)
    measure(args, command_line(program, argv))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Adds the arguments of every measurement on a pretrained model, parses them, and sets the CPU threads."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=cores())
    parser.add_argument("--out", metavar="DIR", type=Path, required=True)
    args = parser.parse_args(argv)
    need("transformers", extra="transformers")
    torch.set_num_threads(args.threads)
    return args


def command_line(program: str, argv: Sequence[str]) -> str:
    """Returns the command as results record it, without --out."""
    words = [word for at, word in enumerate(argv) if "--out" not in (word.partition("=")[0], *argv[at - 1 : at])]
    return shlex.join([*program.split(), *words])


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures all ways, writes speed.json and prints its table."""
    model, tokens = load(args.model, torch.device("cpu"))
    train_length = training_length(model, args.model, None)
    longest = max(args.length + DECODED, args.train_tokens or 0)
    texts = {args.text: Path(args.text).read_text(encoding="utf-8")}
    row = torch.tensor([[*tokens.start, *text_windows(texts, tokens, longest, 1, args.seed)[0]]])
    ways = ways_of(model, args.schemes, train_length, args.length, args.window)
    tasks = ["read", "train"] if args.train_tokens else ["read"]
    seconds: dict[tuple[str, str, str], list[float]] = {}
    sizes = {}
    with Bar(len(args.dtype) * args.rounds * len(ways) * len(tasks)) as bar:
        bar.start("rounds")
        for dtype in args.dtype:
            model.to(DTYPES[dtype])
            for _ in range(args.rounds):
                for way in ways:
                    way.apply()
                    read, decoded, sizes[dtype, way.label] = reading(model, row, args.length)
                    seconds.setdefault((dtype, way.label, "read"), []).append(read)
                    seconds.setdefault((dtype, way.label, "decode"), []).append(decoded)
                    bar.step(1)
            for _ in range(args.rounds if args.train_tokens else 0):
                for way in ways:
                    way.apply()
                    found = training_step(model, row[:, : args.train_tokens + 1])
                    seconds.setdefault((dtype, way.label, "train"), []).append(found)
                    bar.step(1)
    rows = [
        {"dtype": dtype, "way": label, "task": task, "seconds": found, "median": median(found)}
        for (dtype, label, task), found in seconds.items()
    ]
    record = {
        "model": describe(model, args.model, train_length),
        "text": Path(args.text).name,
        "length": args.length,
        "decoded": DECODED,
        "train_tokens": args.train_tokens,
        "threads": args.threads,
        "machine": f"{hardware('cpu')}, torch {torch.__version__}, kernels {kernels()}",
        "command": command,
        "cache_bytes_per_token": [{"dtype": d, "way": label, "bytes": size} for (d, label), size in sizes.items()],
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    files.write(args.out / RESULT, json.dumps(record, indent=1) + "\n")
    print(table(record))


def kernels() -> str:
    """Returns the target of the compiled kernels, or "composed" if there are no compiled kernels."""
    found = loader.load()
    return found.path.stem if found else "composed"


def as_it_came(model):
    """Returns the model after reverting its conversion, if it was converted."""
    from flashrope.integrations.transformers import revert

    return revert(model) if any(hasattr(module, "_flashrope") for module in model.modules()) else model


def ways_of(model, names: Sequence[str], train_length: int, longest: int, window: int | None) -> list[Way]:
    from flashrope.integrations.transformers import convert

    found = applicable(model, names, train_length, longest, [window] if window else [])[0] if names else []
    return [
        Way(BASE, lambda: as_it_came(model)),
        Way(CONVERTED, lambda: convert(model)),
        *(Way(each.label, each.apply) for each in found),
    ]


@torch.no_grad()
def reading(model, row: torch.Tensor, length: int) -> tuple[float, float, int]:
    """Returns the seconds to prefill the first ``length`` tokens of row (1, tokens), the seconds per token decoded
    after them, and the cache's bytes per token."""
    from transformers import DynamicCache

    model.eval()
    cache = DynamicCache(config=model.config)
    begin = time.perf_counter()
    model(row[:, :length], past_key_values=cache, use_cache=True, **keep_logits(model, 1))
    middle = time.perf_counter()
    for at in range(length, length + DECODED):
        model(row[:, at : at + 1], past_key_values=cache, use_cache=True)
    end = time.perf_counter()
    held = sum(x.nbytes // x.shape[2] for layer in cache.layers for x in (layer.keys, layer.values))
    return middle - begin, (end - middle) / DECODED, held


def training_step(model, row: torch.Tensor) -> float:
    """Returns the seconds of forward, backward and AdamW on row (1, tokens + 1). The weights stay as they are."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    begin = time.perf_counter()
    logits = model(row[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), row[0, 1:]).backward()
    optimizer.step()
    seconds = time.perf_counter() - begin
    optimizer.zero_grad(set_to_none=True)
    return seconds


def table(record: dict[str, Any]) -> str:
    """Returns a Markdown table of medians over the rounds. Next to each median is its ratio to the median of the
    unconverted model in the same dtype."""
    found = {(row["dtype"], row["way"], row["task"]): row["median"] for row in record["rows"]}
    sizes = {(each["dtype"], each["way"]): each["bytes"] for each in record["cache_bytes_per_token"]}
    length, train = record["length"], record["train_tokens"]
    heads = ["type", "scheme", f"seconds to read {length:,} tokens", f"milliseconds a token after {length:,}"]
    if train:
        heads.append(f"seconds of a training step of {train:,} tokens")
    heads.append("cache, bytes a token")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for dtype, label in sizes:
        cells = [dtype, label]
        for task, scale, digits in (("read", 1, 1), ("decode", 1000, 0), ("train", 1, 2)):
            if (value := found.get((dtype, label, task))) is not None:
                ratio = "" if label == BASE else f" ({value / found[dtype, BASE, task]:.2f})"
                cells.append(f"{value * scale:.{digits}f}{ratio}")
        lines.append("| " + " | ".join([*cells, f"{sizes[dtype, label]:,}"]) + " |")
    return "\n".join(lines)
