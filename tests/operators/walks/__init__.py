"""Draws random schemes, shapes and cache operations for ``test_walks.py``, and compares their results with float64."""
