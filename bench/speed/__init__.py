"""Measures speed and memory, against other implementations in the same run."""
