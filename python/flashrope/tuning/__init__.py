"""Tiles measured on the user's GPU: ``flashrope tune`` finds them, ``store`` keeps them, the Triton backend reads them.

``candidates`` lists what is tried, ``workloads`` the calls that are checked and timed, ``measure`` does both, ``timer``
holds the clock, and ``command`` is the command line. Nothing here runs unless a user asks for it, except that the
backend reads the file once.
"""
