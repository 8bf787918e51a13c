"""The CPU backend.

If the installation has the compiled kernels of csrc/cpu, they compute most calls (loader.py, tiles.py, decode.py).
Otherwise the backend calls torch's own flash-attention kernel for the CPU on parts of every band.
"""

from .attention import backward, forward, kept_shapes, unsupported_reason
from .plan import append_to_cache, plan_cache
from .rotated import rotate
from .runs import unsupported_positions

__all__ = [
    "append_to_cache",
    "backward",
    "forward",
    "kept_shapes",
    "plan_cache",
    "rotate",
    "unsupported_positions",
    "unsupported_reason",
]
