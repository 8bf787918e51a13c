"""Benchmarks and compile checks, run with ``python -m bench`` from a checkout.

compiling/  compiles kernels without a GPU and checks registers, spills and instructions
timing/     measures speed and memory
report/     the records of a run, goals, figures, and bench/results/README.md
"""
