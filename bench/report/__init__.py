"""Reads and writes the records of a run, judges the goals, and draws figures."""
