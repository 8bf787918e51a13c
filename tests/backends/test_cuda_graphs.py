"""Tests what needs a GPU: CUDA graphs, streams, a host that must not wait, several devices."""

import pytest
import support
import torch
from flashrope import Rotary, attention, attention_varlen, attention_varlen_with_cache, attention_with_cache
from test_graph_recipe import Recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tensors(seed=0, seqlen=200, device="cuda", grad=False):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, seqlen, heads, 64, generator=generator).to(device, torch.bfloat16).requires_grad_(grad)
        for heads in (4, 2, 2)
    )


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def test_the_first_call_of_a_scheme_lies_in_a_graph_of_the_compiler():
    """If the first call of a scheme is part of a compiler's CUDA graph, the scheme's tables outlive the memory pool of
    this graph."""
    rotary = Rotary.rope(64, base=12_347.0).rectify(50)  # no other test builds its tables
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, rotary), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):  # warm-up, recording, replay
            out = compiled(*tensors(seed)).clone()
            torch.testing.assert_close(out, attention(*tensors(seed), rotary))


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_a_captured_step_follows_the_lengths(seqlen_q):
    rotary = Rotary.rope(64).rectify(50).log_n(100)
    (q, k, v), (_, k_cache, v_cache), lengths = tensors(1, seqlen_q), tensors(2, 512), int32([0, 0])

    def step():
        return attention_with_cache(q, k_cache, v_cache, rotary, lengths, k=k, v=v)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for values in ([3, 100], [400, 0]):
        lengths.copy_(int32(values))
        graph.replay()
        assert torch.equal(out, step())


def test_a_captured_batch_follows_the_lengths():
    """One graph serves steps, drafts and a prompt, in any order and number."""
    rotary, (q, _, _), (_, k_cache, v_cache) = Rotary.rope(64).rectify(50), tensors(1, 50), tensors(2, 512)
    q, starts, lengths = q.flatten(0, 1), int32([0, 0, 0]), int32([0, 0])

    def step():
        return attention_varlen_with_cache(q, k_cache, v_cache, rotary, starts, lengths, 100)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for rows, values in (([0, 1, 100], [300, 120]), ([0, 70, 71], [70, 512]), ([0, 3, 3], [9, 0])):
        starts.copy_(int32(rows)), lengths.copy_(int32(values))
        graph.replay()
        assert torch.equal(out, step())


def test_the_recipe_of_a_paged_cache():
    """Captures the recipe in the docstring of ``PagedKVCache``, which ``test_graph_recipe.py`` runs without a GPU."""
    recipe = Recipe(support.Target("triton", torch.float32, "cuda"), "raw")
    recipe.run(recipe.step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = recipe.step()

    def replay():
        graph.replay()
        return results

    for _ in range(1, 8):
        recipe.run(replay)
    recipe.held.look()


def test_captured_positions():
    rotary, positions = Rotary.axial(64), torch.rand(2, 200, 2, device="cuda") * 30
    q, k, v = tensors()
    attention(q, k, v, rotary, positions=positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, rotary, positions=positions)
    positions.add_(torch.rand_like(positions) * 30)
    graph.replay()
    assert torch.equal(out, attention(q, k, v, rotary, positions=positions))


def test_no_call_waits_for_the_device():
    q, k, v = tensors(grad=True)
    cu_seqlens, positions = int32([0, 150, 400]), torch.rand(2, 200, device="cuda")

    def calls():
        packed = (x.flatten(0, 1) for x in (q, k, v))
        for out in (
            attention(q, k, v, Rotary.rope(64).rectify(50)),
            attention(q, k, v, Rotary.rope(64).log_n(50), positions=positions),
            attention_varlen(*packed, Rotary.rope(64), cu_seqlens, cu_seqlens, 250, 250),
        ):
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_a_stream_of_its_own():
    rotary, want = (
        Rotary.rope(64, base=12_377.0),
        attention(*tensors(), Rotary.rope(64, base=12_377.0), impl="reference"),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q, k, v = tensors()
        out = attention(q, k, v, rotary)
    stream.synchronize()
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    rotary = Rotary.rope(64, base=12_379.0).rectify(50)
    with torch.cuda.device(0):
        first, second = (attention(*tensors(device=f"cuda:{index}"), rotary) for index in (0, 1))
    assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("known_table", [False, True])
def test_first_use_inside_a_capture_is_refused(known_table):
    rotary, x = Rotary.rope(48, base=12_391.0), torch.zeros(1, 100, 1, 48, dtype=torch.bfloat16, device="cuda")
    if known_table:  # float32 needs a separate kernel
        attention(x, x, x, rotary)
        x = x.float()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(x, x, x, rotary)
