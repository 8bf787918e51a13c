"""Arguments that the commands on Hugging Face models share."""

from __future__ import annotations

import argparse

from ...backends.names import CACHE_DTYPES
from ...console.options import positive
from ...schemes.catalogue import SCHEMES

DTYPES = ("float32", "bfloat16", "float16")


def add_measuring(parser: argparse.ArgumentParser, name: str, schemes: list[str]) -> None:
    """Adds the options of a command that measures a model under several schemes. schemes: the default of --schemes."""
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        required=True,
        help="a transformers checkpoint, its name on the hub, or a .gguf file; without a tokenizer, tokens are bytes, "
        "if the vocabulary has 256 to 512 entries",
    )
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=SCHEMES,
        default=schemes,
        help="schemes to run the model under; rerope and leaky include log n, rerope-plain does not; dual-chunk: DCA, "
        "for training lengths above 128 tokens",
    )
    parser.add_argument(
        "--rotary",
        nargs="+",
        metavar="TEXT_OR_PATH",
        default=[],
        help="also measure schemes of your own: the text of a Rotary, a file with that text, or the folder of a model "
        "that was saved with a scheme; each replaces the model's scheme as a whole",
    )
    parser.add_argument(
        "--sinks",
        type=positive,
        metavar="W",
        help="also measure a baseline that reads text of any length: the cache keeps the first 4 tokens and the last "
        "W, and drops the others (StreamingLLM)",
    )
    add_model_run(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=f"runs/{name}",
        help=f"directory for {name}.png, .svg, .pdf, .csv and .json",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run in --out")


def add_model_run(parser: argparse.ArgumentParser) -> None:
    """Adds options that say how a model runs."""
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="read all text through a cache that holds keys and values in this type, with a scale for each token and "
        "key head; the stock scheme then runs on flashrope's kernels too",
    )
    parser.add_argument(
        "--train-length",
        type=positive,
        metavar="N",
        help="training length in tokens; default: max_position_embeddings of the configuration",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the weights and of the computation; default: bfloat16 on a GPU, float32 elsewhere",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: the cores available")
