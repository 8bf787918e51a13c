"""Arguments of ``flashrope loss``."""

from __future__ import annotations

import argparse

from ..cli.options import positive
from . import hf_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hf_model.add_model(parser)
    parser.add_argument(
        "--text", metavar="PATH", nargs="+", required=True, help="text files or folders of them, unseen in training"
    )
    hf_model.add_schemes(parser, ["stock", "log-n", "ntk", "yarn", "rerope", "leaky"])
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
        help="measure every token of the longest length in one pass, in means over BIN positions (default: 1024); by "
        "default twice the training length. Results are written after every window, and a run that was interrupted "
        "goes on",
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
    parser.add_argument("--windows", type=positive, metavar="N", default=8, help="pieces of text that do not overlap")
    parser.add_argument(
        "--repeat",
        action="store_true",
        help="also fill the longer lengths with copies of the last tokens instead of the text before them",
    )
    parser.add_argument(
        "--copy",
        type=positive,
        metavar="N",
        help="also measure a passage of N tokens that comes again at the end of every length: whether the model reads "
        "what is far away",
    )
    parser.add_argument("--batch", type=positive, metavar="N", default=1, help="windows per forward pass")
    parser.add_argument(
        "--chunk",
        type=positive,
        metavar="N",
        help="read a window in pieces of N tokens over a cache, which takes less memory; default: at once",
    )
    hf_model.add_sinks(parser)
    hf_model.add_cache_dtype(parser)
    hf_model.add_training_length(parser)
    parser.add_argument(
        "--window",
        nargs="+",
        type=positive,
        metavar="W",
        default=[],
        help="windows of ReRoPE, Leaky ReRoPE and Self-Extend, a row for each; default: half the training length",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of windows")
    hf_model.add_run(parser, "loss")


def run(args: argparse.Namespace) -> int:
    from ..evaluation import loss

    return loss.run(args)
