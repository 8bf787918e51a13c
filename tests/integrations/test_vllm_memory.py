"""Tests that the memory that the vLLM plugin keeps free holds the workspaces of a step. vLLM is not needed."""

import gc
import re
from pathlib import Path

import pytest
import torch
from flashrope import CacheLayer, CacheTables, Rotary, plan_cache
from flashrope.calls.cache_tables import Packed
from flashrope.calls.int8 import quantize
from flashrope.integrations.vllm.engine_memory import kept_free
from flashrope.integrations.vllm.engine_plan import EnginePlan, Layer

PAGE = 16


def one_layer(rotary: Rotary, rotated: bool = False) -> EnginePlan:
    return EnginePlan((Layer(rotary, None, rotated),), frozenset())


def step(impl, rotary, new: int, seqlen: int, slots: int, dtype=torch.float32, heads=1, rotated=False, quantized=False):
    """Returns a function that attends with the last `new` tokens of one sequence over vLLM's pages of `slots` slots."""
    width, generator = 2 * rotary.head_dim, torch.Generator().manual_seed(0)
    cache = torch.randn(slots // PAGE, heads, PAGE, width, generator=generator).to(dtype)
    k, v = cache.transpose(1, 2).split(rotary.head_dim, -1)
    layer = CacheLayer(k, v)
    if quantized:
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        layer = CacheLayer(k, v, k_scale=k_scale, v_scale=v_scale)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, new], [seqlen]))
    table = torch.arange(slots // PAGE, dtype=torch.int32).flip(0)[None]  # pages that do not follow one another
    packed = Packed(starts, new, slot_mapping=torch.full((new,), -1, dtype=torch.int64))
    tables = CacheTables(lengths, table.contiguous(), new=packed)
    options = dict(seqlen_q=new, heads_q=heads, dtype=dtype, impl=impl, rotated_keys=rotated)
    plan = plan_cache(tables, like=layer, rotary=rotary, **options)
    q = torch.randn(new, heads, rotary.head_dim).to(dtype)
    out = torch.empty_like(q)
    return lambda: plan.attend(q, layer, out=out)


def resident(name: str) -> int:
    """Returns a size from Linux's status of this process, in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def grown(call) -> int:
    """Returns by how much the resident memory of this process grows at most while it runs a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


LONG = 1 << 16
ROPE = Rotary.rope(128)
ON_CPU = {
    "rerope": (ROPE.rectify(1024), {}),
    "rerope, bfloat16": (ROPE.rectify(1024), dict(dtype=torch.bfloat16)),
    "rerope, int8": (ROPE.rectify(1024), dict(quantized=True)),
    "rotated keys": (ROPE, dict(rotated=True)),
    "self_extend": (ROPE.self_extend(1024, 8), {}),
    "one long chunk": (ROPE.rectify(1024), dict(new=512)),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_the_workspace_of_a_long_prompt_on_the_cpu(name):
    rotary, given = ON_CPU[name]
    given = dict(given)
    new, dtype = given.pop("new", 130), given.get("dtype", torch.float32)
    plan = one_layer(rotary, given.get("rotated", False))
    options = dict(heads_kv=4, itemsize=dtype.itemsize, quantized=given.get("quantized", False), on_cpu=True)
    kept = kept_free(plan, 1 << 40, max_model_len=LONG, **options)
    needed = grown(step("cpu", rotary, new, LONG, LONG, heads=4, **given))
    assert kept / 8 < needed <= kept, (needed, kept)


@pytest.mark.parametrize("window, share", [(64, 0.7), (16, 0.5), (128, 0.9), (160, 0.0)])
def test_the_workspace_of_a_long_prompt_on_a_gpu(window, share):
    """The rotated copies of keys of the Triton kernels fit into the memory that is kept free beside the cache. Copies
    that would have more rows than the cache are not made."""
    rotary, slots = Rotary.rope(32).rectify(window), 272
    available = slots * 3 * 32 * 4  # keys, values, and one rotated copy of the keys
    options = dict(heads_kv=1, itemsize=4, quantized=False, max_model_len=slots, on_cpu=False)
    kept = kept_free(one_layer(rotary), available, **options)
    assert (available - kept) // (2 * 32 * 4) == slots
    attend = step("triton", rotary, 132, 256, slots)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attend()
    copies = max(event.cpu_memory_usage for event in profile.events() if event.name == "aten::new_empty")
    assert share * kept <= copies <= kept and bool(copies) == bool(share)


def test_rotated_keys_need_no_workspace_on_a_gpu():
    options = dict(heads_kv=2, itemsize=2, quantized=False, max_model_len=4096, on_cpu=False)
    assert kept_free(one_layer(ROPE, True), 1 << 30, **options) == 0 < kept_free(one_layer(ROPE), 1 << 30, **options)


def test_the_share_of_the_workspace():
    """A GPU of a model with 28 layers keeps the keys of one layer free: one part in 57. More layers, an int8 cache and
    pipeline parallelism change the share as they change the size of one layer's keys."""
    layer = Layer(ROPE.rectify(64), None)
    plan, hybrid = EnginePlan((layer,) * 28, frozenset()), EnginePlan((layer, *[Layer(ROPE.local(8), 8, True)] * 5), {})
    options = dict(heads_kv=8, itemsize=2, quantized=False, max_model_len=131072, on_cpu=False)
    assert kept_free(plan, 57 << 20, **options) == 1 << 20
    assert kept_free(plan, 29 << 20, ranks=2, **options) == 1 << 20
    assert kept_free(hybrid, 3 << 20, **options) == 1 << 20  # the cache of each kind fills the pool by itself
    assert kept_free(plan, 57 << 20, **{**options, "quantized": True}) > 3 << 19


def test_the_figures_of_the_docs():
    """On the CPU, a prompt of Qwen3-0.6B needs 27,648 bytes a token beside the 114,688 bytes of its cache. It cannot be
    longer than the cache."""
    plan = EnginePlan((Layer(ROPE.rectify(20480), None),) * 28, frozenset())
    options = dict(heads_kv=8, itemsize=2, quantized=False, max_model_len=131072, on_cpu=True)
    assert kept_free(plan, 1 << 40, **options) == 131072 * 27_648
    assert kept_free(plan, 1000 * (114_688 + 27_648), **options) == 1000 * 27_648
    page = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    assert "27,648" in page and "114,688" in page
    int8 = {**options, "quantized": True}
    assert kept_free(plan, 1 << 40, **int8) == 131072 * (27_648 - 2 * 8 * (256 - 132))
