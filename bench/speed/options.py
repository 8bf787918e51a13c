"""Defines the options that the subcommands share, and makes problems and tables from them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import torch
from flashrope.console.options import positive

from ..report.output import add_output_options
from .contestants import Contestant
from .problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SECONDS = {"cuda": 1.0, "cpu": 4.0}


@dataclasses.dataclass(frozen=True)
class Table:
    """Holds the contestants that are compared on one problem. recorded: whether they are replayed as CUDA graphs."""

    title: str
    contestants: Sequence[Contestant]
    problem: Problem
    backward: bool = False
    recorded: bool = False


def parser(command: str, doc: str, cuda: dict, cpu: dict) -> argparse.ArgumentParser:
    """Returns a parser for the shared options. cuda, cpu: the defaults of heads, heads_kv, head_dim, seqlens, tokens
    and window on a GPU and on the CPU."""
    p = argparse.ArgumentParser(
        f"python -m bench {command}", description=doc.strip().split("\n")[0], allow_abbrev=False
    )
    add_device_option(p)
    p.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on the CPU")
    for name, what in (
        ("heads", "query heads"),
        ("heads-kv", "key heads"),
        ("head-dim", "channels of a head"),
        ("window", "ReRoPE's window"),
        ("tokens", "tokens of a batch: the batch size is tokens / seqlen"),
    ):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=positive, help=f"{what} (default: GPU {cuda.get(key)}, CPU {cpu.get(key)})")
    p.add_argument("--batch", type=positive, help="batch size, instead of --tokens")
    shapes = "batches and lengths, instead of --seqlens, --batch and --tokens"
    p.add_argument("--shapes", type=shape, nargs="+", metavar="BATCHxSEQLEN", help=shapes)
    seqlens = f"default: GPU {_words(cuda['seqlens'])}; CPU {_words(cpu['seqlens'])}"
    p.add_argument("--seqlens", type=positive, nargs="+", help=seqlens)
    p.add_argument("--train-length", type=positive, default=8192, help="HoPE's training length (default 8192)")
    p.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--passes",
        nargs="+",
        choices=("forward", "both"),
        default=["forward", "both"],
        help="forward: measure the forward pass only; both: measure forward and backward together (default: measure "
        "the forward first, then both)",
    )
    p.add_argument("--contestants", nargs="+", metavar="NAME", help="time contestants whose name contains a NAME")
    seconds = (
        f"seconds for the rounds of each table; the whole run takes longer (default: GPU {SECONDS['cuda']}, CPU "
        f"{SECONDS['cpu']})"
    )
    p.add_argument("--seconds", type=float, help=seconds)
    p.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's)")
    add_output_options(p)
    p.set_defaults(defaults={"cuda": cuda, "cpu": cpu})
    return p


def add_device_option(p: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=default, help="cuda, cuda:1, cpu (default: a GPU if there is one)")


def device_of(p: argparse.ArgumentParser, name: str, needs_device: bool = True) -> torch.device:
    """Returns the device of this name. Exits with a message if it is not present and is needed."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        p.error(f"--device: {str(error).splitlines()[0]}")
    if device.type not in ("cpu", "cuda"):
        p.error(f"--device: expected cpu or cuda, got {device}")
    if needs_device and device.type == "cuda" and not torch.cuda.is_available():
        p.error("--device: no CUDA device is available")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def parse(p: argparse.ArgumentParser, argv: list[str], needs_device: bool = True) -> argparse.Namespace:
    """Parses the options and fills in the defaults of the device."""
    options = p.parse_args(argv)
    options.device = device_of(p, options.device, needs_device)
    kind = options.device.type
    for name, value in options.defaults[kind].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.dtype = DTYPES[options.dtype or ("bf16" if kind == "cuda" else "fp32")]
    options.seconds = SECONDS[kind] if options.seconds is None else options.seconds
    if options.heads % options.heads_kv:
        p.error(f"--heads: expected a multiple of --heads-kv {options.heads_kv}, got {options.heads}")
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def shape(text: str) -> tuple[int, int]:
    """Reads BATCHxSEQLEN, such as 8x4096."""
    batch, _, seqlen = text.partition("x")
    try:
        return positive(batch), positive(seqlen)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected BATCHxSEQLEN, such as 8x4096, got {text!r}") from None


def problems(options: argparse.Namespace, **changes) -> list[Problem]:
    """Returns the problem of every length, or of every shape."""
    if options.shapes:
        return [problem(options, seqlen, batch=batch, **changes) for batch, seqlen in options.shapes]
    return [problem(options, seqlen, **changes) for seqlen in options.seqlens]


def problem(options: argparse.Namespace, seqlen: int, **changes) -> Problem:
    return Problem(
        options.batch or max(1, options.tokens // seqlen),
        seqlen,
        options.heads,
        options.heads_kv,
        options.head_dim,
        options.dtype,
        options.device,
        options.causal,
        options.window,
        options.train_length,
    ).replace(**changes)


def prefill_tables(options: argparse.Namespace, contestants: Sequence[Contestant]) -> list[Table]:
    """Returns one table for every pass and length."""
    tables = []
    for backward in backwards(options):
        for p in problems(options):
            title = f"seqlen {p.seqlen}, batch {p.batch}, {'forward + backward' if backward else 'forward'}"
            tables.append(Table(title, contestants, p, backward))
    return tables


def backwards(options: argparse.Namespace) -> list[bool]:
    """Returns one bool for every pass that --passes selects: whether the pass includes the backward."""
    return [passes == "both" for passes in ("forward", "both") if passes in options.passes]


def stem(command: str, options: argparse.Namespace) -> str:
    """Returns the name of a run's files without suffix. A run with the same sizes replaces these files."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == options.dtype)
    full = "" if options.causal else "-full"
    code = f"-sm{options.code}" if getattr(options, "code", None) else ""
    return f"{command}-d{options.head_dim}-h{options.heads}x{options.heads_kv}-{dtype}{full}{code}"


def _words(values) -> str:
    return " ".join(map(str, values))
