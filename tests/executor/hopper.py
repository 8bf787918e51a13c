"""The forward with TMA (``triton_kernels/hopper_forward.py``) on the executor. Like ``test_cases.py``, for sm_90.

PYTHONPATH=tests pytest -p executor.plugin --executor 90 tests/executor/hopper.py
"""

import dataclasses
import re

import pytest
import support
import test_varlen
import torch
import triton
from flashrope import attention
from flashrope.backends.triton import launcher, tiles
from flashrope.triton_kernels import configs
from support import SCHEMES

from .mutations import EVERYWHERE, WGMMA, Mutation, mutated, removed, replaced, sites
from .test_executed_mutants import STEP_LIMIT, verdict

BF16, FP16 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16))
quick, slow = pytest.mark.quick, pytest.mark.slow


@pytest.fixture(autouse=True)
def hopper(arch):
    if arch != 90:
        pytest.skip("sm_90")


@pytest.fixture
def tile(monkeypatch):
    """Makes the plan choose this kernel, with the tile given."""

    def choose(tile):
        for name in ("forward tma", "forward tma banded"):
            monkeypatch.setitem(configs.FORWARD_TMA, name, dict.fromkeys((64, 128), tile))
        tiles.choose.cache_clear()

    choose(configs.Tile(128, 128, 4, 2))
    yield choose
    monkeypatch.undo()
    tiles.choose.cache_clear()


@dataclasses.dataclass
class Forward:
    """One call, and what float64 gives. A small softmax_scale makes the budget tight."""

    problem: support.Problem

    def __post_init__(self):
        self.exact = support.exact_and_bound(self.problem)

    def run(self):
        p = self.problem
        with torch.no_grad():
            out, lse = attention(
                p.q, p.k, p.v, p.rotary, causal=p.causal, softmax_scale=p.softmax_scale, positions=p.positions,
                return_lse=True, impl="triton",
            )  # fmt: skip
        return {"out": out, "lse": lse}

    def excess(self, results) -> float:
        return max(support.excess(results, *self.exact, self.problem.q.dtype).values())

    def within_budget(self, results) -> bool:
        return self.excess(results) <= support.COEFFICIENT[self.problem.q.dtype]

    def restore(self, machine) -> None:
        machine.rewrite = None


def kernels(machine) -> set[str]:
    return {launch.kernel for launch in machine.launches}


# head_dim, scheme, seqlen_q, seqlen_k, others
CASES = {
    "rope-d128": (BF16, "rope", 128, (200, None), {}, quick),
    "rerope-d64": (BF16, "rerope", 64, (150, None), {}, quick),
    "rerope-d128": (BF16, "rerope", 128, (300, None), {"heads": 4, "batch": 2}, ()),
    "hope-interleaved-log-n-d64": (FP16, "hope_rerope_log_n", 64, (300, None), {}, ()),
    "hope-interleaved-d128": (BF16, "hope_paper", 128, (140, None), {}, ()),
    "hope-zeros-d128": (FP16, "hope_zeros", 128, (130, None), {}, ()),
    "three-bands-d64": (BF16, "yarn_leaky_local_log_n", 64, (200, None), {}, ()),
    "none-d128": (FP16, "none", 128, (90, None), {"heads": 6, "group": 3}, ()),
    "local-d64": (BF16, "local", 64, (400, None), {}, ()),
    "fewer-queries-d64": (BF16, "leaky", 64, (70, 330), {}, ()),
    "more-queries-d64": (BF16, "inverse_leaky", 64, (300, 40), {"batch": 2}, ()),
    "one-key-d64": (BF16, "rerope", 64, (1, 1), {}, ()),
    "two-sided-d64": (BF16, "hope_rerope_log_n", 64, (150, 270), {"causal": False}, ()),
    "two-sided-rope-d128": (BF16, "rope", 128, (130, 256), {"causal": False}, ()),
    "window-of-a-buffer-d64": (BF16, "rerope", 64, (150, None), {"layout": "poisoned", "batch": 2}, quick),
    "heads-first-d128": (BF16, "leaky", 128, (150, None), {"layout": "transposed"}, ()),
}


@pytest.mark.parametrize("case", [pytest.param(case[:-1], id=name, marks=case[-1]) for name, case in CASES.items()])
def test_forward(machine, tile, case):
    target, scheme, head_dim, lengths, options = case
    forward = Forward(support.problem(target, SCHEMES[scheme](head_dim), *lengths, seed=1, **options))
    results = forward.run()
    assert "hopper_forward" in kernels(machine) and "attention_forward" not in kernels(machine)
    assert forward.within_budget(results), forward.excess(results)


@pytest.mark.parametrize(
    "chosen", [pytest.param((d, t), id=f"d{d}-{t}") for d in (64, 128) for t in configs.FORWARD_TMA_TILES[d]]
)
def test_tiles(machine, tile, chosen):
    head_dim, candidate = chosen
    tile(candidate)
    forward = Forward(support.problem(BF16, SCHEMES["rerope"](head_dim), 420, seed=2))
    assert forward.within_budget(forward.run())
    assert "hopper_forward" in kernels(machine)


@pytest.mark.parametrize("kind", ["fractions", "axial"])
def test_positions(machine, tile, kind):
    from flashrope import Rotary

    given, rotary = torch.rand(2, 140, generator=torch.Generator().manual_seed(10)) * 90 - 5, Rotary.rope(64).log_n(20)
    if kind == "axial":
        given = torch.stack((torch.arange(140) // 8, torch.arange(140) % 8), -1).expand(2, 140, 2)
        rotary = Rotary.axial(64)
    options = {"batch": 2, "positions": given, "causal": kind != "axial"}
    forward = Forward(support.problem(BF16, rotary, 140, seed=11, **options))
    assert forward.within_budget(forward.run())
    assert "hopper_forward" in kernels(machine)


@quick
def test_the_backward_takes_its_results(machine, tile):
    support.check(BF16, support.problem(BF16, SCHEMES["rerope"](64), 140, seed=3))
    assert {"hopper_forward", "attention_grad_q"} <= kernels(machine)


@quick
def test_the_plain_kernel_serves_the_rest(machine, tile):
    """Where ``hopper.unsupported_reason`` has a reason."""
    support.check(BF16, support.problem(BF16, SCHEMES["rope_partial"](64), 40, seed=4))
    support.check(BF16, support.problem(BF16, SCHEMES["rope"](32), 40, seed=4))
    test_varlen.test_packed_is_a_loop_over_sequences(BF16, "rope", test_varlen.LENGTHS["different"], True)
    assert "hopper_forward" not in kernels(machine)


@quick
def test_lengths_compile_nothing_anew(machine, tile, monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", {})
    for seqlen in (64, 129, 160):
        forward = Forward(support.problem(BF16, SCHEMES["rope"](64), seqlen, seed=5))
        assert forward.within_budget(forward.run())
    assert len({launch.function for launch in machine.launches if launch.kernel == "hopper_forward"}) == 1
    assert len([key for key in launcher._compiled if key[0] == "hopper_forward"]) == 1


ORDERS = [pytest.param(range(1, 9), marks=quick), pytest.param(range(9, 220), marks=slow)]


@pytest.mark.parametrize("seeds", ORDERS, ids=("8", "211"))
@pytest.mark.parametrize(("scheme", "head_dim"), [("rerope", 64), pytest.param("rope", 128, marks=slow)])
def test_every_order_of_warps_gives_the_same_bits(machine, tile, seeds, scheme, head_dim):
    """No deadlock, no race, no other bit, whichever warp comes first and however late copies land."""
    forward = Forward(support.problem(BF16, SCHEMES[scheme](head_dim), 400, seed=6))
    machine.reset(seed=0)
    first = forward.run()
    assert forward.within_budget(first)
    for seed in seeds:
        machine.reset(seed=seed)
        assert all(torch.equal(x, first[name]) for name, x in forward.run().items()), seed


# ---- broken kernels

PARITY = r"(try_wait\.parity\S* complete, \[%r\d+\]), %r\d+"
BROKEN: dict[str, Mutation] = {
    "arrive removed": removed("mbarrier.arrive.shared::cta.b64"),
    "arrive and expect removed": removed("mbarrier.arrive.expect_tx.shared.b64"),
    "half the bytes expected": replaced(r"(expect_tx.*), 16384;", r"\1, 8192;"),
    "twice the bytes expected": replaced(r"(expect_tx.*), 16384;", r"\1, 32768;"),
    "parity 0": replaced(PARITY, r"\1, 0"),
    "parity 1": replaced(PARITY, r"\1, 1"),
    "wait removed": replaced(r"mbarrier\.try_wait\S* complete, .*", "mov.pred complete, -1;"),
    "copy removed": removed("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"),
    "one arrival more": replaced(r"(mbarrier\.init\S* \[%r\d+\]), 2;", r"\1, 3;"),
    "one arrival less": replaced(r"(mbarrier\.init\S* \[%r\d+\]), 2;", r"\1, 1;"),
    "too many registers": replaced(r"(setmaxnreg\.inc\S*\s+)232;", r"\g<1>240;"),
    "barrier of other warps": replaced(r"bar\.sync\s+2, 128;", "bar.sync 0, 128;"),
    "barrier for switching removed": replaced(r"barrier\.sync\s+1;", "mov.b32 %r1, %r1;"),
}
QUICK = {name: 2 for name in BROKEN}


@pytest.fixture
def broken(machine, tile):
    """A function: mutants of a mutation at up to so many places, and the lines of those that were not noticed."""
    forward = Forward(support.problem(FP16, SCHEMES["rerope"](64), 300, seed=1, softmax_scale=0.02))
    machine.reset(strict=False, step_limit=STEP_LIMIT)
    results = forward.run()
    assert forward.within_budget(results)
    launch = next(launch for launch in machine.launches if launch.kernel == "hopper_forward")
    text, executed = machine.modules[launch.function][1], launch.executed_lines

    def survivors(mutation: Mutation, most: int) -> tuple[int, list[str]]:
        left, places = [], sites(text, executed, mutation, most)
        for line in places:
            machine.reset(strict=False, step_limit=STEP_LIMIT)
            changed = mutated(text, line, mutation)
            machine.rewrite = lambda name, ptx, changed=changed: changed if ptx == text else ptx
            how = verdict(machine, forward.run, forward, results)
            if how in ("same bits", "within budget"):
                left.append(f"{how}: line {line} {text.splitlines()[line - 1].strip()[:120]}")
        return len(places), left

    return survivors


# Mutants that change nothing: name, what the line holds.
HARMLESS = {
    "arrive removed": "nothing waits for the release of the last tiles",
    "parity 0": "the parity is 0 there",
    "parity 1": "the parity is 1 there",
    "wait removed": "the first round of a ring waits for nothing, and the last wait may come late",
    "barrier for switching removed": "other barriers order the same",
}


@quick
@pytest.mark.parametrize("name", BROKEN)
def test_broken_synchronisation(broken, name):
    count, left = broken(BROKEN[name], 2)
    assert count and (not left or (name in HARMLESS and len(left) < count)), "\n".join(left)


@slow
@pytest.mark.parametrize("name", [*EVERYWHERE, *WGMMA])
def test_broken_instructions(broken, name):
    _, left = broken((EVERYWHERE | WGMMA)[name], 8)
    print("\n".join(left))
    assert all(line.startswith("same bits") for line in left), "\n".join(left)


@quick
def test_another_swizzle(machine, tile, monkeypatch):
    forward = Forward(support.problem(BF16, SCHEMES["rope"](64), 150, seed=7))
    utils = triton.runtime.driver.active.utils
    encode = utils.fill_tma_descriptor
    without = 0
    monkeypatch.setattr(
        utils, "fill_tma_descriptor", lambda base, swizzle, *rest: encode(base, without, *rest), raising=False
    )
    assert not forward.within_budget(forward.run())


@quick
def test_a_tile_left_out(machine, tile):
    """Producer and consumers that round the number of tiles down instead of up."""
    forward = Forward(support.problem(BF16, SCHEMES["rope"](64), 128, 150, seed=8))
    assert forward.within_budget(forward.run())
    machine.reset(strict=False)
    machine.rewrite = lambda name, text: re.sub(r"(add\.s32\s+%r\d+, %r\d+), 127;", r"\1, 0;", text)
    try:
        assert not forward.within_budget(forward.run())
    finally:
        machine.rewrite = None
    assert machine.launches[-1].kernel == "hopper_forward" and not machine.launches[-1].findings
