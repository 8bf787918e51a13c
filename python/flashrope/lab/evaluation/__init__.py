"""Measures how well Hugging Face models use texts of several lengths (``flashrope passkey`` and ``flashrope loss``).

Models are measured under their own scheme and under other schemes. ``model`` loads a model and runs it, ``schemes``
converts it, ``passkey`` and ``loss`` measure it. The extras ``demo`` (matplotlib) and ``transformers`` are needed.
"""
