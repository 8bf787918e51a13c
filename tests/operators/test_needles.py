"""Tests needles at the edges of bands. A needle is a key that takes nearly all of a row's probability."""

import pytest
import support
import torch
from flashrope import Rotary
from flashrope.schemes.cos_sin import cos_sin

WINDOW = 21


def match(p, i, distance):
    """Returns a key that matches query i: after the rotation for this distance, the key has the query's direction. The
    score of the query and the key is near 12."""
    cos, sin = (x.float() for x in cos_sin(p.rotary, torch.tensor(float(distance))))
    q = p.q[0, i, 0].float().cpu()
    first, second = q.chunk(2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin))
    return rotated * (12 * len(q) ** 0.5 / q.square().sum())


def needle(target, rotary, distance, causal=True, seqlen=70):
    """Returns a problem in which every third row i has a key at i - distance that matches it after rotation, with a
    score near 12."""
    p = support.problem(target, rotary, seqlen, heads=1, group=1, seed=20, causal=causal)
    far = [b for b in rotary.bands_for(causal) if b.start <= distance < b.stop]
    k = (p.k * 0.1).float().cpu()
    for i in range(max(distance, 0), min(seqlen, seqlen + distance), 3):
        # the key has the angle that the scheme gives this distance, or the angle of the true distance if no band
        # contains it
        slope, offset = (far[0].slope, far[0].offset) if far else (1.0, 0.0)
        k[0, i - distance, 0] = match(p, i, slope * distance + offset)
    return p.replace(k=k.to(p.k))


@pytest.mark.interpreted(
    lambda exact, kind, distance: kind == "rectify" and distance or kind == "local" and distance <= WINDOW
)
@pytest.mark.parametrize("distance", [0, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("kind", ["rectify", "leaky", "local", "rope"])
def test_at_the_edge(exact, kind, distance):
    rope = Rotary.rope(16)
    rotary = {
        "rectify": rope.rectify(WINDOW),
        "leaky": rope.rectify(WINDOW, 4.0),
        "local": rope.local(WINDOW),
        "rope": rope,
    }[kind]
    p = needle(exact, rotary, distance)
    if kind != "local" or distance < WINDOW:
        lse = support.exact_and_bound(p)[0]["lse"]
        assert lse[0, 0, distance::3].median() > 8  # the needle really dominates its rows
    support.check(exact, p)


@pytest.mark.interpreted(lambda exact, kind, distance: distance == -WINDOW)
@pytest.mark.parametrize("distance", [-WINDOW - 1, -WINDOW, 1 - WINDOW, -1, WINDOW])
@pytest.mark.parametrize("kind", ["rectify", "local"])
def test_at_the_edge_of_the_keys_ahead(exact, kind, distance):
    rotary = getattr(Rotary.rope(16), kind if kind == "local" else "rectify")(WINDOW)
    support.check(exact, needle(exact, rotary, distance, causal=False, seqlen=50))


def test_the_diagonal(exact):
    """The key just after the query would match best, but must not be visible."""
    support.check(exact, needle(exact, Rotary.rope(16), -1))
