"""Chooses windows, groups and chunks of Self-Extend and dual chunk attention from the lengths of a trained model."""

from __future__ import annotations

from .scheme_checks import TILE


def self_extend_for(train_length: int, longest: int, window: int | None = None) -> tuple[int, int]:
    """Returns (window, group) of ``Rotary.self_extend``, with the smallest group that keeps all distances below the
    training length.

    In the longest sequence, the last query sees the first key at the distance
    floor((longest - 1) / group) + window - window / group. The group is chosen so that this is less than train_length.

    Args:
        train_length, longest: the training length and the longest length to read, in tokens.
        window: in positions. None: half the training length.

    Raises:
        ValueError: no divisor of the window is large enough to be the group.
    """
    window = max(train_length // 2, 1) if window is None else window
    for group in range(1, window + 1):
        if window % group == 0 and _farthest(longest, window, group) < train_length:
            return window, group
    raise ValueError(
        f"self_extend: no group that divides window {window} brings {longest} tokens within the training length "
        f"{train_length}; the largest group, {window}, leaves a distance of {_farthest(longest, window, window)}"
    )


def _farthest(longest: int, window: int, group: int) -> int:
    return (longest - 1) // group + window - window // group


def dual_chunk_for(train_length: int) -> tuple[int, int]:
    """Returns (chunk_size, local_size) of ``Rotary.dual_chunk``.

    chunk_size is the training length. local_size is chosen so that chunk_size - local_size is a multiple of 128 and
    about three quarters of the training length, as in the experiments of the DCA paper.

    Raises:
        ValueError: the training length is at most 128, too short for a chunk and a local size of at least 1.
    """
    chunk = max(3 * train_length // 4 // TILE, 1) * TILE
    if chunk >= train_length:
        raise ValueError(
            f"dual_chunk: expected a training length above {TILE}, the rows of a tile and the shortest chunk, got "
            f"{train_length}, which leaves no positions for local_size"
        )
    return train_length, train_length - chunk
