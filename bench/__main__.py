"""python -m bench SUBCOMMAND [OPTIONS]

``python -m bench SUBCOMMAND -h`` shows the options of a subcommand. Every subcommand prints its results. With --out or
--publish it also writes them to files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from flashrope.console.program import guarded

SUBCOMMANDS = {  # {name: (module or module:function, what it does)}; a module without a function runs its main
    "hope": (
        "speed.prefill:hope",
        "prefill and training with RoPE and HoPE, against rotation and attention as separate steps",
    ),
    "rerope": (
        "speed.prefill:rerope",
        "prefill and training with ReRoPE, against two calls, two passes and two dense score matrices",
    ),
    "decode": ("speed.decode", "one token with a KV cache: time, and bandwidth against a kernel that only reads"),
    "rotation": ("speed.rotation", "cost of rotation, inside flashrope's forward and as a separate pass"),
    "scaling": ("speed.scaling", "growth of time and memory with length, heads, batch, context and window"),
    "all": ("speed.all", "the five above, in the sizes that the goals name"),
    "ceilings": ("speed.ceilings", "what the device reaches: a large matrix product, a copy, a read"),
    "cpu": ("speed.cpu", "speed and memory of the CPU backend, against PyTorch in the same run"),
    "cpu-ragged": ("speed.cpu_ragged", "decoding batches of unequal lengths on the CPU, against equal lengths"),
    "host": ("speed.host", "host time until a call has queued its Triton kernels, with or without a GPU"),
    "serving": ("speed.serving", "vLLM on the CPU, stock and with flashrope's plugin: tokens per second, cache bytes"),
    "tune": ("speed.tune", "tiles for configs.py: timed on a GPU, or ranked by their machine code without one"),
    "gate": (
        "machine_code.gate",
        "compile every Triton kernel without a GPU; check spills, shared memory, instructions",
    ),
    "gate-cuda": (
        "machine_code.gate_cuda",
        "compile the CUDA C++ kernels with nvcc, without a GPU; check spills, shared memory, copies",
    ),
    "model": ("model", "predict from the machine code what the inner loops wait for; no GPU is needed"),
    "peers": (
        "machine_code.peers",
        "machine code of PyTorch's FlashAttention-2 kernels beside that of ours, without a GPU",
    ),
    "correct": ("correct", "compare every kind of kernel with float64 on the CPU, at real sizes"),
    "device": ("device", "the steps of bench/on_gpu.sh first second: compile, time, count, and one table"),
    "sanitize": ("sanitize", "run every kernel once on small shapes, for compute-sanitizer"),
    "report": ("results_page", "regenerate bench/results/README.md from the records in that folder"),
}


def main(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        return guarded("python -m bench", lambda: run(*argv))
    print(__doc__)
    for name, (_, purpose) in SUBCOMMANDS.items():
        print(f"  {name:<10} {purpose}")
    return 0 if argv in (["-h"], ["--help"]) else 2


def run(name: str, *words: str) -> int:
    """Runs a subcommand and returns the exit code. With --publish it then regenerates bench/results/README.md."""
    if "--publish" in words:
        from .machine import CHANGED, revision

        if (found := revision()).endswith(CHANGED):
            print(
                f"--publish: expected a tree without changes, got {found}; commit first, or use --out", file=sys.stderr
            )
            return 2
    code = _main_of(name)(list(words))
    return code or (_main_of("report")([]) if "--publish" in words else 0)


def _main_of(name: str) -> Callable[[list[str]], int]:
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    return getattr(import_module(f".{module}", __package__), function or "main")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
