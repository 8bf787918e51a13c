"""``flashrope bench ...``: ``python -m bench ...`` of the checkout that this package is installed from.

The benchmarks are no part of the installed package: they compare with other libraries, keep their results beside their
code and are of use where the kernels are worked on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="subcommand ...",
        help="as after python -m bench; none lists the subcommands",
    )


def run(args: argparse.Namespace) -> int:
    if not (CHECKOUT / "bench" / "__main__.py").exists():
        print(
            "flashrope bench: the benchmarks are in the folder bench/ of the source, which is not here: in a checkout run "
            "pip install -e '.[demo]' and then flashrope bench, or python -m bench",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(CHECKOUT))
    from bench.__main__ import main

    return main(args.words)
