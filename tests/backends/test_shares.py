"""Tests how decoding divides the keys of a batch into shares, one per program, and that results do not depend on the
shares."""

import itertools
import random
from collections import defaultdict

import pytest
import support
import torch
from caching import PAGE, Cached, Page

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import Rotary, plan_cache
from flashrope.backends.triton import cached, launcher
from flashrope.triton_kernels.cached.shares import BEGINNING, SETUP, WHOLE
from support import SCHEMES, int32

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or support.INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, FP16 = (support.Target("triton", dtype, DEVICE) for dtype in (torch.float32, torch.float16))
LENGTHS = (1, 190, 0, 40, 65)
LATENT = Rotary.rope(576, rotary_dim=64, first_channel=512)
WEIGHT = torch.linspace(-0.5, 1.5, 576)


@pytest.fixture
def limit(monkeypatch):
    """Sets how many programs the device can run at a time."""

    def limit(programs: int) -> None:
        monkeypatch.setattr(cached.TritonCachePlan, "_resident_blocks", lambda *_: programs)

    return limit


@pytest.fixture
def launches(monkeypatch):
    """Records the arguments of every launch, by kernel."""
    found, launch = defaultdict(list), launcher.launch

    def record(kernel, grid, *args, **options):
        found[kernel.__name__].append((grid, args, options["VARIANT"]))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(launcher, "launch", record)
    return found


def divided(launches) -> tuple[list[list[list[int]]], list[list[int]], list[int]]:
    """Returns the pieces of every share, the cuts and the empty sequences, as the last launch of plan_shares found
    them."""
    ((programs,), (workspace, *_), _) = launches["plan_shares"][-1]
    shares, pieces, cuts, empty = (x.tolist() for x in workspace[:4])
    return [pieces[first : first + count] if count else [] for first, count in shares[:programs]], cuts, empty


def check_division(call: Cached, launches, tiles: list[range], rows: list[int]) -> None:
    """Checks that the shares cover every tile once and in order, and that their sizes, pieces and cuts are right.
    tiles: for each sequence, the key tiles that it sees. rows: for each sequence, the number of tiles of query rows."""
    shares, cuts, empty = divided(launches)
    heads_kv = call.heads[1]
    wanted = [
        (b, head, row, tile)
        for b, own in enumerate(tiles)
        for row in range(rows[b])
        for head in range(heads_kv)
        for tile in own
    ]
    found = [(b, head, row, tile) for own in shares for b, head, row, a, z, _ in own for tile in range(a, z)]
    assert found == wanted
    assert empty == [int(not own or not n) for own, n in zip(tiles, rows, strict=True)]
    sizes = [sum(z - a for *_, a, z, _ in own) for own in shares]
    assert max(sizes, default=0) <= -(-len(wanted) // len(shares)) + SETUP
    pieces = defaultdict(list)
    for n, own in enumerate(shares):
        for b, head, row, first, stop, part in own:
            pieces[b, head, row].append((n, part))
            assert (part == WHOLE) == (first == tiles[b].start and stop == tiles[b].stop)
            assert (part == BEGINNING) == (first == tiles[b].start and stop < tiles[b].stop)
    expected = {own[0][0]: [len(own), *segment] for segment, own in pieces.items() if len(own) > 1}
    assert {n: cut for n, cut in enumerate(cuts) if cut[0]} == expected


@pytest.mark.parametrize("seed", range(6))
def test_every_tile_of_keys_lies_in_one_share(limit, launches, monkeypatch, seed):
    """The shares hold every tile of keys once. No share exceeds the mean by more than ``SETUP``, which is the cost of
    a second segment, in tiles. The cuts name all pieces of a segment."""
    draw = random.Random(seed)
    batch = draw.choice((2, 3, 31, 32, 33, 70))
    longest = draw.choice((16, 64, 65, 700))
    lengths = [draw.choice((0, 1, longest, draw.randrange(longest + 1))) for _ in range(batch)]
    lengths[0] = max(lengths[0], 1)
    limit(draw.choice((1, 2, 5, 64, 216)))
    monkeypatch.setattr(launcher.Launch, "__call__", lambda *_: None)  # the kernels that use the shares do not run
    window = draw.choice((None, 100))
    rotary = Rotary.rope(32) if window is None else Rotary.rope(32).local(window)
    call = Cached(FP32, rotary, lengths, heads=(2, draw.choice((1, 2))), new=0, capacity=704)
    call.call()
    *_, variant = launches["plan_shares"][-1]
    block = variant.block_n
    tiles = [range(0 if window is None else max(n - window, 0) // block, -(-n // block)) for n in lengths]
    check_division(call, launches, tiles, [1] * batch)


@pytest.mark.parametrize(
    ("lengths", "programs", "sizes"),
    [
        ([700] * 3, 5, [13, 13, 13, 13, 14]),  # shares of whole segments would have 22 tiles
        ([700] * 3, 4, [16, 17, 16, 17]),
        ([192] * 3, 4, [6, 6, 6]),  # whole segments make shares at most 2 tiles longer
        ([192] * 3, 7, [3, 3, 3, 3, 3, 3]),
    ],
)
def test_segments_are_cut_alike_where_that_is_cheap(limit, launches, monkeypatch, lengths, programs, sizes):
    limit(programs)
    monkeypatch.setattr(launcher.Launch, "__call__", lambda *_: None)
    Cached(FP32, Rotary.rope(32), lengths, heads=(1, 1), new=0, capacity=704).call()
    shares, *_ = divided(launches)
    assert [sum(z - a for *_, a, z, _ in own) for own in shares if own] == sizes


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_packed_queries(limit, launches, programs):
    """A sequence has as many tiles of query rows as it needs. A sequence that the kernel for long chunks serves has
    none."""
    limit(programs)
    sizes = ((1, 45), (70, 80), (20, 20), (0, 9), (3, 130))
    call = Cached.packed(FP32, SCHEMES["rerope"](32), sizes, heads=(2, 1), page=PAGE)
    call.check()
    *_, variant = launches["plan_shares"][-1]
    tiles = [range(-(-n // variant.block_n)) for _, n in sizes]
    rows = [0 if n > 64 else -(-2 * n // variant.block_m) for n, _ in sizes]
    check_division(call, launches, tiles, rows)


SCHEME_CASES = {
    "rope": (SCHEMES["rope"](32), {}),
    "leaky": (SCHEMES["leaky"](32), dict(page=PAGE, leftpad=(3, 0, 5, 1, 0))),
    "local": (Rotary.rope(32).local(30), dict(queries=3)),
    "two-sided": (Rotary.rope(32).rectify(50), dict(causal=False, queries=2)),
    "self-extend": (Rotary.rope(32).self_extend(48, 8), {}),
    "dual chunk": (Rotary.rope(32).dual_chunk(160, 32), dict(page=64)),
    "int8": (SCHEMES["rerope"](128), dict(cache_dtype="int8", heads=(2, 1))),
    "many rows": (SCHEMES["rope"](128), dict(queries=20, heads=(3, 1), new=0)),
    "sinks": (SCHEMES["rope"](32), dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "narrow values": (SCHEMES["rerope"](32), dict(head_dim_v=8, page=PAGE)),
    "heads in parts, narrow values": (Rotary.rope(256, rotary_dim=64), dict(head_dim_v=40, heads=(2, 1))),
    "values in keys": (SCHEMES["rerope"](32), dict(values=slice(8, 24), key_weight=WEIGHT[:32])),
    "values in parts of keys": (LATENT, dict(values=slice(0, 512), key_weight=WEIGHT, page=64, heads=(2, 1))),
    "inner values in parts of keys": (LATENT, dict(values=slice(64, 560), heads=(2, 1), new=0)),
}


@pytest.mark.parametrize(("case", "programs"), zip(SCHEME_CASES, itertools.cycle((1, 3, 7)), strict=False))
def test_results(limit, launches, case, programs):
    limit(programs)
    rotary, options = SCHEME_CASES[case]
    lengths = tuple(max(n, options.get("queries", 1) if options.get("new") is None else 0) for n in LENGTHS)
    target = FP32 if rotary.head_dim <= 64 else FP16  # heads of more than 64 channels use shares only in 16-bit types
    Cached(target, rotary, lengths, **{"capacity": 192, **options}).check()
    assert launches["plan_shares"]


def test_a_captured_step_follows_the_lengths(limit):
    """After ``refresh``, a plan uses the lengths that were written in place, as in the replay of a CUDA graph."""
    limit(5)
    call = Cached(FP32, SCHEMES["rerope"](32), (150, 190, 170), new=0)
    tables, layer = call.parts()
    shapes = dict(seqlen_q=1, heads_q=call.heads[0], dtype=call.q.dtype, impl="triton")
    plan = plan_cache(tables, like=layer, rotary=call.rotary, **shapes)
    for lengths in ((150, 190, 170), (0, 3, 170), (65, 0, 1)):
        tables.seqlens.copy_(int32(lengths, DEVICE))
        plan.refresh()
        out, lse = plan.attend(call.q, layer, return_lse=True)
        want, want_lse = call.replace(sequences=None).call(cache_seqlens=int32(lengths, DEVICE))
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        for b, n in enumerate(lengths):
            p = call.problems[b].replace(k=call.problems[b].k[:, :n], v=call.problems[b].v[:, :n])
            if n:
                support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, p, FP32.dtype, f"{b}: ")
            else:
                assert not out[b].any() and (lse[b] == -torch.inf).all()


def test_padding_pages_and_what_neighbours_hold_change_no_bit(limit):
    limit(3)
    plain = Cached(FP16, SCHEMES["rerope"](64), LENGTHS, new=0, capacity=256)
    out, lse = plain.call()
    for changes in (dict(page=PAGE), dict(page=64), dict(leftpad=(5, 61, 7, 0, 1)), dict(capacity=512)):
        got = plain.replace(sequences=plain.problems, **changes).call()
        assert torch.equal(got[0], out) and torch.equal(got[1], lse), changes
    others = plain.replace(seed=1).problems
    for b in range(len(LENGTHS)):
        mixed = [plain.problems[b] if n == b else other for n, other in enumerate(others)]
        got = plain.replace(sequences=mixed).call()
        assert torch.equal(got[0][b], out[b]) and torch.equal(got[1][b], lse[b])


def test_one_sequence_is_divided_by_shape(launches):
    """A batch of one sequence is divided evenly by splits, without a launch of plan_shares."""
    Cached(FP32, SCHEMES["rope"](32), (190,), heads=(1, 1)).check()
    assert set(launches) == {"append_rows", "attention_decode", "combine_splits"}


def test_explicit_positions_are_divided_by_shape(launches):
    pages = [[Page(20 * n, 13, 2) for n in range(15)], [Page(5)], [Page(0, 0)], [Page(n * PAGE) for n in range(9)]]
    Cached.of_pages(FP32, SCHEMES["rerope"](32), pages, queries=2).check()
    assert set(launches) == {"place_tokens", "attention_decode", "combine_splits"}
