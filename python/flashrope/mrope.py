"""Which coordinate of a position each channel pair rotates with, in vision-language models (mrope)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["section_axes"]


def section_axes(sections: Sequence[int], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """The axis of every pair. sections: pairs of each axis.

    interleaved=False: the first sections[0] pairs belong to axis 0, the next sections[1] to axis 1, and so on
    (Qwen2-VL; Wang et al. 2024, section 2.1). interleaved=True: pair m belongs to axis m modulo the number of axes as
    long as that axis has pairs left, otherwise to axis 0 (Qwen3-VL).

    Raises:
        ValueError, TypeError: sections are no positive integers, or do not add up to the pairs.
    """
    if isinstance(sections, str) or not isinstance(sections, Sequence):
        raise TypeError(f"sections: expected a list of integers, got {sections!r}")
    if len(sections) < 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sections):
        raise ValueError(f"sections: expected the pairs of two or more axes, positive integers, got {list(sections)}")
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
            f"sections: expected the first to be the longest if they are interleaved, got {list(sections)}, which "
            f"{pairs} pairs can only have as {counts}"
        )
    return axis_of
