"""``plan_cache``: the layers of a step, bitwise what ``attention_with_cache`` gives for each of them."""

import gc
import re

import pytest
import torch
from flashrope import (
    CacheLayer,
    CachePositions,
    CacheTables,
    Packed,
    PagedKVCache,
    Rotary,
    attention_varlen_with_cache,
    attention_with_cache,
    plan_cache,
)
from flashrope.backends.quantized import quantize
from flashrope.backends.registry import load_backend
from support import int32

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE, PAGES = 4, 2, 32, 16, 5
LENGTHS = (40, 17, 64)
SCHEMES = {
    "rope": Rotary.rope(HEAD_DIM),
    "hope": Rotary.hope(HEAD_DIM, 16),
    "rerope": Rotary.rope(HEAD_DIM).rectify(8).log_n(32),
}
TYPES = {"float": None, "int8": torch.int8, "int4": torch.uint8}
OPTIONS = {"seqlen_q": 1, "heads_q": HEADS_Q, "dtype": torch.float32}


def table() -> torch.Tensor:
    return torch.randperm(len(LENGTHS) * PAGES, generator=torch.Generator().manual_seed(1)).view(3, -1).int()


def layer_of(seed: int, paged: bool, codes=None) -> CacheLayer:
    shape = (len(LENGTHS) * PAGES, PAGE) if paged else (len(LENGTHS), PAGES * PAGE)
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(*shape, HEADS_KV, HEAD_DIM, generator=generator) for _ in "kv")
    if codes is None:
        return CacheLayer(k, v)
    (k, k_scale), (v, v_scale) = quantize(k, codes), quantize(v, codes)
    return CacheLayer(k, v, k_scale, v_scale)


def rows(seed: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(*shape, heads, HEAD_DIM, generator=generator) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]


def copy(layer: CacheLayer) -> CacheLayer:
    return CacheLayer(*(x if x is None else x.clone() for x in layer))


def alike(got, wanted) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("codes", TYPES)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_a_step(scheme, paged, codes, impl):
    rotary, tables = SCHEMES[scheme], CacheTables(int32(LENGTHS), table() if paged else None, int32([3, 0, 9]), new=1)
    layers = [layer_of(n, paged, TYPES[codes]) for n in range(2 if impl == "triton" else 3)]
    plan = plan_cache(tables, like=layers[0], rotary=rotary, impl=impl, **OPTIONS)
    for n, layer in enumerate(layers):
        q, k, v = rows(n, 3, 1)
        alone = copy(layer)
        scales = {"k_scale": alone.k_scale, "v_scale": alone.v_scale}
        options = {"block_table": tables.block_table, "cache_leftpad": tables.leftpad, "impl": impl, **scales}
        wanted, lse = attention_with_cache(
            q, alone.k, alone.v, rotary, tables.seqlens, k=k, v=v, return_lse=True, **options
        )
        out = torch.empty_like(q)
        got = plan.attend(q, layer, k, v, return_lse=True, out=out)
        assert got[0] is out and torch.equal(out, wanted) and torch.equal(got[1], lse) and out.any()
        assert alike(layer, alone)
        assert torch.equal(plan.attend(q, layer), wanted)  # the layer holds the new keys already


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("placed", [False, True], ids=["appended", "mapped"])
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 3, 3), (1, 4, 0)], ids=str)
def test_packed_queries(queries, placed, impl):
    starts, total = int32([0, *torch.tensor(queries).cumsum(0).tolist()]), sum(queries)
    pages, lengths = table(), [n + new * placed for n, new in zip(LENGTHS, queries, strict=True)]
    slots = [
        int(pages[b, i // PAGE]) * PAGE + i % PAGE
        for b, (n, new) in enumerate(zip(LENGTHS, queries, strict=True))
        for i in range(n, n + new)
    ]
    mapping = torch.tensor(slots) if placed else None
    tables = CacheTables(int32(lengths), pages, new=Packed(starts, max(queries), mapping, appends=not placed))
    layers, rotary = [layer_of(n, True) for n in range(3)], SCHEMES["rerope"]
    plan = plan_cache(tables, like=layers[0], rotary=rotary, impl=impl, **OPTIONS | {"seqlen_q": total})
    for n, layer in enumerate(layers):
        (q, k, v), alone = rows(n, total), copy(layer)
        wanted = attention_varlen_with_cache(
            q, alone.k, alone.v, rotary, starts, tables.seqlens, max(queries), k=k, v=v, block_table=pages,
            slot_mapping=mapping, impl=impl,
        )  # fmt: skip
        out = torch.empty_like(q)
        assert torch.equal(plan.attend(q, layer, k, v, out=out), wanted) and torch.equal(out, wanted)
        assert alike(layer, alone)


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("stored", [False, True])
def test_explicit_positions_are_stored_once(impl, stored, monkeypatch):
    slots = torch.arange(len(LENGTHS) * PAGES * PAGE).view(-1, PAGE) % (PAGES * PAGE) + 0.5
    first = torch.zeros(3, PAGES, dtype=torch.int32)
    first[0, 1] = 4  # hides four rows
    positions = CachePositions(page_first=first, slot_positions=slots.clone() if stored else None)
    rotary, layers = SCHEMES["rope"], [layer_of(n, True) for n in range(3)]
    tables = CacheTables(int32(LENGTHS), table(), new=1, positions=positions)
    plan = plan_cache(tables, like=layers[0], rotary=rotary, impl=impl, **OPTIONS)
    for n, layer in enumerate(layers):
        (q, k, v), alone = rows(n, 3, 1), copy(layer)
        given = {"slot_positions": slots.clone()} if stored else {}
        wanted = attention_with_cache(
            q, alone.k, alone.v, rotary, tables.seqlens, k=k, v=v, block_table=tables.block_table, page_first=first,
            impl=impl, **given,
        )  # fmt: skip
        assert torch.equal(plan.attend(q, layer, k, v), wanted)
        if stored:
            assert torch.equal(positions.slot_positions, given["slot_positions"])


def test_rotated_keys_and_append():
    rotary, layer = SCHEMES["rope"], layer_of(0, False)
    tables, (q, k, v) = CacheTables(int32(LENGTHS), new=1), rows(0, 3, 1)
    plan = plan_cache(tables, like=layer, rotary=rotary, rotated_keys=True, **OPTIONS)
    alone = copy(layer)
    plan.append(layer, k, v)
    wanted = attention_with_cache(q, *alone[:2], rotary, tables.seqlens, k=k, v=v, rotated_keys=True)
    assert torch.equal(plan.attend(q, layer), wanted) and alike(layer, alone)


def test_sinks_differ_by_layer():
    tables, layers = CacheTables(int32(LENGTHS)), [layer_of(n, False) for n in range(2)]
    plan = plan_cache(tables, like=layers[0], rotary=SCHEMES["rope"], **OPTIONS)
    for n, layer in enumerate(layers):
        (q, _, _), sinks = rows(n, 3, 1), torch.randn(HEADS_Q)
        wanted = attention_with_cache(q, *layer[:2], SCHEMES["rope"], tables.seqlens, sinks=sinks)
        assert torch.equal(plan.attend(q, layer, sinks=sinks), wanted)


def test_a_plan_after_its_tables_were_written():
    layer, tables, (q, k, v) = layer_of(0, False), CacheTables(int32(LENGTHS), new=1), rows(0, 3, 1)
    plan = plan_cache(tables, like=layer, rotary=SCHEMES["rope"], **OPTIONS)
    plan.attend(q, layer, k, v)
    tables.seqlens.add_(1)
    with pytest.raises(ValueError, match="^tables: expected unchanged since the plan was made"):
        plan.attend(q, layer)
    plan.refresh()
    alone = copy(layer)
    wanted = attention_with_cache(q, *alone[:2], SCHEMES["rope"], tables.seqlens, k=v, v=k)
    assert torch.equal(plan.attend(q, layer, v, k), wanted) and alike(layer, alone)


@pytest.mark.usefixtures("compiled")
def test_what_the_first_layer_held_lives_on():
    """Compiled calls keep pointers: to what a plan holds, not to the tensors of its first call."""
    tables, layers = CacheTables(int32(LENGTHS), table(), new=1), [layer_of(n, True) for n in range(2)]
    plan = plan_cache(tables, like=layers[0], rotary=SCHEMES["rerope"], **OPTIONS)
    plan.attend(rows(0, 3, 1)[0], layers[0], *rows(0, 3, 1)[1:])
    (q, k, v), alone = rows(1, 3, 1), copy(layers[1])
    wanted = attention_with_cache(
        q, *alone[:2], SCHEMES["rerope"], tables.seqlens.clone(), k=k, v=v, block_table=tables.block_table.clone()
    )
    del tables, layers[0]
    gc.collect()
    garbage = [torch.full((n,), float("nan")) for n in range(1, 200)]
    assert garbage and torch.equal(plan.attend(q, layers[0], k, v), wanted)


def test_compile_sees_the_tables_as_inputs():
    """One graph serves other lengths."""
    layer, rotary = layer_of(0, False), SCHEMES["rerope"]
    seen = []

    def backend(graph, inputs):
        seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int32])
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(seqlens, k_cache, v_cache, q, k, v):
        own = CacheLayer(k_cache, v_cache)
        tables = CacheTables(seqlens, new=1)
        return plan_cache(tables, like=own, rotary=rotary, **OPTIONS).attend(q, own, k, v)

    for lengths in (LENGTHS, (3, 2, 1)):
        (q, k, v), alone = rows(7, 3, 1), copy(layer)
        wanted = attention_with_cache(q, *alone[:2], rotary, int32(lengths), k=k, v=v)
        assert torch.equal(step(int32(lengths), *layer[:2], q, k, v), wanted)
    assert seen == [[(3,)]]


# ---- bad input


def planned(**changes):
    layer = layer_of(0, True)
    tables = CacheTables(int32(LENGTHS), table(), new=1)._replace(**changes.pop("tables", {}))
    return plan_cache(tables, like=layer, **{"rotary": SCHEMES["rope"], **OPTIONS, **changes}), layer


Q, K, V = rows(0, 3, 1)
AS_PLANNED = "as in the plan, got"
REFUSED = {
    "another number of heads": (lambda p, x: p.attend(Q[:, :, :2], x), "q: expected shape (3, 1, 4, 32) as in the"),
    "another type": (lambda p, x: p.attend(Q.half(), x), f"q: expected torch.float32 {AS_PLANNED} torch.float16"),
    "another length": (lambda p, x: p.attend(rows(0, 3, 2)[0], x), "q: expected shape (3, 1, 4, 32) as in the plan"),
    "no tensor": (lambda p, x: p.attend(None, x), "q: expected a tensor, got NoneType"),
    "a layer of another shape": (lambda p, x: p.attend(Q, CacheLayer(x.k[1:], x.v[1:])),
                                 f"layer.k: expected shape (15, 16, 2, 32) {AS_PLANNED} (14, 16, 2, 32)"),
    "a layer of another type": (lambda p, x: p.attend(Q, CacheLayer(x.k.half(), x.v.half())),
                                f"layer.k: expected torch.float32 {AS_PLANNED} torch.float16"),
    "a layer with scales": (lambda p, x: p.attend(Q, layer_of(0, True, torch.int8)),
                            f"layer.k: expected torch.float32 {AS_PLANNED} torch.int8"),
    "a layer of other strides": (lambda p, x: p.attend(Q, x._replace(k=x.k.mT.contiguous().mT)),
                                 "layer.k: expected strides (1024, 64, 32, 1) as in the plan"),
    "two caches": (lambda p, x: p.attend(Q, (x.k, x.v)), "layer: expected a CacheLayer, got tuple"),
    "only k": (lambda p, x: p.attend(Q, x, K), "v: expected a tensor, got NoneType"),
    "two new keys": (lambda p, x: p.attend(Q, x, *rows(0, 3, 2)[1:]),
                     f"k: expected shape (3, 1, 2, 32) {AS_PLANNED} (3, 2, 2, 32)"),
    "new keys twice": (lambda p, x: (p.attend(Q, x, K, V), p.attend(Q, x, K, V)),
                       "k: expected new keys once for every layer, got them again"),
    "gradients": (lambda p, x: p.attend(Q.clone().requires_grad_(), x), "q: expected no gradient to be asked for"),
    "another output": (lambda p, x: p.attend(Q, x, out=Q[:2]), "out: expected a contiguous tensor like q, got shape"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_refused_by_attend(call, message, impl):
    plan, layer = planned(impl=impl)
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call(plan, layer)
    assert plan.attend(Q, layer).any()


ONE = {"rotary": SCHEMES["rope"], "seqlen_q": 1, "heads_q": 4}
BARE = CacheTables(int32(LENGTHS))
PLANS = {
    "no tables": (lambda: plan_cache(LENGTHS, like=None, **ONE), "tables: expected CacheTables, got tuple"),
    "no layer": (lambda: plan_cache(BARE, like=K, **ONE), "like: expected a CacheLayer, got Tensor"),
    "heads": (lambda: planned(heads_q=3), "q: expected heads_q to be a multiple of heads_kv = 2, got 3"),
    "lengths of another type": (lambda: planned(tables={"seqlens": torch.tensor(LENGTHS)}),
                                "cache_seqlens: expected int32, got torch.int64"),
    "quantized without a type": (lambda: plan_cache(BARE, like=layer_of(0, False, torch.int8), **ONE),
        "dtype: expected float16, bfloat16, float32 or float64 beside a cache of torch.int8, got None"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), PLANS.values(), ids=PLANS.keys())
def test_refused_by_plan_cache(call, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call()


def test_packed_queries_without_a_place_for_keys():
    packed = Packed(int32([0, 1, 2, 3]), 1)
    plan, layer = planned(tables={"new": packed}, seqlen_q=3)
    q, k, v = rows(0, 3)
    with pytest.raises(ValueError, match=r"^k: expected None, since tables.new neither appends nor has a slot_mapping"):
        plan.attend(q, layer, k, v)


# ---- key weights


def test_key_weight_is_applied_or_refused_by_name():
    layer, weight = layer_of(0, False), torch.rand(HEAD_DIM) + 0.5
    weighted, tables, q = layer._replace(key_weight=weight), CacheTables(int32(LENGTHS)), rows(0, 3, 1)[0]
    options = {"rotary": SCHEMES["rope"], **OPTIONS}
    got = plan_cache(tables, like=weighted, impl="reference", **options).attend(q, weighted)
    wanted = attention_with_cache(q, layer.k * weight, layer.v, SCHEMES["rope"], tables.seqlens, impl="reference")
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="^impl='cpu' cannot serve this call: key_weight is not supported"):
        plan_cache(tables, like=weighted, impl="cpu", **options)
    for wrong in (weight.double(), weight[:8]):
        with pytest.raises((TypeError, ValueError), match="^key_weight: expected"):
            plan_cache(tables, like=weighted._replace(key_weight=wrong), impl="reference", **options)


def test_layers_of_a_cache_share_one_plan(monkeypatch):
    """Also layers of a paged cache whose sequences were moved."""
    made, backend = [], load_backend("cpu")
    stock = backend.plan_cache
    monkeypatch.setattr(backend, "plan_cache", lambda *given: made.append(given) or stock(*given))
    cache = PagedKVCache(12, 16, HEADS_KV, HEAD_DIM, torch.float32, layers=4, device="cpu")
    one = cache.allocate()
    for moved in (False, True):
        with cache.step([one], 30) as step:
            for n in range(4):
                q, k, v = rows(n, 1, 30)
                step.attend(q, SCHEMES["rerope"], k, v, layer=n, impl="cpu")
        if not moved:
            cache.remove(one, 5, 9)
    assert len(made) == 2
