"""Mutation testing: break one line at a time and see which test notices. ``python -m tests.mutants --help``."""
