"""Kernels over a cache: decoding, chunks of a prompt, writing, and explicit positions."""
