"""Tests the composition of PyTorch's operators on a GPU (backends/sdpa/whole.py) without a GPU.

``ON_CPU`` has an operator's functions, computed by the CPU's kernel with masks. With it the same code runs with
numbers: views, grouped heads, padding, merged lse. The operators of a GPU are called with meta tensors.
"""

import dataclasses

import pytest
import support
import torch
from flashrope import Band, Rotary
from flashrope.backends import others
from flashrope.backends.sdpa import operators, whole
from flashrope.backends.sdpa.operators import CUDNN, FLASH, HALF_TYPES, Operator, PackedLengths, Problem
from flashrope.calls.records import AttentionCall
from support import int32

aten = torch.ops.aten
TARGET = support.Target("sdpa", torch.float32, "cpu")
D = 16


def mask(q, k, problem: Problem) -> torch.Tensor:
    """Returns the mask of a batch, 0 or -inf. The last row sees the last key."""
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    unseen = (distance < 0) & problem.causal | (distance >= (problem.window or torch.inf))
    return torch.zeros(unseen.shape, dtype=q.dtype).masked_fill(unseen, -torch.inf)


def sequences(problem: Problem):
    starts = problem.lengths.cu_seqlens_q.tolist(), problem.lengths.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False):
        if q1 > q0 and k1 > k0:
            yield slice(q0, q1), slice(k0, k1)


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def forward(q, k, v, problem: Problem):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    if problem.lengths is not None:
        out, lse = q.new_zeros(q.shape), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        alone = problem._replace(lengths=None)
        for rows, keys in sequences(problem):
            out[rows], lse[:, rows] = (x[0] for x in forward(q[None, rows], k[None, keys], v[None, keys], alone))
        return out, lse
    seen = mask(q, k, problem)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first(q, k, v), 0.0, False, attn_mask=seen, scale=problem.scale
    )
    empty = ~(seen == 0).any(1)
    return out.masked_fill(empty[:, None], 0).transpose(1, 2), lse.masked_fill(empty, -torch.inf)


def backward(grad_out, q, k, v, out, lse, problem: Problem):
    if problem.lengths is not None:
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        alone = problem._replace(lengths=None)
        for rows, keys in sequences(problem):
            tensors = (grad_out[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows])
            found = backward(*tensors, lse[None, :, rows], alone)
            for grad, part, x in zip(grads, (rows, keys, keys), found, strict=True):
                grad[part] = x[0]
        return tuple(grads)
    # exp(score - lse) of a row without keys is 0 if its lse is inf
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first(grad_out, q, k, v, out), lse, 0.0, False, attn_mask=mask(q, k, problem), scale=problem.scale
    )
    return tuple(x.nan_to_num(0.0) for x in heads_first(*grads))


ON_CPU = Operator("on the CPU", forward, backward, 256, general=True)
SQUARE = ON_CPU._replace(name="squares on the CPU", head_dim=128, general=False)
OPERATORS = (SQUARE, ON_CPU)

ROPE = Rotary.rope(D)
SCHEMES = {
    **{name: support.SCHEMES[name](D) for name in ("none", "rope", "rope_interleaved", "rope_partial", "hope_zeros")},
    **{name: support.SCHEMES[name](D) for name in ("rerope", "leaky", "inverse_leaky", "local", "log_n_clipped")},
    "scaled rotation": ROPE.scale_rotated(4.0).rectify(21),
    "length": dataclasses.replace(ROPE.rectify(21), length_scale=20.0),
    "yarn": ROPE.yarn(4.0, train_length=64),
}


@pytest.fixture
def without_triton(monkeypatch):
    plain = others.backend
    gone = type("Gone", (), {"unsupported_reason": staticmethod(lambda q: "not here")})
    monkeypatch.setattr(others, "backend", lambda name: gone if name == "triton" else plain(name))


def results(p: support.Problem, call: AttentionCall, lse_too=True, by=OPERATORS) -> dict[str, torch.Tensor]:
    """Returns the results and gradients of a problem by the composition."""
    out, lse, kept = whole.forward(p.q, p.k, p.v, call, by)
    assert out.is_contiguous() and lse.is_contiguous()
    assert kept.rotated_k.shape == whole.kept_shapes(p.k, call).rotated_k
    grads = whole.backward(p.grad_out, p.grad_lse if lse_too else None, p.q, p.k, p.v, out, lse, kept, call, by)
    assert all(x.is_contiguous() and x.shape == y.shape for x, y in zip(grads, (p.q, p.k, p.v), strict=True))
    return dict(zip(support.NAMES, (out, lse, *grads), strict=True))


def call_of(p: support.Problem, causal=True) -> AttentionCall:
    lengths = {"max_seqlen_q": p.q.shape[1], "max_seqlen_k": p.k.shape[1]}
    return AttentionCall(p.rotary, causal, p.q.shape[-1] ** -0.5, **lengths)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name):
    """Out, lse and gradients are within the error bound. The keys have as many heads or a quarter of the heads."""
    for heads, group in ((2, 1), (4, 4)):
        p = support.problem(TARGET, SCHEMES[name], 70, batch=2, heads=heads, group=group, seed=1)
        support.check_budget(results(p, call_of(p)), p, torch.float32)


@pytest.mark.skipif(not support.INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("name", ["rope_interleaved", "rerope", "leaky"])
def test_with_triton(name):
    p = support.problem(TARGET, SCHEMES[name], 70, batch=1, heads=2, group=2, seed=2)
    support.check_budget(results(p, call_of(p)), p, torch.float32)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("seqlens", [(1, 1), (2, 2), (3, 3), (21, 21), (22, 22), (5, 70), (70, 5), (30, 40)], ids=str)
@pytest.mark.parametrize("name", ["rope", "rerope", "leaky", "local", "log_n_clipped"])
def test_lengths(name, seqlens):
    """Lengths of 1 to 3, windows as long as the sequence, chunks, and rows that see no key."""
    p = support.problem(TARGET, SCHEMES[name], *seqlens, batch=2, heads=2, group=2, seed=3)
    support.check_budget(results(p, call_of(p)), p, torch.float32)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim_v", [8, 24])
def test_values_of_another_width(causal, head_dim_v):
    p = support.problem(TARGET, ROPE, 40, batch=1, heads=2, group=2, causal=causal, seed=4)
    v = torch.randn(*p.k.shape[:-1], head_dim_v, generator=torch.Generator().manual_seed(5))
    grad_out = torch.randn(*p.q.shape[:-1], head_dim_v, generator=torch.Generator().manual_seed(6))
    p = p.replace(v=v, grad_out=grad_out)
    support.check_budget(results(p, call_of(p, causal)), p, torch.float32)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ["hope_zeros", "log_n_clipped"])
def test_devices_without_an_operator_that_returns_lse(name, causal, monkeypatch):
    """There scaled_dot_product_attention computes one band. It runs on every device, here on the CPU. lse has no
    gradient."""
    monkeypatch.setattr(operators, "LSE_ROWS", 32)
    p = support.problem(TARGET, SCHEMES[name], 70, batch=2, heads=2, group=2, causal=causal, seed=13)
    found = results(p, call_of(p, causal), False, (operators.SDPA,))
    support.check_budget(found, p.replace(grad_lse=torch.zeros_like(p.grad_lse)), torch.float32)
    with pytest.raises(ValueError, match="^impl='sdpa' cannot serve this call: no gradient of lse on cpu"):
        results(p, call_of(p, causal), True, (operators.SDPA,))


class Elsewhere(torch.Tensor):
    """A tensor on the CPU that says it is on another device."""

    device = property(lambda self: torch.device("xpu"))


def test_what_other_devices_refuse():
    backend, (q, k, v) = others.backend("sdpa"), (torch.randn(1, 9, 2, D).as_subclass(Elsewhere) for _ in range(3))
    assert backend.unsupported_reason(q) == "" and "over a cache it needs" in backend.unsupported_reason(q, True)
    for rotary in (ROPE.rectify(5), ROPE.local(5)):
        with pytest.raises(ValueError, match="^impl='sdpa' cannot serve this call: on xpu .*; use impl='reference'"):
            backend.forward(q, k, v, AttentionCall(rotary, True, 0.25))
    with pytest.raises(ValueError, match="batches of equal lengths"):
        backend.forward(q[:, :3], k, v, AttentionCall(ROPE, True, 0.25))


def test_gradients_without_that_of_lse():
    p = support.problem(TARGET, SCHEMES["rerope"], 70, batch=2, heads=2, group=2, seed=7)
    found = results(p, call_of(p), lse_too=False)
    support.check_budget(found, p.replace(grad_lse=torch.zeros_like(p.grad_lse)), torch.float32)


def test_q_that_is_k():
    """q, k and v may be the same tensor. Each gets its own gradient, and the inputs are not written."""
    p = support.problem(TARGET, SCHEMES["rerope"], 50, batch=1, heads=2, group=1, seed=8)
    p, before = p.replace(q=p.k, v=p.k), p.k.clone()
    support.check_budget(results(p, call_of(p)), p, torch.float32)
    assert torch.equal(p.k, before)


@pytest.mark.parametrize("name", ["rope", "hope_zeros", "local"])
def test_packed_sequences(name):
    """Packed sequences of one band, among them an empty one. Rows behind the last sequence are NaN and get zeros."""
    rotary, cu_q, cu_k = SCHEMES[name], int32([0, 30, 30, 37, 60]), int32([0, 40, 44, 51, 74])
    make = torch.Generator().manual_seed(9)
    q, grad = (torch.randn(64, 4, D, generator=make) for _ in range(2))
    k, v = (torch.randn(80, 2, D, generator=make) for _ in range(2))
    for x in (q, grad, k, v):
        x[60 if len(x) == 64 else 74 :] = torch.nan
    call = AttentionCall(rotary, True, 0.25, None, cu_q, cu_k, 30, 40)
    out, lse, kept = whole.forward(q, k, v, call, OPERATORS)
    grads = whole.backward(grad, None, q, k, v, out, lse, kept, call, OPERATORS)
    wanted = others.backend("sdpa").forward(q, k, v, call)[:2]
    expected = (*wanted, *others.backend("sdpa").backward(grad, None, q, k, v, *wanted, None, call))
    for x, y in zip((out, lse, *grads), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_explicit_positions():
    p = support.problem(TARGET, ROPE, 40, batch=2, heads=2, group=2, seed=10)
    places = torch.arange(40).double().repeat(2, 1) * torch.tensor([[1.0], [2.0]])
    for rotary in (ROPE, ROPE.log_n(9), ROPE.rectify(11), ROPE.rectify(11, 4.0)):
        p = p.replace(rotary=rotary)
        call = call_of(p)._replace(positions=places)
        want_out, want_lse, _ = others.backend("reference").forward(p.q, p.k, p.v, call)
        out, lse, kept = whole.forward(p.q, p.k, p.v, call, OPERATORS)
        torch.testing.assert_close((out, lse), (want_out, want_lse), rtol=1e-4, atol=1e-5)
        grads = whole.backward(p.grad_out, None, p.q, p.k, p.v, out, lse, kept, call, OPERATORS)
        want = others.backend("sdpa").backward(p.grad_out, None, p.q, p.k, p.v, out, lse, None, call)
        torch.testing.assert_close(grads, want, rtol=1e-4, atol=1e-4)


def test_keys_that_triton_kept():
    """The backward rotates keys again if the forward kept only the channels that rotate."""
    p = support.problem(TARGET, SCHEMES["hope_zeros"], 40, batch=1, heads=2, group=2, seed=11)
    call = call_of(p)
    out, lse, kept = whole.forward(p.q, p.k, p.v, call, OPERATORS)
    part = kept._replace(rotated_k=kept.rotated_k[..., :8])
    found = (whole.backward(p.grad_out, None, p.q, p.k, p.v, out, lse, x, call, OPERATORS) for x in (kept, part, None))
    one, *rest = found
    assert all(torch.equal(x, y) for other in rest for x, y in zip(one, other, strict=True))


ONE_BAND = {name: x for name, x in SCHEMES.items() if len(x.bands) == 1 and name not in ("local", "log_n_clipped")}
ONE_BAND["scaled rotation"] = ROPE.scale_rotated(4.0)


@pytest.mark.skipif(not support.INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("name", ONE_BAND)
def test_each_backward_takes_what_the_other_forward_keeps(name):
    """With impl=None the forward and the backward of a call may be computed by different backends."""
    p = support.problem(TARGET, ONE_BAND[name], 70, batch=1, heads=2, group=2, seed=14)
    p, triton = p.replace(grad_lse=torch.zeros_like(p.grad_lse)), others.backend("triton")
    call = call_of(p)._replace(whole_keys=True)
    by_triton, by_torch = triton.forward(p.q, p.k, p.v, call), whole.forward(p.q, p.k, p.v, call, OPERATORS)
    assert by_triton[2].rotated_k.shape == by_torch[2].rotated_k.shape
    torch.testing.assert_close(by_triton[2].rotated_k, by_torch[2].rotated_k)
    inputs = p.grad_out, None, p.q, p.k, p.v
    for grads in (
        triton.backward(*inputs, *by_torch, call),
        whole.backward(*inputs, *by_triton, call, OPERATORS),
    ):
        support.check_budget(dict(zip(support.NAMES, (*by_triton[:2], *grads), strict=True)), p, torch.float32)


REFUSED = {
    "two finite bands": (ROPE.rectify(5).local(20), {}, "one band, or a window and all keys before it, got 2 bands"),
    "three bands": (
        dataclasses.replace(ROPE, bands=(Band(0, 5, 1.0, 0.0), Band(5, 9, 0.0, 5.0), Band(9, torch.inf, 0.0, 9.0))),
        {},
        "got 3 bands",
    ),
    "a band of only the past": (dataclasses.replace(ROPE, bands=(Band(4, torch.inf, 1.0, 0.0),)), {}, "got 1 bands"),
    "maps": (ROPE.dual_chunk(256, 128), {}, "maps of positions"),
    "not causal": (ROPE.rectify(5), {"causal": False}, "got "),
    "packed": (ROPE.rectify(5), {"cu_seqlens_q": int32([0, 9]), "cu_seqlens_k": int32([0, 9])}, "packed sequences of"),
    "deterministic": (ROPE, {"deterministic": True}, "not reproducible"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    rotary, changes, reason = REFUSED[name]
    found = whole.unserved(AttentionCall(rotary, True, 0.25)._replace(**changes))
    assert reason in found and "use impl='triton'" in found


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_else_is_refused(name):
    assert whole.unserved(AttentionCall(SCHEMES[name], True, 0.25)) == ""


# ---- the operators


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize(
    "operator, problem",
    [
        (CUDNN, Problem(True, 0.1)),
        (CUDNN, Problem(False, 0.1)),
        (FLASH, Problem(True, 0.1)),
        (FLASH, Problem(True, 0.1, window=9)),
        (FLASH, Problem(True, 0.1, lengths=PackedLengths(int32([0, 9, 40]), int32([0, 9, 40]), 31, 31))),
    ],
    ids=["cuDNN", "cuDNN, full", "flash", "flash, window", "flash, packed"],
)
def test_the_operators_take_these_arguments(operator, problem, dtype):
    """The operators of this version of torch take the arguments, and give results of the expected shapes."""
    shape = (40,) if problem.lengths else (2, 40)
    if problem.lengths:
        problem = problem._replace(lengths=problem.lengths._replace(
            cu_seqlens_q=problem.lengths.cu_seqlens_q.to("meta"), cu_seqlens_k=problem.lengths.cu_seqlens_k.to("meta")
        ))  # fmt: skip
    q, k, v = (torch.empty(*shape, heads, 64, dtype=dtype, device="meta") for heads in (4, 2, 2))
    out, lse = operator.forward(q, k, v, problem)
    assert out.shape == q.shape and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == ((4, 40) if problem.lengths else (2, 4, 40)) and lse.dtype == torch.float32
    grads = operator.backward(torch.empty_like(out), q, k, v, out, lse, problem)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_tensors_that_the_operators_cannot_read_are_copied():
    x = torch.randn(2, 9, 3, 64).to(torch.float16)
    fused = torch.randn(2, 9, 3, 3 * 64).to(torch.float16)
    for given in (x, x[:, 1:], x[:1], fused[..., 64:128], x.transpose(1, 2), x[:, :1]):
        assert operators.readable(given) is given
    odd = torch.randn(2, 9, 3, 65).to(torch.float16)
    for given in (
        odd[..., :64],
        odd.flatten()[1:385].view(1, 2, 3, 64),
        x[:1].expand(2, -1, -1, -1),
        x.transpose(2, 3),
    ):
        copy = operators.readable(given)
        assert copy is not given and copy.is_contiguous() and torch.equal(copy, given)


def test_which_operator_computes_what(monkeypatch):
    monkeypatch.setattr(operators, "activated", lambda: None)
    for capability, names in ((80, ["FlashAttention-2"]), (90, ["cuDNN", "FlashAttention-2"]), (None, [FLASH.name])):
        assert [x.name for x in operators.operators_on(capability)] == names
    both = operators.operators_on(100)
    assert operators.choose(both, 128, plain=True) is CUDNN
    assert operators.choose(both, 136, plain=True) is FLASH  # 8 channels more for a gradient of lse
    assert operators.choose(both, 128, plain=False) is FLASH
    assert operators.choose(both, 264, plain=True) is None
    assert operators.is_plain(Problem(True, 1.0), 9, 9) and operators.is_plain(Problem(False, 1.0), 8, 9)
    assert not operators.is_plain(Problem(True, 1.0), 8, 9) and not operators.is_plain(Problem(True, 1.0, 3), 9, 9)
    monkeypatch.setattr(operators, "activated", lambda: "FA3")
    assert operators.operators_on(90) == (FLASH,)


def test_torch_says_which_flash_attention_is_active(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert operators.activated() == "FA4"
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert operators.activated() is None


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", ["rope", "leaky"])
def test_sixteen_bits(name, dtype):
    """The error bound holds although the results of both bands are rounded before they are merged."""
    p = support.problem(support.Target("sdpa", dtype, "cpu"), support.SCHEMES[name](64), 150, seed=12)
    found = results(p, call_of(p), lse_too=False)
    support.check_budget(found, p.replace(grad_lse=torch.zeros_like(p.grad_lse)), dtype)
