"""Byte-level language models, which ``flashrope demo`` and the experiments train. They need the extra ``demo``."""
