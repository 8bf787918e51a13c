"""Defines the arguments of the commands. Each command has a module with ``add_arguments(parser)`` and ``run(args)``,
which returns the exit code.

Nothing here loads torch before ``run``.
"""
