"""Benchmarks and compile checks, run with ``python -m bench`` from a checkout.

compiling/  compiles kernels without a GPU and checks registers, spills and instructions
report/     the records of a run, goals and figures
timing/     measures speed and memory; imports compiling/ and report/
results_page.py writes bench/results/README.md from the records; imports report/ and timing/
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler, which measures memory, prints USDT lines
