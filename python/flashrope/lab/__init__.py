"""Measures and trains models: the loss by length, passkeys, generation, the demo, and the tiles of this GPU."""
