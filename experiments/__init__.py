"""Repeats the experiments of the HoPE and ReRoPE papers with small byte-level models: ``python -m experiments NAME``.

Run the command from a checkout. It uses the installed ``flashrope`` package with the extra ``demo``. Nothing in
``flashrope`` or ``bench`` uses this package.
"""
