"""``flashrope passkey`` and ``flashrope loss``: Hugging Face models by length, stock and under other schemes.

``model`` loads a model and runs it, ``schemes`` converts it, ``passkey`` and ``loss`` measure. Needs the extras
``demo`` (matplotlib) and ``transformers``.
"""
