"""python -m bench SUBCOMMAND [OPTIONS]"""

from __future__ import annotations

import sys
from importlib import import_module

SUBCOMMANDS = {
    "cpu": "speed and memory of the CPU implementation against PyTorch in the same run",
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
