"""The command line: ``flashrope <command>``, also ``python -m flashrope <command>``.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``. It is imported only when it is
called, and loads torch only in ``run``, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from ._version import __version__

COMMANDS = {  # command: (module, what it does)
    "build-cpu": ("flashrope.commands.build_cpu", "compile faster kernels for this processor; needs a C++ compiler"),
    "demo": ("flashrope.commands.demo", "train two small models and compare the schemes beyond the training length"),
    "generate": (
        "flashrope.commands.generate",
        "continue a text with a model trained by flashrope demo, past its training length",
    ),
    "info": ("flashrope.info", "show versions, devices and the backends available here"),
    "loss": (
        "flashrope.commands.loss",
        "measure the loss of a Hugging Face model on your text by length of the context, under several schemes",
    ),
    "passkey": (
        "flashrope.commands.passkey",
        "measure by length, depth and scheme how often a Hugging Face model finds a hidden number",
    ),
    "tune": ("flashrope.tuning.command", "measure on this GPU which tiles are fastest, and use them from then on"),
}
CHECKOUT_COMMANDS = {"bench": "python -m bench", "experiment": "python -m experiments"}

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    code = guarded("flashrope", lambda: _run(sys.argv[1:] if argv is None else argv))
    if argv is None and code == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # a second Ctrl-C while the interpreter ends
    return code


def guarded(program: str, command: Callable[[], int]) -> int:
    """The exit code of ``command()``. Ctrl-C and a closed stdout end it without a traceback."""
    try:
        return command()
    except BrokenPipeError:  # the reader of stdout has exited, as in "flashrope info | head -1"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return 1
    except (KeyboardInterrupt, Exception) as error:
        if not _is_interrupt(error):
            raise
        print(f"\n{program}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or what a library made of it: the import of an extension module raises ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


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


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option, unless there is none or the help describes it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


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
            formatter_class=_HelpFormatter,
        )
        command.set_defaults(parser=command)
        if name == called:
            import_module(module).add_arguments(command)
    return parser


def reject_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Exit with code 2 and a message that names the closest known option."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    name = unknown[0].split("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    parser.error(f"unknown option {unknown[0]}{guess}; the options are {' '.join(known)}")
