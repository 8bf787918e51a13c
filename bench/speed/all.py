"""Runs the subcommands one after another, each in its own process.

Part "main" uses the sizes that the goals name. Part "more" uses head_dim 64 and grouped heads.

python -m bench all [--part main] [--only hope decode] [--seconds 1] [--out DIR] [--note TEXT] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from flashrope.console.options import positive

from .. import machine
from ..progress import steps
from ..report.output import add_output_options, output_folder
from .options import add_device_option

MAIN = tuple((command, ()) for command in ("hope", "rerope", "decode", "rotation", "scaling"))
MORE = (
    ("hope", ("--head-dim", "64", "--heads", "32", "--heads-kv", "32")),
    ("hope", ("--heads", "32", "--heads-kv", "8", "--seqlens", "2048", "8192")),
    ("rerope", ("--head-dim", "64", "--heads", "32", "--heads-kv", "32")),
    ("decode", ("--head-dim", "64")),
)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench all", description=__doc__.split("\n")[0], allow_abbrev=False)
    add_device_option(p)
    p.add_argument("--only", nargs="+", choices=[command for command, _ in MAIN], help="only these subcommands")
    p.add_argument("--part", choices=("main", "more"), help="default: both on a GPU, main on the CPU")
    p.add_argument("--seconds", type=float, help="time for the rounds of each table, not for the whole run")
    p.add_argument("--threads", type=positive, help="CPU threads")
    add_output_options(p)
    options = p.parse_args(argv)
    common = ["--device", options.device]
    if folder := output_folder(options):
        common += ["--out", str(folder)]
    for name in ("seconds", "threads", "note"):
        if getattr(options, name) not in (None, ""):
            common += [f"--{name}", str(getattr(options, name))]
    parts = {"main": MAIN, "more": MORE}
    chosen = parts[options.part] if options.part else MAIN if options.device == "cpu" else MAIN + MORE
    chosen = [(command, arguments) for command, arguments in chosen if not options.only or command in options.only]
    if not chosen:
        p.error(f"--only: expected subcommands of --part {options.part}, got {' '.join(options.only)}")
    path = os.pathsep.join(filter(None, (str(machine.ROOT), os.environ.get("PYTHONPATH"))))
    codes = []
    for command, arguments in steps("all", chosen, lambda item: " ".join((item[0], *item[1]))):
        words = [sys.executable, "-m", "bench", command, *arguments, *common]
        codes.append(subprocess.run(words, env=os.environ | {"PYTHONPATH": path}).returncode)
        print(flush=True)
    return max(map(abs, codes))
