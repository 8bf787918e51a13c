"""Rotary channels that do not begin at 0: the same scores as with those channels moved to the front of the head."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, attention, rotate

DOUBLE = support.Target("reference", torch.float64, "cpu")
FORMS = {
    "half": lambda d, first: Rotary.rope(d, rotary_dim=8, first_channel=first),
    "interleaved": lambda d, first: Rotary.rope(d, rotary_dim=8, interleaved=True, first_channel=first),
    "rerope": lambda d, first: Rotary.rope(d, rotary_dim=8, first_channel=first).rectify(21, 4.0),
    "scaled": lambda d, first: Rotary.rope(d, rotary_dim=8, interleaved=True, first_channel=first).scale_rotated(1.4),
    "table": lambda d, first: Rotary.from_inv_freq([1.0, 0.5, 0.01], d, first_channel=first).log_n(20),
}
FIRST = (2, 8, 16)
forms = pytest.mark.parametrize("form", FORMS)


def to_front(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    return x.roll(-rotary.first_channel, -1)


@pytest.mark.parametrize("first", FIRST)
@forms
def test_the_reference_rotates_these_channels(form, first):
    rotary, front = FORMS[form](24, first), FORMS[form](24, 0)
    p = support.problem(DOUBLE, rotary, 9, 30)
    got = attention(p.q, p.k, p.v, rotary, return_lse=True, impl="reference")
    moved = (to_front(x, rotary) for x in (p.q, p.k))
    want = attention(*moved, p.v, front, return_lse=True, impl="reference")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert rotary != front and Rotary.from_text(rotary.text) == rotary and f"from {first} on" in repr(rotary)


@pytest.mark.interpreted(lambda target, form, first: first == 16 or (form, first) == ("half", 2))
@pytest.mark.parametrize("first", FIRST)
@forms
def test_forward_and_backward(target, form, first):
    support.check(target, support.problem(target, FORMS[form](24, first), 40, 60, seed=first))


@pytest.mark.interpreted(lambda target, form, page: form in ("half", "interleaved") or page)
@pytest.mark.parametrize("page", [0, PAGE])
@forms
def test_over_a_cache(target, form, page):
    for first, queries in ((16, 2), (8, 70)):
        Cached(target, FORMS[form](24, first), (80, 97), queries, page=page, heads=(2, 1)).check()


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("first", [2, 8, 16])
def test_over_a_quantized_cache(target, cache_dtype, first):
    rotary = Rotary.rope(64, rotary_dim=16, first_channel=first).rectify(21)
    Cached(target, rotary, (50, 61), 2, heads=(2, 1), cache_dtype=cache_dtype).check()


@pytest.mark.parametrize("form", ["half", "interleaved", "scaled"])
def test_rotate(target, form):
    rotary, front = FORMS[form](24, 16), FORMS[form](24, 0)
    x = support.random((2, 9, 3, 24), target, 5)
    want = rotate(to_front(x.double(), rotary), front, impl="reference").roll(16, -1)
    torch.testing.assert_close(rotate(x, rotary, impl=target.impl).double(), want, rtol=0.01, atol=0.02)
