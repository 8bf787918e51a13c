"""``flashrope demo``, ``flashrope generate`` and ``flashrope passkey``, and the small language model they train.

Needs the extra ``demo`` (matplotlib, safetensors, tqdm); ``passkey`` also needs ``transformers``.
"""
