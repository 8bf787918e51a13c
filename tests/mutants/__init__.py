"""Mutation testing: breaks one line at a time and sees which test notices. See ``python -m tests.mutants --help``."""
