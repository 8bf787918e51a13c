"""Code that the command-line programs share: exit codes, help texts, and the error for an unknown option."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def guarded(program: str, command: Callable[[], int]) -> int:
    """Runs ``command()`` and returns its exit code. Ctrl-C and a closed stdout end the command without a traceback."""
    try:
        return command()
    except BrokenPipeError:  # the reader of stdout has exited, as in "flashrope info | head -1"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter warns at exit
        return 1
    except (KeyboardInterrupt, Exception) as error:
        if not _is_interrupt(error):
            raise
        print(f"\n{program}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether the error is Ctrl-C or was caused by it: Ctrl-C during the import of an extension module raises
    ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option to its help, unless the option has no default or the help describes it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def reject_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Exits with code 2 and a message that names the closest known option."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    name = unknown[0].split("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    parser.error(f"unknown option {unknown[0]}{guess}; the options are {' '.join(known)}")
