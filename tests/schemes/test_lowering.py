"""Tests how a scheme is lowered to numbered rotations and band rows."""

import math

import pytest
from flashrope import Rotary
from flashrope.schemes.lowered import UNBOUNDED, lower

SCHEMES = {
    "none": Rotary.none(32),
    "rope": Rotary.rope(32),
    "rerope": Rotary.rope(32).rectify(8),
    "leaky": Rotary.rope(32).rectify(1001, 3.0),
    "leaky yarn": Rotary.rope(32).yarn(2.0, 4096).rectify(77, 7.0),
    "local rerope": Rotary.hope(32, 512).rectify(8).local(100),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_bands(name, causal):
    rotary = SCHEMES[name]
    lowered = lower(rotary, causal)
    rotations, rotates = lowered.rotations, any(rotary.frequencies)
    assert rotations[0] == (0, 0) and len(set(rotations)) == len(rotations)
    before = None
    for row, band in zip(lowered.bands, rotary.bands_for(causal), strict=True):
        assert (row.start, row.stop) == tuple(max(min(x, UNBOUNDED), -UNBOUNDED) for x in (band.start, band.stop))
        of_q, of_k = ((band.slope, band.offset), (band.slope, 0)) if rotates else ((0, 0), (0, 0))
        assert rotations[row.q_rotation] == of_q and rotations[row.k_rotation] == of_k
        for now, was, step in ((of_q, before and before[0], row.dq_step), (of_k, before and before[1], row.dk_step)):
            expected = (0, 0) if was is None else tuple(a - b for a, b in zip(now, was, strict=True))
            assert rotations[step] == expected
        assert row.k_copy == (lowered.k_copies.index(row.k_rotation) if row.k_rotation else -1)
        before = of_q, of_k
    assert lowered.q_rotations == tuple(row.q_rotation for row in lowered.bands)


def test_rectified_by_hand():
    lowered = lower(Rotary.rope(32).rectify(8), True)
    near, far = lowered.bands
    at = lowered.rotations
    assert [at[near.q_rotation], at[far.q_rotation]] == [(1, 0), (0, 8)]
    assert [at[near.k_rotation], at[far.k_rotation]] == [(1, 0), (0, 0)]
    assert [at[near.dq_step], at[far.dq_step]] == [(0, 0), (-1, 8)]
    assert [at[near.dk_step], at[far.dk_step]] == [(0, 0), (-1, 0)]
    assert (near.start, near.stop, far.start, far.stop) == (0, 8, 8, UNBOUNDED)
    assert (near.k_copy, far.k_copy) == (0, -1) and lowered.rotated_bands == 0b01
    assert lowered.rotated_key_ranges == ((near.k_rotation, 8),)


def test_not_causal():
    """The mirror image of ReRoPE's far band needs no rotation of the keys. With Leaky ReRoPE, the mirror image shares
    the rotated copy of keys with the far band."""
    rerope, leaky = (lower(Rotary.rope(32).rectify(8, factor), False) for factor in (None, 4.0))
    assert [band.k_copy for band in rerope.bands] == [0, -1, -1] and rerope.rotated_bands == 0b001
    assert [band.k_copy for band in leaky.bands] == [0, 1, 1] and leaky.k_stops == (8, UNBOUNDED)


def test_nothing_rotates():
    lowered = lower(Rotary.none(32).rectify(8), True)
    assert lowered.rotations == ((0, 0),) and lowered.k_copies == () and lowered.rotated_pairs == 0
    assert all(band[2:] == (0, 0, -1, 0, 0) for band in lowered.bands)


def test_rotated_pairs():
    assert lower(Rotary.rope(64), True).rotated_pairs == 32
    assert lower(Rotary.hope(64, 512), True).rotated_pairs == 16
    assert lower(Rotary.from_inv_freq([0.0, 1.0, 0.0], 64), True).rotated_pairs == 2
    assert math.isinf(Rotary.rope(64).bands[-1].stop)


def test_unbounded_numbers_of_chunks_stay_countable():
    """The start and stop of bands over chunks stay so small that kernels can multiply them by the chunk length in
    int32."""
    lowered = lower(Rotary.rope(32).dual_chunk(160, 32), True)
    chunk = lowered.maps[0].chunk
    assert chunk == 128 and max(band.stop for band in lowered.bands) == UNBOUNDED // chunk
    assert all(abs(x) * chunk <= UNBOUNDED for band in lowered.bands for x in (band.start, band.stop))
