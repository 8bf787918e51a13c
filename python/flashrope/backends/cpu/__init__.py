"""The CPU backend: the compiled kernels of csrc/cpu (loader.py, tiles.py, decode.py, rotated.py).

What they do not serve (served.py) is refused. ``impl=None`` then takes the backend ``sdpa``.
"""

from ...calls.plans import CACHE_OPTIONS
from ..shared.runs import unsupported_positions
from .attention import backward, forward, kept_shapes
from .cached import attend as attend_part
from .decode import DecodePart as part_of
from .loader import warn_once
from .plan import append_to_cache, plan_cache
from .rotated import rotate
from .served import unserved_attention, unserved_cache, unserved_rotation, unsupported_reason

__all__ = [
    "CACHE_OPTIONS",
    "append_to_cache",
    "attend_part",
    "backward",
    "forward",
    "kept_shapes",
    "part_of",
    "plan_cache",
    "rotate",
    "unserved_attention",
    "unserved_cache",
    "unserved_rotation",
    "unsupported_positions",
    "unsupported_reason",
    "warn_once",
]
