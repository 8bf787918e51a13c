"""Measures tiles on the user's GPU. ``flashrope tune`` finds the fastest tiles, and the Triton backend uses them.

``candidates`` lists the tiles to try. ``workloads`` defines the calls that check and time a tile. ``measure`` runs
these calls and times them with ``timer``. ``lab/commands/tune.py`` is the command line. ``backends/tuned_tiles.py``
writes the file of winners and reads it once per process. Nothing in this package runs unless a user runs ``flashrope
tune``.
"""
