"""Arguments of ``flashrope passkey``."""

from __future__ import annotations

import argparse

from ...console.options import positive
from . import hf_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hf_model.add_measuring(parser, "passkey", ["stock", "rerope", "leaky", "yarn"])
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help="prompt lengths in tokens, including the answer; default: 1/2, 1, 2 and 4 times the training length, "
        "but long enough for the question",
    )
    parser.add_argument(
        "--depths", type=positive, metavar="N", default=5, help="number of depths, evenly spaced from start to end"
    )
    parser.add_argument("--trials", type=positive, metavar="N", default=4, help="prompts per length and depth")
    parser.add_argument(
        "--text",
        metavar="PATH",
        nargs="+",
        help="hide the numbers in your own text, files or folders; default: a block of filler text, repeated, in which "
        "only the hidden number is new",
    )
    parser.add_argument(
        "--keys",
        type=int,
        choices=range(1, 11),
        metavar="K",
        default=1,
        help="hidden numbers per prompt, 1 to 10; if there are several, the question names one of them",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt into the model's chat template; default: if the model has one",
    )
    parser.add_argument("--batch", type=positive, metavar="N", default=1, help="prompts per forward pass")
    parser.add_argument(
        "--window",
        type=positive,
        metavar="W",
        help="window of ReRoPE, Leaky ReRoPE and Self-Extend; default: half the training length",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for the hidden numbers")


def run(args: argparse.Namespace) -> int:
    from ..evaluation import retrieval as passkey

    return passkey.run(args)
