"""Every combination that impl="triton" offers over caches has a case on the executor (tests/executor/test_offered.py).

The checks themselves say what is offered.
"""

import itertools

import pytest
import torch
from executor import offered
from flashrope.backends.triton.device import block_d
from flashrope.triton_kernels import configs

FAMILIES = [configs.HALF, configs.NEWER_HALF]


def kind_of_head(head_dim: int) -> tuple[int, bool]:
    """Returns what a kernel is compiled for: the channels of its tiles, and whether some of them are padding."""
    return block_d(head_dim), block_d(head_dim) != head_dim


def kind_of_page(page: int) -> int:
    """Returns the page size, but at most the number of keys of the largest tile. All pages that hold whole tiles of
    keys are alike."""
    largest = max(tile.block_n for table in FAMILIES for kinds in table.values() for tile in tiles_of(kinds))
    return min(page, largest)


def tiles_of(kinds) -> list[configs.Tile]:
    return [tile for name, tiles in kinds.items() if name.startswith(("decode", "forward")) for tile in tiles.values()]


def dtypes() -> list[torch.dtype]:
    """Returns all dtypes of PyTorch that a tensor can have without further arguments."""
    found = vars(torch).items()
    return [x for name, x in found if isinstance(x, torch.dtype) and not (x.is_complex or name[0] == "q")]


def accepted(values, axis: int) -> list:
    """Returns the values of one axis that are accepted if the other axes have common values."""
    usual = [64, 16, torch.float16, None, None]
    return [x for x in values if offered.is_offered(*usual[:axis], x, *usual[axis + 1 :])]


def test_every_head_dim_has_a_case_of_its_kind():
    head_dims = accepted(range(1, 1025), 0)
    assert {kind_of_head(x) for x in head_dims} == {kind_of_head(x) for x in offered.HEAD_DIMS}
    assert set(offered.HEAD_DIMS) <= set(head_dims) and {head_dims[0], head_dims[-1]} <= set(offered.HEAD_DIMS)


def test_every_page_has_a_case_of_its_kind():
    pages = accepted(range(2049), 1)
    assert set(offered.PAGES) <= set(pages)
    assert {kind_of_page(x) for x in pages} == {kind_of_page(x) for x in offered.PAGES}


def test_every_type_has_a_case():
    assert set(accepted(dtypes(), 2)) == set(offered.DTYPES)
    assert accepted(dtypes(), 3) == [torch.int8] and offered.CACHE_DTYPES == (None, "int8")


def test_every_combination_has_a_case():
    found = {x for x in map(offered.Offered._make, itertools.product(*offered.AXES)) if offered.is_offered(*x)}
    cases = offered.product()
    assert found == {case.offered for case in cases}
    assert len({str(case) for case in cases}) == len(cases) > 1000


def test_every_two_values_meet_in_the_sample():
    """The sample covers every pair of values of two axes that are offered together, for example every head_dim with
    every type. The only missing pair is a contiguous cache with tables of pages, which does not exist."""
    axes = enumerate((*offered.AXES, offered.SCHEMES, offered.SEQLENS, offered.PADDED))
    expected = {
        ((i, x), (j, y))
        for (i, first), (j, second) in itertools.combinations(axes, 2)
        for x, y in itertools.product(first, second)
    }
    cases = offered.sample()
    values = [(*case.offered, *case[1:]) for case in cases]
    met = {pair for each in values for pair in itertools.combinations(enumerate(each), 2)}
    others = [(3, x) for x in offered.CACHE_DTYPES if x] + [(4, x) for x in offered.POSITIONS if x]
    refused = {((0, x), other) for x in offered.HEAD_DIMS if x > 256 for other in others}
    assert met == expected - refused - {((1, 0), (4, "tables"))} and len(cases) < 120
    assert {case.offered for case in cases} <= {case.offered for case in offered.product()}


@pytest.mark.parametrize("axis, value", [(0, 520), (1, 24), (2, torch.float64), (3, torch.int16), (4, "tables")])
def test_refused(axis, value):
    """is_offered refuses what the checks refuse. This shows that it can return False."""
    combination = [64, 0, torch.float16, None, None]
    assert offered.is_offered(*combination)
    combination[axis] = value
    assert not offered.is_offered(*combination)
