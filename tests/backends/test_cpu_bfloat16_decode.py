"""Tests decoding with products in bfloat16 on the CPU (csrc/cpu/bf16/decode.cpp). The kernel needs AVX512-BF16. It uses
AMX if the processor has it."""

import pytest
import support
import torch
from bfloat16_products import BRAIN, check_runs_of_keys, hide_instructions, results_of_pytorch
from caching import Cached
from flashrope import Rotary, attention_with_cache
from flashrope.backends.cpu import library
from support import Target

ROWS = library.FEW_ROWS + 1
LENGTHS, PADS = (1060, 513, 70, 1, 0), (15, 0, 3, 0, 40)  # three chunks; one chunk and one key; two blocks; one; none
SCHEMES = {
    "rope": lambda d: Rotary.rope(d),
    "rerope": lambda d: Rotary.rope(d).rectify(600),
    "leaky_log_n": lambda d: Rotary.hope(d, 512).rectify(90, 4.0).log_n(20),
    "interleaved": lambda d: Rotary.rope(d, interleaved=True).rectify(70),
    "behind": lambda d: Rotary.rope(d, rotary_dim=16, first_channel=d - 16).rectify(100),
    "local": lambda d: Rotary.rope(d).local(100),
    "self_extend": lambda d: Rotary.rope(d).self_extend(16, 4),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(144, 16),
    "none": lambda d: Rotary.none(d),
}


@pytest.fixture(autouse=True)
def counted(compiled, monkeypatch):
    """Returns the calls that multiply in bfloat16."""
    if not compiled.multiplies(torch.bfloat16, 100):
        pytest.skip("needs AVX512-BF16")
    calls, multiply = [], compiled._bfloat16_decode
    monkeypatch.setattr(compiled, "_bfloat16_decode", lambda call: calls.append(1) or multiply(call))
    return calls


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("head_dim", [24, 40, 64, 128, 200, 512])
def test_accuracy(counted, head_dim, scheme):
    """Results are within the budget for widths with and without whole vectors and strips, for several numbers of query
    heads, with padding, and over pages."""
    number = head_dim // 8 + list(SCHEMES).index(scheme)
    group, page = (ROWS, 7, 8, 14, 16)[number % 5], (16, 64)[number % 2]
    rotary = SCHEMES[scheme](head_dim)
    Cached(BRAIN, rotary, LENGTHS, 1, new=0, heads=(group, 1), leftpad=PADS, capacity=1088).check()
    Cached(BRAIN, rotary, LENGTHS[1:], 1, new=0, heads=(2 * group, 2), page=page).check()
    assert len(counted) == 2


@pytest.mark.parametrize("options", [{"layout": "poisoned"}, {"layout": "heads first"}, {"head_dim_v": 72}], ids=str)
def test_layouts(counted, options):
    Cached(BRAIN, Rotary.rope(128).rectify(300), LENGTHS, 1, new=0, heads=(16, 2), **options).check()
    assert counted


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("key_weight", [None, "weighted"])
def test_latent_attention(counted, page, key_weight):
    """Values that are channels of the keys, and weights of the keys, in DeepSeek's layout."""
    weight = None if key_weight is None else 1 + torch.arange(576) % 7 / 8
    rotary = Rotary.rope(576, rotary_dim=64, first_channel=512)
    options = {"values": slice(0, 512), "key_weight": weight, "page": page}
    Cached(BRAIN, rotary, LENGTHS[:4], 1, heads=(16, 1), **options).check()
    assert counted


def test_runs_of_keys(counted):
    check_runs_of_keys(support.problem(BRAIN, Rotary.rope(64).rectify(100), 1, 256, heads=8, group=8))
    assert counted


@pytest.mark.parametrize("edges", [(0, 63, 64, 65), (511, 512, 513), (15, 16, 31, 32)], ids=str)
def test_needles(edges):
    """A key that is three times as long as the others is found at the edges of groups, blocks and chunks of keys, and
    at the edge of a window."""
    for rotary in (Rotary.rope(64).rectify(100), Rotary.rope(64).local(560)):
        for edge in (*edges, 600 - 560, 600 - 560 - 1, 599):
            p = support.problem(BRAIN, rotary, 1, 600, heads=8, group=8)
            p.k[:, edge] *= 3
            arguments = (p.q, p.k, p.v, rotary, support.int32([600]))
            out, lse = attention_with_cache(*arguments, return_lse=True, impl="cpu")
            support.check_budget({"out": out, "lse": lse}, p, torch.bfloat16)


def test_what_is_multiplied_in_bfloat16(counted, monkeypatch):
    """Only calls with one query token and at least ROWS query heads per key head multiply in bfloat16. The results of
    other calls are bitwise equal to those of the library for AVX-512."""
    cases = [
        (dtype, group, queries)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for group, queries in ((ROWS - 1, 1), (ROWS, 1), (ROWS, 2))
    ]

    def run() -> dict[tuple, torch.Tensor]:
        return {
            (dtype, group, queries): Cached(
                Target("cpu", dtype, "cpu"), Rotary.rope(64).rectify(90), (300, 71), queries, heads=(group, 1)
            ).call()[0]
            for dtype, group, queries in cases
        }

    ours = run()
    assert len(counted) == 1
    hide_instructions(monkeypatch)
    for case, out in run().items():
        assert torch.equal(out, ours[case]) == (case != (torch.bfloat16, ROWS, 1)), case


@pytest.mark.parametrize("hidden", [slice(0, 500), slice(640, 700)], ids=["before the window", "after the last key"])
def test_values_that_no_query_sees_are_not_read(hidden):
    q = support.random((1, 1, 8, 64), BRAIN, 1)
    k, v = (support.random((1, 700, 1, 64), BRAIN, seed) for seed in (2, 3))
    arguments = (Rotary.rope(64).local(100), support.int32([640]))
    expected = attention_with_cache(q, k, v, *arguments, impl="cpu")
    k[:, hidden], v[:, hidden] = torch.nan, torch.nan
    assert torch.equal(attention_with_cache(q, k, v, *arguments, impl="cpu"), expected)


def test_neighbors_pages_and_threads_change_nothing():
    k, v = (support.random((3, 1024, 2, 64), BRAIN, seed) for seed in (2, 3))
    q, rotary, seqlens = support.random((3, 1, 16, 64), BRAIN, 1), Rotary.rope(64).rectify(90), (1000, 64, 513)
    threads, expected = (
        torch.get_num_threads(),
        attention_with_cache(q, k, v, rotary, support.int32(seqlens), impl="cpu"),
    )
    for b, seqlen in enumerate(seqlens):
        own = slice(b, b + 1)
        alone = attention_with_cache(q[own], k[own], v[own], rotary, support.int32([seqlen]), impl="cpu")
        assert torch.equal(alone, expected[own])
    order = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(4))
    pages = [x.view(3 * 64, 16, 2, 64)[order] for x in (k, v)]
    table = order.argsort().view(3, 64).to(torch.int32)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = attention_with_cache(q, *pages, rotary, support.int32(seqlens), block_table=table, impl="cpu")
            assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(threads)


def test_tiles_are_left_to_other_libraries():
    """PyTorch's own attention and products give the same results before and after a call."""
    q, k, v = torch.randn(3, 1, 2, 150, 64).bfloat16().unbind()
    before = results_of_pytorch(q, k, v)
    Cached(BRAIN, Rotary.rope(64), (300,), 1, heads=(16, 1)).call()
    assert all(map(torch.equal, results_of_pytorch(q, k, v), before))
