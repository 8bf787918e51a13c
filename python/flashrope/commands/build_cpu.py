"""Arguments of ``flashrope build-cpu``."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compiler", default="c++", help="a C++17 compiler, GCC 12 or newer")
    parser.add_argument("--remove", action="store_true", help="delete the compiled kernels instead")


def run(args: argparse.Namespace) -> int:
    from ..backends.cpu import build

    return build.run(args)
