"""Broken kernels: what the executor and the error budget notice.

A mutant is one changed instruction of a compiled kernel (``mutations.py``), or one changed input of a launch. It is
noticed when the executor reports it or when a result leaves the budget. float16 and a small softmax_scale make the
budget tight. What survives must not change a bit of the results: there the instruction does nothing for this input.
"""

import functools

import pytest
import support
import test_decode
import torch
from flashrope import Rotary, attention
from flashrope.backends.triton import device, launcher
from flashrope.triton_kernels.arguments import Scheme
from support import SCHEMES

from . import driver
from .mutations import MUTATIONS, mutated, sites

FP16 = support.Target("triton", torch.float16, "cpu")
STEP_LIMIT = 3_000_000


class OfTriton:
    """Kernels that Triton compiles. A scenario has run() -> results and within_budget(results)."""

    def source(self, machine, launch) -> str:
        """The PTX that ran."""
        return machine.modules[launch.function][1]

    def use(self, machine, text: str, changed: str) -> None:
        """Later runs take ``changed`` in place of ``text``."""
        machine.rewrite = lambda name, ptx: changed if ptx == text else ptx

    def restore(self, machine) -> None:
        machine.rewrite = None


class Dense(OfTriton):
    """attention and its backward: three tiles of keys, the window ends in the first."""

    rotary, lengths = SCHEMES["rerope"](64), (150,)

    def __init__(self):
        self.problem = support.problem(FP16, self.rotary, *self.lengths, heads=2, seed=1, softmax_scale=0.02)
        self.exact = support.exact_and_bound(self.problem)

    def run(self):
        return support.run(self.problem, "triton")

    def within_budget(self, results) -> bool:
        return max(support.excess(results, *self.exact, torch.float16).values()) <= 1


class Atomic(Dense):
    """The gradient of q is added up by atomics."""

    def __init__(self):
        super().__init__()
        self.problem.deterministic = False


class Forward(Dense):
    """Without the backward."""

    def run(self):
        p = self.problem
        with torch.no_grad():
            out, lse = attention(p.q, p.k, p.v, p.rotary, softmax_scale=0.02, return_lse=True, impl="triton")
        return {"out": out, "lse": lse}


class SelfExtend(Dense):
    rotary = Rotary.rope(64).self_extend(48, 8)


class DualChunk(Dense):
    """Rows in three chunks."""

    rotary, lengths = Rotary.rope(64).dual_chunk(160, 32), (60, 290)


class Decode(OfTriton):
    """One token for three sequences in pages with left padding, in two splits. Each split of the longest has several
    blocks of keys in both bands, so that pages loaded a block ahead are used."""

    rotary = Rotary.rope(64).rectify(250)

    def __init__(self):
        options = {"leftpad": (3, 0, 40), "capacity": 512, "page_size": 16, "softmax_scale": 0.02}
        self.cache = test_decode.cached(FP16, self.rotary, (500, 1, 87), 1, **options)
        self.before = self.cache.k_cache.clone(), self.cache.v_cache.clone()
        self.exact = [support.exact_and_bound(p) for p in self.cache.sequences]

    def run(self):
        self.cache.k_cache.copy_(self.before[0]), self.cache.v_cache.copy_(self.before[1])
        out, lse = self.cache.run("triton", num_splits=2)
        return {"out": out, "lse": lse}

    def within_budget(self, results) -> bool:
        rows = [{name: x[b : b + 1] for name, x in results.items()} for b in range(len(self.exact))]
        return all(
            max(support.excess(row, *e, torch.float16).values()) <= 1 for row, e in zip(rows, self.exact, strict=True)
        )


class DecodeSelfExtend(Decode):
    rotary = Rotary.rope(64).self_extend(64, 8)


class DecodeDualChunk(Decode):
    rotary = Rotary.rope(64).dual_chunk(160, 32)


@functools.cache
def scenario(kind):
    return kind()


KERNELS = {
    "attention_forward": Forward,
    "attention_decode": Decode,
    "attention_grad_kv": Dense,
    "attention_finish_grad_q": Atomic,
    "attention_grad_q": Dense,
    "rotate_rows": Forward,
    "append_rows": Decode,
    "combine_splits": Decode,
}


@functools.cache
def clean(kind, kernel: str):
    """(PTX, lines that ran, results) of a run without mutation. kernel: its name, or a part of it."""
    machine = driver.Machine.current
    machine.reset(strict=False, step_limit=STEP_LIMIT)
    machine.launches.clear()
    problem = scenario(kind)
    results = problem.run()
    assert problem.within_budget(results)
    launch = next(launch for launch in machine.launches if kernel in launch.kernel)
    assert not any(launch.findings for launch in machine.launches)
    return problem.source(machine, launch), launch.executed_lines, results


def verdict(machine, run, problem, results) -> str:
    """How a mutant was noticed: by a finding, an error, the budget; or "" with "same bits" or "within budget"."""
    machine.launches.clear()
    try:
        got = run()
    except RuntimeError as error:
        return f"error: {error}"
    finally:
        problem.restore(machine)
    findings = [finding for launch in machine.launches for finding in launch.findings]
    if findings:
        return f"finding: {findings[0]}"
    if not problem.within_budget(got):
        return "budget"
    same = all(torch.equal(got[name], results[name]) for name in results)
    return "same bits" if same else "within budget"


def survivors(machine, kind, kernel: str, mutation: str, most: int, last: bool = False) -> tuple[int, list[str]]:
    """(mutants, those not noticed) of one mutation at up to `most` places of a kernel in a scenario, or at the last."""
    text, executed, results = clean(kind, kernel)
    problem, lines, left = scenario(kind), text.splitlines(), []
    places = sites(text, executed, MUTATIONS[mutation], len(lines) if last else most)
    places = places[-1:] if last else places
    for line in places:
        machine.reset(strict=False, step_limit=STEP_LIMIT)
        problem.use(machine, text, mutated(text, line, MUTATIONS[mutation]))
        how = verdict(machine, problem.run, problem, results)
        if how in ("same bits", "within budget"):
            left.append(f"{how}: {kernel} line {line} {lines[line - 1].strip()[:120]}")
    return len(places), left


# ---- one instruction changed

# Why a mutant of such a kind may survive: for this input the instruction changes no bit.
PADDING = "rows of a tile that hold no query, or keys behind the last: masked or never stored"
REPLICA = "the lanes of a quad hold equal values: which of them stores makes no difference"
REASONS = {
    "barrier removed": "another barrier lies between the same accesses",
    "global load 16 bytes off": PADDING,
    "guard of a global load inverted": PADDING,
    "guard of a global store inverted": REPLICA,
    "guard of a global store dropped": REPLICA,
    "guard of a shared store inverted": REPLICA,
    "guard of a shared store dropped": REPLICA,
    "shared store 16 bytes off": PADDING,
    "shared load 16 bytes off": PADDING,
    "less becomes less or equal": "the two sides are never equal here",
    "comparison inverted": "both branches of a clamp give the same here; or " + PADDING,
    "shuffle from another lane": PADDING,
    "shift by one more": "of zero: there is one sequence, head or page",
    "maximum becomes minimum": "softmax is the same for any shift of the scores; or " + PADDING,
    "exponential left out": PADDING,
    "cp.async.wait_group removed": "no group is under way behind the loop",
    "cp.async.wait_group weakened": "no group is under way behind the loop",
    "cp.async.commit_group removed": "its copies join the next group, which the same wait covers",
    "copy to 16 bytes further": PADDING,
    "copy from 16 bytes further": "a masked copy reads nothing",
    "copy from one element further": PADDING,
    "A's registers swapped": PADDING,
    "B's registers swapped": PADDING,
    "ldmatrix 16 bytes off": PADDING,
    "ldmatrix results swapped": "accumulators of zero change their layout; or " + PADDING,
    "fence.proxy.async removed": "another fence follows before wgmma reads",
    "wgmma.wait_group removed": "no product is under way",
    "wgmma.wait_group weakened": "no product is under way",
    "wgmma.fence removed": "no register was written since the last one",
}
# They may change the maximum of a row or where it is kept; softmax is the same for any shift, but for rounding.
OTHER_SHIFT = ("maximum becomes minimum", "shared store 16 bytes off", "shared load 16 bytes off")
# No mutant of these kinds survives at the middle one of its places. Barriers are removed at the last place: one at the
# start may guard shared memory that nothing has used yet.
QUICK = {
    "attention_forward": (
        "global store 16 bytes off",
        "guard of a global store inverted",
        "shuffle from another lane",
        "xor with another bit",
        "address 17 bytes off",
        "cp.async.wait_group removed",
        "cp.async.wait_group weakened",
        "copy from one element further",
        "ldmatrix 16 bytes off",
        "shared store 16 bytes off",
        ".trans lost",
        "A's registers swapped",
        "B's registers swapped",
        "wgmma.wait_group removed",
        "wgmma.wait_group weakened",
        "wgmma.fence removed",
        "descriptor 32 bytes off",
        "descriptor of another swizzle",
        "transposition flipped",
        "accumulation lost",
        "A's registers swapped (wgmma)",
    ),
    "attention_decode": (
        "barrier removed",
        "global load 16 bytes off",
        "global store 16 bytes off",
        "guard of a global load inverted",
        "xor with another bit",
        "address 17 bytes off",
        "cp.async.wait_group removed",
        "cp.async.wait_group weakened",
        "copy from one element further",
        "ldmatrix 16 bytes off",
        ".trans lost",
        "stmatrix 16 bytes off",
    ),
    "combine_splits": ("barrier removed", "global load 16 bytes off", "shared load 16 bytes off"),
    "append_rows": ("global load 16 bytes off", "global store 16 bytes off", "guard of a global store dropped"),
}


@pytest.mark.filterwarnings("ignore:deterministic:UserWarning")
def test_mutants_of_sums_in_accumulator_order(machine, arch):
    found = [mutation for mutation in MUTATIONS if mutation.startswith("red ")]
    assert check_middle_ones(machine, [(Atomic, "attention_grad_kv", mutation) for mutation in found]) == (
        3 if arch >= 90 else 1
    )


def test_mutants(machine):
    cases = [(KERNELS[kernel], kernel, mutation) for kernel in QUICK for mutation in QUICK[kernel]]
    assert check_middle_ones(machine, cases) >= 30


def check_middle_ones(machine, cases) -> int:
    """Asserts that no mutant of these (scenario, kernel, mutation) survives; returns the number of mutants."""
    total, left = 0, []
    for kind, kernel, mutation in cases:
        count, some = survivors(machine, kind, kernel, mutation, 1, last=mutation == "barrier removed")
        total, left = total + count, left + some
    assert not left, "\n".join(left)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_mutants_of_every_kind(machine, kernel):
    """At up to six places of each kind: a survivor has a reason, and changes no bit but by another softmax shift."""
    check_every_kind(machine, KERNELS[kernel], kernel, REASONS)


def check_every_kind(machine, kind, kernel, reasons, within_budget=OTHER_SHIFT):
    """within_budget: the mutations that may change bits."""
    total, left = 0, []
    for mutation in MUTATIONS:
        count, some = survivors(machine, kind, kernel, mutation, 6)
        allowed = ("same bits", "within budget") if mutation in within_budget else ("same bits",)
        unexpected = [x for x in some if mutation not in reasons or not x.startswith(allowed)]
        assert not unexpected, "\n".join([mutation, *unexpected])
        total, left = total + count, left + some
    print(f"{kind.__name__}, {kernel}: {total} mutants, {len(left)} survive", *left, sep="\n  ")
    assert len(left) <= 0.5 * total


# ---- one input changed


def launch_with(change):
    """A ``launcher.launch`` whose grid and arguments pass through change(kernel's name, grid, arguments)."""
    original = launcher.launch

    def launch(kernel, grid, *args, **options):
        grid, args = change(kernel.__name__, grid, list(args))
        return original(kernel, grid, *args, **options)

    return launch


def shorter_grid(name, grid, args):
    return (grid[0] - 1, *grid[1:]), args


def shifted(place):
    """The tensor view at this place of the forward kernel's arguments starts one element later."""

    def change(name, grid, args):
        if name == "attention_forward":
            x = args[place].ptr
            args[place] = args[place]._replace(ptr=x.as_strided(x.shape, x.stride(), x.storage_offset() + 1))
        return grid, args

    return change


def longer_sequence(name, grid, args):
    if name == "attention_forward":
        args[10] += 1  # seqlen_k
    return grid, args


def wider_rows(name, grid, args):
    if name == "attention_forward":
        args[1] = args[1]._replace(stride_row=args[1].stride_row + (8 << 4))
    return grid, args


def shorter_table(name, grid, args):
    if name == "attention_forward":
        args[6] = args[6]._replace(table=args[6].table.flatten()[:100])
    return grid, args


CHUNK, GROUP, LAST = range(3)  # columns of the maps


def of_maps(kernel, column, by, rows=lambda maps: maps[:, 0] == maps[:, 0]):
    """Adds ``by`` to a column of the maps that this kernel gets, in the rotations that ``rows`` selects."""

    def change(name, grid, args):
        if name == kernel:
            (place,) = (n for n, x in enumerate(args) if isinstance(x, Scheme))
            maps = args[place].maps.clone()
            maps[rows(maps), column] += by
            args[place] = args[place]._replace(maps=maps)
        return grid, args

    return change


def grouped(maps):
    return maps[:, GROUP] > 1


def of_keys(maps):
    return (maps[:, 3] == 0) & (torch.arange(len(maps)) > 0)


def bands_unit(maps):
    """The first map, whose chunk the bands count in."""
    return torch.arange(len(maps)) == 0


MAP_CHANGES = {
    "group off by one": (SelfExtend, of_maps("attention_forward", GROUP, 1, grouped)),
    "a group in dQ": (SelfExtend, of_maps("attention_grad_q", GROUP, -1, grouped)),
    "another group in dK": (SelfExtend, of_maps("attention_grad_kv", GROUP, 1, grouped)),
    "a chunk's edge off by one": (DualChunk, of_maps("attention_forward", CHUNK, -1, bands_unit)),
    "a chunk's edge off by one in dK": (DualChunk, of_maps("attention_grad_kv", CHUNK, 1, bands_unit)),
    "true positions in dK": (DualChunk, of_maps("attention_grad_kv", CHUNK, -128, of_keys)),
    "the last position off by one": (
        DualChunk,
        of_maps("attention_forward", LAST, -1, lambda maps: (maps[:, LAST] > 0) & (maps[:, LAST] < 128)),
    ),
    "group off by one in decoding": (DecodeSelfExtend, of_maps("attention_decode", GROUP, 1, grouped)),
    "keys of another chunk in decoding": (DecodeDualChunk, of_maps("attention_decode", CHUNK, 64, of_keys)),
    "a chunk's edge off by one in decoding": (DecodeDualChunk, of_maps("attention_decode", CHUNK, 1, bands_unit)),
}


@pytest.mark.parametrize("change", MAP_CHANGES)
def test_changed_maps(machine, monkeypatch, change):
    machine.reset(strict=False, step_limit=STEP_LIMIT)
    kind, changed = MAP_CHANGES[change]
    problem = scenario(kind)
    results = problem.run()
    assert problem.within_budget(results)
    monkeypatch.setattr(launcher, "launch", launch_with(changed))
    assert verdict(machine, problem.run, problem, results) not in ("same bits", "within budget")


CHANGES = {
    "a block too few": shorter_grid,
    "q an element later": shifted(0),
    "v an element later": shifted(3),
    "a key too many": longer_sequence,
    "rows of k too far apart": wider_rows,
    "a short table": shorter_table,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_inputs(machine, monkeypatch, arch, change):
    machine.reset(strict=False, step_limit=STEP_LIMIT)
    problem = scenario(Forward)
    results = problem.run()
    monkeypatch.setattr(launcher, "launch", launch_with(CHANGES[change]))
    assert verdict(machine, problem.run, problem, results) not in ("same bits", "within budget")


def test_false_claim_of_alignment(machine, monkeypatch):
    """The second row lies at an odd address, and the kernel is that for aligned ones."""
    p = scenario(Forward).problem
    room = torch.zeros(1, 150, 1, 67, dtype=torch.float16)
    machine.reset(strict=False)
    monkeypatch.setattr(device, "aligned", lambda *tensors: True)
    machine.launches.clear()
    with torch.no_grad():
        attention(p.q, room[..., :64], p.v, p.rotary, softmax_scale=0.02, impl="triton")
    findings = [finding for launch in machine.launches for finding in launch.findings]
    assert any(finding.startswith("misaligned global access: attention_forward") for finding in findings), findings
