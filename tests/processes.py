"""Runs commands in separate processes and interrupts them, and simulates a terminal for progress bars."""

import os
import signal
import subprocess


def interrupted_at(arguments: list[str], moment: str, **options) -> tuple[int, list[str]]:
    """Returns (exit code, lines of stderr) of a command that gets SIGINT as soon as a line of stderr contains
    `moment`."""
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    process = subprocess.Popen(arguments, **pipes, **options)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if moment in line:
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, [*lines, *rest.splitlines(keepends=True)]


class Terminal(list):
    """A stream that keeps what is written, and claims to be a terminal."""

    def write(self, text):
        self.append(text)

    def flush(self):
        pass

    def isatty(self):
        return True
