"""The CPU backend. It calls torch's own flash-attention kernel for the CPU on parts of every band.

It calls the compiled kernels of csrc/cpu instead where the installation has them (loader.py, tiles.py, decode.py).
"""

from .attention import backward, forward, kept_shapes, unsupported_reason
from .plan import append_to_cache, attention_with_cache, plan_cache
from .rotated import rotate
from .runs import unsupported_positions

__all__ = [
    "append_to_cache",
    "attention_with_cache",
    "backward",
    "forward",
    "kept_shapes",
    "plan_cache",
    "rotate",
    "unsupported_positions",
    "unsupported_reason",
]
