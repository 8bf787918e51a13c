"""Tests bands that the user gives: which bands are refused, and that all backends give equal results for valid
bands."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from flashrope import Band, Rotary, attention, attention_with_cache
from support import INTERPRETED

INF, NAN = math.inf, math.nan
ROPE = Rotary.rope(16)
NEAR = Band(0, 5, 1.0, 0.0)

REFUSED = {
    "overlap": ([NEAR, Band(3, INF, 0.0, 5.0)], ValueError, "bands[1].start: expected at least 5, where bands[0]", "3"),
    "one distance in two": ([NEAR, Band(4, INF, 0.0, 5.0)], ValueError, "bands[1].start: expected at least 5", "got 4"),
    "the same twice": ([NEAR, NEAR], ValueError, "bands[1].start: expected at least 5", "got 0"),
    "out of order": ([Band(5, INF, 0.0, 5.0), NEAR], ValueError, "bands[1].start: expected at least inf", "got 0"),
    "fractional start": ([Band(0.5, 5, 1.0, 0.0)], ValueError, "bands[0].start: expected a whole number", "got 0.5"),
    "fractional stop": ([Band(0, 5.5, 1.0, 0.0)], ValueError, "bands[0].stop: expected a whole number", "got 5.5"),
    "NaN start": ([Band(NAN, 5, 1.0, 0.0)], ValueError, "bands[0].start: expected a whole number", "got nan"),
    "NaN stop": ([Band(0, NAN, 1.0, 0.0)], ValueError, "bands[0].stop: expected a whole number", "got nan"),
    "NaN slope": ([Band(0, 5, NAN, 0.0)], ValueError, "bands[0].slope: expected a finite number", "got nan"),
    "infinite slope": ([NEAR, Band(5, 9, INF, 0)], ValueError, "bands[1].slope: expected a finite number", "got inf"),
    "NaN offset": ([Band(0, 5, 1.0, NAN)], ValueError, "bands[0].offset: expected a finite number", "got nan"),
    "start beyond stop": ([Band(7, 5, 1.0, 0.0)], ValueError, "bands[0].stop: expected a whole number above", "got 5"),
    "an empty band": ([Band(5, 5, 1.0, 0.0)], ValueError, "bands[0].stop: expected a whole number above", "got 5"),
    "the future": ([Band(-3, 5, 1.0, 0.0)], ValueError, "bands[0].start: expected a whole number of at least 0", "-3"),
    "all distances": ([Band(-INF, INF, 1.0, 0.0)], ValueError, "bands[0].start: expected a whole number of", "-inf"),
    "infinite start": ([Band(INF, INF, 1.0, 0.0)], ValueError, "bands[0].start: expected a whole number", "got inf"),
    "text": ([Band("0", 5, 1.0, 0.0)], TypeError, "bands[0].start: expected a number", "got '0'"),
    "a flag": ([Band(0, True, 1.0, 0.0)], TypeError, "bands[0].stop: expected a number", "got True"),
    "None for inf": ([Band(0, None, 1.0, 0.0)], TypeError, "bands[0].stop: expected a number", "got None"),
    "three numbers": (
        [(0, 5, 1.0)],
        TypeError,
        "bands[0]: expected a Band (start, stop, slope, offset)",
        "(0, 5, 1.0)",
    ),
    "a bare band": (NEAR, TypeError, "bands[0]: expected a Band (start, stop, slope, offset)", "got 0"),
    "no sequence": (5, TypeError, "bands: expected a tuple of", "got int"),
}


@pytest.mark.parametrize(("bands", "error", "expected", "given"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("build", [ROPE.with_bands, lambda b: Rotary(16, (1.0,), bands=b)])
def test_bands_are_refused(build, bands, error, expected, given):
    with pytest.raises(error) as raised:
        build(tuple(bands) if isinstance(bands, list) else bands)
    assert str(raised.value).startswith(expected) and given in str(raised.value)


def test_a_mirror_image_that_falls_on_its_band():
    """With causal=False, a band with offset 3 that contains distance 0 raises an error, because its mirror image would
    give this distance the offset -3. Causal attention has no mirror image."""
    rotary = dataclasses.replace(ROPE, bands=(Band(0, INF, 1.0, 3.0),))
    q = torch.randn(1, 6, 2, 16)
    with pytest.raises(ValueError, match=r"bands\[0\].offset: expected 0 .* not causal, got 3"):
        attention(q, q, q, rotary, causal=False)
    assert attention(q, q, q, rotary).isfinite().all()


@pytest.mark.parametrize(
    ("field", "value", "error", "expected", "given"),
    [
        ("frequencies", (1.0, "2"), TypeError, "inv_freq[1]: expected a number", "'2'"),
        ("frequencies", (1.0, NAN), ValueError, "inv_freq[1]: expected a finite number", "nan"),
        ("frequencies", 1.0, TypeError, "inv_freq: expected a tuple of numbers", "float"),
        ("frequencies", torch.ones(8), TypeError, "inv_freq: expected a tuple of numbers", "use from_inv_freq"),
        ("axis", 2, TypeError, "axis: expected a tuple of integers", "got 2"),
        ("axis", (0, 1, 0, 1, 0, 1, 0, -1), ValueError, "axis[7]: expected a non-negative integer", "got -1"),
        ("axis", (0, 1.0, 0, 1, 0, 1, 0, 1), ValueError, "axis[1]: expected a non-negative integer", "got 1.0"),
        ("axis", (0, 1), ValueError, "axis: expected one integer for each of the 8 pairs", "got 2"),
        ("log_n_scale", 512, TypeError, "log_n_scale: expected None or (train_length, clip)", "got 512"),
        ("log_n_scale", (1, True), ValueError, "train_length: expected more than 1", "got 1.0"),
        ("log_n_scale", (512, 1), TypeError, "clip: expected True or False", "got 1"),
        ("temperature", NAN, ValueError, "temperature: expected a positive finite number", "got nan"),
    ],
)
def test_other_fields_are_refused(field, value, error, expected, given):
    with pytest.raises(error) as raised:
        dataclasses.replace(ROPE, **{field: value})
    assert str(raised.value).startswith(expected) and given in str(raised.value)


ALLOWED = {
    "a gap": (NEAR, Band(9, INF, 0.0, 6.0)),
    "no near keys": (Band(4, INF, 1.0, 0.0),),
    "three": (NEAR, Band(5, 11, 0.5, 2.5), Band(11, INF, 0.0, 8.0)),
    "an end": (NEAR, Band(5, 12, 0.0, 5.0)),
    "backwards": (NEAR, Band(5, INF, -0.5, 7.5)),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bands", ALLOWED.values(), ids=ALLOWED.keys())
@pytest.mark.parametrize(
    "impl",
    [None, "sdpa", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter"))],
)
def test_backends_agree_on_bands_given_by_hand(impl, bands, causal):
    rotary = dataclasses.replace(ROPE, bands=bands)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=generator) for _ in range(3))
    got, want = (attention(q, k, v, rotary, causal=causal, return_lse=True, impl=i) for i in (impl, "reference"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    lengths = torch.tensor([40], dtype=torch.int32)
    cached = attention_with_cache(q[:, -3:], k, v, rotary, lengths, causal=causal, impl=impl)
    want = attention_with_cache(q[:, -3:], k, v, rotary, lengths, causal=causal, impl="reference")
    torch.testing.assert_close(cached, want, rtol=1e-4, atol=1e-4)


def test_gradients_over_bands_given_by_hand():
    q, k, v = (torch.randn(1, 30, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for bands in ALLOWED.values():
        rotary = dataclasses.replace(ROPE, bands=bands)
        got, want = (
            torch.autograd.grad(attention(q, k, v, rotary, impl=i).square().sum(), (q, k, v), allow_unused=True)
            for i in ("sdpa", "reference")
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_numbers_of_other_kinds_are_numbers():
    """Numpy's numbers and whole floats in bands become Python's numbers, because graphs and checkpoints store a scheme
    as text."""
    bands = (Band(np.int64(0), np.float32(5), np.float32(1), 0), Band(5.0, INF, 0, np.int32(5)))
    rotary = dataclasses.replace(ROPE, bands=bands, frequencies=[np.float64(f) for f in ROPE.frequencies])
    assert rotary == ROPE.rectify(5) and Rotary.from_text(rotary.text) == rotary
    assert hash(rotary) == hash(ROPE.rectify(5)) and rotary.text == ROPE.rectify(5).text


def test_a_text_needs_no_more_than_a_table():
    """The text of a Rotary needs only a table. Fields that it leaves out have their defaults."""
    assert Rotary.from_text('{"head_dim": 16, "frequencies": [1.0]}') == Rotary.from_inv_freq([1.0], 16)


def test_a_scheme_that_rotates_nothing_warns():
    with pytest.warns(UserWarning, match=r"train_length: expected at least 7 .* got 6; no pair of this scheme rotates"):
        assert Rotary.hope(64, 6).rotary_dim == 64
    with pytest.warns(UserWarning, match="train_length"):
        Rotary.hope(64, 6.28, interleaved=True)


@pytest.mark.filterwarnings("error")
def test_a_scheme_that_rotates_something_does_not_warn():
    assert sum(f > 0 for f in Rotary.hope(64, 7).frequencies) == 1
    Rotary.none(64)
