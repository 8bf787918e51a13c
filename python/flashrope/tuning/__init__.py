"""Measures tiles on the user's GPU. ``flashrope tune`` finds them, and the Triton backend uses them.

``candidates`` lists the tiles to try, ``workloads`` the calls that are checked and timed, ``measure`` checks and times
them, and ``timer`` holds the clock. ``commands/tune.py`` is the command line. ``backends/tuned_tiles.py`` writes the
file of winners and reads it once per process. Nothing in this package runs unless a user asks for it.
"""
