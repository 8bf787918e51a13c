"""Arguments of ``flashrope demo``."""

from __future__ import annotations

import argparse
import dataclasses

from ...console.options import positive
from ...schemes.catalogue import SCHEMES
from ..small_models.presets import COMPARED, PRESETS, TIMES, Preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    path = parser.add_argument_group("text and results")
    path.add_argument(
        "--text", metavar="PATH", help="a file or folder to train on instead of Python's standard library"
    )
    path.add_argument("--out", metavar="DIR", default="runs/demo", help="directory for the results")
    path.add_argument(
        "--overwrite", action="store_true", help="replace the models and results of an earlier run in --out"
    )
    run_ = parser.add_argument_group("run")
    run_.add_argument(
        "--preset",
        choices=PRESETS,
        help="sizes of the run; default: gpu on a GPU, otherwise cpu. Time of a run: "
        + ", ".join(f"{name} {time}" for name, time in TIMES.items()),
    )
    run_.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    run_.add_argument(
        "--threads", type=positive, help="CPU threads in total; default: one per model, if there are two cores"
    )
    run_.add_argument("--seed", type=int, default=0, help="seed for the weights, the batches and the unseen windows")
    sizes = parser.add_argument_group("sizes (default: those of the preset)")
    for field in dataclasses.fields(Preset):
        kind = float if field.name == "learning_rate" else positive
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            metavar="X" if kind is float else "N",
            default=argparse.SUPPRESS,
            help=", ".join(f"{name} {getattr(preset, field.name):g}" for name, preset in PRESETS.items()),
        )
    schemes = parser.add_argument_group("schemes")
    schemes.add_argument(
        "--schemes",
        nargs="+",
        choices=[name for name in SCHEMES if name not in ("stock", "log-n", "hope")],
        default=list(COMPARED),
        help="schemes to compare with RoPE and HoPE; every scheme runs without and with log n, on the model trained "
        "with RoPE, and rerope also on the model trained with HoPE",
    )
    schemes.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="window of ReRoPE, Leaky ReRoPE and Self-Extend; default: half the training "
        "length (ReRoPE's author found a quarter to a half of it best)",
    )


def run(args: argparse.Namespace) -> int:
    from ..small_models import comparison as main

    return main.run(args)
