"""Runs the command line: ``flashrope <command>``, also ``python -m flashrope <command>``.

A command is a module with ``add_arguments(parser)`` and ``run(args)``, which returns the exit code. The module is
imported only when the command is called, and loads torch only in ``run``. So ``--help`` and errors about options appear
immediately.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from importlib import import_module

from .._version import __version__
from ..console.program import INTERRUPTED, HelpFormatter, guarded, reject_unknown

COMMANDS = {  # command: (module, what it does)
    "demo": (
        "flashrope.lab.commands.demo",
        "train two small models and compare the schemes beyond the training length",
    ),
    "generate": (
        "flashrope.lab.commands.generate",
        "continue a text with a Hugging Face model or a model of flashrope demo, under any scheme",
    ),
    "info": ("flashrope.cli.info", "show versions, devices and the backends available here"),
    "loss": (
        "flashrope.lab.commands.loss",
        "measure the loss of a Hugging Face model on your text by length of the context, under several schemes",
    ),
    "passkey": (
        "flashrope.lab.commands.passkey",
        "measure by length, depth and scheme how often a Hugging Face model finds a hidden number",
    ),
    "tune": ("flashrope.lab.commands.tune", "measure on this GPU which tiles are fastest, and use them from then on"),
}
CHECKOUT_COMMANDS = {"bench": "python -m bench", "experiment": "python -m experiments"}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 for success, 1 for failure, 2 for bad input, 130 if interrupted."""
    code = guarded("flashrope", lambda: _run(sys.argv[1:] if argv is None else argv))
    if argv is None and code == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # for a second Ctrl-C while the interpreter ends
    return code


def _run(argv: list[str]) -> int:
    if argv and argv[0] in CHECKOUT_COMMANDS:
        print(
            f"flashrope: error: {argv[0]!r} is not part of the installed package; "
            f"in a checkout of the repository, run {CHECKOUT_COMMANDS[argv[0]]}",
            file=sys.stderr,
        )
        return 2
    parser = _parser(argv)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    if unknown:
        reject_unknown(args.parser, unknown)
    args.command_line = shlex.join(["flashrope", *argv])
    return import_module(COMMANDS[args.command][0]).run(args)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashrope", allow_abbrev=False, description="Fused attention kernels for rotary position schemes."
    )
    parser.add_argument("--version", action="version", version=f"flashrope {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    called = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        command.set_defaults(parser=command)
        if name == called:
            import_module(module).add_arguments(command)
    return parser
