"""Tests which results NaN and infinity in q, k and v reach, in every call.

Other sequences, and the query heads of other key heads, keep their bits in the forward and in the backward. In the
forward, a NaN or infinity in q reaches only its own row, and one in k or v reaches every row that attends to it. A NaN
or infinity in k or v may also reach masked rows whose products share a tile with that key (docs/numerics.md).
"""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import attention, attention_varlen
from support import NAMES, SCHEMES

D, ROWS, WHERE = 16, 70, 40
VALUES = [torch.nan, torch.inf, -torch.inf]
INTERPRETED = pytest.mark.interpreted(lambda **_: False)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
poisons = pytest.mark.parametrize("value", VALUES, ids=str)
whiches = pytest.mark.parametrize("which", ["q", "k", "v"])
schemes = pytest.mark.parametrize("scheme", ["rope", "rerope", "local"])


def poisoned(p: support.Problem, which: str, value: float, channels=slice(0, 1), row=WHERE) -> support.Problem:
    """Returns the problem with `value` in batch 1, this row, head 0 of the tensor `which`."""
    x = getattr(p, which).clone()
    x[1, row, 0, channels] = value
    return p.replace(**{which: x})


def by_row(name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns x with the dimensions (batch, rows, heads, ...)."""
    return x.transpose(1, 2)[..., None] if name == "lse" else x


def changed(got, want) -> dict[str, torch.Tensor]:
    """Returns which (batch, row, head) of each result differ."""
    return {name: (by_row(name, got[name]) != by_row(name, want[name])).any(-1) for name in got}


@INTERPRETED
@schemes
@whiches
@poisons
def test_attention(exact, one_thread, scheme, which, value):
    """Two key heads have two query heads each. Only the heads that share the poisoned row's key head change."""
    p = support.problem(exact, SCHEMES[scheme](D), ROWS, batch=2, heads=4, group=2, seed=1)
    before = support.run(p, exact.impl)
    after = support.run(poisoned(p, which, value), exact.impl)
    differ = changed(after, before)
    for name, x in differ.items():
        heads = x.shape[2] // 2
        assert not x[0].any() and not x[1, :, heads:].any(), name
        if which == "q":
            assert name in ("grad_k", "grad_v") or not x[1, :, 1].any(), name
    for name in ("out", "lse"):
        rows = differ[name][1, :, 0]
        if which == "q":
            assert rows.nonzero().flatten().tolist() == [WHERE], name
        elif which == "k" and exact.impl == "triton":
            assert not rows[:WHERE].any(), name
    reached = after["out"][1, :, 0]
    if value != value:  # not checked for infinity: an infinite score may give a weight of 0, which changes no result
        sees = [WHERE] if which == "q" else range(WHERE, min(ROWS, WHERE + 21 if scheme == "local" else ROWS))
        assert all(reached[row].isnan().any() for row in sees)
        grads = {"q": ("grad_q",), "k": ("grad_q", "grad_k"), "v": ("grad_q", "grad_k")}[which]
        assert all(after[name][1, WHERE, 0].isnan().any() for name in grads)


@poisons
@schemes
@pytest.mark.parametrize("row", [WHERE, ROWS - 3], ids=["first tile", "second tile"])
def test_keys_that_a_row_does_not_see(compiled, one_thread, row, scheme, value):
    """In the compiled CPU kernels a NaN or infinity in a row of q reaches only the gradients of the keys that the row
    sees."""
    target = support.Target("cpu", torch.float32, "cpu")
    p = support.problem(target, SCHEMES[scheme](D), ROWS, batch=2, heads=4, group=2, seed=1)
    before, after = support.run(p, "cpu"), support.run(poisoned(p, "q", value, row=row), "cpu")
    first = row - 20 if scheme == "local" else 0
    for name in ("grad_k", "grad_v"):
        got, want = after[name][1, :, 0], before[name][1, :, 0]
        seen = torch.zeros(ROWS, dtype=torch.bool)
        seen[first : row + 1] = True
        assert torch.isfinite(got[~seen]).all()
        assert torch.equal(got[~seen], want[~seen]), name
        if value != value:
            assert got[seen].isnan().any(-1).all(), name


@pytest.mark.parametrize("value", [torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("scheme", ["rope", "rerope", "leaky"])
@pytest.mark.parametrize("channel", [0, D // 2 + 1])
def test_infinite_keys_on_the_cpu_as_in_the_reference(compiled, one_thread, scheme, value, channel):
    """An infinity in a key that a band does not rotate stays an infinity. A rotation by an angle of 0 would turn it
    into NaN. Only the compiled kernels keep the infinity. PyTorch's kernels add a mask to the scores, and a masked
    infinity becomes NaN."""
    target = support.Target("cpu", torch.float32, "cpu")
    p = poisoned(support.problem(target, SCHEMES[scheme](D), ROWS, batch=2, seed=1), "k", value, channel)
    got, want = (support.run(p, impl)["out"].isnan() for impl in ("cpu", "reference"))
    assert torch.equal(got, want) and want.any()


@pytest.mark.interpreted(lambda exact, value, **_: value != value)
@whiches
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_rows_that_a_number_may_reach(exact, which, value):
    """A NaN or infinity in q reaches only its own row. Under the causal mask, a NaN or infinity in k or v reaches no
    row that precedes it by more than a tile."""
    tile, seqlen, at = (512, 1200, 900) if exact.impl in ("cpu", "sdpa") else (128, exact.size(160, 300), 150)
    p = support.problem(exact, SCHEMES["rerope"](D), seqlen, heads=1, group=1, seed=15)
    dirty = getattr(p, which).clone()
    dirty[:, at] = value
    clean, out = (
        attention(x.q, x.k, x.v, p.rotary, impl=exact.impl)[0, :, 0] for x in (p, p.replace(**{which: dirty}))
    )
    rows = torch.arange(seqlen, device=exact.device)
    untouched = rows != at if which == "q" else rows < at - tile
    assert torch.equal(out[untouched], clean[untouched]) and not out[at].isfinite().all()


@INTERPRETED
@whiches
@poisons
def test_packed_neighbours(exact, one_thread, which, value):
    """Sequences next to a poisoned one keep their bits in the forward and in the backward."""
    rotary, lengths = SCHEMES["leaky"](D), [30, 1, 33]
    cu = torch.tensor([0, 30, 31, 64], dtype=torch.int32, device=exact.device)
    tensors = [support.random((1, 64, heads, D), exact, n)[0] for n, heads in enumerate((2, 1, 1, 2))]

    def run(values):
        leaves = [x.detach().requires_grad_() for x in values[:3]]
        out, lse = attention_varlen(*leaves, rotary, cu, cu, 33, 33, return_lse=True, impl=exact.impl)
        grads = torch.autograd.grad(out, leaves, values[3])
        return [out.detach(), lse.detach().T, *grads]

    before = run(tensors)
    wrong = [x.clone() for x in tensors]
    wrong["qkv".index(which)][30] = value
    after = run(wrong)
    others = torch.tensor([*range(30), *range(31, 64)])
    assert sum(lengths) == 64 and all(torch.equal(x[others], y[others]) for x, y in zip(after, before, strict=True))
    if exact.impl != "sdpa" or value != value and which == "v":
        # torch's kernel returns 0 for a row that sees only one key, if this key is NaN
        assert not after[0][30].isfinite().all()


@INTERPRETED
@whiches
@pytest.mark.parametrize("layout", ["contiguous", "paged", "packed"])
def test_cached_neighbours(exact, one_thread, which, layout):
    """NaN in new tokens or cached keys leaves the bits of the other sequences and of their slots, also if their pages
    are neighbours."""
    options = {"contiguous": {"queries": 3}, "paged": {"queries": 3, "page": PAGE}}
    options["packed"] = {"queries": (3, 3, 3), "page": PAGE}

    def run(value):
        c = Cached(exact, SCHEMES["rerope"](D), (40, 23, 48), capacity=64, **options[layout])
        if value is not None:
            {"q": c.q.view(9, 4, D), "k": c.k_new, "v": c.v_new}[which][4] = value
            if which != "q":
                page, row = c.visible[1]
                getattr(c, f"{which}_cache")[page[7], row[7]] = value
        out, lse = c.call()
        lse = lse.view(4, 3, 3).transpose(0, 1) if layout == "packed" else lse
        held = [[x[c.visible[b]] for x in (c.k_cache, c.v_cache)] for b in range(3)]
        return out.view(3, 3, 4, D), lse, held

    out, lse, caches = run(None)
    for value in (torch.nan, torch.inf):
        got_out, got_lse, got_caches = run(value)
        for b in (0, 2):
            assert torch.equal(got_out[b], out[b]) and torch.equal(got_lse[b], lse[b])
            assert all(map(torch.equal, got_caches[b], caches[b]))
        if which == "q":
            assert torch.equal(got_out[1, ::2], out[1, ::2]) and torch.equal(got_lse[1, :, ::2], lse[1, :, ::2])
        assert not got_out[1, 1].isfinite().all()


def test_positions(exact, one_thread):
    """A NaN position reaches only its own row and the rows of its sequence that see its key."""
    if exact.slow:
        pytest.skip("the tables are made by the same code")
    rotary, positions = SCHEMES["rope"](D), torch.arange(30.0).expand(2, 30).clone()
    p = support.problem(exact, rotary, 30, batch=2, seed=3)
    before = support.run(p.replace(positions=positions), exact.impl)
    for value in VALUES:
        wrong = positions.clone()
        wrong[1, 20] = value
        after = support.run(p.replace(positions=wrong), exact.impl)
        for name in NAMES:
            assert torch.equal(after[name][0], before[name][0]), name
        assert torch.equal(after["lse"][1, :, :20], before["lse"][1, :, :20]) and after["out"][1, 20:].isnan().all()
