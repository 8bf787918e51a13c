"""Gives one small valid call of every kind, and checks errors. A test changes some arguments of such a call."""

import re

import pytest
import torch
from caching import Cached
from flashrope import Rotary, attention, attention_varlen
from support import Target

ROPE = Rotary.rope(16)


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, K = zeros(2, 6, 4, 16), zeros(2, 6, 2, 16)
ONE, NEW = zeros(2, 1, 4, 16), zeros(2, 1, 2, 16)


def dense(**changes):
    return attention(**{"q": Q, "k": K, "v": K, "rotary": ROPE} | changes)


def varlen(**changes):
    lengths = {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 4, 9), "max_seqlen_q": 5, "max_seqlen_k": 5}
    tensors = {"q": zeros(9, 4, 16), "k": zeros(9, 2, 16), "v": zeros(9, 2, 16), "rotary": ROPE}
    return attention_varlen(**tensors | lengths | changes)


CPU = Target("cpu", torch.float32, "cpu")
CACHED = Cached(CPU, ROPE, (4, 6), capacity=32)
PAGED = Cached(CPU, ROPE, (4, 6), page=16, capacity=64)
PACKED = Cached(CPU, ROPE, (7, 10), (4, 5), capacity=32)


def cached(**changes):
    return _leaves_the_cache(CACHED, changes)


def paged(**changes):
    return _leaves_the_cache(PAGED, changes)


def varlen_cached(**changes):
    return _leaves_the_cache(PACKED, changes)


def _leaves_the_cache(c: Cached, changes):
    """Runs the call. If the call raises an error, checks that it has not written to k_cache or v_cache."""
    call, arguments = c.arguments()
    arguments |= changes
    caches = [x for x in (arguments["k_cache"], arguments["v_cache"]) if isinstance(x, torch.Tensor)]
    for x in caches:
        x.fill_(3)
    before = [x.clone() for x in caches]
    try:
        return call(**arguments)
    except (TypeError, ValueError):
        assert all(map(torch.equal, caches, before))
        raise


def check_refused(call, error, name, expected, given):
    """Checks that the message begins with the argument's name, and then says what was expected and what was given."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message[: len(name) + 2]), message
    rest = message.replace(name, "", 1)
    assert expected in rest and given in rest.replace(expected, "", 1), message
    assert re.search("expected|cannot serve|not accepted|not supported", message), message
