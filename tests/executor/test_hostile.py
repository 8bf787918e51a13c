"""Tests packed calls with wrong entries in tables. As on a device, the host does not read these tables.

The executor watches the bounds of every tensor. Sequences with correct entries are bitwise unchanged.
"""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope.backends import triton as backend
from flashrope.calls.plans import attend_once
from flashrope.calls.records import AttentionCall, CacheCall
from flashrope.triton_kernels import configs

BF16 = support.Target("triton", torch.bfloat16, "cpu")
TOTAL, STARTS = 200, [0, 70, 110, 200]
# (index of the entry, wrong value); the entry makes the sequences on both sides wrong
HOSTILE = {
    "largest": (3, 2**31 - 1),
    "within": (2, 150),
    "the first negative": (0, -(2**31)),
    "the last negative": (3, -(2**31)),
}
OVERLAPPING = {  # with these values two sequences share rows
    "negative": (2, -5),
    "least": (2, -(2**31)),
    "before its sequence": (2, 69),
    "the first beyond": (0, 2**31 - 1),
}


def run(starts_q, starts_k, deterministic=True):
    p = support.problem(BF16, support.SCHEMES["rerope"](16), TOTAL, heads=4, seed=40)
    q, k, v, grad_out = (getattr(p, name)[0] for name in ("q", "k", "v", "grad_out"))
    cu = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)]
    call = AttentionCall(p.rotary, True, 0.25, None, *cu, 90, 90, deterministic)
    out, lse, kept = backend.forward(q, k, v, call)
    return out, lse.T, *backend.backward(grad_out, p.grad_lse[0], q, k, v, out, lse, kept, call)


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_cu_seqlens(machine, entry, which):
    n, value = entry
    wrong = list(STARTS)
    wrong[n] = value
    want = run(STARTS, STARTS)
    got = run(wrong if which != "k" else STARTS, wrong if which != "q" else STARTS)
    for b, (start, stop) in enumerate(zip(STARTS, STARTS[1:], strict=False)):
        if n not in (b, b + 1):
            assert all(torch.equal(x[start:stop], y[start:stop]) for x, y in zip(got, want, strict=True)), b


@pytest.mark.parametrize("entry", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_cu_seqlens_that_decrease(machine, entry):
    """Decreasing entries make sequences overlap. They write to the same rows, but to no row outside the tensors."""
    n, value = entry
    wrong = list(STARTS)
    wrong[n] = value
    machine.reset(strict=False)
    for starts in ((wrong, STARTS), (STARTS, wrong), (wrong, wrong)):
        run(*starts)
    findings = [finding for launch in machine.launches for finding in launch.findings]
    assert all(finding.startswith("race: ") for finding in findings), findings


@pytest.mark.filterwarnings("ignore:deterministic:UserWarning")
def test_cu_seqlens_of_the_atomic_backward(machine):
    want = run(STARTS, STARTS, False)
    for n, value in HOSTILE.values():
        wrong = list(STARTS)
        wrong[n] = value
        got = run(wrong, wrong, False)
        rows = slice(0, 70) if n > 1 else slice(110, 200)  # rows of a sequence that the entry does not touch
        for name, x, y in zip(support.NAMES, got, want, strict=True):
            assert name == "grad_q" or torch.equal(x[rows], y[rows])


@pytest.mark.parametrize("starts_q", [[0, 20, 130, 200], [0, 0, 0, 2**31 - 1]], ids=str)
def test_cu_seqlens_of_stored_scores(machine, monkeypatch, starts_q):
    """A sequence with more keys than max_seqlen_k causes no finding, although the workspace has columns for
    max_seqlen_k keys only."""
    monkeypatch.setattr(configs, "storing_is_faster", lambda *args: True)
    run(starts_q, [0, 0, 0, 200])
    assert not any(launch.findings for launch in machine.launches)


# ---- an engine's batch: pages of keys and values side by side, slots that the engine chose

SIZES = ((1, 40), (70, 93), (5, 64))  # a step, a chunk, a draft
TABLES = {
    "block_table": (-1, 18, 2**31 - 1, -(2**31)),
    "cache_seqlens": (-1, -(2**31), 2**31 - 1),
    "slot_mapping": (-2, 18 * PAGE, 2**31, 2**62, -(2**62)),
    "cu_seqlens_q": (-(2**31), 2**31 - 1),
}


def step(which: str = "", value: int = 0):
    """Returns the call, out and lse. which: the table whose entries of the second sequence hold the value."""
    c = Cached.packed(BF16, support.SCHEMES["rerope"](16), SIZES, page=PAGE, mapped=True, layout="shared")
    if which == "slot_mapping":
        c.slot_mapping[1:71] = value if abs(value) < 2**40 else value + torch.arange(70)
    elif which == "cu_seqlens_q":
        c.cu_seqlens_q[-1] = value
    elif which:
        getattr(c, which)[1] = value
    tables, layer = c.parts()
    backend.append_to_cache(layer, *c.new_keys(), tables)
    return c, *attend_once(backend, c.q, layer, CacheCall(c.rotary, True, 0.25, tables))


@pytest.mark.parametrize(("which", "value"), [(which, value) for which, values in TABLES.items() for value in values])
def test_an_engines_batch(machine, which, value):
    right, out, lse = step()
    wrong, got_out, got_lse = step(which, value)
    assert {"append_rows", "attention_decode", "attention_chunks"} <= {x.kernel for x in machine.launches}
    for b in [0] if which == "cu_seqlens_q" else [0, 2]:
        rows, slots = right.rows(b), right.places(b)
        assert torch.equal(got_out[rows], out[rows]) and torch.equal(got_lse[:, rows], lse[:, rows])
        assert torch.equal(wrong.k_cache[slots], right.k_cache[slots])
        assert torch.equal(wrong.v_cache[slots], right.v_cache[slots])
