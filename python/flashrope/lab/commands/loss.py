"""Arguments of ``flashrope loss``."""

from __future__ import annotations

import argparse

from ...console.options import positive
from . import hf_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hf_model.add_measuring(parser, "loss", ["stock", "log-n", "ntk", "yarn", "rerope", "leaky"])
    parser.add_argument(
        "--text",
        metavar="PATH",
        nargs="+",
        required=True,
        help="text files, or folders with text files, that the model was not trained on",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help="tokens that the model reads; default: 1/2, 1, 2 and 4 times the training length",
    )
    parser.add_argument(
        "--by-position",
        type=positive,
        nargs="?",
        const=1024,
        metavar="BIN",
        help="measure every token of the longest length (default: twice the training length) in one pass, and report "
        "means over BIN positions (default: 1024). Results are written after every window. The same command resumes "
        "an interrupted run",
    )
    parser.add_argument(
        "--axis", choices=("linear", "log"), default="linear", help="the axis of positions in the figure"
    )
    parser.add_argument(
        "--targets",
        type=positive,
        metavar="N",
        help="predicted tokens at the end of every window; default: half the shortest length, at most 512",
    )
    parser.add_argument(
        "--windows", type=positive, metavar="N", default=8, help="number of windows; they do not overlap"
    )
    parser.add_argument(
        "--repeat",
        action="store_true",
        help="also fill the longer lengths with copies of the last tokens instead of the text before them",
    )
    parser.add_argument(
        "--copy",
        type=positive,
        metavar="N",
        help="also measure the loss on a passage of N tokens that is read at the start and again at the end of every "
        "length: the loss on the second copy is low if the model finds the first",
    )
    parser.add_argument("--batch", type=positive, metavar="N", default=1, help="windows per forward pass")
    parser.add_argument(
        "--chunk",
        type=positive,
        metavar="N",
        help="read a window in pieces of N tokens over a cache, which takes less memory; default: at once",
    )
    parser.add_argument(
        "--window",
        nargs="+",
        type=positive,
        metavar="W",
        default=[],
        help="windows of ReRoPE, Leaky ReRoPE and Self-Extend, with a row of results for each window; "
        "default: half the training length",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of windows")


def run(args: argparse.Namespace) -> int:
    from ..evaluation import losses as loss

    return loss.run(args)
