"""Runs decoding in which each warp has keys and a softmax of its own (``Variant.key_groups``) on the executor."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, attention_with_cache
from flashrope.backends.triton import cached
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.triton_kernels import configs
from operators.test_needles import needle

BF16, FP16 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16))
LENGTHS = (1, 330, 3, 87, 65)  # one long sequence among short ones
RECTIFIED, LEAKY = Rotary.rope(64).rectify(70), Rotary.rope(64).rectify(21, 4.0)
MANY = Rotary.rope(64).yarn(4.0, train_length=64).rectify(11, 8.0).local(150).log_n(20, clip=False)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
PADS = (3, 0, 5, 0, 40)
slow = pytest.mark.slow
CASES = {  # with groups on sm_80 and sm_90: target, scheme, programs or None for splits, options of Cached, marks
    "rerope-bf16": (BF16, RECTIFIED, 3, dict(leftpad=PADS), ()),
    "rerope-bf16-page64": (BF16, RECTIFIED, 3, dict(page=64, sinks=SINKS), ()),
    "rerope-bf16-page128-padded": (BF16, RECTIFIED, 4, dict(page=128, leftpad=PADS), slow),
    "leaky-fp16-page16-drafts": (FP16, LEAKY, 4, dict(queries=3, page=PAGE, leftpad=PADS), ()),
    "leaky-bf16-page32-one-program": (BF16, LEAKY, 1, dict(page=32, heads=(5, 1)), slow),
    "window-log-n-bf16": (BF16, MANY, 3, dict(queries=2, heads=(8, 1)), ()),
    "ahead-bf16": (BF16, RECTIFIED, 3, dict(queries=4, causal=False, page=PAGE), slow),
    "one-head-each-fp16": (FP16, RECTIFIED, 5, dict(heads=(3, 3), queries=5), slow),
    "no-keys-bf16": (BF16, RECTIFIED, 3, dict(lengths=(0, 170, 0, 66), queries=2, new=0), ()),
    "d40-v24-bf16": (BF16, Rotary.rope(40).rectify(21), None, dict(head_dim_v=24, page=PAGE), ()),
    "d64-v40-fp16-no-keys": (FP16, RECTIFIED, 3, dict(lengths=(0, 170, 0, 66), new=0, head_dim_v=40), slow),
    "weighted-bf16": (BF16, LEAKY, 3, dict(key_weight=torch.linspace(-0.5, 1.5, 64), page=PAGE), ()),
    "self-extend-bf16": (BF16, Rotary.rope(64).self_extend(48, 8), 3, dict(page=PAGE, leftpad=PADS), ()),
    "dual-chunk-bf16": (BF16, Rotary.rope(64).dual_chunk(512, 128), 4, dict(queries=2), ()),
    "splits-d64-bf16": (BF16, RECTIFIED, None, dict(page=64, leftpad=PADS), ()),
    "splits-d64-fp16-drafts": (FP16, LEAKY, None, dict(queries=3), slow),
    "splits-d128-bf16": (BF16, Rotary.rope(128).rectify(70), None, dict(leftpad=PADS), ()),
    "splits-d128-fp16-page16": (FP16, Rotary.rope(128).rectify(21, 4.0), None, dict(queries=3, page=PAGE), ()),
    "splits-d64-self-extend-bf16": (BF16, Rotary.rope(64).self_extend(48, 8), None, dict(page=PAGE), slow),
    "splits-d128-self-extend-bf16": (BF16, Rotary.rope(128).self_extend(48, 8), None, dict(page=PAGE), ()),
    "splits-d128-dual-chunk-fp16": (FP16, Rotary.rope(128).dual_chunk(512, 128), None, dict(leftpad=PADS), ()),
    "splits-d72-bf16-page64": (BF16, Rotary.rope(72).rectify(70), None, dict(page=64), slow),
}  # fmt: skip
CASES_90 = {  # with groups on sm_90, not on sm_80
    "rope-bf16": (BF16, Rotary.rope(64), 3, dict(leftpad=PADS), ()),
    "rope-fp16-page16-drafts": (FP16, Rotary.rope(64), 3, dict(queries=3, page=PAGE), ()),
    "rope-bf16-page64-sinks": (BF16, Rotary.rope(64), 4, dict(page=64, sinks=SINKS, heads=(4, 1)), slow),
    "rope-weighted-bf16": (BF16, Rotary.rope(64), 3, dict(key_weight=torch.linspace(-0.5, 1.5, 64), page=32), slow),
    "window-log-n-bf16-page32": (BF16, Rotary.rope(64).local(150).log_n(20), 3, dict(page=32, heads=(8, 1)), ()),
    "rope-ahead-fp16": (FP16, Rotary.rope(64), 3, dict(queries=4, causal=False, leftpad=PADS), slow),
    "none-bf16-page16": (BF16, Rotary.none(64), 3, dict(page=PAGE), ()),
    "rope-d128-bf16": (BF16, Rotary.rope(128), 3, dict(leftpad=PADS), ()),
    "rope-d128-bf16-page16": (BF16, Rotary.rope(128), 3, dict(page=PAGE, heads=(4, 1)), ()),
    "rope-d128-fp16-page64-drafts": (FP16, Rotary.rope(128), 4, dict(queries=3, page=64), ()),
    "rope-d128-bf16-page32-padded": (BF16, Rotary.rope(128), 3, dict(page=32, leftpad=PADS), ()),
    "rope-d128-bf16-no-keys": (BF16, Rotary.rope(128), 3, dict(lengths=(0, 170, 0, 66), queries=2, new=0), slow),
    "rope-d96-v64-bf16-page16": (BF16, Rotary.rope(96), None, dict(page=PAGE, head_dim_v=64), ()),
    "none-d128-bf16": (BF16, Rotary.none(128), 3, dict(leftpad=PADS), ()),
    "rerope-d128-bf16": (BF16, Rotary.rope(128).rectify(70), 3, dict(leftpad=PADS), ()),
    "leaky-d128-fp16-page16-drafts": (FP16, Rotary.rope(128).rectify(21, 4.0), 4, dict(queries=3, page=PAGE), ()),
    "self-extend-d128-bf16": (BF16, Rotary.rope(128).self_extend(48, 8), 3, dict(page=64), slow),
    "splits-rope-d64-bf16-page16": (BF16, Rotary.rope(64), None, dict(page=PAGE, leftpad=PADS), ()),
    "splits-rope-d128-bf16-page16": (BF16, Rotary.rope(128), None, dict(page=PAGE, heads=(8, 1)), ()),
    "splits-rope-d128-fp16": (FP16, Rotary.rope(128), None, dict(queries=3, leftpad=PADS), slow),
    "splits-rope-d32-bf16": (BF16, Rotary.rope(32), None, dict(leftpad=PADS), ()),
    "splits-rerope-d32-fp16-page16": (FP16, Rotary.rope(32).rectify(21), None, dict(queries=2, page=PAGE), ()),
}  # fmt: skip


def takes_groups(arch: int, name: str) -> bool:
    """Whether configs.py chooses groups for a test, under the Triton that compiles it. name: the test's parameters."""
    newer = configs.newer_triton() and any(width in name for width in ("d128", "d96", "d72"))
    return (arch == 90 and not newer) or (arch == 80 and name not in CASES_90 and not name.startswith("sm_90"))


@pytest.fixture(autouse=True)
def groups(machine, monkeypatch, request):
    """Records the number of groups of every launch. Checks after the test that each warp had a group."""
    name = request.node.callspec.id if hasattr(request.node, "callspec") else ""
    if not takes_groups(machine.arch, name):
        pytest.skip("this kernel has one group of keys")
    found, decide = [], configs.key_groups

    def recorded(tile, *arguments):
        found.append((decide(tile, *arguments), tile.num_warps))
        return found[-1][0]

    monkeypatch.setattr(configs, "key_groups", recorded)
    yield found
    assert found and all(groups == warps for groups, warps in found)


@pytest.fixture
def limit(monkeypatch):
    """Sets how many programs share the keys."""
    return lambda programs: monkeypatch.setattr(cached.TritonCachePlan, "_resident_blocks", lambda *_: programs)


EVERY = CASES | CASES_90


@pytest.mark.parametrize("name", [pytest.param(name, marks=case[-1]) for name, case in EVERY.items()])
def test_case(machine, limit, name):
    target, rotary, programs, options, _ = EVERY[name]
    limit(programs)
    lengths = [max(n, options.get("queries", 1)) for n in LENGTHS]
    Cached(target, rotary, **{"lengths": lengths, "capacity": 384, **options}).check(num_splits=None if programs else 3)
    launched = {launch.kernel for launch in machine.launches}
    assert ("plan_shares" in launched) == (programs is not None)
    assert ("combine_splits" in launched) == (programs is None)


@pytest.mark.parametrize("splits", [None, 3])
def test_packed(limit, splits):
    limit(4)
    sizes = ((1, 45), (5, 300), (0, 9), (1, 130))
    call = Cached.packed(BF16, RECTIFIED, sizes, heads=(2, 1), page=PAGE, mapped=True, leftpad=(0, 7, 0, 30))
    call.check(num_splits=splits)


def test_a_block_of_eight_warps(limit):
    """A tile that tuning may choose has eight warps, and so eight groups."""
    limit(3)
    with tiles.forced("decode", configs.Tile(16, 128, 8, 3)):
        Cached(BF16, RECTIFIED, LENGTHS, page=PAGE).check()


@pytest.mark.parametrize("distance", [0, 20, 21, 22])
@pytest.mark.parametrize("factor", [None, 4.0], ids=["rerope", "leaky"])
def test_needles_on_the_edge(limit, factor, distance):
    """A key with nearly all of a row's probability lies in one group, at the edge of a band."""
    limit(2)
    rotary = Rotary.rope(64).rectify(21) if factor is None else Rotary.rope(64).rectify(21, factor)
    full, rows = needle(BF16, rotary, distance, seqlen=140), []
    for n in range(1, 4):
        row = {name: getattr(full, name)[:, -n - 1 : -n] for name in ("q", "grad_out")}
        rows.append(full.replace(**row, grad_lse=full.grad_lse[..., -n - 1 : -n], k=full.k[:, :-n], v=full.v[:, :-n]))
    assert max(support.exact_and_bound(p)[0]["lse"].max() for p in rows) > 8
    Cached(BF16, full.rotary, [p.k.shape[1] for p in rows], page=PAGE, sequences=rows).check()


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("rotary", [RECTIFIED, Rotary.rope(128)], ids=["rerope", "sm_90-rope-d128"])
def test_padding_pages_and_what_neighbours_hold_change_no_bit(limit, rotary, splits):
    limit(3)
    plain = Cached(BF16, rotary, (20, 130, 0, 66), new=0, capacity=256, heads=(2, 1))
    out, lse = plain.call(num_splits=splits)
    others = plain.replace(seed=1).problems
    for changes in (
        dict(page=PAGE),
        dict(page=64),
        dict(leftpad=(5, 61, 7, 0)),
        dict(sequences=[others[0], plain.problems[1], *others[2:]]),
    ):
        got = plain.replace(**{"sequences": plain.problems, **changes}).call(num_splits=splits)
        same = [1] if "sequences" in changes else range(4)
        assert all(torch.equal(x[b], y[b]) for x, y in zip(got, (out, lse), strict=True) for b in same), changes


def test_given_splits_give_the_bits_of_each_sequence_alone():
    batch = Cached(FP16, LEAKY, (112, 45, 200), new=0, page=PAGE, heads=(2, 1))
    out, lse = batch.call(num_splits=3)
    for b in range(3):
        alone = batch.replace(lengths=batch.lengths[b : b + 1], sequences=[batch.problems[b]], capacity=batch.slots)
        got = alone.call(num_splits=3)
        assert torch.equal(got[0][0], out[b]) and torch.equal(got[1][0], lse[b])


@pytest.mark.parametrize("rotary", [LEAKY, RECTIFIED], ids=["leaky", "rerope"])
def test_given_splits_give_a_chunk_the_bits_of_single_steps(rotary):
    """However tokens are divided into calls, an explicit number of splits gives them the same bits."""
    chunk = Cached(FP16, rotary, (140,), 5, new=0, page=PAGE, heads=(2, 1))
    out, lse = chunk.call(num_splits=3)
    for row in range(5):
        tables = dict(cache_seqlens=chunk.cache_seqlens - (4 - row), block_table=chunk.block_table)
        options = dict(return_lse=True, impl="triton", num_splits=3)
        step = chunk.q[:, row : row + 1], chunk.k_cache, chunk.v_cache, rotary
        got = attention_with_cache(*step, **tables, **options)
        assert torch.equal(got[0], out[:, row : row + 1]) and torch.equal(got[1], lse[..., row : row + 1])
