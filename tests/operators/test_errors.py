"""Tests wrong arguments of attention and attention_varlen. The message names the argument, what was expected and what
was given.

test_cache_errors.py tests calls over caches, test_scheme_errors.py schemes, and test_sinks.py sinks.
"""

import contextlib
import inspect
import math
import re
import warnings

import pytest
import torch
from caching import cached_call
from flashrope import (
    CacheLayer,
    CachePositions,
    KVCache,
    Packed,
    Rotary,
    attention,
    attention_varlen,
    attention_varlen_with_cache,
    attention_with_cache,
    plan_cache,
    rotate,
)
from flashrope.calls import checks
from flashrope.calls.foreign_keywords import ELSEWHERE, INSTEAD, NO_OPS
from small_calls import ROPE, K, Q, cached, check_refused, dense, int32, paged, varlen, varlen_cached, zeros

CALLS = (attention, attention_varlen, attention_with_cache, attention_varlen_with_cache)
T, V, M = TypeError, ValueError, "meta"
FLOATS = "float16, bfloat16, float"


def keys(*shape, **options):
    x = zeros(*shape, **options)
    return {"k": x, "v": x}


# case: (call, error, the argument, what is expected, what was given)
REFUSED = {
    # habits from flash-attn and SDPA
    "dropout as the fourth": (lambda: attention(Q, K, K, 0.0), T, "rotary", "a flashrope.Rotary", "float"),
    "cos and sin": (lambda: dense(rotary=(Q, Q)), T, "rotary", "a flashrope.Rotary", "tuple"),
    "documents": (lambda: dense(document_ids=zeros(9)), T, "document_ids", "attention_varlen",
                  "flashrope.cu_seqlens_of(document_ids)"),
    "a block mask": (lambda: dense(block_mask=3), T, "block_mask", "cu_seqlens_of(document_ids)", "rotary.local"),
    "window_size": (lambda: dense(window_size=(128, 0)), T, "window_size", "rotary.local(w + 1)", "(128, 0)"),
    "dropout_p": (lambda: dense(dropout_p=0.1), T, "dropout_p", "0.0, because these kernels have no dropout",
                  "dropout_p=0.1"),
    "alibi": (lambda: varlen(alibi_slopes=Q), T, "alibi_slopes", "without it; see docs/extending.md, 'A scheme",
              "a tensor of shape (2, 6, 4, 16)"),
    "one default and one value": (lambda: dense(dropout_p=0.0, softcap=30.0), T, "softcap", "no soft cap", "30.0"),
    "False as dropout": (lambda: dense(dropout_p=False), T, "dropout_p", "0.0", "dropout_p=False"),
    "is_causal": (lambda: dense(is_causal=True), T, "is_causal", "causal, which is True by", "is_causal=True"),
    "scale": (lambda: cached(scale=0.1), T, "scale", "softmax_scale", "scale=0.1"),
    "deterministic of a cache": (lambda: cached(deterministic=True), T, "deterministic", "no backward", "True"),
    "pages without a cache": (lambda: varlen(block_table=3), T, "block_table", "attention_varlen_with_cac", "3"),
    "a typing error": (lambda: dense(softmax_scal=1.0), T, "softmax_scal", "softmax_scale", "softmax_scal=1.0"),
    "an unknown word": (lambda: dense(zebra=1.0), T, "zebra", "one of q, k, v, rotary, causal", "zebra=1.0"),
    # shapes, dtypes, devices
    "numpy": (lambda: dense(q=Q.numpy()), T, "q", "a tensor", "got ndarray"),
    "k is not a tensor": (lambda: dense(k=None), T, "k", "a tensor", "got NoneType"),
    "packed in attention": (lambda: dense(q=Q[0]), V, "q", "(batch, seqlen, heads, head_dim)", "shape (6, 4, 16)"),
    "rank of v": (lambda: dense(v=K[..., None]), V, "v", "(batch, ", "got shape (2, 6, 2, 16, 1)"),
    "q and k exchanged": (lambda: dense(q=K, k=Q, v=Q), V, "q", "heads_q to be a multiple of heads_kv = 4",
                          "got 2; shapes"),
    "one query, transposed": (lambda: dense(q=zeros(2, 4, 1, 16)), V, "q", "heads_kv = 2", "got 1; shapes are (b"),
    "no key heads": (lambda: dense(**keys(2, 6, 0, 16)), V, "q", "heads_q to be a multiple of heads_kv = 0", "got 4"),
    "batch": (lambda: dense(**keys(3, 6, 2, 16)), V, "k", "batch 2 as in q", "got 3"),
    "values of another length": (lambda: dense(v=K[:, :5]), V, "v", "shape (2, 6, 2, 16), the shape of k,",
                                 "got (2, 5, 2, 16)"),
    "width 12 of v": (lambda: dense(v=zeros(2, 6, 2, 12)), V, "v", "head_dim to be a multiple of 8 up to", "got 12"),
    "width 520 of v": (lambda: dense(v=zeros(2, 6, 2, 520)), V, "v", "head_dim to be a multiple of 8", "got 520"),
    "wide values of another length": (lambda: dense(v=zeros(2, 5, 2, 32)), V, "v",
                                      "shape (2, 6, 2, 32), the shape of k except for head_dim", "got (2, 5, 2, 32)"),
    "heads of wide packed values": (lambda: varlen(v=zeros(9, 1, 32)), V, "v",
                                    "shape (9, 2, 32), the shape of k except for head_dim", "got (9, 1, 32)"),
    "head_dim of k": (lambda: dense(k=zeros(2, 6, 2, 24)), V, "k", "head_dim 16 as in q", "got 24"),
    "head_dim 100": (lambda: dense(q=zeros(2, 6, 4, 100), k=zeros(2, 6, 2, 100)), V, "q", "of 8 up to 512", "100"),
    "head_dim 576": (lambda: dense(q=zeros(2, 6, 4, 576), **keys(2, 6, 2, 576)), V, "q",
                     "head_dim to be a multiple of 8 up to 512", "got 576"),
    "another model's scheme": (lambda: dense(rotary=Rotary.rope(64)), V, "rotary", "head_dim 16 as in q", "got 64"),
    "whole numbers": (lambda: dense(q=Q.long()), T, "q", FLOATS, "got torch.int64"),
    "int8": (lambda: dense(k=K.char()), V, "k", FLOATS, "got torch.int8; quantized keys and values are read from a"),
    "int8 values": (lambda: varlen(v=zeros(9, 2, 16).char()), V, "v", FLOATS, "got torch.int8; quantized keys"),
    "k_descale": (lambda: dense(k_descale=Q), T, "k_descale", "k_scale of a CacheLayer for plan_cache", "k_descale="),
    "scales of no cache": (lambda: dense(k_scale=Q), T, "k_scale", "with CacheLayer(k_scale=...)", "k_scale="),
    "complex v": (lambda: dense(v=K.to(torch.complex64)), T, "v", FLOATS, "got torch.complex64"),
    "bfloat16 keys": (lambda: dense(k=K.bfloat16()), T, "k", "torch.float32, the dtype of q", "got torch.bfloat16"),
    "keys on meta": (lambda: dense(k=K.to(M)), V, "k", "device cpu, the device of q", "got meta"),
    "values on meta": (lambda: dense(v=K.to(M)), V, "v", "device cpu, the device of q", "got meta"),
    "stride of q": (lambda: dense(q=zeros(2, 6, 16, 4).mT), V, "q", "a contiguous last dimension", "got stride 4"),
    "stride of v": (lambda: dense(v=zeros(2, 6, 2, 32)[..., ::2]), V, "v", "a contiguous last dimension",
                    "got stride 2"),
    # numbers, flags, backends
    "a tensor as scale": (lambda: dense(softmax_scale=torch.tensor(0.5)), T, "softmax_scale", "a number", "tensor"),
    "no scale": (lambda: dense(softmax_scale=math.nan), V, "softmax_scale", "a finite number", "got nan"),
    "a negative scale": (lambda: dense(softmax_scale=-0.5), V, "softmax_scale", "at least 0", "got -0.5"),
    "causal=None": (lambda: dense(causal=None), T, "causal", "True or False", "got None"),
    "deterministic=0": (lambda: dense(deterministic=0), T, "deterministic", "True, False or None", "got 0"),
    "Hugging Face's impl": (lambda: dense(impl="flash_attention_2"), V, "impl",
                            "None or one of triton, sdpa, cuda, cpu, reference", "got 'flash_attention_2'"),
    "cuda": (lambda: dense(impl="cuda"), V, "impl='cuda'", "cannot serve this call: ", ""),
    "cpu on meta": (lambda: dense(q=Q.to(M), k=K.to(M), v=K.to(M), impl="cpu"), V, "impl='cpu'",
                    "cannot serve this call: it needs tensors on the CPU", "q is on meta"),
    "triton in float64": (lambda: dense(q=Q.double(), k=K.double(), v=K.double(), impl="triton"), V, "impl='triton'",
                          "cannot serve this call: ", "float64"),
    # positions
    "axial without": (lambda: dense(rotary=Rotary.axial(16)), V, "positions",
                      "shape (batch, seqlen, 2) for an axial scheme", "got None"),
    "positions of ReRoPE": (lambda: dense(rotary=ROPE.rectify(4), positions=zeros(6)), V, "positions",
                            "None, or a scheme that leaves every distance d as it is",
                            "got one whose distance is d for 0 <= d < 4; 4 for d >= 4"),
    "positions by axis first": (lambda: dense(positions=zeros(3, 2, 6)), V, "positions", "shape (2, 6) or (6,)",
                                "got (3, 2, 6)"),
    "axes of positions": (lambda: dense(rotary=Rotary.axial(16), positions=zeros(2, 6, 3)), V, "positions",
                          "shape (2, 6, 2)", "got (2, 6, 3)"),
    "a list of positions": (lambda: dense(positions=[0, 1]), T, "positions", "a tensor", "got list"),
    "flags as positions": (lambda: dense(positions=zeros(2, 6).bool()), T, "positions", "numbers", "got torch.bool"),
    "positions on meta": (lambda: dense(positions=zeros(6, device=M)), V, "positions", "device cpu, the device of q",
                          "got meta"),
    "positions of other lengths": (lambda: dense(**keys(2, 7, 2, 16), positions=zeros(2, 6)), V, "positions",
                                   "None, or seqlen_q == seqlen_k", "got 6 and 7"),
    "positions of unequal sequences": (lambda: varlen(positions=zeros(9), cu_seqlens_k=int32(0, 5, 9)), V, "positions",
                                       "equal cu_seqlens_q and cu_seqlens_k", "got [0, 4, 9] and [0, 5, 9]"),
    "packed positions with axes": (lambda: varlen(positions=zeros(9, 2)), V, "positions", "shape (9,)", "got (9, 2)"),
    # cu_seqlens
    "dense in varlen": (lambda: varlen(q=Q), V, "q", "(total, heads, head_dim)", "got shape (2, 6, 4, 16)"),
    "a list of sums": (lambda: varlen(cu_seqlens_k=[0, 4, 9]), T, "cu_seqlens_k", "an int32 tensor", "got list"),
    "int64": (lambda: varlen(cu_seqlens_q=int32(0, 4, 9).long()), T, "cu_seqlens_q", "int32",
              "got torch.int64; pass cu_seqlens_q.int()"),
    "two dimensions": (lambda: varlen(cu_seqlens_q=int32(0, 4, 9)[None]), V, "cu_seqlens_q", "shape (sequences + 1,)",
                       "got (1, 3)"),
    "no entry": (lambda: varlen(cu_seqlens_q=int32()), V, "cu_seqlens_q", "shape (sequences + 1,)", "got (0,)"),
    "sums on meta": (lambda: varlen(cu_seqlens_k=int32(0, 9).to(M)), V, "cu_seqlens_k", "device cpu, the device of k",
                     "got meta"),
    "stride of sums": (lambda: varlen(cu_seqlens_q=int32(0, 9, 4, 9, 9, 9)[::2]), V, "cu_seqlens_q",
                       "a contiguous tensor", ""),
    "other sequences": (lambda: varlen(cu_seqlens_k=int32(0, 4)), V, "cu_seqlens_k",
                        "shape (3,), the shape of cu_seqlens_q", "got (2,)"),
    "lengths, not sums": (lambda: varlen(cu_seqlens_q=int32(4, 5)), V, "cu_seqlens_q", "to start at 0", "got 4"),
    "sums that fall": (lambda: varlen(cu_seqlens_k=int32(0, 6, 4)), V, "cu_seqlens_k", "non-decreasing values",
                       "got [0, 6, 4]"),
    "too many rows": (lambda: varlen(cu_seqlens_q=int32(0, 4, 12)), V, "cu_seqlens_q",
                      "to end at 9 at most, the rows of q", "got 12"),
    "a small maximum": (lambda: varlen(max_seqlen_q=3), V, "max_seqlen_q", "at least the longest sequence, 5",
                        "got 3"),
    "a negative maximum": (lambda: varlen(max_seqlen_k=-1), V, "max_seqlen_k", "a non-negative integer", "got -1"),
    "a tensor as maximum": (lambda: varlen(max_seqlen_k=int32(5)[0]), V, "max_seqlen_k", "a non-negative integer",
                            "got tensor(5, dtype=torch.int32); pass max_seqlen_k.item()"),
    "a float as maximum": (lambda: varlen(max_seqlen_k=5.0), V, "max_seqlen_k", "a non-negative integer", "got 5.0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "name", "expected", "given"), REFUSED.values(), ids=REFUSED.keys())
def test_the_message_names_the_argument_what_was_expected_and_what_came(call, error, name, expected, given):
    check_refused(call, error, name, expected, given)


def test_axial_and_packed_without_positions():
    with pytest.raises(ValueError, match=r"positions: expected shape \(total, 2\) for an axial scheme, got None"):
        varlen(rotary=Rotary.axial(16))


def test_the_right_calls():
    """Each case of REFUSED changes one argument of a call. Without the change, the call is valid."""
    for call in (dense, varlen, cached, paged, varlen_cached):
        assert call().shape[-2:] == (4, 16)
    assert paged(validate=True).shape == varlen_cached(slot_mapping=torch.arange(9), validate=True)[:2, None].shape


@pytest.mark.parametrize("width", [8, 512])
def test_the_narrowest_and_the_widest_values(width):
    """Values of 8 and of 512 channels are accepted: the first and the last width of the documented range."""
    assert dense(v=zeros(2, 6, 2, width)).shape == (2, 6, 4, width)


# ---- keywords


POSITIONAL = {
    attention: "q k v rotary",
    attention_varlen: "q k v rotary cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    attention_with_cache: "q k_cache v_cache rotary cache_seqlens",
    attention_varlen_with_cache: "q k_cache v_cache rotary cu_seqlens_q cache_seqlens max_seqlen_q",
    rotate: "x rotary positions",
}


@pytest.mark.parametrize("call", POSITIONAL, ids=lambda call: call.__name__)
def test_all_other_arguments_are_named(call):
    """Only the tensors and lengths that every call needs can be positional. All other arguments are keyword-only."""
    parameters = inspect.signature(call).parameters.values()
    assert [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD] == POSITIONAL[call].split()
    others = [x for x in parameters if x.kind is not x.POSITIONAL_OR_KEYWORD]
    assert [x.kind.name for x in others] == ["KEYWORD_ONLY"] * (len(others) - 1) + ["VAR_KEYWORD"]


@pytest.mark.parametrize("call", [attention_with_cache, attention_varlen_with_cache], ids=lambda call: call.__name__)
def test_arguments_of_plans_are_refused_by_name(call):
    """The functions do not take the arguments of plans. The error says which argument of a plan it is."""
    for name in ("rotated_keys", *CacheLayer._fields[2:], *CachePositions._fields[:4], "positions", "slot_mapping"):
        with pytest.raises(TypeError, match=f"^{name}: expected plan_cache.*, got {name}=3"):
            call(*[Q] * len(POSITIONAL[call].split()), **{name: 3})


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_every_foreign_keyword_names_ours(call):
    parameters = inspect.signature(call).parameters
    needed = [Q] * sum(x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())
    for name in (INSTEAD.keys() | ELSEWHERE.keys()) - parameters.keys():
        message = f"^{name}: expected .*, got {name}=3, an unexpected keyword argument of {call.__name__}$"
        with pytest.raises(TypeError, match=message):
            call(*needed, **{name: 3})


@pytest.mark.parametrize("call", [dense, varlen, cached, paged, varlen_cached])
def test_defaults_of_other_libraries_change_nothing(call):
    """The calls also accept arguments of flash-attn, SDPA and Hugging Face that have their defaults there. Such
    arguments change no result."""
    own = {name for each in CALLS for name in inspect.signature(each).parameters}
    given = {name: value for name, values in NO_OPS.items() if name not in own for value in values[:1]}
    assert {"dropout_p", "softcap", "window_size", "attn_mask"} <= given.keys()
    assert torch.equal(call(**given), call())
    for name, values in NO_OPS.items():
        for value in values if name not in own else ():
            call(**{name: value})


def test_every_default_has_a_keyword_with_a_hint():
    assert NO_OPS.keys() <= INSTEAD.keys() | ELSEWHERE.keys()


def test_every_hint_can_be_given():
    """No hint is for an argument that all calls accept. Such a hint would never be read."""
    everywhere = set.intersection(*(set(inspect.signature(call).parameters) for call in CALLS))
    assert not everywhere & (INSTEAD.keys() | ELSEWHERE.keys())


def test_a_compiled_call_accepts_the_defaults_too():
    torch.compiler.reset()
    compiled = torch.compile(dense, fullgraph=True, backend="eager")
    assert torch.equal(compiled(dropout_p=0.0, window_size=(-1, -1)), dense())


def test_the_names_in_the_hints_are_ours():
    """A one-word hint names an argument of one of our calls. No hint names an argument of another library."""
    own = {
        name
        for call in CALLS
        for name in call.__code__.co_varnames[: call.__code__.co_argcount + call.__code__.co_kwonlyargcount]
    }
    for name, hint in INSTEAD.items():
        assert re.search(r"\W", hint) or hint in own, (name, hint)
        assert name not in own - {"deterministic"}, name
    plans = {*inspect.signature(plan_cache).parameters, *CacheLayer._fields, *CachePositions._fields, *Packed._fields}
    assert ELSEWHERE.keys() <= own | plans


@pytest.mark.parametrize("wrong", [{"window_size": (3, 0)}, {"softmax_scal": 0.5}])
def test_a_compiled_call_refuses_them_too(wrong):
    torch.compiler.reset()
    with pytest.raises(Exception, match="unexpected keyword argument"):
        torch.compile(dense, fullgraph=True, backend="eager")(**wrong)


@contextlib.contextmanager
def silent(*messages):
    """Turns any warning into an error, except warnings with one of the messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in messages:
            warnings.filterwarnings("ignore", message=message)
        yield


# ---- layouts


def like(batch, *shape):
    return torch.zeros(batch, *shape, 16)


SUSPECT = {
    "grouped heads": (like(1, 32, 48), like(1, 8, 48), "32 queries and only 8 keys.* the first 24 rows"),
    "a batch of them": (like(2, 8, 12), like(2, 4, 12), "8 queries and only 4 keys"),
    "short and equal heads": (like(2, 4, 200), like(2, 4, 200), "200 heads and only 4 queries"),
    "long and equal heads": (like(1, 8, 300), like(1, 8, 300), "300 heads and only 8 queries"),
}


@pytest.mark.parametrize(("q", "k", "why"), SUSPECT.values(), ids=SUSPECT.keys())
def test_a_transposed_layout_is_suspected(q, k, why):
    shapes = rf"\(batch, seqlen, heads, head_dim\), got shape {re.escape(str(tuple(q.shape)))} with k"
    with pytest.warns(UserWarning, match=f"^q: expected {shapes}.*{why}.*transpose") as caught:
        attention(q, k, k, ROPE)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        (like(1, 48, 32), like(1, 48, 8), {}),
        (like(1, 32, 48), like(1, 8, 48), {"causal": False}),
        (like(1, 9, 4), like(1, 8, 4), {}),  # valid: the first row has no key
        (like(1, 8, 4), like(1, 4, 2), {}),
        (like(1, 8, 4), like(1, 0, 4), {}),
        (like(1, 1, 32), like(1, 64, 8), {}),
        # DeepSeek-V3 has 128 heads. This shape cannot be distinguished from (batch, heads, seqlen).
        (like(1, 4, 128), like(1, 4, 128), {}),
        (like(1, 4, 232), like(1, 4, 8), {}),  # Falcon 180B
    ],
)
def test_a_layout_that_is_not_suspected(q, k, options):
    with silent("attention: .* no key"):
        attention(q, k, k, ROPE, **options)


# ---- rows without keys


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr(checks, "_warned_calls", set())


def test_fewer_keys_than_queries_warn_once(nothing_warned):
    q, k = torch.randn(1, 64, 4, 16), torch.randn(1, 30, 2, 16)
    with pytest.warns(
        UserWarning, match=r"^attention: 34 rows see no key, .*bottom-right.* 64 queries and 30 keys"
    ) as caught:
        out = attention(q, k, k, ROPE)
    assert [warning.filename for warning in caught] == [__file__]
    assert int((out == 0).all(-1).all(-1).sum()) == 34  # the number in the warning
    with silent():
        attention(q, k, k, ROPE)  # warns only once
    checks._warned_calls.clear()
    with silent():
        attention(q, k, k, ROPE, causal=False)
        attention(q[:, :30], k, k, ROPE)
        torch.compiler.reset()
        torch.compile(attention, fullgraph=True, backend="eager")(q, k, k, ROPE)


def test_a_cache_with_fewer_keys_than_queries_warns_once(nothing_warned):
    """Sequences with 5 and 4 keys for 6 queries cause a warning, once. A sequence without keys causes no warning,
    because it pads the batch."""
    q, k_cache, v_cache = torch.randn(2, 6, 4, 16), *torch.randn(2, 2, 16, 2, 16)
    call = lambda *lengths: attention_with_cache(q, k_cache, v_cache, ROPE, int32(*lengths))  # noqa: E731
    with silent():
        call(6, 9)
        call(0, 6)
    message = "^attention_with_cache: 3 rows see no key, .*bottom-right.* 6 queries and 4 keys"
    with pytest.warns(UserWarning, match=message) as caught:
        call(5, 4)
    assert [warning.filename for warning in caught] == [__file__]
    with silent():
        call(5, 4)


@pytest.mark.parametrize("shape", [(1, 6), (6,)], ids=str)
def test_positions_that_require_a_gradient(exact, shape):
    """Kernels read positions as constants, so they raise an error that names the argument. The reference differentiates
    by positions."""
    x = torch.randn(1, 6, 2, 16, device=exact.device, dtype=exact.dtype, requires_grad=True)
    positions = torch.arange(6.0, device=exact.device).expand(shape).clone().requires_grad_()
    rotary, cu = Rotary.rope(16), torch.tensor([0, 6], dtype=torch.int32, device=exact.device)
    calls = {
        "attention": lambda impl: attention(x, x, x, rotary, positions=positions, impl=impl),
        "varlen": lambda impl: attention_varlen(
            x[0], x[0], x[0], rotary, cu, cu, 6, 6, positions=positions.flatten(), impl=impl
        ),
        "rotate": lambda impl: rotate(x, rotary, positions, impl=impl),
        "packed": lambda impl: rotate(x[0], rotary, positions.flatten(), impl=impl),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=rf"^positions: no gradient from impl='{exact.impl}' .* requires grad"):
            call(exact.impl)
        with torch.no_grad():
            call(exact.impl)
        assert torch.autograd.grad(call("reference").sum(), positions)[0].abs().sum() > 0
    cache = [torch.zeros(1, 8, 2, 16, device=exact.device, dtype=exact.dtype) for _ in "kv"]
    lengths = torch.zeros(1, dtype=torch.int32, device=exact.device)
    for name, given in (("positions", positions.view(1, 6)), ("slot_positions", torch.zeros(1, 8).to(positions))):
        new = dict(zip("kv", [x.detach()] * 2, strict=True))
        with pytest.raises(ValueError, match=rf"^{name}: expected .* not require grad"):
            options = {name: given.detach().requires_grad_(), "impl": exact.impl}
            cached_call(x.detach(), *cache, rotary, lengths, **new, **options)


NESTED = {
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=torch.jagged),
    "strided": lambda: torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=torch.strided),
    "sparse_coo": lambda: torch.randn(2, 3, 2, 16).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", NESTED)
def test_tensors_of_other_layouts(layout):
    x, rope, dense = NESTED[layout](), Rotary.rope(16), torch.zeros(2, 16, 2, 16)
    starts, lengths = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    cache = KVCache(2, 16, 2, 16, torch.float32, "cpu")
    for name, call in (
        ("q", lambda: attention(x, x, x, rope)),
        ("q", lambda: attention_varlen(x, x, x, rope, starts, starts, 5, 5)),
        ("x", lambda: rotate(x, rope)),
        ("q", lambda: attention_with_cache(x, dense, dense, rope, lengths)),
        ("k_cache", lambda: attention_with_cache(dense[:, :1], x, x, rope, lengths)),
        ("k", lambda: attention_with_cache(dense[:, :1], dense, dense.clone(), rope, lengths, k=x, v=x)),
        ("q", lambda: attention_varlen_with_cache(x, dense, dense, rope, starts, lengths, 5)),
        ("k", lambda: cache.append(x, x)),
        ("q", lambda: cache.attend(x, rope)),
        ("positions", lambda: attention(dense, dense, dense, rope, positions=x)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected a dense tensor, got .* of layout torch.{layout}"):
            call()
