"""Tests Llama 4's query scale in steps and a factor on rotated channels: their formulas, and every backend."""

import math

import pytest
import support
import torch
from caching import Cached
from flashrope import Rotary, attention
from flashrope.schemes.lowered import lower
from packing import packing
from support import check, problem

REFERENCE = support.Target("reference", torch.float64, "cpu")
SCHEMES = {
    "steps": Rotary.rope(16).log_steps(7, 0.5),
    "steps_nope": Rotary.none(16).log_steps(9, 0.3, first=0),
    "steps_leaky": Rotary.hope(16, 60).rectify(11, 4.0).log_steps(3),
    "rotated": Rotary.rope(16, rotary_dim=8).scale_rotated(1.4),
    "rotated_rerope": Rotary.rope(16, rotary_dim=12, interleaved=True).scale_rotated(0.7).rectify(11).log_n(20),
    "rotated_maps": Rotary.rope(16, rotary_dim=8).yarn(4.0, 64).scale_rotated(1.3).self_extend(12, 4).log_steps(10),
    "rotated_zeros": Rotary.hope(16, 40).rectify(0).scale_rotated(1.5),  # no key rotates; 6 of 8 frequencies are 0
}


def given(rotary, seqlen_q=30, seqlen_k=30, seed=0):
    shapes = (seqlen_q, seqlen_k, seqlen_k)
    return [
        torch.randn(1, n, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for n in shapes
    ]


FACTORS = {  # {name: (scheme, the factor that it gives the query at position i)}
    "Llama 4, from 0": (Rotary.rope(16).log_steps(7, 0.5, 0), lambda i: 1 + 0.5 * math.log(1 + math.floor(i / 7))),
    "Llama 4, from 1": (
        Rotary.rope(16).log_steps(7, 0.5, 1),
        lambda i: 1 + 0.5 * math.log(1 + math.floor((i + 1) / 7)),
    ),
    "log n": (Rotary.rope(16).log_n(8, False), lambda i: math.log(i + 1) / math.log(8)),
    "log n, clipped": (Rotary.rope(16).log_n(8), lambda i: max(math.log(i + 1) / math.log(8), 1)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_queries_have_the_factor_of_their_position(name):
    rotary, factor = FACTORS[name]
    q, k, v = given(None)
    got = attention(q, k, v, rotary, impl="reference")
    for i in range(30):
        scaled = attention(q * factor(i), k, v, Rotary.rope(16), impl="reference")
        torch.testing.assert_close(got[:, i], scaled[:, i])


def test_the_factor_is_hugging_faces_attention_factor():
    """A factor a on cos and sin acts on queries and keys, so the rotated channels contribute a ** 2 times as much."""
    q, k, v = given(None)
    rotary, a = Rotary.rope(16, rotary_dim=8), 1.2

    def times(x):
        return torch.cat((x[..., :8] * a, x[..., 8:]), -1)

    expected = attention(times(q), times(k), v, rotary, impl="reference")
    torch.testing.assert_close(attention(q, k, v, rotary.scale_rotated(a * a), impl="reference"), expected)
    whole = Rotary.rope(16).yarn(4.0, 64)
    by_temperature = Rotary.rope(16).yarn(4.0, 64, temperature=1.0).scale_rotated(whole.temperature)
    torch.testing.assert_close(
        attention(q, k, v, whole, impl="reference"), attention(q, k, v, by_temperature, impl="reference")
    )


QUICK = ("steps_leaky", "rotated_rerope", "rotated_maps")  # the other schemes are slow on Triton


def case(where, name, slow):
    return pytest.param(
        where, name, marks=[pytest.mark.slow] if slow and name not in QUICK else [], id=f"{where}-{name}"
    )


@pytest.mark.parametrize(
    "target, name",
    [
        case(target, name, target.slow or target.dtype == torch.float16)
        for target in support.TARGETS
        if not (target.slow and target.dtype == torch.float16)
        for name in SCHEMES
    ],
)
def test_every_backend(target, name):
    check(target, problem(target, SCHEMES[name], 33, 40))


@pytest.mark.parametrize("name", ["steps", "rotated", "rotated_rerope"])
@pytest.mark.parametrize("target", [t for t in support.TARGETS if t.dtype == torch.float32], ids=str)
def test_given_positions_and_both_sides(target, name):
    rotary = SCHEMES[name]
    if name != "rotated_rerope":
        positions = torch.rand(1, 25, generator=torch.Generator().manual_seed(3)) * 60 - 5
        check(target, problem(target, rotary, 25).replace(positions=positions.to(target.device)))
    check(target, problem(target, rotary, 25, 33, causal=False))


EVERY = [REFERENCE, *(t for t in support.TARGETS if t.dtype == torch.float32)]


@pytest.mark.parametrize("target, name", [case(target, name, target.slow) for target in EVERY for name in SCHEMES])
def test_decoding_and_packed(target, name):
    """Over a cache, a prompt and steps of one and of several tokens give the results of the formula. So do packed
    sequences without a cache."""
    for queries in (17, 1, 3):
        Cached(target, SCHEMES[name], (24, 17), queries, heads=(2, 1)).check()
    p = packing(target, SCHEMES[name], (24, 5))
    p.check(p.run(target.impl), target.dtype)


def test_keys_and_other_schemes_pay_nothing():
    """The lowered scheme applies the factor to queries only. Without a factor, all rotations have a scale of 1."""
    plain, scaled = Rotary.rope(16).rectify(9), Rotary.rope(16).rectify(9).scale_rotated(1.5)
    assert set(lower(plain, True).scales) == {1.0}
    lowered = lower(scaled, True)
    assert {lowered.scales[band.q_rotation] for band in lowered.bands} == {1.5}
    assert {lowered.scales[band.k_rotation] for band in lowered.bands} == {1.0}
    assert {lowered.scales[step] for band in lowered.bands for step in band[-2:]} == {1.0}
    assert lowered.k_copies and lowered.rotated_key_ranges[0][1] == lower(plain, True).rotated_key_ranges[0][1]


def test_equality_and_repr():
    rope = Rotary.rope(16, rotary_dim=8)
    assert len({rope, rope.log_steps(7), rope.log_steps(7, first=0), rope.log_n(7), rope.scale_rotated(2.0)}) == 5
    assert rope.scale_rotated(2.0).scale_rotated(0.5) == rope
    assert "score scale: (1 + 0.1 ln(1 + floor((i + 1) / 8192)))" in repr(rope.log_steps(8192))
    assert "1.5 on the first 8 channels" in repr(rope.scale_rotated(1.5))


def test_cuda_refuses_steps():
    from flashrope.backends import cuda
    from flashrope.calls.cache_tables import CacheTables
    from flashrope.calls.records import CacheCall

    call = CacheCall(Rotary.rope(64).log_steps(8), True, 1.0, CacheTables(support.int32([5])))
    with pytest.raises(ValueError, match="impl='cuda' cannot serve this call: its kernels have no log_steps"):
        cuda.attention_with_cache(None, None, call)
