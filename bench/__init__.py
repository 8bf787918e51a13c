"""Benchmarks and compile checks, run with ``python -m bench`` from a checkout.

compiling/  compiles kernels without a GPU and checks registers, spills and instructions
report/     reads and writes the records of a run, judges goals and draws figures
timing/     measures speed and memory (imports compiling/ and report/)
results_page.py writes bench/results/README.md from the records (imports report/ and timing/)
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported, whose memory profiler prints USDT lines
