"""Runs the package's kernels, as compiled, without a GPU, on the machine of machine/. See docs/dev/executor.md."""
