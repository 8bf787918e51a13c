"""One small right call of every kind, which a test changes by argument, and what a test asks of an error."""

import re

import pytest
import torch
from flashrope import Rotary, attention, attention_varlen, attention_varlen_with_cache, attention_with_cache

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


def cached(**changes):
    caches = {"k_cache": zeros(2, 32, 2, 16), "v_cache": zeros(2, 32, 2, 16), "cache_seqlens": int32(3, 5)}
    return _leaves_the_cache(attention_with_cache, {"q": ONE, "rotary": ROPE, "k": NEW, "v": NEW} | caches | changes)


def paged(**changes):
    pages = {
        "k_cache": zeros(8, 16, 2, 16),
        "v_cache": zeros(8, 16, 2, 16),
        "block_table": int32(0, 1, 2, 3).view(2, 2),
    }
    return cached(**pages | changes)


def varlen_cached(**changes):
    caches = {"k_cache": zeros(2, 32, 2, 16), "v_cache": zeros(2, 32, 2, 16), "cache_seqlens": int32(3, 5)}
    tensors = {"q": zeros(9, 4, 16), "k": zeros(9, 2, 16), "v": zeros(9, 2, 16), "rotary": ROPE}
    queries = {"cu_seqlens_q": int32(0, 4, 9), "max_seqlen_q": 5}
    return _leaves_the_cache(attention_varlen_with_cache, tensors | caches | queries | changes)


def _leaves_the_cache(call, arguments):
    """The call. If it is refused, it must not have written to k_cache and v_cache."""
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
    """The message begins with the argument's name; then it says what was expected, then what came."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message[: len(name) + 2]), message
    rest = message.replace(name, "", 1)
    assert expected in rest and given in rest.replace(expected, "", 1), message
    assert re.search("expected|cannot serve|not accepted|not supported", message), message
