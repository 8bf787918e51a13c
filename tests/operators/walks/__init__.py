"""Random walks: schemes, shapes and cache operations at random, against float64, for ``test_walks.py``."""
