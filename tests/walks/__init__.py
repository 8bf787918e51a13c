"""Random walks: schemes, shapes and cache operations at random, against float64. See ``tests/test_walks.py``."""
