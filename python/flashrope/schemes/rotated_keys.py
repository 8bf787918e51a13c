"""Checks that a scheme's keys can be rotated outside of attention, and derives the scheme of attention over such
keys."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from .bands import PositionMap, band_text, shared_map
from .rotary import Rotary


def one_rotation(rotary: Rotary, why: str) -> PositionMap:
    """Returns the map of positions by which all queries and keys of the scheme rotate.

    why: the purpose, for the message.

    Raises:
        ValueError: queries or keys rotate in several ways. The message names the scheme.
    """
    found = shared_map(rotary.bands)
    if found is None:
        raise ValueError(
            f"rotary: expected a scheme in which a query and a key each have one rotation, {why}; got {_name(rotary)}, "
            f"whose distance is {'; '.join(map(band_text, rotary.bands))}"
        )
    return found


def _name(rotary: Rotary) -> str:
    """Returns a name for the kind of scheme, judged by its bands."""
    if any(band.keys_rotated for band in rotary.bands):
        return "a scheme over rotated keys"
    if any(band.chunk for band in rotary.bands):
        return "dual chunk attention"
    if any(band.group > 1 for band in rotary.bands):
        return "Self-Extend"
    if any(band.slope == 0 for band in rotary.bands):
        return "ReRoPE"
    near, far = rotary.bands[0], rotary.bands[-1]
    if near.is_plain and far.offset == far.start * (1 - far.slope):
        return "Leaky ReRoPE"
    return "bands of several rotations"


def rotation_scale(rotary: Rotary) -> float:
    """Returns the factor by which the table's channels of queries and of keys are multiplied. The product of a query
    and a key then has the factor rotated_scale."""
    return math.sqrt(rotary.rotated_scale)


@lru_cache(maxsize=1024)
def over_rotated_keys(rotary: Rotary) -> Rotary:
    """Returns the scheme for keys that ``flashrope.rotate`` has rotated: its bands rotate only the queries.

    ``flashrope.rotate`` has multiplied the keys by the square root of ``rotated_scale``. The scheme multiplies the
    queries by this root, too.

    Raises:
        ValueError: queries or keys rotate in several ways.
    """
    one_rotation(rotary, "so that its keys can be stored rotated")
    bands = tuple(band._replace(keys_rotated=True) for band in rotary.bands)
    return dataclasses.replace(rotary, bands=bands, rotated_scale=rotation_scale(rotary))


@lru_cache(maxsize=1024)
def inverted(rotary: Rotary) -> Rotary:
    """Returns the scheme that rotates by the same angles in the opposite direction."""
    return dataclasses.replace(rotary, frequencies=tuple(-f for f in rotary.frequencies))
