"""The arguments of the commands. A module per command: ``add_arguments(parser)`` and ``run(args) -> exit code``.

Nothing here loads torch before ``run``.
"""
