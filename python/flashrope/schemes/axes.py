"""Assigns channel pairs to the axes of a position: each pair rotates by the coordinate on its axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .scheme_checks import check_positive_int, is_integer
from .tables import geometric_table, given_table

__all__ = ["axial_pairs", "section_axes"]


def axial_pairs(
    axes: int | Iterable[Any] | None, base: float, axis: Sequence[int] | None, pairs: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Returns inv_freq and the axis of every pair, for ``Rotary.axial``. pairs: the number of pairs of the scheme.

    Raises:
        TypeError, ValueError: axes or axis is invalid. The message says what was expected.
    """
    order = () if axis is None else _checked_order(axis, pairs)
    if order and axes is None:
        axes = max(order) + 1
    entries = _entries(2 if axes is None else axes, order, pairs)
    tables = [_table_of(f"axes[{n}]", entry, base) for n, entry in enumerate(entries)]
    counts = [len(table) for table in tables]
    if sum(counts) != pairs:
        hint = "; these are channels, but axes counts pairs, so give half" if sum(counts) == 2 * pairs else ""
        raise ValueError(
            f"axes: expected pairs that add up to {pairs}, half the channels, got {counts}, which add up to "
            f"{sum(counts)}{hint}"
        )
    order = order or tuple(a for a, count in enumerate(counts) for _ in range(count))
    found = [order.count(a) for a in range(max(len(counts), max(order) + 1))]
    if found != counts:
        raise ValueError(f"axis: expected {counts} pairs per axis, as given by axes, got {found}")
    remaining = [iter(table) for table in tables]
    return tuple(next(remaining[a]) for a in order), order


def _entries(axes: int | Iterable[Any], order: tuple[int, ...], pairs: int) -> list:
    """Returns, for each axis, the number of its pairs or its table."""
    if isinstance(axes, int):
        check_positive_int("axes", axes)
        if order:
            if axes != max(order) + 1:
                raise ValueError(f"axes: expected {max(order) + 1}, the number of axes in axis, got {axes}")
            return [order.count(a) for a in range(axes)]
        if pairs % axes:
            raise ValueError(
                f"axes: expected a divisor of the {pairs} pairs, got {axes}; or give a list with the pairs of each axis"
            )
        return [pairs // axes] * axes
    if isinstance(axes, (str, bytes, dict)) or not isinstance(axes, Iterable):
        raise TypeError(
            f"axes: expected a number of axes, or a list with the pairs or the table of each axis, got {axes!r}"
        )
    entries = list(axes)
    if not entries:
        raise ValueError("axes: expected the pairs or the table of at least one axis, got none")
    return entries


def _checked_order(axis, pairs: int) -> tuple[int, ...]:
    if isinstance(axis, str) or not isinstance(axis, Sequence):
        raise TypeError(f"axis: expected a list of integers, one per pair, got {axis!r}")
    for m, each in enumerate(axis):
        if not is_integer(each, 0):
            raise ValueError(f"axis[{m}]: expected a non-negative integer, got {each!r}")
    if len(axis) != pairs:
        raise ValueError(f"axis: expected one integer for each of the {pairs} pairs, got {len(axis)}")
    if missing := sorted(set(range(max(axis))) - set(axis)):
        raise ValueError(f"axis: expected pairs of every axis up to {max(axis)}, got none of axis {missing[0]}")
    return tuple(axis)


def _table_of(name: str, entry, base: float) -> tuple[float, ...]:
    if not isinstance(entry, (int, float, str)):
        table = given_table(name, entry)
        if not table:
            raise ValueError(f"{name}: expected a table of at least one pair, got none")
        return table
    if not is_integer(entry, 1):
        raise ValueError(f"{name}: expected the axis's number of pairs, at least 1, or its table, got {entry!r}")
    return geometric_table(base, 2 * entry)


def section_axes(sections: Sequence[int], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Returns the axis of every pair. sections: the number of pairs of each axis.

    interleaved=False: the first sections[0] pairs belong to axis 0, the next sections[1] to axis 1, and so on
    (Qwen2-VL; Wang et al. 2024, section 2.1). interleaved=True: pair m belongs to axis m modulo the number of axes as
    long as that axis has pairs left, otherwise to axis 0 (Qwen3-VL).

    Raises:
        ValueError, TypeError: sections are not positive integers, or do not add up to the number of pairs.
    """
    if isinstance(sections, str) or not isinstance(sections, Sequence):
        raise TypeError(f"sections: expected a list of integers, got {sections!r}")
    if len(sections) < 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sections):
        raise ValueError(
            f"sections: expected the numbers of pairs of two or more axes, positive integers, got {list(sections)}"
        )
    if sum(sections) != pairs:
        raise ValueError(
            f"sections: expected numbers that add up to the {pairs} pairs of the table, got {list(sections)}, which "
            f"add up to {sum(sections)}"
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = len(sections)
    axis_of = tuple(m % axes if m < axes * sections[m % axes] else 0 for m in range(pairs))
    counts = [axis_of.count(axis) for axis in range(axes)]
    if counts != list(sections):
        raise ValueError(
            f"sections: expected the first to be the longest, because interleaved=True, got {list(sections)}; "
            f"interleaving {pairs} pairs gives {counts}"
        )
    return axis_of
