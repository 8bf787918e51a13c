"""Tests the compiled kernels over caches whose values are channels of the keys, with and without weights of keys."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.backends.triton import cached
from support import SCHEMES, int32

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
MLA = Rotary.rope(576, rotary_dim=64, first_channel=512)  # DeepSeek: 512 latent channels, then 64 that rotate
IN_FRONT = Rotary.rope(576, rotary_dim=64, interleaved=True)
GEMMA = Rotary.p_rope(512, 0.25, base=1e6)
LATENT, ALL = slice(0, 512), slice(None)
MANY = dict(heads=(40, 1), page=64)  # query heads of one key head, enough for the tile for many rows
# Target, scheme, channels that are values, number of tiles that hold them, whether keys are weighted, options.
CASES = {
    "mla-bf16": (BF16, MLA, LATENT, 4, False, {}),
    "mla-bf16-rectified-paged": (BF16, MLA.rectify(21), LATENT, 4, False, dict(page=PAGE)),
    "mla-fp16-leaky-padded-weighted": (FP16, MLA.rectify(21, 4.0), LATENT, 4, True, dict(leftpad=(3, 5))),
    "mla-bf16-many-heads": (BF16, MLA, LATENT, 4, False, MANY),
    "mla-bf16-many-heads-rectified-weighted": (BF16, MLA.rectify(21), LATENT, 4, True, MANY),
    "mla-bf16-chunk": (BF16, MLA, LATENT, 4, False, dict(queries=70)),
    "mla-bf16-packed": (BF16, MLA, LATENT, 4, False, dict(queries=[1, 70], page=PAGE)),
    "mla-fp32-paged": (FP32, MLA.log_n(20), LATENT, 4, False, dict(page=64)),
    "mla-interleaved-in-front-bf16": (BF16, IN_FRONT, slice(64, 576), 4, True, dict(page=64)),
    "mla-in-front-bf16-many-heads": (BF16, Rotary.rope(576, rotary_dim=64), LATENT, 6, False, MANY),
    "mla-rotating-values-bf16-many-heads": (BF16, MLA, slice(64, 576), 6, True, MANY),
    "mla-none-fp16": (FP16, Rotary.none(576), LATENT, 6, False, {}),
    "mla-self-extend-bf16": (BF16, MLA.self_extend(64, 8), LATENT, 4, False, dict(page=64)),
    "mla-rotating-values-bf16": (BF16, MLA, slice(64, 576), 6, False, {}),
    "gemma-bf16-weighted": (BF16, GEMMA, ALL, 5, True, {}),
    "gemma-bf16-weighted-rectified-paged": (BF16, GEMMA.rectify(21), ALL, 5, True, dict(page=PAGE)),
    "gemma-bf16-many-heads-weighted": (BF16, GEMMA, ALL, 5, True, MANY),
    "gemma-fp16-window-paged": (FP16, GEMMA.local(40), ALL, 5, False, dict(page=32, leftpad=(3, 5))),
    "gemma-bf16-chunk-weighted": (BF16, GEMMA.rectify(21), ALL, 5, True, dict(queries=70, page=64)),
    "gemma-fp32-weighted": (FP32, GEMMA, ALL, 5, True, {}),
    "rope-d512-bf16": (BF16, Rotary.rope(512), ALL, 4, False, {}),
    "rerope-d512-fp16-paged-weighted": (FP16, Rotary.rope(512).rectify(21), ALL, 4, True, dict(page=PAGE)),
    "rope-d512-bf16-many-heads": (BF16, Rotary.rope(512), slice(0, 256), 4, False, MANY),
    "hope-d512-bf16-interleaved-weighted": (BF16, Rotary.hope(512, 1e6, interleaved=True), ALL, 2, True, {}),
    "rope-d320-bf16-paged": (BF16, Rotary.rope(320), slice(64, 320), 4, False, dict(page=PAGE)),
    "partial-d384-fp16-weighted": (FP16, Rotary.rope(384, rotary_dim=256), slice(0, 256), 4, True, {}),
    "rope-d256-bf16": (BF16, SCHEMES["rope"](256), ALL, 2, False, {}),
    "rope-d256-bf16-chunk": (BF16, SCHEMES["rope"](256), ALL, 0, False, dict(queries=70, page=PAGE)),
    "behind-d256-bf16-paged-weighted": (
        BF16, Rotary.rope(256, rotary_dim=64, first_channel=192), slice(0, 192), 2, True, dict(page=64),
    ),
    "partial-d256-bf16-many-heads": (BF16, Rotary.rope(256, rotary_dim=64), ALL, 4, False, MANY),
    "rerope-d128-bf16-paged-weighted": (BF16, SCHEMES["rerope"](128), ALL, 2, True, dict(page=PAGE)),
    "rope-d128-fp16-interleaved-first": (FP16, Rotary.rope(128, interleaved=True), slice(0, 64), 1, False, {}),
    "leaky-d64-bf16-middle": (BF16, SCHEMES["leaky"](64), slice(8, 48), 2, True, dict(leftpad=(3, 5))),
    "rope-d64-bf16-odd-channel": (BF16, SCHEMES["rope"](64), slice(5, 21), 2, False, dict(page=PAGE)),
    "partial-d72-fp16-weighted": (FP16, SCHEMES["rope_partial"](72), ALL, 2, True, {}),
    "none-d64-bf16-weighted": (BF16, SCHEMES["none"](64), ALL, 2, True, {}),
    "rerope-d32-fp32-weighted": (FP32, SCHEMES["rerope"](32), ALL, 2, True, {}),
    "rope-d16-bf16": (BF16, SCHEMES["rope"](16), slice(0, 8), 0, True, {}),
    "rope-d24-bf16-odd": (BF16, SCHEMES["rope"](24), ALL, 2, True, dict(layout="poisoned")),
}  # fmt: skip
QUICK = (
    "mla-bf16-rectified-paged",
    "mla-in-front-bf16-many-heads",
    "gemma-bf16-weighted",
    "rerope-d128-bf16-paged-weighted",
    "rope-d16-bf16",
)


def weight(head_dim):
    return torch.rand(head_dim, generator=torch.Generator().manual_seed(7)) * 2 - 0.5


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_case(machine, monkeypatch, case):
    target, rotary, values, tiles, weighted, options = CASES[case]
    seen, real = [], cached.variant_of
    monkeypatch.setattr(cached, "variant_of", lambda *args, **named: seen.append(real(*args, **named)) or seen[-1])
    options = {"heads": (2, 1), "key_weight": weight(rotary.head_dim) if weighted else None, **options}
    Cached(target, rotary, (90, 71), **{"queries": 1, "values": values, **options}).check()
    shared = [variant for variant in seen if variant.first_value >= 0]
    assert bool(shared) == bool(tiles)
    first = values.indices(rotary.head_dim)[0]
    for variant in shared:
        assert variant.first_value == first and value_tiles(variant) == tiles


def value_tiles(variant) -> int:
    """Returns how many of the tiles that a block of keys is divided into hold values."""
    if not variant.channels:
        return variant.parts * (1 if variant.interleaved else 2)
    stop = variant.first_value + variant.head_dim_v
    runs = [{part.first, part.second} for part in variant.channels]
    held = [
        any(run < stop and variant.first_value < run + part.width // 2 for run in own)
        for own, part in zip(runs, variant.channels, strict=True)
    ]
    pairs = [1 + (part.rotates and not variant.interleaved) for part in variant.channels]
    return sum(n for n, holds in zip(pairs, held, strict=True) if holds)


def test_splits(machine):
    options = dict(values=LATENT, heads=(4, 1), key_weight=weight(576))
    Cached(BF16, MLA, (120, 7), 2, **options).check(num_splits=3)
    assert "combine_splits" in {launch.kernel for launch in machine.launches}


@pytest.mark.slow
def test_placed_and_mapped_tokens():
    options = dict(values=slice(0, 40), key_weight=weight(64), page=PAGE)
    Cached.packed(FP16, SCHEMES["rerope"](64), [(3, 20), (1, 9)], mapped=True, **options).check()
    call = Cached(BF16, SCHEMES["rerope"](64), (40, 30), 2, new=0, **options)
    starts = (torch.arange(call.block_table.shape[1]) * (PAGE + 3)).expand(2, -1)
    call.at(page_positions=int32(starts.tolist())).check()
    call.at(slot_positions=call.by_slot(torch.arange(call.slots) * 1.5 + torch.zeros(2, 1))).check()


@pytest.mark.slow
def test_weights_of_quantized_keys():
    for rotary in (SCHEMES["rerope"](64), SCHEMES["rope_partial"](128), SCHEMES["none"](64)):
        weighted = dict(key_weight=weight(rotary.head_dim), cache_dtype="int8", page=PAGE)
        Cached(BF16, rotary, (40, 30), 2, **weighted).check()
