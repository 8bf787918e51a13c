"""Checks that no tensor that a call writes overlaps itself or another tensor of the call, and that tables were not
written since a plan was made.

Only shapes, strides, addresses and versions are compared, so that nothing waits for the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .cache_tables import CacheLayer, CacheTables

Dimensions = tuple[tuple[int, int, int], ...]  # (stride, lowest index, highest index), the largest stride first


def check_append(layer: CacheLayer, k, v, tables: CacheTables) -> None:
    """Checks the memory of a call that writes k and v to a layer of a cache, with their scales and positions.

    v: None if values are channels of the keys, so that only keys are written.

    With a block table, different pages of two caches may share memory, because the block table decides which pages are
    used. For example, both caches may be views of one tensor and use alternate pages of it. Page n of all caches is
    written together, so only equal page numbers are compared. Tensors on the meta device have no memory and are not
    checked.

    Raises:
        ValueError: memory would be written twice, or written before it is read. The message names the tensors.
    """
    if layer.k.is_meta:
        return
    written = [("k_cache", layer.k)]
    if v is not None:
        written.append(("v_cache", layer.v))
    if layer.k_scale is not None and layer.v_scale is not None:
        written += [("k_scale", layer.k_scale), ("v_scale", layer.v_scale)]
    if tables.positions is not None and tables.positions.slot_positions is not None:
        written.append(("slot_positions", tables.positions.slot_positions))
    found: list[tuple[str, torch.Tensor, int, int]] = []
    caches = len(written)
    for n, (name, x) in enumerate((*written, ("k", k), *([] if v is None else [("v", v)]))):
        start, (size, repeats) = x.data_ptr(), _extent(x.shape, x.stride(), x.itemsize)
        is_written = n < caches
        if is_written and repeats:
            raise ValueError(
                f"{name}: expected memory of its own for every element, because new keys and values are written to "
                f"it, got shape {tuple(x.shape)} with strides {x.stride()}"
            )
        for other, y, low, end in found:
            same_page = is_written and tables.block_table is not None
            if start < end and low < start + size and _meet(start - low, _layout(y), _layout(x), same_page):
                why = "both are written" if is_written else f"{other} is written while {name} is read"
                view = ", or a view of its channels and v=None" if name == "v_cache" and other == "k_cache" else ""
                raise ValueError(
                    f"{name}: expected memory that does not overlap {other}{view} ({why}), got tensors that overlap"
                )
        if is_written:
            found.append((name, x, start, start + size))


def check_apart(name: str, x: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    """Checks that a tensor shares no memory with the other tensors of a call.

    Raises:
        ValueError: memory is shared. The message names both tensors.
    """
    start, size = x.data_ptr(), _size(x.shape, x.stride(), x.itemsize)
    for other, y in others.items():
        low = y.data_ptr()
        if start < low + _size(y.shape, y.stride(), y.itemsize) and low < start + size:
            if _meet(start - low, _layout(y), _layout(x)):
                raise ValueError(
                    f"{name}: expected memory that does not overlap {other} ({name} is written while {other} is read), "
                    "got tensors that overlap"
                )


class AppendCheck:
    """Runs ``check_append`` for the layers of a plan, whose caches have equal shapes and strides.

    The check is skipped for a layer if k and v have the same strides as in the previous call, and if the address range
    of neither cache overlaps that of another tensor.
    """

    __slots__ = ("_strides", "_sizes")

    def __init__(self) -> None:
        self._strides: tuple | None = None
        self._sizes: tuple[int, ...] = ()

    def __call__(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables) -> None:
        if v is None:
            check_append(layer, k, None, tables)
            return
        strides = k.stride(), v.stride()
        if strides == self._strides and layer.k_scale is None and tables.positions is None:
            if not self._sizes:
                self._sizes = tuple(_size(x.shape, x.stride(), x.itemsize) for x in (layer.k, layer.v, k, v))
            a, b, c, d = layer.k.data_ptr(), layer.v.data_ptr(), k.data_ptr(), v.data_ptr()
            of_a, of_b, of_c, of_d = self._sizes
            if (
                (a + of_a <= b or b + of_b <= a)
                and (a + of_a <= c or c + of_c <= a)
                and (a + of_a <= d or d + of_d <= a)
                and (b + of_b <= c or c + of_c <= b)
                and (b + of_b <= d or d + of_d <= b)
            ):
                return
        check_append(layer, k, v, tables)
        self._strides, self._sizes = strides, ()


class Unwritten:
    """Remembers tensors, to tell later whether one of them was written.

    A tensor counts how often it is written, except if it was made in inference mode. On the CPU it is then watched
    by a copy of its values. On a GPU it is not watched, because comparing its values would make the host wait.
    """

    __slots__ = ("_tensors", "_versions", "_copies")

    def __init__(self, tensors: list[torch.Tensor]):
        self._tensors = [x for x in tensors if not x.is_inference()]
        self._versions = [x._version for x in self._tensors]
        silent = [x for x in tensors if x.is_inference() and x.is_cpu and type(x) is torch.Tensor]
        self._copies = [(x, x.clone()) for x in silent]

    def broken(self) -> bool:
        """Whether a tensor was written."""
        return self._versions != [x._version for x in self._tensors] or any(
            not torch.equal(x, copy) for x, copy in self._copies
        )


def address(x: torch.Tensor) -> int:
    """Returns the address of a tensor, or 0 if it has none: while a call is traced, and without elements."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel():
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # fake tensors and tensors of torch.func's transforms
        return 0


def _layout(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.itemsize


@lru_cache(1024)
def _extent(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> tuple[int, bool]:
    """Returns ``_size``, and whether two elements share an address."""
    return _size(shape, strides, itemsize), _repeats(shape, strides)


def _size(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> int:
    """Returns the number of bytes from the first element to the end of the last one, or 0 without elements."""
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))


def _repeats(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether two elements share an address."""
    if 0 in shape:
        return False
    sizes = sorted(((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1), reverse=True)
    if any(not stride for stride, _ in sizes):
        return True
    rest: Dimensions = tuple((stride, 1 - n, n - 1) for stride, n in sizes)
    for stride, _, highest in rest:
        rest = rest[1:]
        reach = sum(s * high for s, _, high in rest)
        if any(_reaches(n * stride, rest) for n in range(1, min(highest, reach // stride) + 1)):
            return True
    return False


@lru_cache(1024)
def _meet(distance: int, first: tuple, second: tuple, same_page: bool = False) -> bool:
    """Whether two tensors share a byte.

    distance: bytes from the start of the first tensor to the start of the second. first, second: their ``_layout``.
    same_page: compares only equal indices of the first dimension.
    """
    if same_page and 0 not in (*first[0], *second[0]):
        (pages, *_), (others, *_) = first[0], second[0]
        by = second[1][0] * second[2] - first[1][0] * first[2]  # how much the distance grows from page to page
        pairs = [(shape[1:], strides[1:], itemsize) for shape, strides, itemsize in (first, second)]
        return any(_meet(distance + n * by, *pairs) for n in range(min(pages, others) if by else 1))
    spans: dict[int, tuple[int, int]] = {}
    for sign, (shape, strides, itemsize) in ((1, first), (-1, second)):
        for n, stride in ((itemsize, 1), *((n, stride * itemsize) for n, stride in zip(shape, strides, strict=True))):
            low, high = spans.get(stride, (0, 0))
            spans[stride] = (low + min(0, sign * (n - 1)), high + max(0, sign * (n - 1)))
    spans.pop(0, None)  # steps of 0 bytes
    return _reaches(distance, tuple((stride, *spans[stride]) for stride in sorted(spans, reverse=True)))


def _reaches(distance: int, dimensions: Dimensions) -> bool:
    """Whether steps along the dimensions, each within its bounds, add up to the distance."""
    if not dimensions:
        return distance == 0
    (stride, lowest, highest), rest = dimensions[0], dimensions[1:]
    low, high = (sum(each[0] * each[n] for each in rest) for n in (1, 2))
    first, last = max(lowest, -((high - distance) // stride)), min(highest, (distance - low) // stride)
    return any(_reaches(distance - n * stride, rest) for n in range(first, last + 1))
