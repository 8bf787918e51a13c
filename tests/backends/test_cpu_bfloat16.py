"""Tests matrix products in bfloat16 on the CPU, which the kernels of csrc/cpu/bf16 compute. The kernels need
AVX512-BF16, and use AMX if the processor has it. On such processors, all bfloat16 tests of the CPU backend run these
kernels too."""

import pytest
import support
import torch
from bfloat16_products import BRAIN, check_runs_of_keys, hide_instructions, results_of_pytorch
from caching import Cached
from flashrope import Rotary, attention
from flashrope.backends.cpu import library
from support import Target

ROWS = library.FEW_QUERIES + 1


@pytest.fixture(autouse=True)
def multiplied(compiled):
    """Returns the library that multiplies in bfloat16."""
    if not compiled.multiplies(torch.bfloat16, ROWS):
        pytest.skip("needs AVX512-BF16")
    return compiled


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [(150, 150), (33, 200), (200, 65), (128, 64), (9, 129)], ids=str)
@pytest.mark.parametrize("head_dim", [24, 40, 64, 128, 200, 256])
def test_accuracy(head_dim, lengths, causal):
    """Out, lse and gradients are within the budget for widths with and without whole vectors, for incomplete tiles of
    queries and incomplete strips and blocks of keys, and for one band and two."""
    for rotary, options in (
        (Rotary.rope(head_dim), {}),
        (Rotary.hope(head_dim, 64, interleaved=True).rectify(20), {"softmax_scale": 0.3}),
        (Rotary.rope(head_dim, rotary_dim=16).local(70), {"layout": "poisoned"}),
    ):
        support.check(BRAIN, support.problem(BRAIN, rotary, *lengths, batch=2, heads=4, causal=causal, **options))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_equal_scores(causal):
    """The results are right if all weights of a row are equal. The rounding errors of the weights are then equal too
    and do not cancel. The budget therefore allows one rounding for the weights and another one for the results."""
    p = support.problem(BRAIN, Rotary.none(64), 150, batch=2, heads=4, causal=causal, softmax_scale=0.0)
    support.check(BRAIN, p, roundings=2)


@pytest.mark.parametrize("widths", [(64, 40), (40, 72), (24, 128), (192, 128)], ids=str)
def test_values_of_another_width(widths):
    rotary = Rotary.rope(widths[0]).rectify(30)
    support.check(BRAIN, support.problem(BRAIN, rotary, 140, heads=2, head_dim_v=widths[1]))


@pytest.mark.parametrize("width", [3, 17, 64])
def test_needles_at_the_edges_of_a_window(width):
    """A key that is three times as long as the others is found at its distance, just before or after an edge of a
    window, a strip, a block or a tile."""
    keys = 200
    needles = sorted(
        {edge + d for edge in (0, 32, 64, 96, 128, 160, keys - width, keys) for d in (-1, 0)} & {*range(keys)}
    )
    p = support.problem(BRAIN, Rotary.rope(64).local(width), keys, batch=len(needles), heads=1, group=1)
    for b, j in enumerate(needles):
        p.k[b, j] *= 3
    support.check(BRAIN, p)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_over_a_cache(head_dim, page, cache_dtype):
    """A chunk of queries reads keys of every cache type, contiguous and in pages. The chunk has enough queries for
    packing the keys to pay off."""
    options = dict(new=0, capacity=416, page=page, cache_dtype=cache_dtype)
    Cached(BRAIN, Rotary.rope(head_dim).rectify(90), (400, 300, 71), 70, **options).check()


def test_tiles_are_left_to_other_libraries():
    """PyTorch's own attention and products give the same results before and after a call. They may use AMX too."""
    q, k, v = torch.randn(3, 1, 2, 150, 64).bfloat16().unbind()

    before = results_of_pytorch(q, k, v)
    for _ in range(2):
        attention(*(x.transpose(1, 2) for x in (q, k, v)), Rotary.rope(64), impl="cpu")
        assert all(map(torch.equal, results_of_pytorch(q, k, v), before))


def test_runs_are_merged_in_float32(multiplied, monkeypatch):
    """With pages at explicit positions, every contiguous run of keys is one call with a float32 result."""
    types, forward = [], type(multiplied).forward
    monkeypatch.setattr(
        type(multiplied),
        "forward",
        lambda self, c, dtype: types.append((c.dtype, c.float32_out)) or forward(self, c, dtype),
    )
    check_runs_of_keys(support.problem(BRAIN, Rotary.rope(64), 80, 256, heads=2, group=1))
    assert types and all(each == (2, 1) for each in types)


def test_what_is_multiplied_in_bfloat16(monkeypatch):
    """Only calls in bfloat16 with at least ROWS queries multiply in bfloat16: their results differ from products in
    float32. All other calls give bitwise the results of the library for AVX-512, including gradients."""
    cases = {
        (dtype, rows): support.problem(Target("cpu", dtype, "cpu"), Rotary.hope(64, 64), rows, 300, causal=True)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for rows in (ROWS - 1, ROWS)
    }
    ours = {case: support.run(p, "cpu") for case, p in cases.items()}
    hide_instructions(monkeypatch)
    for case, p in cases.items():
        same = {name: torch.equal(ours[case][name], x) for name, x in support.run(p, "cpu").items()}
        assert not any(same.values()) if case == (torch.bfloat16, ROWS) else all(same.values()), case


@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out", "grad_lse"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_gradients_of_what_is_not_finite(monkeypatch, which, value):
    """Calls whose inputs have NaN or infinity use the float32 backward. In this backward, a row does not affect the
    gradients of keys that are not visible to the row."""
    p = support.problem(BRAIN, Rotary.rope(64).local(20), 100, batch=2, heads=2, group=1)
    dirty = getattr(p, which).clone()
    dirty[(0, 50) if which != "grad_lse" else (0, 0, 50)] = value
    p = p.replace(**{which: dirty})
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    results = attention(*leaves, p.rotary, return_lse=True, impl="cpu")

    def gradients():
        return torch.autograd.grad(results, leaves, (p.grad_out, p.grad_lse), retain_graph=True)

    got = gradients()
    hide_instructions(monkeypatch)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(got, gradients(), strict=True))
    assert torch.isfinite(got[2][1]).all() and (which == "v" or not torch.isfinite(got[0][0]).all())


def test_nan_reaches_the_rows_that_see_it():
    q, k, v = (torch.randn(1, 170, 2, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    k[0, 40, 0, 3] = torch.nan
    out = attention(q, k, v, Rotary.rope(16), impl="cpu")
    assert out[0, 40:, 0].isnan().all() and not out[0, :40].isnan().any() and not out[0, :, 1].isnan().any()


def test_every_number_is_read_and_rounded():
    """If a row sees a single key, its result is the value of that key, for all numbers of the type. Subnormal numbers
    count as 0, as in the instruction, and NaN stays NaN."""
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1024, 1, 1, 64)
    q = torch.zeros(1024, ROWS, 1, 64, dtype=torch.bfloat16)
    out = attention(q, torch.zeros_like(v), v, Rotary.rope(64), causal=False, impl="cpu")
    expected = torch.where(v.abs() < torch.finfo(torch.bfloat16).smallest_normal, 0, v).expand_as(out)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out[~out.isnan()], expected[~out.isnan()])


def test_results_are_rounded_to_nearest():
    """The mean of two values, which float32 holds exactly, is rounded to nearest."""
    v = support.random((1, 2, 8, 64), BRAIN, 4)
    q = torch.zeros(1, ROWS, 8, 64, dtype=torch.bfloat16)
    out = attention(q, torch.zeros_like(v), v, Rotary.rope(64), causal=False, impl="cpu")
    assert torch.equal(out[0], v[0].float().mean(0).to(torch.bfloat16).expand_as(out[0]))


def test_weights_are_rounded_to_nearest():
    """With values of 1, the results are the sums of rounded weights divided by the sums of weights. Truncated
    weights would make the results smaller than 1."""
    q, k, _ = torch.randn(3, 1, 400, 4, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    out = attention(q, k, torch.ones_like(k), Rotary.rope(64), causal=False, impl="cpu")
    assert torch.equal(out, torch.ones_like(out))


def test_neighbors_and_threads_change_nothing():
    p = support.problem(BRAIN, Rotary.rope(64).rectify(50), 200, batch=2, heads=4)
    threads, expected = torch.get_num_threads(), support.run(p, "cpu")
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, support.run(p, "cpu").values(), expected.values()))
    finally:
        torch.set_num_threads(threads)
    alone = p.replace(**{name: getattr(p, name)[:1] for name in ("q", "k", "v", "grad_out", "grad_lse")})
    assert all(torch.equal(x, expected[name][:1]) for name, x in support.run(alone, "cpu").items())
