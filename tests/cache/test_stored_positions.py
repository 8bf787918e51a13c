"""Compares caches that store positions, one number per slot or one per axis, with the formula."""

import pytest
import support
import torch
from caching import PAGE, POSITIONED, Cached, cached_call
from flashrope import Rotary
from flashrope.calls.cache_tables import CachePositions, CacheTables, Packed
from flashrope.calls.visible import store_positions
from support import SCHEMES, int32
from test_cached_positions import MAPPED, holes, hostile, in_float32, targets

EXACT = [t for t in POSITIONED if t.impl in ("triton", "cpu") and t.dtype == torch.float32]
exact_targets = pytest.mark.parametrize("target", EXACT, ids=str)
triton = pytest.mark.parametrize("target", [t for t in EXACT if t.impl == "triton"], ids=str)
AXIAL = {
    "mrope": lambda d: Rotary.rope(d).mrope((d // 4, d // 8, d // 8)),
    "mrope_interleaved": lambda d: Rotary.rope(d).yarn(4.0, train_length=64).mrope((d // 4, d // 8, d // 8), True),
    "mrope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 2, interleaved=True).mrope((d // 8, d // 16, d // 16)),
    "mrope_local": lambda d: Rotary.rope(d).local(21).mrope((d // 4, d // 8, d // 8)),
    "scaled": lambda d: Rotary.rope(d, rotary_dim=d // 2).scale_rotated(1.7).mrope((d // 8, d // 16, d // 16)),
    "axial": lambda d: Rotary.axial(d, axes=2),
    "one_axis": lambda d: Rotary.axial(d, axes=1),
}
EVERY = SCHEMES | AXIAL | MAPPED


def over(target, scheme, lengths, queries=2, head_dim=32, page=PAGE, **options) -> Cached:
    """Returns a call that reads a cache and appends nothing."""
    rotary = EVERY[scheme](head_dim) if isinstance(scheme, str) else scheme
    options = {"heads": (2, 1) if target.slow else (4, 2), **options}
    return Cached(target, rotary, lengths, queries, new=0, page=page, layout="poisoned", **options)


def coordinates(c: Cached, axes: int, seed=7, low=-3, high=60) -> torch.Tensor:
    """Returns whole coordinates in random order, as image patches have them, in float32. axes 0: one number per
    slot."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high, (*c.k_cache.shape[:2], axes or 1), generator=generator).float()
    return values.to(c.q.device) if axes else values[..., 0].to(c.q.device)


@pytest.mark.interpreted(lambda target, scheme: scheme in ("mrope_interleaved", "mrope_local", "scaled"))
@exact_targets
@pytest.mark.parametrize("scheme", AXIAL)
def test_axes(target, scheme):
    """Pages with hidden rows and explicit positions are right. A window of an axial scheme follows the order of the
    visible keys."""
    c = over(target, scheme, [75, 80])
    slots = coordinates(c, c.rotary.axes)
    c.at(slot_positions=slots, **holes(2, 5, 16)).check(validate=False)
    c.replace(causal=False).at(slot_positions=slots).check()


@pytest.mark.interpreted(lambda target, scheme: scheme == "mrope_local")
@exact_targets
@pytest.mark.parametrize("scheme", ["axial", "mrope_local"])
def test_axes_where_the_last_rows_of_a_page_are_visible(target, scheme):
    """Only the last rows of a page are visible. Queries are right, although a query's rank among the visible
    keys is lower than the row numbers of the keys that the query sees."""
    c = over(target, scheme, [16, 16])
    tables = dict(page_first=int32([[10], [9]]), page_lengths=int32([[6], [5]]))
    c.at(slot_positions=coordinates(c, c.rotary.axes), **tables).check()


@in_float32
@pytest.mark.parametrize("target", [t for t in POSITIONED if t.impl == "triton"], ids=str)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_padded_sequences_and_queries_of_their_own(target, paged):
    c = over(target, "mrope", [86, 40], 3, 64, page=32 * paged, leftpad=[5, 40], capacity=96, heads=(2, 1))
    slots = coordinates(c, 3)
    whole = torch.randint(-9, 99, (2, 3, 3), generator=torch.Generator().manual_seed(3))
    for queries in (None, whole, whole.int(), whole / 8 + 0.125):
        c.at(slot_positions=slots, positions=queries).check()
    tables = dict(page_positions=int32([[1000, -7, 50]] * 2)) if paged else {}
    c.at(slot_positions=slots / 3, **tables).check(num_splits=3, validate=False)


@pytest.mark.interpreted(lambda target: False)
@exact_targets
def test_chunks(target):
    """Chunks with more queries than the decode kernel takes, such as a prompt with an image, give right results."""
    c = over(target, "mrope", [93], 80)
    c.at(slot_positions=coordinates(c, 3)).check()
    c = over(target, "rerope", [93], 80)
    c.at(slot_positions=c.by_slot(torch.arange(96.0)[None])).check()


KINDS = {
    "runs": lambda at: at + 7 * (at // 24),
    "runs at halves": lambda at: at + 7 * (at // 24) + 0.5,
    "scattered": lambda at: at * 3 - at % 3,
    "fractions": lambda at: at * 1.37 - 40.3,
    "equal": lambda at: (at // 5).floor(),
    "falling": lambda at: 200.0 - at,
    "negative": lambda at: at * 0.31 - 1000,
}
FAST = (("equal", "local"), ("fractions", "local"), ("fractions", "yarn_leaky_local_log_n"), ("falling", "rope"))


@pytest.mark.interpreted(lambda target, kind, scheme: (kind, scheme) in FAST)
@triton
@pytest.mark.parametrize("scheme", ["rope", "rerope", "yarn_leaky_local_log_n", "hope_rerope_log_n", "local"])
@pytest.mark.parametrize("kind", KINDS)
def test_bands(target, kind, scheme):
    """Bands use the exact distances between stored positions, including fractions, wherever the band's edge falls."""
    paged = kind in ("runs", "fractions", "falling")
    c = over(target, scheme, [180, 192], page=PAGE * paged, leftpad=[3, 0])
    slots = c.by_slot(KINDS[kind](torch.arange(192.0).repeat(2, 1)))
    c.at(slot_positions=slots).check(validate=kind == "equal")
    if scheme in ("rerope", "local"):
        c.replace(causal=False).at(slot_positions=slots).check(validate=False)
    if paged and scheme in ("rerope", "yarn_leaky_local_log_n"):
        c.at(slot_positions=slots, **holes(2, 12, 16)).check(validate=False)


@pytest.mark.interpreted(lambda target, distance: distance in (20.99, 21.01, 21.8, -0.25))
@triton
@pytest.mark.parametrize("distance", [20.5, 20.99, 21.0, 21.01, 21.5, 21.8, 0.0, 0.25, -0.25])
def test_keys_at_the_edge_of_a_window(target, distance):
    """A key that dominates its row is visible or hidden as it should be, if it is a fraction of a position away from
    the edge of the window or from the query."""
    p = support.problem(target, SCHEMES["rope"](32), 1, 64)
    p.k *= 0.1
    p.k[0, 35] = p.q[0, 0, :1] * 4
    query = 10.9 if distance == 21.8 else 40.25  # the key's position is then -10.9
    slots = torch.arange(64.0) / 8 - 20
    slots[35:] = query
    slots[35] = query - distance
    for scheme in ("rerope", "local", "leaky"):
        rotary = SCHEMES[scheme](32)
        c = over(target, rotary, [64], 1, heads=(2, 1), sequences=[p.replace(rotary=rotary)])
        c.at(slot_positions=c.by_slot(slots[None]), positions=torch.tensor([[query]])).check(validate=False)


@triton
def test_bands_that_begin_and_end_with_64_slots(target):
    """The kernel finds a band from the lowest and the highest position in every 64 slots. The test has three hard
    cases: a key that is in the window only because of its fraction, a query far from all keys, and the first slots
    after padding."""
    c = over(target, "local", [129, 122], 1, 16, page=0, leftpad=[0, 7], capacity=192)
    slots = torch.full((2, 192), 21.25)
    slots[0, :64], slots[1, :64], slots[:, 128:] = torch.arange(-62.25, 1.75), torch.arange(-1000.0, -936.0), 21.5
    c.at(slot_positions=slots).check()


@triton
@pytest.mark.parametrize("scheme", ["mrope_local", "leaky"])
def test_many_pages(target, scheme):
    """Sequences may have more pages, and more groups of slots, than one step of the preparing passes reads. Some rows
    are hidden."""
    axial = scheme == "mrope_local"
    rotary = AXIAL[scheme](16) if axial else Rotary.rope(16).rectify(21, 4.0).local(300)
    c = over(target, rotary, [66 * 64 - 3], page=64, heads=(2, 1))
    slots = coordinates(c, 3) if axial else c.by_slot(torch.arange(66.0 * 64)[None] / 2)
    lengths = 60 - torch.arange(66, dtype=torch.int32)[None] % 3
    c.at(slot_positions=slots, page_lengths=lengths).check()


@triton
@pytest.mark.parametrize("scheme", ["mrope", "leaky"])
def test_far_positions(target, scheme):
    """Positions from 2^23 on, where float32 holds only whole numbers, are right. Page positions are added to the stored
    positions."""
    c = over(target, scheme, [64], table=torch.arange(4)[None])
    slots = torch.tensor([-(2.0**27), -4097.5, 0.375, 2.0**23])[:, None] + torch.arange(16.0)
    slots = slots[..., None] + torch.arange(3.0) * 1000 if scheme == "mrope" else slots
    bases = int32([[-(2**27), 5, 2**20 + 1, 2**27 + 3]])
    c.at(slot_positions=slots, page_positions=bases).check()
    c.at(slot_positions=slots).check()


@pytest.mark.interpreted(lambda target, seqlen_q, scheme: seqlen_q == 1)
@exact_targets
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_hostile_tables(target, seqlen_q, scheme):
    c = hostile(target, EVERY[scheme](32), seqlen_q)
    slots, tables = coordinates(c, 3 * (scheme == "mrope")), dict(c.tables)
    c.at(slot_positions=slots, **tables).check(validate=False)
    del tables["page_positions"]
    c.at(slot_positions=slots, **tables).check(validate=False)


@pytest.mark.interpreted(lambda target, slot, seqlen_q: slot != torch.inf and seqlen_q == 2)
@exact_targets
@pytest.mark.parametrize("seqlen_q", [1, 2, 70])
@pytest.mark.parametrize("slot", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_numbers_that_are_no_positions(target, slot, seqlen_q):
    """Stored numbers that are not valid positions affect only the sequence that stores them."""
    for scheme, axes in (("rerope", 0), ("mrope", 3)):
        c, results = over(target, scheme, [96, 96], seqlen_q, page=0), []
        slots = coordinates(c, axes)
        for value in (20.0, slot):
            slots[0, 20] = value
            results.append(c.call(slot_positions=slots, validate=False))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a[1], b[1])


@pytest.mark.interpreted(lambda target, scheme: scheme == "mrope")
@triton
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_quantized(target, scheme):
    c = over(target, scheme, [75, 80], cache_dtype="int8")
    c.at(slot_positions=coordinates(c, 3 * (scheme == "mrope")), **holes(2, 5, 16)).check(validate=False)


@in_float32
@targets
@pytest.mark.parametrize("scheme", MAPPED)
def test_fractions(target, scheme):
    """Fractional positions are right just before and just after a key and the edges of a group and of a chunk."""
    c = over(target, scheme, [75, 80], 3, heads=(2, 1))
    slots = c.by_slot(torch.arange(160.0).view(2, 80) * 1.375 - 20)
    queries = torch.tensor([[88.0, 126.875, 128.125], [127.75, 195.5, 300.25]])
    for tables in ({"slot_positions": slots, "positions": queries}, {"slot_positions": slots}, {"positions": queries}):
        if "slot_positions" in tables or scheme == "self_extend":
            c.at(**tables).check()


# ---- what calls store


@triton
@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_packed(target, scheme):
    """Packed sequences with 2, 0 and 1 new rows give the results of separate calls, and new keys write their
    positions."""
    axial, new = scheme == "mrope", [support.random((1, 3, 2, 32), target, seed)[0] for seed in (8, 9)]
    c = over(target, scheme, [30, 20, 40], (2, 0, 1), capacity=48, heads=(4, 2))
    slots = coordinates(c, 3) if axial else c.by_slot(torch.arange(144.0).view(3, 48)) * 1.5
    slots = slots.to(c.q.device)
    given = torch.tensor([[80, 81, 82], [83, 90, 83], [97, 3, 5]], device=slots.device) / 4 + 60
    given = given if axial else given[:, 0].contiguous()
    caches, stored = [x.clone() for x in (c.k_cache, c.v_cache)], slots.clone()
    options = dict(return_lse=True, impl=target.impl)
    out, lse = cached_call(
        c.q, *caches, c.rotary, c.cu_seqlens_q, c.cache_seqlens, 2, k=new[0], v=new[1], slot_positions=stored,
        positions=given, block_table=c.block_table, **options,
    )  # fmt: skip
    for b in (0, 2):
        caches, alone, table = [x.clone() for x in (c.k_cache, c.v_cache)], slots.clone(), c.block_table[b : b + 1]
        q, k, v, positions = (x[None, c.rows(b)].contiguous() for x in (c.q, *new, given))
        want = cached_call(
            q, *caches, c.rotary, c.cache_seqlens[b : b + 1], k=k, v=v, slot_positions=alone, positions=positions,
            block_table=table, **options,
        )  # fmt: skip
        torch.testing.assert_close(out[None, c.rows(b)], want[0])
        torch.testing.assert_close(lse[None, :, c.rows(b)], want[1])
        pages = table[0, : 3 if b == 2 else 2].long()
        assert torch.equal(stored[pages], alone[pages])


@targets
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_new_keys_leave_their_positions(target, paged):
    """New keys store positions that follow the last key, or the given positions. The next call reads them."""
    rotary, device, shape = SCHEMES["rerope"](16), target.device, (4, PAGE) if paged else (2, 32)
    p = support.problem(target, rotary, 12, batch=2, heads=4)
    slots = torch.full(shape, torch.nan, device=device)
    caches = [torch.full((*shape, 2, 16), torch.nan).to(p.q) for _ in range(2)]
    options = dict(slot_positions=slots, impl=target.impl, return_lse=True, validate=True)
    if paged:  # a slot stores its position relative to the position of its page
        options["block_table"] = int32([[2, 1], [3, 0]], device)
        options["page_positions"] = int32([[3, 20], [-5, 11]], device)
    given = torch.tensor([[0, 1, 2, 7, 7.5], [3, 4, 5, 6, 9]], device=device)
    placed, first = [], 0
    for rows, positions in ((5, given), (3, None), (4, given[:, :4] + 40)):
        q, k, v = (x[:, first : first + rows].contiguous() for x in (p.q, p.k, p.v))
        lengths = int32([first] * 2, device)
        out, lse = cached_call(q, *caches, rotary, lengths, k=k, v=v, positions=positions, **options)
        if positions is None:
            positions = placed[-1][:, -1:] + torch.arange(1, 4, device=device)
        placed.append(positions.double())
        first += rows
        keys = torch.cat(placed, 1)
        for b in range(2):
            own = slice(b, b + 1)
            one = p.replace(q=q[own], k=p.k[own, :first], v=p.v[own, :first], places=(placed[-1][b], keys[b]))
            one = one.replace(grad_out=p.grad_out[own, :rows], grad_lse=p.grad_lse[own, :, :rows])
            support.check_budget({"out": out[own], "lse": lse[own]}, one, target.dtype)


@targets
def test_axial(target):
    """Three coordinates per slot give the right results, as in the cache of a vision-language model. Causality follows
    the order of tokens."""
    p = support.problem(target, Rotary.axial(24, axes=3), 20, heads=4)
    grid, device = torch.tensor([[3, n // 4, n % 4] for n in range(12)]), target.device
    text = torch.arange(3)[:, None].expand(3, 3), torch.arange(6, 11)[:, None].expand(5, 3)
    positions = torch.cat((text[0], grid, text[1])).to(device, torch.int32)[None]
    caches = [torch.full((2, PAGE, 2, 24), torch.nan).to(p.q) for _ in range(2)]
    options = dict(block_table=int32([[1, 0]], device), slot_positions=torch.zeros(2, PAGE, 3, device=device))
    options |= dict(impl="sdpa" if target.impl == "cpu" else target.impl, return_lse=True)
    results, n = [], 0
    for rows, given in ((15, positions[:, :15]), (4, positions[:, 15:19]), (1, None)):
        q, k, v = (x[:, n : n + rows].contiguous() for x in (p.q, p.k, p.v))
        lengths = int32([n], device)
        results.append(cached_call(q, *caches, p.rotary, lengths, k=k, v=v, positions=given, **options))
        n += rows
    out, lse = torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)
    places = positions[0].double()
    support.check_budget({"out": out, "lse": lse}, p.replace(places=(places, places)), target.dtype)


@pytest.mark.parametrize("axes", [(), (3,)], ids=["one", "axes"])
@pytest.mark.parametrize("placed", ["behind", "mapped"])
def test_new_keys_without_a_place_leave_no_position(placed, axes):
    """New keys beyond the capacity or the pages, or with slot -1, store no position. The other keys store theirs, in
    any order."""
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
    """The host reads no position of new keys. The tensors are fake, and reading a value of a fake tensor raises an
    error."""
    with torch._subclasses.FakeTensorMode():
        cache, slots, given = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 3), torch.zeros(2, 1, 3)
        table, seqlens = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        positions = CachePositions(slot_positions=slots, queries=given, page_positions=table)
        store_positions(cache, CacheTables(seqlens, table, new=1, positions=positions), 1)
