"""The command line: ``flashrope <command>``, also ``python -m flashrope <command>``.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``. It is imported when it is asked
for, so that ``flashrope --help`` loads none of them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from importlib import import_module

from ._version import __version__

COMMANDS = {  # command: (module, what it does)
    "bench": ("flashrope.bench", "speed and memory against other implementations (from a checkout)"),
    "demo": ("flashrope.experiments.demo", "train two small models and compare the schemes beyond the training length"),
    "experiment": (
        "flashrope.experiments.experiment",
        "the sources' experiments: train small models, measure, draw, tabulate",
    ),
    "generate": (
        "flashrope.experiments.generate",
        "continue a text from a model that the demo trained, past its training length",
    ),
    "info": ("flashrope.info", "versions, devices, and which implementations can serve here"),
    "passkey": (
        "flashrope.experiments.passkey",
        "how deep and how far a Hugging Face model finds a hidden number, by scheme",
    ),
}

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = _parser(argv)
        args, unknown = parser.parse_known_args(argv)
        if args.command is None:
            parser.print_help()
            return 2
        if unknown:
            _refuse(args.parser, unknown)
        args.command_line = shlex.join(["flashrope", *argv])
        return import_module(COMMANDS[args.command][0]).run(args)
    except KeyboardInterrupt:
        print("\nflashrope: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has gone, as in "flashrope info | head -1"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return 1


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashrope", allow_abbrev=False, description="Fused attention kernels for rotary position schemes."
    )
    parser.add_argument("--version", action="version", version=f"flashrope {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.set_defaults(parser=command)
        if name == asked:
            import_module(module).add_arguments(command)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    name = unknown[0].split("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    parser.error(f"unknown option {unknown[0]}{guess}; the options are {' '.join(known)}")
