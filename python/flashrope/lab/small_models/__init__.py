"""Byte-level language models, which ``flashrope demo`` and the experiments train. The models need the extra
``demo``."""
