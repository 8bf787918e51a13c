"""Byte-level language models that ``flashrope demo`` and the experiments train. Needs the extra ``demo``."""
