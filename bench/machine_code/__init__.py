"""Compiles kernels for GPUs that need not be present, and checks the machine code."""
