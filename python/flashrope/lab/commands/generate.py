"""Arguments of ``flashrope generate``."""

from __future__ import annotations

import argparse

from ...console.options import positive
from ...schemes.catalogue import SCHEMES
from ..small_models.presets import CHECKPOINTS
from . import hf_model


def first_and_last(text: str):
    """Parses the value FIRST,LAST of --keep."""
    first, comma, last = text.partition(",")
    if not (comma and first.strip().isdecimal() and last.strip().isdecimal() and int(last)):
        raise argparse.ArgumentTypeError(f"expected FIRST,LAST, two numbers of tokens, LAST at least 1, got {text!r}")
    return int(first), int(last)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        default=f"runs/demo/{CHECKPOINTS['rope']}",
        help="a checkpoint written by flashrope demo, a transformers checkpoint, its name on the hub, or a .gguf file",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="PATH", help="a file with the text to continue")
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        default=256,
        help="number of tokens to generate; a token is a byte for models of flashrope demo",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.8, help="0 always takes the most likely token"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="sample from the K most likely tokens only")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling")
    parser.add_argument(
        "--keep",
        type=first_and_last,
        metavar="FIRST,LAST",
        help="keep only the first and the last tokens, in a cache of fixed size: attention sinks and a rolling window. "
        "The kept tokens have positions 0, 1, 2, ..., so the text may be of any length",
    )
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        metavar="NAME",
        help="the scheme to run the model under, default: its own; its parameters are computed from the training "
        f"length and the length of the text; one of {', '.join(SCHEMES)}",
    )
    parser.add_argument(
        "--window", type=positive, metavar="W", help="the scheme's window in tokens, default: half the training length"
    )
    parser.add_argument(
        "--factor",
        type=float,
        metavar="K",
        help="Leaky ReRoPE: beyond the window, each further token adds 1/K to the distance",
    )
    hf_model.add_model_run(parser)


def run(args: argparse.Namespace) -> int:
    from ..evaluation import generation

    return generation.run(args)
