"""Arguments of ``flashrope generate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...backends.names import BACKENDS, CACHE_DTYPES
from ...console.options import MAX_THREADS, positive
from ...schemes.catalogue import SCHEMES
from ..small_models.presets import CHECKPOINTS
from .hf_model import add_dtype


def first_and_last(text: str) -> tuple[int, int]:
    """Parses the value FIRST,LAST of --keep."""
    first, comma, last = text.partition(",")
    if not (comma and first.strip().isdecimal() and last.strip().isdecimal() and int(last)):
        raise argparse.ArgumentTypeError(f"expected FIRST,LAST, two numbers of bytes, LAST at least 1, got {text!r}")
    return int(first), int(last)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and prompt")
    model.add_argument(
        "--model",
        metavar="PATH",
        default=f"runs/demo/{CHECKPOINTS['rope']}",
        help="a checkpoint written by flashrope demo, a transformers checkpoint, its name on the hub, or a .gguf file",
    )
    prompt = model.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the text to continue; default for a model of flashrope demo: part of a file that the model was not "
        "trained on, as long as the training length",
    )
    prompt.add_argument("--prompt-file", metavar="PATH", help="a file with the text to continue")
    run_ = parser.add_argument_group("run")
    run_.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        default=256,
        help="number of tokens to generate; a token is a byte for models of flashrope demo",
    )
    run_.add_argument(
        "--temperature", type=float, metavar="T", default=0.8, help="0 always takes the most likely token"
    )
    run_.add_argument("--top-k", type=positive, metavar="K", help="sample from the K most likely tokens only")
    run_.add_argument("--seed", type=int, default=0, help="seed for sampling and for the choice of the default prompt")
    run_.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_dtype(run_)
    run_.add_argument(
        "--impl",
        choices=BACKENDS,
        help="attention backend, for models of flashrope demo; default: chosen by the device",
    )
    run_.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="keep keys and values in this type, with a scale for each token and key head; default: in the type of the "
        "computation",
    )
    run_.add_argument(
        "--keep",
        type=first_and_last,
        metavar="FIRST,LAST",
        help="keep only the first and the last bytes, in a cache of fixed size: attention sinks and a rolling window. "
        "The kept bytes have positions 0, 1, 2, ..., so the text may be of any length. For models of flashrope demo",
    )
    run_.add_argument(
        "--threads",
        type=positive,
        help=f"CPU threads; default: one for small models, otherwise the cores available, at most {MAX_THREADS}",
    )
    scheme = parser.add_argument_group("scheme (default: the one the model was trained with)")
    scheme.add_argument(
        "--scheme",
        choices=SCHEMES,
        metavar="NAME",
        help="a scheme by name; its parameters are computed from the training length and the length of the text; "
        f"one of {', '.join(SCHEMES)}",
    )
    scheme.add_argument(
        "--rectify", action="store_true", help="ReRoPE: distances beyond the window count as the window"
    )
    scheme.add_argument(
        "--window",
        type=positive,
        metavar="W",
        help="window in tokens, default: half the training length; implies --rectify, unless --scheme is given",
    )
    scheme.add_argument(
        "--factor",
        type=float,
        metavar="K",
        help="Leaky ReRoPE: beyond the window, each further token adds 1/K to the distance; implies --rectify, unless "
        "--scheme is given",
    )
    scheme.add_argument(
        "--log-n", action="store_true", help="scale the query at position i by max(1, ln(i + 1) / ln(training length))"
    )
    scheme.add_argument(
        "--train-length",
        type=positive,
        metavar="N",
        help="the training length in tokens, for checkpoints that do not record it",
    )


def run(args: argparse.Namespace) -> int:
    path = Path(args.model)
    of_llama_cpp = path.suffix == ".gguf"
    if not of_llama_cpp and path.is_file() or path.suffix == Path(CHECKPOINTS["rope"]).suffix:
        from ..small_models import continuation as of_demo

        return of_demo.run(args)
    from ..evaluation import generation as of_transformers

    return of_transformers.run(args)
