"""A functional executor of PTX: runs the package's Triton kernels, as compiled, without a GPU. See docs/executor.md."""
