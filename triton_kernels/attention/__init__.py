"""Kernels of whole sequences: the forward, the backward, and the merging of two results."""
