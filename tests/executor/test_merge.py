"""Runs the compiled kernel that merges two results, against float64."""

import pytest
import torch
from flashrope import Rotary
from flashrope.backends.triton.merging_results import merge

slow = pytest.mark.slow
SHAPES = {  # (dtype, head_dim_v, seqlen, rows)
    "bf16-d64": (torch.bfloat16, 64, 150, 129),
    "fp16-d128": (torch.float16, 128, 70, 70),
    "bf16-d72": (torch.bfloat16, 72, 65, 1),
    "bf16-d256": (torch.bfloat16, 256, 100, 40),
    "fp16-d8": (torch.float16, 8, 64, 64),
}


@pytest.mark.parametrize(
    "name", ["bf16-d64", *(pytest.param(name, marks=slow) for name in SHAPES if name != "bf16-d64")]
)
def test_merge(name):
    dtype, width, seqlen, rows = SHAPES[name]
    make, first = torch.Generator().manual_seed(1), seqlen - rows
    out, more = (torch.randn(2, n, 3, width, generator=make).to(dtype) for n in (seqlen, rows))
    lse, more_lse = (4 * torch.randn(2, 3, n, generator=make) for n in (seqlen, rows))
    lse[0, 0, first] = more_lse[0, 1, -1] = more_lse[1, 2, 0] = -torch.inf
    lse[1, 2, first] = -torch.inf  # no key in either set
    out[1, first, 2] = more[1, 0, 2] = 0
    views = torch.full((2, rows + 3, 3, width), torch.nan, dtype=dtype)[:, 2 : rows + 2]
    views.copy_(more)
    old = out[:, first:].double(), lse[..., first:].double()
    want_lse = torch.logaddexp(old[1], more_lse.double())
    base = want_lse.masked_fill(want_lse == -torch.inf, 0)
    shares = ((x - base).exp().transpose(1, 2)[..., None] for x in (old[1], more_lse.double()))
    want = sum(x * share for x, share in zip((old[0], more.double()), shares, strict=True))
    before = out.clone(), lse.clone()
    merge(out, lse, views, more_lse, first, Rotary.rope(width))
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    allowed = unit * want.abs() + 1e-6 * (old[0].abs() + more.double().abs())
    worst = ((out[:, first:].double() - want).abs() / allowed.clamp(min=1e-30)).max()
    assert worst <= 1.0
    torch.testing.assert_close(lse[..., first:].double(), want_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:, :first], before[0][:, :first]) and torch.equal(lse[..., :first], before[1][..., :first])
