"""Tiles measured on the user's GPU by ``flashrope tune``.

``candidates`` lists what is tried, ``workloads`` lists the calls that are checked and timed, ``measure`` does both, and
``timer`` holds the clock. ``backends/tuned_tiles.py`` stores the winners for the Triton backend, and
``commands/tune.py`` is the command. Nothing here runs unless a user asks for it.
"""
