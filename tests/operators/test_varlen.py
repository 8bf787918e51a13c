"""Packed sequences: every sequence as if it were alone."""

import pytest
import support
import torch
from flashrope import Rotary, attention, attention_varlen
from support import SCHEMES, lse_type

LENGTHS = {
    "equal": ([20, 33, 1], [20, 33, 1]),
    "different": ([5, 40, 0, 3], [37, 12, 4, 0]),
    "none": ([], []),
}


def starts(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


@pytest.mark.interpreted(lambda exact, scheme, lengths, causal: causal and lengths != LENGTHS["equal"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("scheme", ["hope_zeros", "hope_rerope_log_n"])
def test_packed_is_a_loop_over_sequences(exact, scheme, lengths, causal, head_dim=16, head_dim_v=16):
    """Rows past the last sequence are 0 and -inf with gradient 0; each other row meets the budget of its own
    sequence."""
    rotary, (lengths_q, lengths_k), spare = SCHEMES[scheme](head_dim), lengths, 4
    heads_and_width = ((4, head_dim), (2, head_dim), (2, head_dim_v), (4, head_dim_v))
    q, k, v, grad_out = (
        support.random((1, sum(n) + spare, *shape), exact, seed)[0].requires_grad_()
        for seed, (n, shape) in enumerate(
            zip((lengths_q, lengths_k, lengths_k, lengths_q), heads_and_width, strict=True)
        )
    )
    grad_lse = support.random((1, 4, sum(lengths_q) + spare, 1), exact, 9)[0, ..., 0].to(lse_type(exact))
    cu_q, cu_k = starts(lengths_q, exact.device), starts(lengths_k, exact.device)
    out, lse = attention_varlen(
        q,
        k,
        v,
        rotary,
        cu_q,
        cu_k,
        max(lengths_q, default=0),
        max(lengths_k, default=0),
        causal=causal,
        return_lse=True,
        impl=exact.impl,
    )
    assert out.shape == grad_out.shape and lse.shape == (4, q.shape[0])
    grads = torch.autograd.grad((out, lse), (q, k, v), (grad_out, torch.where(lse.isinf(), 0, grad_lse)))
    row = key = 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(row, row + n), slice(key, key + m)
        p = support.Problem(
            *(x.detach()[None] for x in (q[rows], k[keys], v[keys])),
            rotary,
            causal,
            grad_out=grad_out.detach()[None, rows],
            grad_lse=grad_lse[None, :, rows],
        )
        got = dict(
            zip(
                support.NAMES,
                (
                    out.detach()[None, rows],
                    lse.detach()[None, :, rows],
                    grads[0][None, rows],
                    grads[1][None, keys],
                    grads[2][None, keys],
                ),
                strict=True,
            )
        )
        ratios = support.excess(got, *support.exact_and_bound(p), exact.dtype)
        assert max(ratios.values()) <= support.COEFFICIENT[exact.dtype], (n, m, ratios)
        row, key = row + n, key + m
    assert (out[row:] == 0).all() and (lse[:, row:] == -torch.inf).all()
    assert (grads[0][row:] == 0).all() and (grads[1][key:] == 0).all() and (grads[2][key:] == 0).all()


def test_neighbours_do_not_reach_in(exact):
    """Changing one sequence leaves the others' results as they were, bitwise."""
    rotary, cu = Rotary.rope(16).rectify(11), starts([20, 30, 14], exact.device)
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
    cu = starts([40], exact.device)
    packed = attention_varlen(q[0], k[0], v[0], rotary, cu, cu, 40, 40, impl=exact.impl)
    assert torch.equal(packed, attention(q, k, v, rotary, impl=exact.impl)[0])


def test_bounds_may_be_larger_than_the_lengths(exact):
    rotary, cu = Rotary.rope(16), starts([20, 14], exact.device)
    q, k, v = (support.random((1, 34, 2, 16), exact, seed)[0] for seed in range(3))
    assert torch.equal(
        attention_varlen(q, k, v, rotary, cu, cu, 20, 20, impl=exact.impl),
        attention_varlen(q, k, v, rotary, cu, cu, 500, 90, impl=exact.impl),
    )
