"""Every public call gives the same result under another default device and dtype of torch.

Schemes are new in every case, because tables of a scheme are kept after its first call.
"""

import contextlib
import itertools

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, attention, attention_varlen, rotate
from support import Target

D = 16
FRESH = itertools.count(10_001)
TARGETS = [t for t in (*support.TARGETS, Target("reference", torch.float64, "cpu")) if t.dtype != torch.bfloat16]
targets = pytest.mark.parametrize(
    "target", [t for t in TARGETS if t.dtype == torch.float32 or t.impl == "reference"], ids=str
)
DEFAULTS = {"meta": ("meta", torch.float32), "bfloat16": (None, torch.bfloat16)}


@pytest.fixture(params=DEFAULTS)
def elsewhere(request):
    """Returns a context with another default device or dtype."""
    device, dtype = DEFAULTS[request.param]

    @contextlib.contextmanager
    def context():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with contextlib.nullcontext() if device is None else torch.device(device):
                yield
        finally:
            torch.set_default_dtype(before)

    return context


def fresh(scheme: str) -> Rotary:
    return eval(scheme, {"Rotary": Rotary, "R": Rotary.rope(D, base=float(next(FRESH)))})


@targets
@pytest.mark.parametrize("scheme", ["R.rectify(21, 4.0).log_n(20)", "R.self_extend(32, 4)", "R.dual_chunk(160, 32)"])
def test_attention(target, scheme, elsewhere):
    p = support.problem(target, fresh(scheme), 70, heads=1, group=1)
    with elsewhere():
        got = support.run(p, target.impl)
    support.check_budget(got, p, target.dtype)


@targets
@pytest.mark.parametrize("positions", [torch.float32, torch.int64], ids=str)
def test_positions(target, positions, elsewhere):
    p = support.problem(target, fresh("R.log_n(20)"), 30, heads=2)
    at = (torch.arange(30, device=target.device)[None] * 35_791_395).to(positions)  # up to 2^30
    p = p.replace(positions=at)
    with elsewhere():
        got = support.run(p, target.impl)
    support.check_budget(got, p, target.dtype)


@targets
def test_packed(target, elsewhere):
    rotary = fresh("R.rectify(21)")
    p = support.problem(target, rotary, 40, heads=2)
    starts = support.int32([0, 13, 40], target.device)
    with elsewhere():
        got = attention_varlen(p.q[0], p.k[0], p.v[0], rotary, starts, starts, 27, 27, impl=target.impl)
    for part in (slice(0, 13), slice(13, 40)):
        q, k, v = (x[:, part] for x in (p.q, p.k, p.v))
        torch.testing.assert_close(got[None, part], attention(q, k, v, rotary, impl=target.impl))


@targets
def test_rotate(target, elsewhere):
    rotary, x = fresh("R.interpolate(3.0)"), support.random((1, 30, 2, D), target, 0)
    at = torch.arange(30, device=target.device)[None] * 1001
    with elsewhere():
        got = rotate(x, rotary, positions=at, impl=target.impl), rotate(x, rotary, impl=target.impl)
    wide = [rotate(x.double(), rotary, positions=at, impl="reference"), rotate(x.double(), rotary, impl="reference")]
    for each, exact in zip(got, wide, strict=True):
        torch.testing.assert_close(each.double(), exact, rtol=2 * support.UNIT_ROUNDOFF[target.dtype], atol=1e-5)


CACHED = {
    "plain": {},
    "paged, padded": {"page": PAGE, "leftpad": (3, 0, 9)},
    "int8": {"page": PAGE, "cache_dtype": "int8"},
    "packed": {"page": PAGE, "queries": (2, 1, 4)},
    "weighted": {"key_weight": torch.rand(D)},
}


@targets
@pytest.mark.parametrize("kind", CACHED)
def test_caches(target, kind, elsewhere):
    if target.dtype == torch.float64 and kind == "int8":
        kind = "plain"  # float64 has no quantized caches
    c = Cached(target, fresh("R.rectify(8).log_n(32)"), (41, 18, 65), **{"queries": 1, **CACHED[kind]})
    with elsewhere():
        out, lse = c.call()
    c.judge(out, lse)


@targets
@pytest.mark.parametrize("scheme", ["R", "R.rectify(8)", "R.self_extend(32, 4)"])
def test_explicit_positions(target, scheme, elsewhere):
    c = Cached(target, fresh(scheme), (41, 18, 65), 3, page=PAGE, new=0)
    slots = torch.arange(c.slots, dtype=torch.float32, device=target.device).expand(3, -1)
    first = support.int32([[0, 4, 0, 0, 0], [0] * 5, [0] * 5], target.device)  # hides four rows
    c = c.at(page_first=first, slot_positions=c.by_slot(slots if scheme != "R" else slots / 2))
    with elsewhere():
        out, lse = c.call(validate=False)
    c.judge(out, lse)


def test_builders(elsewhere):
    table = [1.0, 0.3, 0.1, 0.0]
    wanted = Rotary.from_inv_freq(table, D), Rotary.rope(D).mrope((4, 2, 2)), Rotary.rope(D).inv_freq
    with elsewhere():
        got = Rotary.from_inv_freq(table, D), Rotary.rope(D).mrope((4, 2, 2)), Rotary.rope(D).inv_freq
        assert got[:2] == wanted[:2] and str(got[2].device) == "cpu"
    assert torch.equal(got[2], wanted[2])
