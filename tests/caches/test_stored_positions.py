"""Caches that store positions, one number a slot or one for each axis, against the formula."""

import pytest
import support
import torch
from flashrope import Rotary, attention_varlen_with_cache, attention_with_cache
from flashrope.backends.cache_tables import CachePositions, CacheTables, Packed
from flashrope.backends.shown import store_positions
from placing import Case
from support import SCHEMES, int32
from test_positions import TARGETS

TRITON = [t for t in TARGETS if t.impl == "triton"]
EXACT = [t for t in TARGETS if t.impl in ("triton", "cpu") and t.dtype == torch.float32]
AXIAL = {
    "mrope": lambda d: Rotary.rope(d).mrope((d // 4, d // 8, d // 8)),
    "mrope_interleaved": lambda d: Rotary.rope(d).yarn(4.0, train_length=64).mrope((d // 4, d // 8, d // 8), True),
    "mrope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 2, interleaved=True).mrope((d // 8, d // 16, d // 16)),
    "mrope_local": lambda d: Rotary.rope(d).local(21).mrope((d // 4, d // 8, d // 8)),
    "scaled": lambda d: Rotary.rope(d, rotary_dim=d // 2).scale_rotated(1.7).mrope((d // 8, d // 16, d // 16)),
    "axial": lambda d: Rotary.axial(d, axes=2),
    "one_axis": lambda d: Rotary.axial(d, axes=1),
}


def coordinates(case: Case, axes: int, seed=7, low=-3, high=60) -> torch.Tensor:
    """Whole ones in any order, as of the patches of images; float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (*case.k.shape[:2], axes), generator=generator).float().to(case.q.device)


def holes(batch: int, entries: int, page: int) -> dict[str, torch.Tensor]:
    """Pages that show rows from their middle, or none; their positions fall."""
    first, lengths = torch.zeros(batch, entries, dtype=torch.int32), torch.full((batch, entries), page).int()
    first[0, 1], lengths[0, 1], lengths[-1, 2], lengths[-1, 0] = 5, page - 7, 0, 3
    positions = 100 - 30 * torch.arange(batch * entries, dtype=torch.int32).view(batch, entries)
    return dict(page_positions=positions, page_first=first, page_lengths=lengths)


@pytest.mark.interpreted(lambda target, **given: given["scheme"] in ("mrope_interleaved", "mrope_local", "scaled"))
@pytest.mark.parametrize("target", EXACT, ids=str)
@pytest.mark.parametrize("scheme", AXIAL)
def test_axes(target, scheme):
    """Pages with holes, at positions of their own; a window of an axial scheme goes by the order of the shown keys."""
    case, rotary = Case(target, (2, 5, 16, 32), 2, lengths=[75, 80]), AXIAL[scheme](32)
    slots = coordinates(case, rotary.axes)
    case.check(rotary, slot_positions=slots, **holes(2, 5, 16))
    case.check(rotary, causal=False, slot_positions=slots)


@pytest.mark.interpreted(lambda target, **given: given["scheme"] == "mrope_local")
@pytest.mark.parametrize("target", EXACT, ids=str)
@pytest.mark.parametrize("scheme", ["axial", "mrope_local"])
def test_axes_where_a_page_shows_its_last_rows(target, scheme):
    """The numbers of the queries are below the rows of the keys that they see."""
    case, rotary = Case(target, (2, 1, 16, 32), 2), AXIAL[scheme](32)
    tables = dict(page_first=int32([[10], [9]]), page_lengths=int32([[6], [5]]))
    case.check(rotary, slot_positions=coordinates(case, rotary.axes), **tables)


@pytest.mark.interpreted(lambda target, **given: given["paged"] and target.dtype == torch.float32)
@pytest.mark.parametrize("target", TRITON, ids=str)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_padded_sequences_and_queries_of_their_own(target, paged):
    case, rotary = Case(target, (2, 3, 32, 64), 3, lengths=[91, 80], leftpad=[5, 40]), AXIAL["mrope"](64)
    case = case if paged else case.contiguous()
    slots = coordinates(case, 3)
    whole = torch.randint(-9, 99, (2, 3, 3), generator=torch.Generator().manual_seed(3))
    for queries in (None, whole, whole.int(), whole / 8 + 0.125):
        case.check(rotary, slot_positions=slots, queries=queries)
    tables = dict(page_positions=int32([[1000, -7, 50]] * 2)) if paged else {}
    case.check(rotary, num_splits=3, slot_positions=slots / 3, **tables)


@pytest.mark.interpreted(lambda target, **given: False)
@pytest.mark.parametrize("target", EXACT, ids=str)
def test_chunks(target):
    """More queries than one step decodes, as a prompt with an image has."""
    case, rotary = Case(target, (1, 6, 16, 32), 80, lengths=[93]), AXIAL["mrope"](32)
    case.check(rotary, slot_positions=coordinates(case, 3))
    case.check(SCHEMES["rerope"](32), slot_positions=torch.arange(96.0).view(6, 16)[torch.argsort(case.block_table[0])])


KINDS = {
    "runs": lambda at: at + 7 * (at // 24),
    "scattered": lambda at: at * 3 - at % 3,
    "fractions": lambda at: at * 1.37 - 40.3,
    "equal": lambda at: (at // 5).floor(),
    "falling": lambda at: 200.0 - at,
    "negative": lambda at: at * 0.31 - 1000,
}
FAST = (("fractions", "local"), ("fractions", "yarn_leaky_local_log_n"), ("falling", "rope"))


@pytest.mark.interpreted(lambda target, **given: (given["kind"], given["scheme"]) in FAST)
@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("scheme", ["rope", "rerope", "yarn_leaky_local_log_n", "hope_rerope_log_n", "local"])
@pytest.mark.parametrize("kind", KINDS)
def test_bands(target, kind, scheme):
    """Distances go by what the slots store: to a fraction, and wherever it falls."""
    paged = kind in ("runs", "fractions", "falling")
    case = Case(target, (2, 12, 16, 32), 2, lengths=[183, 192], leftpad=[3, 0])
    case = case if paged else case.contiguous()
    at = torch.arange(192.0).repeat(2, 1)
    slots = KINDS[kind](at)
    if paged:
        pages = torch.empty(24, 16)
        pages[case.block_table.flatten().long().cpu()] = slots.view(24, 16)
        slots = pages
    case.check(SCHEMES[scheme](32), slot_positions=slots)
    if scheme in ("rerope", "local"):
        case.check(SCHEMES[scheme](32), causal=False, slot_positions=slots)
    if paged and scheme in ("rerope", "yarn_leaky_local_log_n"):
        case.check(SCHEMES[scheme](32), slot_positions=slots, **holes(2, 12, 16))


@pytest.mark.interpreted(lambda target, **given: given["distance"] in (20.99, 21.01, 21.8, -0.25))
@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("distance", [20.5, 20.99, 21.0, 21.01, 21.5, 21.8, 0.0, 0.25, -0.25])
def test_keys_at_the_edge_of_a_window(target, distance):
    """One key dominates its row at a fraction of a position from the edge of the window, or just ahead."""
    case = Case(target, (1, 4, 16, 32), 1, heads=(2, 1), lengths=[64], table=torch.arange(4)[None])
    case.k *= 0.1
    case.k[2, 3] = case.q[0, 0, :1] * 4
    case.whole = case.k.clone(), case.v.clone()
    query = 10.9 if distance == 21.8 else 40.25  # the key then stands on the other side of 0
    slots = torch.arange(64.0) / 8 - 20
    slots[35:] = query
    slots[35] = query - distance
    for scheme in ("rerope", "local", "leaky"):
        case.check(SCHEMES[scheme](32), slot_positions=slots.view(4, 16), queries=torch.tensor([[query]]))


@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
def test_bands_that_begin_and_end_with_64_slots(target):
    """The kernel finds a band by the positions of every 64 slots: here by one key that only its fraction brings into
    the window, by a query that stands alone, and by the first slots behind padding."""
    case = Case(target, (2, 3, 64, 16), 1, lengths=[129, 129], leftpad=[0, 7]).contiguous()
    slots = torch.full((2, 192), 21.25)
    slots[0, :64], slots[1, :64], slots[:, 128:] = torch.arange(-62.25, 1.75), torch.arange(-1000.0, -936.0), 21.5
    case.check(SCHEMES["local"](16), slot_positions=slots)


@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("scheme", ["mrope_local", "leaky"])
def test_many_pages(target, scheme):
    """More pages, and more groups of slots, than a step of the passes before reads; some rows are hidden."""
    case, axial = Case(target, (1, 66, 64, 16), 2, lengths=[66 * 64 - 3]), scheme == "mrope_local"
    rotary = AXIAL[scheme](16) if axial else Rotary.rope(16).rectify(21, 4.0).local(300)
    lengths = 60 - torch.arange(66, dtype=torch.int32)[None] % 3
    if axial:
        slots = coordinates(case, 3)
    else:
        slots = torch.empty(66, 64)
        slots[case.block_table.flatten().long().cpu()] = torch.arange(66.0 * 64).view(66, 64) / 2
    case.check(rotary, slot_positions=slots, page_lengths=lengths)


@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("axes", [0, 3])
def test_far_positions(target, axes):
    """float32 holds whole numbers alone from 2^23 on; pages add to them."""
    case = Case(target, (1, 4, 16, 32), 2, lengths=[64], table=torch.arange(4)[None])
    rotary = AXIAL["mrope"](32) if axes else SCHEMES["leaky"](32)
    slots = torch.tensor([-(2.0**27), -4097.5, 0.375, 2.0**23])[:, None] + torch.arange(16.0)
    slots = slots[..., None] + torch.arange(3.0) * 1000 if axes else slots
    bases = int32([[-(2**27), 5, 2**20 + 1, 2**27 + 3]])
    case.check(rotary, slot_positions=slots, page_positions=bases)
    case.check(rotary, slot_positions=slots)


HOSTILE = dict(
    page_positions=[[50, 40, 66, -(10**6), 0, 60], [0] * 6, [1 - 2**31, 2**31 - 1, 0, 16, 32, -5], [9] * 6],
    page_first=[[0, 3, 16, -4, 9, 0], [1 - 2**31, 2**31 - 1, -1, 20, 0, 1], [0] * 6, [2**31 - 1] * 6],
    page_lengths=[[16, 99, 16, 9, 7, 16], [2**31 - 1] * 2 + [3, 3, -1, 4], [-5, 0, 16, 2**31 - 1, 1, 7], [-9] * 6],
)


@pytest.mark.interpreted(lambda target, **given: given["seqlen_q"] == 1)
@pytest.mark.parametrize("target", EXACT, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_hostile_tables(target, seqlen_q, scheme):
    """Each sequence gets what its own tables say, as far as rows exist."""
    table = torch.tensor([[0, -5, 3, 10**6, 4, 1], [5, 5, 5, 2, 2, 2], [1, 0, 3, 4, 5, 2**31 - 1], [0] * 6])
    case = Case(target, (4, 6, 16, 32), seqlen_q, table=table, lengths=[91, 10**9, 96, -3])
    rotary = AXIAL[scheme](32) if scheme == "mrope" else SCHEMES[scheme](32)
    slots = coordinates(case, 3) if scheme == "mrope" else coordinates(case, 1)[..., 0]
    tables = {name: int32(x) for name, x in HOSTILE.items()}
    case.check(rotary, slot_positions=slots, **tables)
    del tables["page_positions"]
    case.check(rotary, slot_positions=slots, **tables)


@pytest.mark.interpreted(lambda target, **given: given["slot"] != torch.inf)
@pytest.mark.parametrize("target", EXACT, ids=str)
@pytest.mark.parametrize("slot", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_numbers_that_are_no_positions(target, slot):
    """In one sequence, they change no other."""
    case = Case(target, (2, 6, 16, 32), 2).contiguous()
    call = dict(return_lse=True, impl=target.impl)
    for rotary, axes in ((SCHEMES["rerope"](32), ()), (AXIAL["mrope"](32), (3,))):
        slots, results = coordinates(case, 3)[..., 0 if not axes else slice(3)].contiguous(), []
        for value in (20.0, slot):
            slots[0, 20] = value
            results.append(
                attention_with_cache(case.q, case.k, case.v, rotary, case.seqlens, slot_positions=slots, **call)
            )
        for a, b in zip(*results, strict=True):
            assert torch.equal(a[1], b[1])


@pytest.mark.interpreted(lambda target, **given: (given["codes"], given["scheme"]) == (torch.int8, "mrope"))
@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_quantized(target, codes, scheme):
    case = Case(target, (2, 5, 16, 32), 2, lengths=[75, 80], codes=codes)
    axial = scheme == "mrope"
    slots = coordinates(case, 3) if axial else coordinates(case, 1)[..., 0]
    case.check((AXIAL if axial else SCHEMES)[scheme](32), slot_positions=slots, **holes(2, 5, 16))


@pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_packed(target, scheme):
    """Sequences with 2, 0 and 1 rows, whose new keys leave their positions; as the calls of each alone."""
    case = Case(target, (3, 3, 16, 32), 2, lengths=[30, 20, 40])
    axial, device = scheme == "mrope", case.q.device
    rotary = (AXIAL if axial else SCHEMES)[scheme](32)
    slots = coordinates(case, 3) if axial else torch.arange(144.0, device=device).view(9, 16) * 1.5
    given = torch.tensor([[80, 81, 82], [83, 90, 83], [97, 3, 5]], device=device) / 4 + 60
    given = given if axial else given[:, 0].contiguous()
    rows, new = [(0, 0), (0, 1), (2, 1)], [support.random((1, 3, 2, 32), target, seed)[0] for seed in (8, 9)]
    q = torch.stack([case.q[row] for row in rows])
    call = dict(return_lse=True, impl=target.impl, block_table=case.block_table)
    caches, stored = [x.clone() for x in (case.k, case.v)], slots.clone()
    out, lse = attention_varlen_with_cache(
        q, *caches, rotary, int32([0, 2, 2, 3], device), case.seqlens, 2, k=new[0], v=new[1], slot_positions=stored,
        positions=given, **call,
    )  # fmt: skip
    for b, first, end in ((0, 0, 2), (2, 2, 3)):
        caches, alone = [x.clone() for x in (case.k, case.v)], slots.clone()
        call["block_table"] = case.block_table[b : b + 1]
        one = [x[None, first:end].contiguous() for x in (*new, given)]
        want = attention_with_cache(
            q[None, first:end].contiguous(), *caches, rotary, case.seqlens[b : b + 1], k=one[0], v=one[1],
            slot_positions=alone, positions=one[2], **call,
        )  # fmt: skip
        torch.testing.assert_close(out[None, first:end], want[0])
        torch.testing.assert_close(lse[None, :, first:end], want[1])
        pages = case.block_table[b].long()
        assert torch.equal(stored[pages], alone[pages])


@pytest.mark.interpreted(lambda target, **given: target.dtype == torch.float32)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("scheme", ["rope", "rerope", "hope_rerope_log_n"])
def test_float_positions_without_stored_ones(target, scheme, paged):
    case = Case(target, (2, 5, 16, 32), 2, lengths=[75, 80], leftpad=[3, 0])
    tables = holes(2, 5, 16)
    if not paged:
        case, tables = case.contiguous(), {}
    case.check(SCHEMES[scheme](32), queries=torch.tensor([[40.25, 71.5], [-3.75, 60.625]]), **tables)


@pytest.mark.parametrize("axes", [(), (3,)], ids=["one", "axes"])
@pytest.mark.parametrize("placed", ["behind", "mapped"])
def test_new_keys_without_a_place_leave_no_position(placed, axes):
    """Beyond the capacity or the pages, or sent nowhere; the others leave theirs, whichever comes first."""
    cache, table = torch.zeros(4, 16, 2, 8), int32([[3, 0], [7, -1], [2, 1]])
    given = (torch.arange(15.0).view(3, 5) + 100)[(..., *(None,) * len(axes))].expand(3, 5, *axes).contiguous()
    slots = torch.full((4, 16, *axes), -1.0)
    if placed == "behind":
        tables = CacheTables(int32([30, 3, 14]), table, new=5)
        store_positions(cache, tables._replace(positions=CachePositions(slot_positions=slots, queries=given)), 5)
        want = {(0, 14): 100, (0, 15): 101, (2, 14): 110, (2, 15): 111, (1, 0): 112, (1, 1): 113, (1, 2): 114}
    else:
        mapping = int32([-1, 64, 17, -5, 3] + [-1] * 5 + [63, 0, -1, 10**6, 5])
        packed = Packed(int32([0, 5, 10, 15]), 5, mapping)
        tables = CacheTables(int32([5, 5, 5]), table, new=packed)
        positions = CachePositions(slot_positions=slots, queries=given.flatten(0, 1))
        store_positions(cache, tables._replace(positions=positions), 15)
        want = {(1, 1): 102, (0, 3): 104, (3, 15): 110, (0, 0): 111, (0, 5): 114}
    expected = torch.full_like(slots, -1)
    for place, value in want.items():
        expected[place] = value
    assert torch.equal(slots, expected)
    before, nowhere = slots.clone(), tables
    if placed == "mapped":
        nowhere = tables._replace(new=packed._replace(slot_mapping=mapping * 0 - 1))
    nowhere = nowhere._replace(block_table=table * 0 - 1, positions=CachePositions(slot_positions=slots, queries=given))
    if placed == "mapped":
        nowhere = nowhere._replace(positions=positions)
    store_positions(cache, nowhere, given.shape[1] if placed == "behind" else 15)
    assert torch.equal(slots, before)


def test_the_host_reads_no_position_of_new_keys():
    """A fake tensor has no values: reading one raises."""
    with torch._subclasses.FakeTensorMode():
        cache, slots, given = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 3), torch.zeros(2, 1, 3)
        table, seqlens = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        positions = CachePositions(slot_positions=slots, queries=given, page_positions=table)
        store_positions(cache, CacheTables(seqlens, table, new=1, positions=positions), 1)
