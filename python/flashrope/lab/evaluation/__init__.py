"""Measures how well Hugging Face models use texts of several lengths (``flashrope passkey`` and ``flashrope loss``).

Models are measured under their own scheme and under other schemes. ``checkpoint`` loads a model and runs it,
``readings`` converts it, ``retrieval`` and ``losses`` measure it. The extras ``demo`` (matplotlib) and ``transformers``
are needed.
"""
