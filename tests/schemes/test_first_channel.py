"""Tests rotary channels that do not begin at channel 0. Scores are the same as if these channels were moved to the
front of the head."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, attention, rotate
from flashrope.schemes.head_parts import channel_parts, copied_parts
from flashrope.schemes.lowered import lower

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


@pytest.mark.interpreted(
    lambda target, form, first: (first == 16) == (target.dtype == torch.float32) and form != "scaled" and first != 8
)
@pytest.mark.parametrize("first", FIRST)
@forms
def test_forward_and_backward(target, form, first):
    support.check(target, support.problem(target, FORMS[form](24, first), 40, 60, seed=first))


@pytest.mark.interpreted(lambda target, form: (form in ("half", "table")) == (target.dtype == torch.float32))
@forms
def test_over_a_cache(target, form):
    for first, queries, page in ((16, 2, PAGE), (8, 66, 0)):
        Cached(target, FORMS[form](24, first), (70, 87), queries, page=page, heads=(2, 1)).check()


@pytest.mark.parametrize("first", [2, 8, 16])
def test_over_a_quantized_cache(target, first):
    rotary = Rotary.rope(64, rotary_dim=16, first_channel=first).rectify(21)
    Cached(target, rotary, (50, 61), 2, heads=(2, 1), cache_dtype="int8").check()


@pytest.mark.parametrize("form", ["half", "interleaved", "scaled"])
def test_rotate(target, form):
    rotary, front = FORMS[form](24, 16), FORMS[form](24, 0)
    x = support.random((2, 9, 3, 24), target, 5)
    want = rotate(to_front(x.double(), rotary), front, impl="reference").roll(16, -1)
    torch.testing.assert_close(rotate(x, rotary, impl=target.impl).double(), want, rtol=0.01, atol=0.02)


# ---- parts of a head


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_head_in_parts_over_a_cache(target, interleaved):
    rotary = Rotary.rope(64, rotary_dim=32, interleaved=interleaved, first_channel=16).rectify(21)
    Cached(target, rotary, (50, 61), 2, page=PAGE, heads=(2, 1)).check()


HEADS = {
    "partial 256": Rotary.rope(256, rotary_dim=64),
    "partial 128": Rotary.rope(128, rotary_dim=64),
    "hope 64": Rotary.hope(64, 512),
    "hope 128, interleaved": Rotary.hope(128, 512, interleaved=True),
    "proportional 512": Rotary.p_rope(512, 0.25),
    "behind": Rotary.rope(256, rotary_dim=64, first_channel=192),
    "between, interleaved": Rotary.rope(128, rotary_dim=32, interleaved=True, first_channel=64),
}


@pytest.mark.parametrize("head", HEADS)
def test_parts_hold_every_channel_once(head):
    rotary = HEADS[head]
    rotating, *others = parts = channel_parts(rotary, True)
    half = rotating.width // 2
    channels = [c for p in parts for first in (p.first, p.second) for c in range(first, first + p.width // 2)]
    assert sorted(channels) == list(range(rotary.head_dim)) and not any(p.rotates for p in others)
    assert all(p.width in (32, 64, 128) for p in parts) and 2 * rotating.width <= rotary.head_dim
    assert half >= lower(rotary, True).rotated_pairs
    assert rotating.first == rotary.first_channel
    assert rotating.second == rotary.first_channel + (half if rotary.interleaved else rotary.rotary_dim // 2)


def test_a_head_wider_than_a_tile_has_parts():
    """Kernels cannot hold 576 channels as pairs, so such a head has parts even if nothing rotates."""
    rotating, *others = channel_parts(Rotary.none(576), True)
    assert rotating.rotates and rotating.width + sum(part.width for part in others) == 576


@pytest.mark.parametrize("head", HEADS)
def test_copies_hold_the_part_that_rotates(head):
    """Rotated copies hold only the part that rotates. Both of its runs start at multiples of 16 channels of the head.
    With a local window, the same part is copied."""
    (part,) = copied_parts(HEADS[head], True)
    assert part == channel_parts(HEADS[head], True)[0] and not (part.first % 16 or part.second % 16)
    assert copied_parts(HEADS[head].local(9), True) == (part,)


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary.rope(128), Rotary.hope(128, 4096), Rotary.none(128), Rotary.rope(128, rotary_dim=32, first_channel=8),
        Rotary.rope(32, rotary_dim=8), Rotary.rope(120, rotary_dim=32),
    ],
)  # fmt: skip
def test_heads_without_parts(rotary):
    assert channel_parts(rotary, True) == () == copied_parts(rotary, True)
