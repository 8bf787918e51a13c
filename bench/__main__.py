"""python -m bench SUBCOMMAND [OPTIONS]"""

from __future__ import annotations

import sys
from importlib import import_module

SUBCOMMANDS = {
    "hope": "prefill and training with RoPE and HoPE against attention after a rotation of its own",
    "rerope": "prefill and training with ReRoPE against two passes and two dense matrices",
    "decode": "one token over a cache: time, and bandwidth against a read-only probe",
    "rotation": "what rotation costs, in our forward and as a pass of its own",
    "scaling": "time and memory over length, heads and batch; decoding over context and window",
    "all": "the five above, in the sizes that the goals name",
    "cpu": "speed and memory of the CPU implementation against PyTorch in the same run",
    "host": "time until a call's Triton kernels are queued, with or without a GPU",
    "tune": "tiles for configs.py: timed on a GPU, or ranked by their machine code without one",
    "readme": "draws the results in bench/results into README.md",
    "gate": "compile every kernel for GPUs that need not be there; check spills and shared memory",
    "gate-cuda": "the same for the CUDA C++ kernels, where there is nvcc",
}


def main(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        return import_module(f".{argv[0].replace('-', '_')}", __package__).main(argv[1:])
    print(__doc__)
    for name, purpose in SUBCOMMANDS.items():
        print(f"  {name:<10} {purpose}")
    return 0 if argv in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
