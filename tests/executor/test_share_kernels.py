"""Runs decoding by shares on the executor, with so few programs that a share has several pieces."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, plan_cache
from flashrope.backends.triton import cached
from support import SCHEMES, int32

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
LENGTHS = (1, 330, 3, 87, 65)  # one long sequence among short ones
LATENT = Rotary.rope(576, rotary_dim=64, first_channel=512)
WEIGHT = torch.linspace(-0.5, 1.5, 576)
slow = pytest.mark.slow
CASES = {  # target, scheme, programs, options
    "rope-d128-bf16": (BF16, SCHEMES["rope"](128), 5, {}, ()),
    "rerope-d64-bf16-paged": (BF16, SCHEMES["rerope"](64), 3, dict(page=64, leftpad=(3, 0, 5, 0, 40)), ()),
    "leaky-d128-fp16-drafts": (FP16, SCHEMES["leaky"](128), 4, dict(queries=3, page=PAGE), ()),
    "rope-d64-fp32-one-program": (FP32, SCHEMES["rope"](64), 1, {}, slow),
    "local-d64-bf16": (BF16, Rotary.rope(64).local(70), 3, {}, slow),
    "wide-d128-bf16": (BF16, SCHEMES["rerope"](128), 4, dict(queries=20, heads=(3, 1), new=0), ()),
    "int8-d128-bf16": (BF16, SCHEMES["rope"](128), 3, dict(cache_dtype="int8", page=64), ()),
    "int8-d128-fp16": (FP16, SCHEMES["rerope"](128), 3, dict(cache_dtype="int8", heads=(2, 1)), slow),
    "self-extend-d64-bf16": (BF16, Rotary.rope(64).self_extend(48, 8), 3, dict(page=PAGE), slow),
    "dual-chunk-d64-bf16": (BF16, Rotary.rope(64).dual_chunk(160, 32), 4, {}, slow),
    "p-rope-d512-bf16": (BF16, Rotary.p_rope(512, 0.25), 3, dict(heads=(2, 1)), slow),
    "parts-d256-bf16": (BF16, Rotary.rope(256, rotary_dim=64), 3, dict(heads=(2, 1)), slow),
    "no-keys-d64-bf16": (BF16, SCHEMES["rope"](64), 3, dict(lengths=(0, 170, 0, 66), queries=2, new=0), ()),
    "latent-d576-bf16-paged": (BF16, LATENT, 3, dict(values=slice(0, 512), heads=(2, 1), page=64), ()),
    "latent-d576-bf16-many-heads": (BF16, LATENT, 3, dict(values=slice(0, 512), heads=(40, 1), page=64), slow),
    "inner-d576-fp16-weighted": (FP16, LATENT, 4, dict(values=slice(64, 576), heads=(2, 1), key_weight=WEIGHT), slow),
    "shared-d128-bf16-weighted": (
        BF16,
        SCHEMES["rerope"](128),
        3,
        dict(values=slice(32, 128), key_weight=WEIGHT[:128], heads=(2, 1), page=PAGE, leftpad=(3, 0, 5, 0, 40)),
        (),
    ),
    "narrow-d128-v64-bf16": (BF16, Rotary.rope(128, rotary_dim=64), 3, dict(head_dim_v=64, heads=(2, 1)), ()),
    "narrow-d64-v40-fp16-no-keys": (
        FP16,
        SCHEMES["rerope"](64),
        3,
        dict(lengths=(0, 170, 0, 66), queries=2, new=0, head_dim_v=40),
        slow,
    ),
    "shared-d64-bf16-no-keys": (
        BF16,
        SCHEMES["rope"](64),
        3,
        dict(lengths=(0, 170, 0, 66), queries=2, new=0, values=slice(8, 48)),
        slow,
    ),
    "sinks-d64-bf16": (BF16, SCHEMES["rope"](64), 3, dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])), slow),
}


@pytest.fixture
def limit(monkeypatch):
    def limit(programs: int) -> None:
        monkeypatch.setattr(cached.TritonCachePlan, "_resident_blocks", lambda *_: programs)

    return limit


def launched(machine) -> set[str]:
    return {launch.kernel for launch in machine.launches}


@pytest.mark.parametrize("name", [pytest.param(name, marks=case[-1]) for name, case in CASES.items()])
def test_case(machine, limit, name):
    target, rotary, programs, options, _ = CASES[name]
    limit(programs)
    lengths = [max(n, options.get("queries", 1)) for n in LENGTHS]
    Cached(target, rotary, **{"lengths": lengths, "capacity": 384, **options}).check()
    assert {"plan_shares", "attention_decode"} <= launched(machine)
    assert ("combine_shares" in launched(machine)) == (programs > 1)


@pytest.mark.parametrize("programs", [2, 5])
def test_packed(machine, limit, programs):
    """One call gives the right results for steps, a draft, a chunk that another kernel serves, and a sequence without
    queries."""
    limit(programs)
    sizes = ((1, 45), (66, 70), (5, 300), (0, 9), (1, 130))
    Cached.packed(BF16, SCHEMES["rerope"](64), sizes, heads=(2, 1), page=PAGE, mapped=True).check()
    assert {"plan_shares", "combine_shares", "attention_chunks"} <= launched(machine)


@pytest.mark.parametrize("seed", range(2))
def test_random_lengths(machine, limit, seed):
    """Random lengths give the right results for more sequences than plan_shares adds up at once. The bits are the same
    in every order of blocks and warps."""
    limit(9)
    lengths = torch.randint(0, 90, (37,), generator=torch.Generator().manual_seed(seed)).tolist()
    call = Cached(BF16, SCHEMES["rope"](16), lengths, heads=(1, 1), capacity=128, new=0)
    machine.reset(seed=seed)
    out, lse = call.call()
    call.judge(out, lse)
    machine.reset(seed=seed + 10, threads=2)
    again = call.call()
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_a_captured_step_follows_the_lengths(machine, limit):
    """A refreshed plan serves lengths that were written in place. It launches the same kernels as the replay of a CUDA
    graph."""
    limit(4)
    call = Cached(BF16, SCHEMES["rerope"](64), (150, 190, 170), new=0, heads=(2, 1))
    tables, layer = call.parts()
    shapes = dict(seqlen_q=1, heads_q=2, dtype=call.q.dtype, impl="triton")
    plan = plan_cache(tables, like=layer, rotary=call.rotary, **shapes)
    for lengths in ((150, 190, 170), (0, 3, 170), (65, 0, 1)):
        tables.seqlens.copy_(int32(lengths))
        plan.refresh()
        out, lse = plan.attend(call.q, layer, return_lse=True)
        for b, n in enumerate(lengths):
            p = call.problems[b].replace(k=call.problems[b].k[:, :n], v=call.problems[b].v[:, :n])
            if n:
                support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, p, BF16.dtype, f"{b}: ")
            else:
                assert not out[b].any() and (lse[b] == -torch.inf).all()


def test_padding_pages_and_what_neighbours_hold_change_no_bit(machine, limit):
    limit(3)
    plain = Cached(BF16, SCHEMES["rerope"](64), (20, 130, 0, 66), new=0, capacity=256, heads=(2, 1))
    out, lse = plain.call()
    others = plain.replace(seed=1).problems
    for changes in (
        dict(page=64),
        dict(leftpad=(5, 61, 7, 0)),
        dict(sequences=[others[0], plain.problems[1], *others[2:]]),
    ):
        got = plain.replace(**{"sequences": plain.problems, **changes}).call()
        same = [1] if "sequences" in changes else range(4)
        assert all(torch.equal(x[b], y[b]) for x, y in zip(got, (out, lse), strict=True) for b in same), changes
