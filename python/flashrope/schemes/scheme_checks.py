"""Checks a Rotary's fields and the numbers that its methods take. Each check raises TypeError or ValueError."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import wraps
from typing import TypeGuard, TypeVar, cast

TILE = 128  # rows of the kernels' largest tile; a chunk is a whole number of tiles
# The largest magnitude of the numbers of a scheme. Kernels count distances up to this (lowered.UNBOUNDED), and products
# of such numbers with positions are finite in float64.
LARGEST = 1 << 30
MOST_AXES = 16  # in tables of fewer pairs

Method = TypeVar("Method", bound=Callable[..., object])


def says_instead(**names: str) -> Callable[[Method], Method]:
    """Decorates a method so that foreign keywords raise a helpful TypeError. names: for each such keyword, the argument
    that the method has instead."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def checked(*args, **given):
            for name, ours in names.items():
                if name in given:
                    value = f"{name}={given[name]!r}"
                    raise TypeError(
                        f"{name}: expected {ours}, got {value}, an unexpected keyword argument of {method.__name__}"
                    )
            return method(*args, **given)

        return cast(Method, checked)

    return decorate


def positive(name: str, value, finite: bool = True) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    if not number > 0 or finite and number == math.inf:
        raise ValueError(f"{name}: expected a positive {'finite ' if finite else ''}number, got {value!r}")
    return number


def moderate(name: str, value) -> float:
    """Returns a factor of the float32 scores: a number from 2^-30 to 2^30."""
    number = positive(name, value)
    if not 1 / LARGEST <= number <= LARGEST:
        raise ValueError(f"{name}: expected a number from 2^-30 to 2^30, got {value!r}")
    return number


def check_flag(name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def is_integer(value, minimum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def check_positive_int(name: str, value) -> None:
    if not is_integer(value, 1):
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")


def check_even(name: str, value, minimum: int = 2) -> None:
    if not is_integer(value, minimum) or value % 2:
        raise ValueError(f"{name}: expected an even integer of at least {minimum}, got {value!r}")


def checked_rotary_dim(head_dim, rotary_dim, first_channel=0) -> int:
    """Checks the arguments and returns rotary_dim. If it is None, all channels from first_channel on rotate."""
    check_even("head_dim", head_dim)
    check_even("first_channel", first_channel, minimum=0)
    rotary_dim = max(head_dim - first_channel, 0) if rotary_dim is None else rotary_dim
    check_even("rotary_dim", rotary_dim, minimum=0)
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim: expected at most head_dim = {head_dim}, got {rotary_dim}")
    check_first_channel(head_dim, rotary_dim, first_channel)
    return rotary_dim


def check_first_channel(head_dim: int, rotary_dim: int, first_channel) -> None:
    check_even("first_channel", first_channel, minimum=0)
    if first_channel and first_channel + rotary_dim > head_dim:
        raise ValueError(
            f"first_channel: expected at most {head_dim - rotary_dim}, so that {rotary_dim} rotary channels end within "
            f"head_dim = {head_dim}, got {first_channel}"
        )


def check_window(window, name: str = "window") -> None:
    if not is_integer(window, 0):
        raise ValueError(f"{name}: expected a non-negative integer, got {window!r}")


def check_fraction(fraction) -> None:
    if not isinstance(fraction, numbers.Real) or isinstance(fraction, bool):
        raise TypeError(f"fraction: expected a number from 0 to 1, got {fraction!r}")
    if not 0 <= float(fraction) <= 1:
        raise ValueError(f"fraction: expected a number from 0 to 1, got {fraction!r}")


def check_string(start, window) -> None:
    check_positive_int("start", start)
    check_window(window)
    if window >= start:
        raise ValueError(f"window: expected less than start = {start}, got {window}; far keys move nearer, not away")


def check_self_extend(window, group) -> None:
    check_window(window)
    check_positive_int("group", group)
    if window % group:
        raise ValueError(
            f"group: expected a divisor of window = {window}, got {group}; the grouped positions would not meet the "
            f"true ones at the window, try window {round(window / group) * group or group}"
        )


def checked_chunk(chunk_size, local_size) -> int:
    """Checks both sizes and returns the length of a chunk, chunk_size - local_size."""
    check_positive_int("chunk_size", chunk_size)
    if not is_integer(local_size, 0):
        raise ValueError(f"local_size: expected a non-negative integer, got {local_size!r}")
    if local_size >= chunk_size:
        raise ValueError(
            f"local_size: expected less than chunk_size = {chunk_size}, got {local_size}; chunks would be empty"
        )
    chunk = chunk_size - local_size
    if chunk % TILE:
        fitting = max(chunk // TILE, 1) * TILE
        hint = f"; try local_size {chunk_size - fitting}" if chunk_size >= fitting else ""
        raise ValueError(
            f"chunk_size: expected chunk_size - local_size to be a multiple of {TILE}, the rows of a tile, got "
            f"{chunk_size} - {local_size} = {chunk}{hint}"
        )
    return chunk


def checked_frequencies(frequencies, head_dim: int) -> tuple[float, ...]:
    if not isinstance(frequencies, (tuple, list)):
        raise TypeError(f"inv_freq: expected a tuple of numbers, got {type(frequencies).__name__}; use from_inv_freq")
    pairs = len(frequencies)
    if 2 * pairs > head_dim:
        raise ValueError(f"inv_freq: {pairs} pairs need {2 * pairs} channels, got head_dim {head_dim}")
    for m, frequency in enumerate(frequencies):
        if not isinstance(frequency, numbers.Real) or isinstance(frequency, bool):
            raise TypeError(f"inv_freq[{m}]: expected a number, got {frequency!r}")
        if not math.isfinite(frequency):
            raise ValueError(f"inv_freq[{m}]: expected a finite number, got {frequency!r}")
        if abs(float(frequency)) > LARGEST:
            raise ValueError(f"inv_freq[{m}]: expected a magnitude of at most 2^30, got {frequency!r}")
    return tuple(map(float, frequencies))


def checked_axis(axis, pairs: int) -> tuple[int, ...]:
    if not isinstance(axis, (tuple, list)):
        raise TypeError(f"axis: expected a tuple of integers, one per pair, got {axis!r}")
    if axis and len(axis) != pairs:
        raise ValueError(f"axis: expected one integer for each of the {pairs} pairs, got {len(axis)}")
    for m, each in enumerate(axis):
        if not is_integer(each, 0):
            raise ValueError(f"axis[{m}]: expected a non-negative integer, got {each!r}")
        if each >= max(pairs, MOST_AXES):
            raise ValueError(f"axis[{m}]: expected less than {max(pairs, MOST_AXES)}, got {each!r}")
    return tuple(map(int, axis))


def checked_origin(base, exponent_dim, scaled_by) -> tuple[float | None, int, str]:
    """Returns the fields base, exponent_dim and scaled_by of a Rotary, which say where its table comes from."""
    if base is not None:
        base = positive("base", base)
        if not base > 1:
            raise ValueError(f"base: expected more than 1, got {base!r}")
    if not is_integer(exponent_dim, 0):
        raise ValueError(f"exponent_dim: expected a non-negative integer, got {exponent_dim!r}")
    if not isinstance(scaled_by, str):
        raise TypeError(f"scaled_by: expected a string, got {scaled_by!r}")
    return base, exponent_dim, scaled_by
