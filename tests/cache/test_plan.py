"""``plan_cache`` gives all layers of a step bitwise the results of ``attention_with_cache``."""

import gc
import re

import pytest
import torch
from caching import PAGE, Cached, same
from flashrope import CacheLayer, CacheTables, Packed, PagedKVCache, Rotary, attention_with_cache, plan_cache
from flashrope.backends.registry import load_backend
from flashrope.calls.plans import Queries
from flashrope.calls.records import CacheCall
from support import Target, device_of, int32
from test_both_paths import Watching

D, LENGTHS, SHORT = 32, (41, 18, 65), (21, 9, 35)
SCHEMES = {
    "rope": Rotary.rope(D),
    "hope": Rotary.hope(D, 16),
    "rerope": Rotary.rope(D).rectify(8).log_n(32),
}
OPTIONS = {"seqlen_q": 1, "heads_q": 4, "dtype": torch.float32}
impls = pytest.mark.parametrize("impl", ["reference", "cpu"])


def layers_of(impl, queries=1, layers=3, scheme="rerope", at=None, lengths=LENGTHS, **options) -> list[Cached]:
    """Returns the calls of the layers of one step. The layers have the same tables and different tokens."""
    target, options = Target(impl, torch.float32, device_of(impl)), {"page": PAGE, **options}
    calls = [Cached(target, SCHEMES[scheme], lengths, queries, seed=n, **options) for n in range(layers)]
    return [c if at is None else c.at(**{name: x.clone() for name, x in at.items()}) for c in calls]


def plan_of(c: Cached, **options):
    tables, layer = c.parts()
    sizes = {"seqlen_q": c.q.shape[-3], "heads_q": c.q.shape[-2], "dtype": c.q.dtype}
    return plan_cache(tables, like=layer, rotary=c.rotary, impl=c.target.impl, **sizes, **options)


def copy(c: Cached) -> Cached:
    """Returns the same call over copies of its tensors."""
    return c.at(**{name: x.clone() for name, x in c.tables.items()})


def check(layers: list[Cached]) -> None:
    """Compares a plan in all layers with the public call: the results, and the contents of the caches afterwards."""
    plan = plan_of(layers[0])
    for c in layers:
        (_, layer), alone, out = c.parts(), copy(c), torch.empty_like(c.q)
        wanted, lse = alone.call(validate=False)
        got = plan.attend(c.q, layer, *c.new_keys(), return_lse=True, out=out)
        assert got[0] is out and torch.equal(out, wanted) and torch.equal(got[1], lse) and out.any()
        written = [(x, y) for x, y in zip(layer, alone.parts()[1], strict=True) if x is not None]
        assert all(same(*pair) for pair in written)
        for name, x in layers[0].tables.items():
            assert torch.equal(x, alone.tables[name])
        assert torch.equal(plan.attend(c.q, layer), wanted)  # the layer already holds the new keys


@impls
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("page", [0, PAGE], ids=["contiguous", "paged"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_a_step(scheme, page, cache_dtype, impl):
    check(layers_of(impl, 1, 3, scheme, page=page, cache_dtype=cache_dtype, leftpad=(3, 0, 9)))


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dtype": "int8", "leftpad": (3, 0, 9)},
        {"page": 0, "leftpad": (3, 0, 9)},
        {"queries": (1, 4, 0), "mapped": True},
        {"queries": (3, 3, 3)},
        {"scheme": "rope", "at": "stored"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_triton(options):
    if "at" in options:
        options = options | {"at": hidden_rows("triton", stored=True, lengths=SHORT)}
    check(layers_of("triton", layers=2, lengths=SHORT, **options))


@impls
@pytest.mark.parametrize("mapped", [False, True], ids=["appended", "mapped"])
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 3, 3), (1, 4, 0)], ids=str)
def test_packed_queries(queries, mapped, impl):
    check(layers_of(impl, queries, mapped=mapped))


def hidden_rows(impl, stored: bool, **options) -> dict[str, torch.Tensor]:
    """Returns tables that hide four rows of a page. stored: also positions of slots."""
    (c,) = layers_of(impl, layers=1, **options)
    first = torch.zeros(c.block_table.shape, dtype=torch.int32)
    first[0, 1] = 4
    positions = torch.arange(c.pages * PAGE).view(-1, PAGE) % (5 * PAGE) + 0.5
    return {"page_first": first} | ({"slot_positions": positions} if stored else {})


@impls
@pytest.mark.parametrize("stored", [False, True])
def test_explicit_positions_are_stored_once(impl, stored):
    check(layers_of(impl, scheme="rope", at=hidden_rows(impl, stored)))


def test_rotated_keys_and_append():
    (c,) = layers_of("cpu", layers=1, scheme="rope")
    plan, (_, layer), alone = plan_of(c, rotated_keys=True), c.parts(), copy(c)
    plan.append(layer, *c.new_keys())
    wanted, _ = alone.call(rotated_keys=True)
    assert torch.equal(plan.attend(c.q, layer), wanted)
    assert same(c.k_cache, alone.k_cache, c.v_cache, alone.v_cache)


def test_sinks_differ_by_layer():
    layers = layers_of("cpu", layers=2, new=0)
    plan = plan_of(layers[0])
    for c in layers:
        sinks, wanted = torch.randn(4), torch.empty_like(c.q)
        out = plan.attend(c.q, c.parts()[1], sinks=sinks)
        assert torch.equal(out, c.call(sinks=sinks)[0])
        assert plan.attend(c.q, c.parts()[1], sinks=sinks, out=wanted) is wanted and torch.equal(wanted, out)
        with Watching():  # the operator serves the call
            assert plan.attend(c.q, c.parts()[1], sinks=sinks, out=wanted.zero_()) is wanted
        assert torch.equal(wanted, out)


def test_a_plan_after_its_tables_were_written():
    (c,) = layers_of("cpu", layers=1, page=0)
    (plan, (_, layer)), (k, v) = (plan_of(c), c.parts()), c.new_keys()
    plan.attend(c.q, layer, k, v)
    c.cache_seqlens.add_(1)
    with pytest.raises(ValueError, match="^tables: expected tables that are unchanged since the plan was made"):
        plan.attend(c.q, layer)
    plan.refresh()
    caches = c.k_cache.clone(), c.v_cache.clone()
    wanted = attention_with_cache(c.q, *caches, c.rotary, c.cache_seqlens, k=v, v=k)
    assert torch.equal(plan.attend(c.q, layer, v, k), wanted) and same(c.k_cache, caches[0], c.v_cache, caches[1])


@pytest.mark.usefixtures("compiled")
def test_what_the_first_layer_held_lives_on():
    """A plan works after the tensors of the first layer are freed, because its compiled calls point only to tensors
    that the plan itself holds."""
    layers = layers_of("cpu", layers=2)
    plan = plan_of(layers[0])
    plan.attend(layers[0].q, layers[0].parts()[1], *layers[0].new_keys())
    wanted = copy(layers[1]).call()[0]
    del layers[0]
    gc.collect()
    garbage = [torch.full((n,), float("nan")) for n in range(1, 200)]
    (c,) = layers
    assert garbage and torch.equal(plan.attend(c.q, c.parts()[1], *c.new_keys()), wanted)


def test_compile_sees_the_tables_as_inputs():
    """One compiled graph serves calls with other lengths, because the tables are its inputs."""
    seen = []

    def backend(graph, inputs):
        seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int32])
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def step(seqlens, k_cache, v_cache, q, k, v):
        own = CacheLayer(k_cache, v_cache)
        tables = CacheTables(seqlens, new=1)
        return plan_cache(tables, like=own, rotary=SCHEMES["rerope"], **OPTIONS).attend(q, own, k, v)

    for lengths in (LENGTHS, (4, 3, 2)):
        c = layers_of("cpu", layers=1, page=0, capacity=80)[0].replace(lengths=lengths)
        got = step(c.cache_seqlens, c.k_cache.clone(), c.v_cache.clone(), c.q, *c.new_keys())
        assert torch.equal(got, c.call()[0])
    assert seen == [[(3,)]]


# ---- bad input


def planned(impl="cpu", tables=None, **changes):
    (c,) = layers_of(impl, layers=1, scheme="rope")
    own, layer = c.parts()
    options = {"rotary": c.rotary, "impl": impl, **OPTIONS, **changes}
    return plan_cache(own._replace(**tables or {}), like=layer, **options), layer


(BARE,) = layers_of("cpu", layers=1, page=0, new=0)
(CODES,) = layers_of("cpu", layers=1, page=0, new=0, cache_dtype="int8")
(TWO,) = layers_of("cpu", 2, layers=1)
Q, (K, V) = layers_of("cpu", layers=1)[0].q, layers_of("cpu", layers=1)[0].new_keys()
AS_PLANNED = "as in the plan, got"
REFUSED = {
    "another number of heads": (lambda p, x: p.attend(Q[:, :, :2], x), "q: expected shape (3, 1, 4, 32) as in the"),
    "another type": (lambda p, x: p.attend(Q.half(), x), f"q: expected torch.float32 {AS_PLANNED} torch.float16"),
    "another length": (lambda p, x: p.attend(TWO.q, x), "q: expected shape (3, 1, 4, 32) as in the plan"),
    "no tensor": (lambda p, x: p.attend(None, x), "q: expected a tensor, got NoneType"),
    "a layer of another shape": (lambda p, x: p.attend(Q, CacheLayer(x.k[1:], x.v[1:])),
                                 f"layer.k: expected shape (15, 16, 2, 32) {AS_PLANNED} (14, 16, 2, 32)"),
    "a layer of another type": (lambda p, x: p.attend(Q, CacheLayer(x.k.half(), x.v.half())),
                                f"layer.k: expected torch.float32 {AS_PLANNED} torch.float16"),
    "a layer with scales": (lambda p, x: p.attend(Q, CODES.parts()[1]),
                            f"layer.k: expected torch.float32 {AS_PLANNED} torch.int8"),
    "a layer of other strides": (lambda p, x: p.attend(Q, x._replace(k=x.k.mT.contiguous().mT)),
                                 "layer.k: expected strides (1024, 64, 32, 1) as in the plan"),
    "two caches": (lambda p, x: p.attend(Q, (x.k, x.v)), "layer: expected a CacheLayer, got tuple"),
    "only k": (lambda p, x: p.attend(Q, x, K), "v: expected a tensor, got NoneType"),
    "two new keys": (lambda p, x: p.attend(Q, x, *TWO.new_keys()),
                     f"k: expected shape (3, 1, 2, 32) {AS_PLANNED} (3, 2, 2, 32)"),
    "new keys twice": (lambda p, x: (p.attend(Q, x, K, V), p.attend(Q, x, K, V)),
                       "k: expected new keys once for every layer, got new keys of this layer again"),
    "gradients": (lambda p, x: p.attend(Q.clone().requires_grad_(), x),
                  "q: expected a tensor that does not require grad"),
    "a layer with gradients": (lambda p, x: p.attend(Q, x._replace(k=x.k.clone().requires_grad_())),
                               "layer.k: expected a tensor that does not require grad"),
    "a layer with other fields": (lambda p, x: p.attend(Q, x._replace(key_weight=torch.ones(D))),
                                  "layer.key_weight: expected None as in the plan, got Tensor"),
    "a layer without values": (lambda p, x: p.attend(Q, x._replace(v=None)),
                               "layer.v: expected a tensor as in the plan, got NoneType"),
    "another output": (lambda p, x: p.attend(Q, x, out=Q[:2]), "out: expected a contiguous tensor of shape (3, 1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_refused_by_attend(call, message, impl):
    plan, layer = planned(impl=impl)
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call(plan, layer)
    assert plan.attend(Q, layer).any()


ONE = {"rotary": SCHEMES["rope"], "seqlen_q": 1, "heads_q": 4}
PLANS = {
    "no tables": (lambda: plan_cache(LENGTHS, like=None, **ONE), "tables: expected CacheTables, got tuple"),
    "no layer": (lambda: plan_cache(BARE.parts()[0], like=K, **ONE), "like: expected a CacheLayer, got Tensor"),
    "heads": (lambda: planned(heads_q=3), "q: expected heads_q to be a multiple of heads_kv = 2, got 3"),
    "lengths of another type": (lambda: planned(tables={"seqlens": torch.tensor(LENGTHS)}),
                                "cache_seqlens: expected int32, got torch.int64"),
    "quantized without a type": (lambda: plan_cache(BARE.parts()[0], like=CODES.parts()[1], **ONE),
        "dtype: expected float16, bfloat16, float32 or float64 (a cache of torch.int8 does not say the type of q), "
        "got None"),
    "an integer type": (lambda: planned(dtype=torch.int8),
        "dtype: expected float16, bfloat16, float32 or float64, got torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), PLANS.values(), ids=PLANS.keys())
def test_refused_by_plan_cache(call, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call()


def test_packed_queries_without_a_place_for_keys():
    plan, layer = planned(tables={"new": Packed(int32([0, 1, 2, 3]), 1)}, seqlen_q=3)
    with pytest.raises(
        ValueError, match=r"^k: expected None \(tables.new neither appends keys nor has a slot_mapping\)"
    ):
        plan.attend(Q[:, 0], layer, K[:, 0], V[:, 0])


# ---- key weights


def test_key_weight_is_applied_or_refused_by_name(monkeypatch):
    weight, (tables, layer) = torch.rand(D) + 0.5, BARE.parts()
    weighted, options = layer._replace(key_weight=weight), {"rotary": BARE.rotary, **OPTIONS}
    got = plan_cache(tables, like=weighted, impl="reference", **options).attend(BARE.q, weighted)
    caches = layer.k * weight, layer.v
    wanted = attention_with_cache(BARE.q, *caches, BARE.rotary, BARE.cache_seqlens, impl="reference")
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(plan_cache(tables, like=weighted, impl="cpu", **options).attend(BARE.q, weighted), got)
    monkeypatch.setattr(load_backend("cuda"), "unsupported_reason", lambda q, cached: "")
    with pytest.raises(ValueError, match="^impl='cuda' cannot serve this call: key_weight is not supported"):
        plan_cache(tables, like=weighted, impl="cuda", **options)
    with pytest.raises(ValueError, match="^impl='cuda' cannot serve this call: rotated_keys is not supported"):
        plan_cache(tables, like=layer, impl="cuda", rotated_keys=True, **options | {"rotary": Rotary.rope(D)})
    for wrong in (weight.double(), weight[:8]):
        with pytest.raises((TypeError, ValueError), match="^key_weight: expected"):
            plan_cache(tables, like=weighted._replace(key_weight=wrong), impl="reference", **options)


def test_layers_of_a_cache_share_one_plan(monkeypatch):
    """All layers of a cache share one plan, also in a paged cache whose sequences were moved."""
    made, backend = [], load_backend("cpu")
    stock = backend.plan_cache
    monkeypatch.setattr(backend, "plan_cache", lambda *given: made.append(given) or stock(*given))
    cache = PagedKVCache(12, 16, 2, D, torch.float32, layers=4, device="cpu")
    one = cache.allocate()
    for moved in (False, True):
        q, k, v = (torch.randn(4, 1, 30, heads, D) for heads in (4, 2, 2))
        with cache.step([one], 30) as step:
            for n in range(4):
                step.attend(q[n], SCHEMES["rerope"], k[n], v[n], layer=n, impl="cpu")
        if not moved:
            cache.remove(one, 5, 9)
    assert len(made) == 2


def test_the_workspace_of_one_long_prompt_among_others():
    """Rotated copies of keys have room for the sequences that may have one, so a prompt with a wide window fits beside
    a cache that is not much larger than the window."""
    cached = pytest.importorskip("flashrope.backends.triton.cached", reason="triton is not installed")
    tokens, window, pages = 8192, 20480, 2048
    layer = CacheLayer(*(torch.empty(pages, 16, 1, 64, dtype=torch.float16) for _ in "kv"))
    for sizes, copies in (((tokens,), 1), ((tokens - 2, 1, 1), 3), ((66, 70), 2)):
        starts = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
        table = torch.zeros(len(sizes), pages, dtype=torch.int32)
        new = Packed(starts, max(sizes), appends=True)
        call = CacheCall(Rotary.rope(64).rectify(window), True, 0.125, CacheTables(starts[:-1], table, None, new))
        q = torch.empty(sum(sizes), 4, 64, dtype=torch.float16)
        plan = cached.TritonCachePlan(call, layer, Queries.of(q))
        assert plan._rotated_rows().total == sum(sizes) + copies * (window - 1)
        assert plan.prefills == (copies == 1)
