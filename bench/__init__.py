"""Benchmarks and compile checks, run with ``python -m bench`` from a checkout.

machine_code/  compiles kernels without a GPU and checks registers, spills and instructions
report/        reads and writes the records of a run, judges goals and draws figures
speed/         measures speed and memory (imports machine_code/ and report/)
results_page.py writes bench/results/README.md from the records (imports report/ and speed/)
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported, whose memory profiler prints USDT lines
