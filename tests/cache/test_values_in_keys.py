"""Tests caches whose values are channels of the raw keys, and weights of keys."""

import re

import pytest
import torch
from caching import PAGE, Cached, cached_call, page_sizes
from flashrope import (
    CacheLayer,
    CacheTables,
    Rotary,
    plan_cache,
)
from flashrope.backends import cuda
from support import SCHEMES, int32

LATENT = Rotary.rope(576, rotary_dim=64, first_channel=512)  # DeepSeek's latent cache, absorbed
SHARED = Rotary.p_rope(512, 0.25, base=1e6)  # Gemma 4's larger models
CASES = {  # scheme, channels that are values
    "all": (SCHEMES["rerope"](64), slice(0, 64)),
    "first": (SCHEMES["leaky"](64), slice(0, 40)),
    "middle": (SCHEMES["rope"](24), slice(5, 21)),
    "last": (SCHEMES["rope_partial"](32), slice(16, 32)),
    "interleaved": (SCHEMES["rope_interleaved"](32), slice(0, 32)),
    "none": (SCHEMES["none"](32), slice(0, 32)),
    "behind": (Rotary.rope(128, rotary_dim=32, first_channel=96).rectify(21), slice(0, 96)),
    "320": (Rotary.rope(320).rectify(21), slice(0, 256)),
    "shared": (SHARED.rectify(21), slice(0, 512)),
    "latent": (LATENT.rectify(21), slice(0, 512)),
}


def weight(head_dim):
    return torch.rand(head_dim, generator=torch.Generator().manual_seed(7)) * 2 - 0.5


@pytest.mark.interpreted(lambda target, case, weighted: weighted == (target.dtype == torch.float32))
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_queries(target, case, weighted):
    rotary, values = CASES[case]
    options = dict(values=values, heads=(2, 1), leftpad=(0, 3))
    options["key_weight"] = weight(rotary.head_dim) if weighted else None
    for queries in (1, 5):
        page = PAGE if weighted == (queries == 1) else 0
        Cached(target, rotary, (45, 30), queries, page=page, **options).check()


@pytest.mark.interpreted(lambda target, case: False)
@pytest.mark.parametrize("case", ["all", "behind", "shared", "latent"])
def test_one_query_per_key_head(target, case):
    """The CPU's kernel multiplies such a query by keys that it weights and rotates in registers."""
    rotary, values = CASES[case]
    Cached(target, rotary, (45, 30), 1, values=values, heads=(2, 2), key_weight=weight(rotary.head_dim)).check()


@pytest.mark.interpreted(
    lambda target, case, page_size: (case == "latent") == bool(page_size) == (target.dtype == torch.float32)
)
@page_sizes
@pytest.mark.parametrize("case", ["first", "latent"])
def test_a_chunk(target, case, page_size):
    rotary, values = CASES[case]
    options = dict(page=page_size, values=values, heads=(2, 1), key_weight=weight(rotary.head_dim))
    Cached.packed(target, rotary, [(1, 40), (66, 71), (0, 5)], **options).check()
    if not target.slow or case != "latent":
        Cached(target, rotary, (90, 71), 66, **options | {"key_weight": None}).check()


@pytest.mark.parametrize("layout", ["poisoned", "heads first"])
def test_layouts(target, layout):
    Cached(target, CASES["first"][0], (40, 30), 2, layout=layout, values=slice(0, 40)).check()


def test_splits_and_mapped_tokens(target):
    options = dict(values=slice(0, 40), key_weight=weight(64))
    Cached(target, CASES["first"][0], (120, 7), 2, **options).check(num_splits=3)
    Cached.packed(target, CASES["first"][0], [(3, 20), (1, 9)], page=PAGE, mapped=True, **options).check()


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_placed_tokens(target, weighted):
    options = dict(values=slice(0, 40), key_weight=weight(64) if weighted else None)
    call = Cached(target, CASES["first"][0], (40, 30), 2, new=0, page=PAGE, **options)
    starts = (torch.arange(call.block_table.shape[1]) * (PAGE + 3)).expand(2, -1)
    call.at(page_positions=int32(starts.tolist())).check()


def test_weights_of_keys_beside_values_of_their_own(target):
    Cached(target, SCHEMES["rerope"](24), (40, 30), 2, key_weight=weight(24), head_dim_v=16).check()


def test_plans(target):
    call = Cached(target, CASES["first"][0], (40, 30), 2, values=slice(0, 40))
    tables, layer = call.parts()
    options = dict(rotary=call.rotary, seqlen_q=2, heads_q=4, impl=target.impl)
    plan = plan_cache(tables, like=layer, **options)
    k, _ = call.new_keys()
    out, lse = plan.attend(call.q, layer, k, return_lse=True)
    call.judge(out, lse)
    again = torch.empty_like(out)
    assert plan.attend(call.q, layer, out=again) is again and torch.equal(out, again)
    with pytest.raises(ValueError, match=r"^v: expected None, because layer\.v is a view of channels of layer\.k"):
        plan.append(layer, k, k)
    other = layer._replace(v=layer.k[..., 8:48])
    with pytest.raises(
        ValueError, match=r"^layer\.v: expected a view of layer\.k that starts at channel 0, as in the plan"
    ):
        plan.attend(call.q, other)


def test_the_scheme_may_change_between_calls(target):
    """The scheme may change between calls over one cache, because its keys are raw."""
    call = Cached(target, SCHEMES["rope"](64), (40, 30), 1, values=slice(0, 40))
    call.check()
    for scheme in ("rerope", "hope_zeros"):
        other = call.replace(rotary=SCHEMES[scheme](64))
        other.check()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    """A compiled call gives the eager results if the view of the values is made inside the compiled function. If the
    view were an input beside k_cache, torch 2.13 would read it at the offset that it had when the function was
    compiled."""
    rotary, g = Rotary.rope(24), weight(24)
    q, k = torch.randn(1, 1, 2, 24), torch.randn(1, 1, 1, 24)

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q, k, k_cache, lengths):
        return cached_call(q, k_cache, k_cache[..., 8:24], rotary, lengths, k=k, key_weight=g, impl="cpu")

    for layer in torch.randn(2, 1, 16, 1, 24):
        own, lengths = layer.clone(), int32([9])
        expected = cached_call(q, own, own[..., 8:24], rotary, lengths, k=k, key_weight=g)
        torch.testing.assert_close(attend(q, k, layer, lengths), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(layer, own)


# ---- refused

Q, K, NEW, LENGTHS = torch.zeros(1, 1, 2, 24), torch.zeros(1, 16, 1, 24), torch.zeros(1, 1, 1, 24), int32([9])
ROPE, WIDE = Rotary.rope(24), torch.zeros(1, 16, 1, 576)
CODES, SCALES = K.char(), dict(k_scale=torch.ones(1, 16, 1), v_scale=torch.ones(1, 16, 1))


def attend(k_cache, v_cache, q=Q, rotary=ROPE, **options):
    return lambda: cached_call(q, k_cache, v_cache, rotary, LENGTHS, **options)


REFUSED = {
    "values beside a view": (
        attend(K, K[..., 8:], k=NEW, v=NEW[..., 8:]),
        "v: expected None, because v_cache is a view of k_cache from channel 8 on, and the values are part of the "
        "keys, got a tensor",
    ),
    "one tensor with values": (
        attend(K, K, k=NEW, v=NEW),
        "v: expected None, because v_cache is a view of k_cache from channel 0 on, and the values are part of the "
        "keys, got a tensor",
    ),
    "no values for a tensor": (
        attend(K, K.clone(), k=NEW),
        "v: expected both or none of k and v, got only k; v is None where v_cache is a view of channels of k_cache",
    ),
    "other slots": (
        attend(K[:, :12], K[:, 4:], k=NEW, v=NEW),
        "v_cache: expected memory that does not overlap k_cache, or a view of its channels and v=None (both are "
        "written), got tensors that overlap",
    ),
    "other slots without values": (
        attend(K[:, :12], K[:, 4:], k=NEW),
        "v: expected both or none of k and v, got only k; v is None where v_cache is a view of channels of k_cache",
    ),
    "channels beyond the keys": (
        attend(K[..., :16], K[..., 8:], q=Q[..., :16], rotary=Rotary.rope(16), k=NEW[..., 8:], v=NEW[..., 8:]),
        "v_cache: expected memory that does not overlap k_cache, or a view of its channels and v=None (both are "
        "written), got tensors that overlap",
    ),
    "quantized": (
        attend(CODES, CODES, **SCALES),
        "v_cache: a view of k_cache is not supported in quantized caches, got a view from channel 0 on; give quantized "
        "values separate memory",
    ),
    "rotated keys": (
        attend(K, K, rotated_keys=True),
        "rotated_keys: expected False, because v_cache is a view of k_cache and values are channels of raw keys, got "
        "True",
    ),
    "rotated keys with weights": (
        attend(K, K.clone(), rotated_keys=True, key_weight=torch.ones(24)),
        "key_weight: not supported for rotated_keys (it multiplies raw keys), got a tensor",
    ),
    "576 with values of their own": (
        attend(WIDE, WIDE[..., :512].clone(), q=torch.zeros(1, 1, 2, 576), rotary=LATENT),
        "q: expected head_dim to be a multiple of 8 up to 512, or 576 where v_cache is a view of channels of k_cache, "
        "got 576",
    ),
    "576 values": (
        attend(WIDE, WIDE, q=torch.zeros(1, 1, 2, 576), rotary=LATENT),
        "v_cache: expected at most 512 channels of k_cache, got 576",
    ),
    "weight's shape": (
        attend(K, K, key_weight=torch.ones(16)),
        "key_weight: expected shape (24,) on cpu, got (16,) on cpu",
    ),
    "weight's type": (
        attend(K, K, key_weight=torch.ones(24).half()),
        "key_weight: expected a float32 tensor, got torch.float16",
    ),
    "weight's gradient": (
        attend(K, K, key_weight=torch.ones(24, requires_grad=True)),
        "key_weight: expected a tensor that does not require grad; use torch.no_grad(), or attention in training",
    ),
    "cuda": (
        lambda: cuda.append_to_cache(CacheLayer(K, K), NEW, None, CacheTables(LENGTHS)),
        "impl='cuda' cannot serve this call: its kernels need values in separate memory, but v_cache is a view of "
        "k_cache; use impl='triton'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


def test_refused_packed():
    starts = int32([0, 1])
    message = "v: expected None, because v_cache is a view of k_cache from channel 8 on"
    with pytest.raises(ValueError, match=message):
        new = dict(k=NEW[0], v=NEW[0, ..., 8:])
        cached_call(Q[0], K, K[..., 8:], ROPE, starts, LENGTHS, 1, **new)
