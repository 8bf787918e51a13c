"""The experiments of the HoPE and ReRoPE papers, repeated with small byte-level models: ``python -m experiments NAME``.

Run it from a checkout. It uses the installed ``flashrope`` package (with the extra ``demo``); nothing in ``flashrope``
or ``bench`` uses it.
"""
