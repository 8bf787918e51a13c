"""Attention saves as many bytes between the forward and the backward as docs/training.md states."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flashrope import Rotary, attention
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

PAGE = (
    (Path(__file__).resolve().parents[2] / "docs" / "training.md")
    .read_text()
    .split("## Memory")[1]
    .split("## Speed")[0]
)
HEADS, HEADS_KV, HEAD_DIM, WIDTH, SEQLEN = 32, 8, 64, 2048, 32
ROPE = Rotary.rope(HEAD_DIM)
SCHEMES = {
    "none": Rotary.none(HEAD_DIM),
    "rope": ROPE,
    "hope": Rotary.hope(HEAD_DIM, 64),
    "cope": ROPE.cope(64),
    "rectify": ROPE.rectify(8),
    "dual_chunk": ROPE.dual_chunk(160, 32),
    "leaky": ROPE.rectify(8, 4),
    "self_extend": ROPE.self_extend(8, 4),
}


def number(cell: str) -> int:
    return int(cell.strip().replace(",", ""))


def rows() -> dict[str, tuple[int, int]]:
    """Returns the bytes that docs/training.md states for each scheme, on the CPU and under Triton."""
    found = {}
    for names, cpu, triton in re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names) or ["eager"]:
            found[name] = number(cpu), number(triton)
    return found


def inputs(device: str, dtype: torch.dtype = torch.bfloat16, part: int = 1) -> tuple[torch.Tensor, ...]:
    """Returns q, k and v with the number of heads divided by `part`."""
    options = {"dtype": dtype, "device": device, "requires_grad": True}
    return tuple(torch.randn(1, SEQLEN, heads // part, HEAD_DIM, **options) for heads in (HEADS, HEADS_KV, HEADS_KV))


def held(run, besides: int = 0) -> float:
    """Returns the bytes per token that autograd saves. Every storage counts once."""
    storages = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        run()
    return (sum(storages.values()) - besides) / SEQLEN


def test_the_table_has_every_scheme():
    assert rows().keys() == {*SCHEMES, "eager"}


@pytest.mark.parametrize("name", SCHEMES)
def test_attention_holds_what_the_table_says(name):
    q, k, v = inputs("cpu")
    assert held(lambda: attention(q, k, v, SCHEMES[name], impl="cpu")) == rows()[name][0]


@pytest.mark.parametrize("name", SCHEMES)
def test_attention_in_triton_holds_what_the_table_says(name):
    if not find_spec("triton"):
        pytest.skip("triton is not installed")
    # Triton's interpreter has no bfloat16, and float16 takes as many bytes. All saved memory is proportional to the
    # number of heads.
    q, k, v = inputs("cuda", part=8) if torch.cuda.is_available() else inputs("cpu", torch.float16, part=8)
    assert 8 * held(lambda: attention(q, k, v, SCHEMES[name], impl="triton")) == rows()[name][1]


def test_rope_in_pytorch_holds_what_the_table_says():
    q, k, v = inputs("cpu")
    angle = torch.arange(SEQLEN)[:, None] * ROPE.inv_freq.float().repeat(2)
    cos, sin = (table.bfloat16()[:, None] for table in (angle.cos(), angle.sin()))

    def rotated(x):
        return x * cos + torch.cat((-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]), -1) * sin

    def run():
        q1, k1, v1 = (x.transpose(1, 2) for x in (rotated(q), rotated(k), v))
        return F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)

    assert held(run, besides=cos.nbytes + sin.nbytes) == rows()["eager"][0]


def test_the_terms_add_up():
    terms = dict(re.findall(r"^\| (.+?) \| .+? \| ([\d,]+) \|$", PAGE.split("| scheme |")[0], re.MULTILINE))
    sizes = [number(terms[name]) for name in ("q", "k and v", "out", "lse, float32")]
    heads, channels, keys = HEADS, HEADS * HEAD_DIM * 2, HEADS_KV * HEAD_DIM * 2
    assert sizes == [channels, 2 * keys, channels, 4 * heads]
    assert number(terms["rotated keys on a GPU, per copy"]) == keys
    assert rows()["none"] == (sum(sizes),) * 2 and rows()["leaky"][1] == sum(sizes) + 2 * keys
    assert f"{4 * heads * 8192:,} bytes per token at n = 8,192" in PAGE


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
        for name, heads in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, heads * HEAD_DIM, bias=False, dtype=torch.bfloat16))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        return self.out(attention(q, k, v, SCHEMES["hope"], impl="cpu").flatten(-2))


def test_a_checkpointed_layer_allocates_its_output_alone():
    """Only the output of a checkpointed layer stays allocated. It is the next layer's input. Counts allocations minus
    frees, as the allocator reports them."""
    layer, x = Layer(), torch.randn(1, SEQLEN, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer(x)
    runs = layer, lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    allocated = []
    for run in runs:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            out = run(x)
        allocated.append(sum(event.self_cpu_memory_usage for event in profiled.events()) / SEQLEN)
        del out
    size = number(re.search(r"saves only its input, ([\d,]+) bytes", PAGE)[1])
    assert allocated == [rows()["hope"][0] + size, size]
