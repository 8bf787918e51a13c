"""Every packed sequence gets the same result as in a separate call."""

import pytest
import support
import torch
from flashrope import Rotary, attention, attention_varlen, cu_seqlens_of
from packing import cu_seqlens, packing
from support import SCHEMES

LENGTHS = {
    "equal": ([20, 33, 1], [20, 33, 1]),
    "different": ([5, 40, 0, 3], [37, 12, 4, 0]),
    "none": ([], []),
}


@pytest.mark.interpreted(lambda exact, scheme, lengths, causal: causal and lengths != LENGTHS["equal"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("scheme", ["hope_zeros", "hope_rerope_log_n"])
def test_packed_is_a_loop_over_sequences(exact, scheme, lengths, causal, head_dim=16, head_dim_v=16):
    """A packed call equals a loop over the sequences, also with rows past the last sequence."""
    p = packing(exact, SCHEMES[scheme](head_dim), *lengths, head_dim_v=head_dim_v, spare=4, causal=causal)
    p.check(p.run(exact.impl), exact.dtype)


def test_neighbours_do_not_reach_in(exact):
    """Changing one sequence leaves the results of the others bitwise unchanged."""
    rotary, cu = Rotary.rope(16).rectify(11), cu_seqlens([20, 30, 14], exact.device)
    q, k, v = (support.random((1, 64, 2, 16), exact, seed)[0] for seed in range(3))
    before = attention_varlen(q, k, v, rotary, cu, cu, 30, 30, impl=exact.impl)
    for x in (q, k, v):
        x[20:50] = torch.nan
    after = attention_varlen(q, k, v, rotary, cu, cu, 30, 30, impl=exact.impl)
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[50:], after[50:])
    assert after[20:50].isnan().all()


def test_one_sequence_is_the_batched_call(exact):
    rotary = Rotary.rope(16).rectify(11)
    q, k, v = (support.random((1, 40, 2, 16), exact, seed) for seed in range(3))
    cu = cu_seqlens([40], exact.device)
    packed = attention_varlen(q[0], k[0], v[0], rotary, cu, cu, 40, 40, impl=exact.impl)
    assert torch.equal(packed, attention(q, k, v, rotary, impl=exact.impl)[0])


def test_bounds_may_be_larger_than_the_lengths(exact):
    rotary, cu = Rotary.rope(16), cu_seqlens([20, 14], exact.device)
    q, k, v = (support.random((1, 34, 2, 16), exact, seed)[0] for seed in range(3))
    assert torch.equal(
        attention_varlen(q, k, v, rotary, cu, cu, 20, 20, impl=exact.impl),
        attention_varlen(q, k, v, rotary, cu, cu, 500, 90, impl=exact.impl),
    )


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("rows", [0, 4])
def test_no_sequence_has_gradients(rows, impl):
    """A call without any sequence has gradients of zeros, as a step of training over an empty batch needs them."""
    device = support.device_of(impl)
    q, k, v = (torch.randn(rows, 2, 16, device=device, requires_grad=True) for _ in "qkv")
    starts = support.int32([0], device)
    out, lse = attention_varlen(q, k, v, Rotary.rope(16), starts, starts, 0, 0, return_lse=True, impl=impl)
    for result, inputs in ((out, (q, k, v)), (lse, (q, k))):
        grads = torch.autograd.grad(result.masked_fill(result.isinf(), 0).sum(), inputs, retain_graph=True)
        assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, inputs, strict=True))


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("seqlens", [(0, 0), (3, 0), (0, 3)], ids=str)
def test_lse_without_keys_or_queries_has_gradients(seqlens, impl):
    device = support.device_of(impl)
    q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (seqlens[0], *seqlens[1:] * 2))
    _, lse = attention(q, k, v, Rotary.rope(16), causal=False, return_lse=True, impl=impl)
    grads = torch.autograd.grad(lse.masked_fill(lse.isinf(), 0).sum(), (q, k), allow_unused=True)
    assert all(grad is not None and not grad.any() for grad in grads)


def test_cu_seqlens_of_document_ids():
    """Documents end where the id changes and at the end of a row. Ids may be any integers, and recur in other rows."""
    ids = torch.tensor([[5, 5, 5, -1, -1], [-1, 0, 0, 0, 5]])
    found = cu_seqlens_of(ids)
    assert found.tolist() == [0, 3, 5, 6, 9, 10] and found.dtype == torch.int32 and found.is_contiguous()
    assert cu_seqlens_of(ids[0].to(torch.uint8)).tolist() == [0, 3, 5]
    assert cu_seqlens_of(ids[:, :0]).tolist() == cu_seqlens_of(ids[0, :0]).tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([[1, 1], [2, 1]])[..., None], ValueError, r"or \(batch, seqlen\), got \(2, 2, 1\)"),
        (torch.tensor([[1, 1, 1], [2, 1, 2]]), ValueError, "side by side, got document 2 at several places of row 1"),
        (torch.tensor([1.0, 2.0]), TypeError, "expected a tensor of integers, got torch.float32"),
        ([1, 2], TypeError, "expected a tensor of integers, got list"),
    ],
)
def test_wrong_document_ids(ids, error, message):
    with pytest.raises(error, match=f"^document_ids: .*{message}"):
        cu_seqlens_of(ids)
