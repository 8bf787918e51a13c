"""Tests decoding in which the keys of a tile are divided into groups with a softmax of their own
(``Variant.key_groups``): which calls have groups, and their results. The groups are forced, so that every GPU and the
interpreter run them."""

import itertools

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import SMALLEST_TILE, Tile, key_groups, tile

TRITON = [t for t in support.TARGETS if t.impl == "triton"]
RECTIFIED = Rotary.rope(64).rectify(21)


@pytest.fixture(params=TRITON, ids=str)
def target(request):
    return request.param


@pytest.fixture
def forced(monkeypatch):
    """Forces groups: every tile of ``SMALLEST_TILE`` query rows is divided into groups of ``SMALLEST_TILE`` keys.
    Returns a list to which every launch adds its number of groups."""
    found = []

    def groups(tile, *_):
        found.append(tile.block_n // SMALLEST_TILE if tile.block_m == SMALLEST_TILE else 1)
        return found[-1]

    monkeypatch.setattr(configs, "key_groups", groups)
    return found


CASES = {
    "rerope": (RECTIFIED, dict(leftpad=(3, 0, 0, 40)), None),
    "leaky-paged-drafts": (Rotary.rope(64).rectify(21, 4.0), dict(queries=3, page=PAGE, leftpad=(3, 0, 0, 40)), None),
    "window-log-n-page64": (Rotary.rope(64).rectify(11, 8.0).local(45).log_n(20), dict(page=64, heads=(6, 1)), 3),
    "rope": (Rotary.rope(64), dict(page=64), None),
    "rope-page16": (Rotary.rope(64), dict(page=16), None),
    "rerope-page32-drafts": (RECTIFIED, dict(page=32, queries=2), 3),
    "no-keys": (RECTIFIED, dict(lengths=(0, 130, 0, 66), queries=2, new=0), None),
    "sinks": (RECTIFIED, dict(sinks=torch.tensor([0.5, -1.0])), 3),
    "narrow-d40": (Rotary.rope(40).rectify(21), dict(head_dim_v=24), 3),
    "weighted": (RECTIFIED, dict(key_weight=torch.linspace(-0.5, 1.5, 64)), None),
    "self-extend": (Rotary.rope(64).self_extend(48, 8), dict(page=PAGE, leftpad=(3, 0, 0, 40)), 3),
}


@pytest.mark.interpreted(
    lambda target, name: (target.dtype == torch.float16) == (name in ("rerope", "no-keys", "narrow-d40"))
)
@pytest.mark.parametrize("name", CASES)
def test_case(target, name, forced):
    rotary, options, splits = CASES[name]
    Cached(target, rotary, **{"lengths": (45, 3, 130, 70), "capacity": 192, "heads": (2, 1), **options}).check(
        num_splits=splits
    )
    assert min(forced) > 1


@pytest.mark.interpreted(lambda target: target.dtype == torch.float16)
def test_padding_and_pages_change_no_bit(target, forced):
    plain = Cached(target, RECTIFIED, (45, 1, 100), 2, new=0, capacity=128)
    out, lse = plain.call(num_splits=2)
    for changes in ({"page": PAGE}, {"page": 64}, {"leftpad": (7, 19, 0)}):
        got = plain.replace(**changes).call(num_splits=2)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    assert min(forced) > 1


@pytest.mark.interpreted(lambda target, options: target.dtype == torch.float16)
@pytest.mark.parametrize(
    "options", [dict(cache_dtype="int8"), dict(values=slice(0, 64))], ids=["quantized", "values in keys"]
)
def test_calls_that_have_one_group(target, options, forced):
    """Quantized caches, values in keys, interleaved pairs and heads in parts have one group."""
    Cached(target, RECTIFIED, (45, 20), page=PAGE, **options).check()
    Cached(target, Rotary.rope(64, interleaved=True).rectify(21), (45, 20)).check()
    Cached(target, Rotary.rope(64, rotary_dim=32).rectify(21), (45, 20)).check()
    assert not forced


def test_the_rule(monkeypatch):
    """On sm_80 every warp has a group of its own in 16-bit types with several bands: shares at head_dim 64, and splits
    at head_dim 64 and 128. On sm_90 one band has groups too, and shares at head_dim 128, if keys have no weights."""
    monkeypatch.setattr("triton.__version__", "3.6.0")

    def groups(capability=80, block_d=64, itemsize=2, bands=2, shares=True, direction="decode", weighted=False):
        chosen = tile(direction, capability, block_d, itemsize, bands)
        return key_groups(chosen, capability, block_d, itemsize, bands, shares, weighted)

    assert groups() == groups(shares=False) == groups(bands=3) == groups(block_d=128, shares=False) == 4
    assert groups(weighted=True) == groups(block_d=128, shares=False, weighted=True) == 4
    assert groups(block_d=128) == groups(bands=1) == groups(itemsize=4) == groups(direction="decode wide") == 1
    assert {groups(capability) for capability in (86, 89, 100, 120, *configs.AMD)} == {1}
    assert {groups(block_d=block_d, shares=False) for block_d in (16, 32, 256)} == {1}
    sizes = list(itertools.product((64, 128), (1, 2, 3), (True, False)))
    for block_d, bands, shares in sizes:
        assert groups(90, block_d, bands=bands, shares=shares) == 4
        assert groups(90, block_d, bands=bands, shares=shares, weighted=True) == (1 if block_d == 128 else 4)
    assert groups(90, 32, bands=1, shares=False) == groups(90, 32, shares=False) == 4
    assert {groups(90, block_d, shares=False) for block_d in (16, 256)} == {1}
    assert groups(90, itemsize=4) == groups(90, direction="decode wide") == 1
    assert key_groups(Tile(16, 128, 8, 3), 80, 64, 2, 2, True) == 8
    assert (
        key_groups(Tile(16, 128, 4, 3), 80, 64, 2, 2, True) == key_groups(Tile(16, 64, 8, 3), 80, 64, 2, 2, True) == 1
    )
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert groups() == groups(block_d=128, shares=False) == 4
    assert {groups(90, 64, bands=bands, shares=shares) for _, bands, shares in sizes} == {4}
    assert {groups(90, 128, bands=bands, shares=shares) for _, bands, shares in sizes} == {1}
    assert groups(100) == 1
