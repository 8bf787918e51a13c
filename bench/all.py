"""The subcommands one after another: in the sizes that the goals name ("main"), and on a GPU with head_dim 64 and
grouped heads ("more").

Each in a process of its own: what one leaves behind (a profiler, a broken CUDA context) does not touch the next.

    python -m bench all [--part main] [--only hope decode] [--seconds 1] [--out DIR] [--note TEXT] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from . import machine, suite

MAIN = tuple((command, ()) for command in ("hope", "rerope", "decode", "rotation", "scaling"))
MORE = (
    ("hope", ("--head-dim", "64", "--heads", "32", "--heads-kv", "32")),
    ("hope", ("--heads", "32", "--heads-kv", "8", "--seqlens", "2048", "8192")),
    ("rerope", ("--head-dim", "64", "--heads", "32", "--heads-kv", "32")),
    ("decode", ("--head-dim", "64")),
)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench all", description=__doc__.strip().split("\n")[0], allow_abbrev=False)
    p.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: a GPU if there is one)",
    )
    p.add_argument("--only", nargs="+", choices=[command for command, _ in MAIN], help="only these")
    p.add_argument("--part", choices=("main", "more"), help="default: both on a GPU, main on the CPU")
    p.add_argument("--seconds", type=float, help="for the rounds of a table")
    p.add_argument("--threads", type=suite.positive, help="of the CPU")
    p.add_argument("--out", type=Path, default=suite.RESULTS, help="default bench/results")
    p.add_argument("--note", default="", help="kept with the results")
    options = p.parse_args(argv)
    common = ["--device", options.device, "--out", str(options.out)]
    for name in ("seconds", "threads", "note"):
        if getattr(options, name) not in (None, ""):
            common += [f"--{name}", str(getattr(options, name))]
    parts = {"main": MAIN, "more": MORE}
    chosen = parts[options.part] if options.part else MAIN if options.device == "cpu" else MAIN + MORE
    chosen = [(command, arguments) for command, arguments in chosen if not options.only or command in options.only]
    if not chosen:
        p.error(f"--only: none of these is in --part {options.part}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(machine.ROOT), os.environ.get("PYTHONPATH"))))
    }
    codes = []
    for command, arguments in chosen:
        codes.append(
            subprocess.run([sys.executable, "-m", "bench", command, *arguments, *common], env=environment).returncode
        )
        print(flush=True)
    return max(map(abs, codes))
