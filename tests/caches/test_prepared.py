"""The layers of a decoding step through ``prepare``: bitwise what the two calls give."""

import pytest
import torch
from flashrope import Rotary
from flashrope.backends.calls import CacheCall, CacheLayout
from flashrope.backends.cpu import loader
from flashrope.backends.quantized import PER_BYTE
from flashrope.backends.shown import Positions
from flashrope.operators import autograd

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE = 4, 2, 32, 16
LENGTHS, MAX_PAGES = (40, 17, 64), 5
ROPE = Rotary.rope(HEAD_DIM)


def layer(queries: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k_cache, v_cache, k, v and out of a layer, laid out as an engine does: q, k and v are columns of one tensor,
    keys and values halves of a row."""
    rows = len(LENGTHS) * queries
    packed = torch.randn(rows, HEADS_Q + 2 * HEADS_KV, HEAD_DIM).to(dtype)
    pages = torch.randn(len(LENGTHS) * MAX_PAGES, HEADS_KV, PAGE, 2 * HEAD_DIM).to(dtype).transpose(1, 2)
    q, k, v = packed.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=1)
    return [q, *pages.split(HEAD_DIM, dim=-1), k, v, torch.empty(rows, HEADS_Q, HEAD_DIM, dtype=dtype)]


def layout(queries: list[int], kept: dict | None) -> CacheLayout:
    table = torch.randperm(len(LENGTHS) * MAX_PAGES, generator=torch.Generator().manual_seed(1)).view(3, -1).int()
    slots = [
        int(table[b, i // PAGE]) * PAGE + i % PAGE
        for b, (n, new) in enumerate(zip(LENGTHS, queries, strict=True))
        for i in range(n - new, n)
    ]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS).int()
    return CacheLayout(lengths, table, None, 0, starts, torch.tensor(slots), max(queries), kept=kept)


SCHEMES = {
    "rotated": (ROPE, True),
    "raw": (Rotary.hope(HEAD_DIM, 16), False),
    "bands": (ROPE.rectify(8).log_n(32), False),
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_further_layers(scheme, dtype, queries):
    """Three layers; the second has a cache of its own and the third writes to another output."""
    torch.manual_seed(0)
    rotary, rotated_keys = SCHEMES[scheme]
    step = layout([queries] * 3, {})
    call = CacheCall(rotary, True, 0.3, step, 0, rotated_keys)
    layers = [layer(queries, dtype) for _ in range(3)]
    attend = autograd.prepare(*layers[0], call, "cpu")
    for q, k_cache, v_cache, k, v, out in layers:
        caches = k_cache.clone(), v_cache.clone()
        expected, _ = autograd.attention_with_cache(q, *caches, k, v, call, "cpu")
        attend(q, k_cache, v_cache, k, v, out)
        assert torch.equal(out, expected)
        assert torch.equal(k_cache, caches[0]) and torch.equal(v_cache, caches[1])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=str)
def test_layers_of_codes(codes):
    """Rows of codes with their scale behind them, as vLLM lays them out."""
    torch.manual_seed(0)
    step, layers = layout([1] * 3, {}), []
    for _ in range(2):
        q, *_, k, v, out = layer(1, torch.float32)
        half = HEAD_DIM // PER_BYTE[codes] + 4
        rows = torch.zeros(len(LENGTHS) * MAX_PAGES, PAGE, HEADS_KV, 2 * half, dtype=codes)
        caches = rows[..., : half - 4], rows[..., half : 2 * half - 4]
        scales = (rows.view(torch.float32)[..., n * half // 4 - 1] for n in (1, 2))
        layers.append((q, *caches, k, v, out, *scales))
    for x in layers:
        step_of_layer = step._replace(k_scale=x[6], v_scale=x[7])
        call = CacheCall(ROPE, True, 0.3, step_of_layer, 0, True)
        if x is layers[0]:
            attend = autograd.prepare(*x[:6], call, "cpu")
        before = [each.clone() for each in (x[1], x[2], x[6], x[7])]
        attend(*x)
        copied = call.with_layout(step_of_layer._replace(k_scale=before[2], v_scale=before[3]))
        expected, _ = autograd.attention_with_cache(x[0], *before[:2], *x[3:5], copied, "cpu")
        assert torch.equal(x[5], expected) and expected.any()
        for got, wanted in zip((x[1], x[2], x[6], x[7]), before, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.usefixtures("compiled")
def test_what_the_first_layer_held_lives_on():
    """The compiled calls keep pointers: to what they were made of, not to the first layer's tensors."""
    import gc

    call = CacheCall(ROPE, True, 0.3, layout([1] * 3, {}), 0, True)
    first, tensors = layer(1, torch.float32), layer(1, torch.float32)
    attend = autograd.prepare(*first, call, "cpu")
    del first
    call.layout.kept.clear()
    gc.collect()
    garbage = [torch.full((n,), float("nan")) for n in range(1, 200)]
    caches = tensors[1].clone(), tensors[2].clone()
    attend(*tensors)
    expected, _ = autograd.attention_with_cache(tensors[0], *caches, *tensors[3:5], call, "cpu")
    assert garbage and torch.equal(tensors[5], expected)


def refused(monkeypatch, name: str):
    tensors, step = layer(1, torch.float32), layout([1] * 3, {})
    if name == "mixed lengths":
        step, tensors = layout([1, 2, 1], {}), [x[:4] if x.ndim == 3 else x for x in layer(2, torch.float32)]
    elif name == "codes beside bfloat16":
        tensors = [x.bfloat16() for x in tensors]
        step = step._replace(k_scale=torch.ones(15, PAGE, HEADS_KV), v_scale=torch.ones(15, PAGE, HEADS_KV))
    elif name == "positions":
        step = step._replace(positions=Positions(page_first=torch.zeros(3, MAX_PAGES, dtype=torch.int32)))
    elif name == "float64":
        tensors = [x.double() for x in tensors]
    elif name == "composed":
        monkeypatch.setattr(loader, "load", lambda: None)
    elif name == "many queries":
        step, tensors = layout([9] * 3, {}), layer(9, torch.float32)
    elif name == "rows outside every sequence":
        tensors = [x[:3] if x.ndim == 3 else x for x in layer(2, torch.float32)]
        tensors[0] = layer(2, torch.float32)[0]
    return tensors, step


@pytest.mark.parametrize(
    "name",
    [
        "mixed lengths",
        "codes beside bfloat16",
        "positions",
        "float64",
        "composed",
        "many queries",
        "rows outside every sequence",
    ],
)
def test_no_such_call(monkeypatch, name):
    tensors, step = refused(monkeypatch, name)
    assert autograd.prepare(*tensors, CacheCall(ROPE, True, 0.3, step, 0, True), "cpu") is None


def test_a_backend_without_it():
    call = CacheCall(ROPE, True, 0.3, layout([1] * 3, {}), 0, True)
    assert autograd.prepare(*layer(1, torch.float32), call, "reference") is None
