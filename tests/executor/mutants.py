"""Broken kernels: what the executor and the error budget notice. Run like ``cases.py``.

A mutant is one changed instruction of a compiled kernel (``mutations.py``), or one changed input of a launch. It is
noticed when the executor reports it or when a result leaves the budget. float16 and a small softmax_scale make the
budget tight. What survives must not change a bit of the results: there the instruction does nothing for this input.
"""

import functools

import pytest
import support
import test_decode
import torch
from support import SCHEMES

from flashrope import attention
from flashrope.backends import base
from flashrope.backends.triton import launcher

from . import driver
from .mutations import MUTATIONS, mutated, sites

FP16 = support.Target("triton", torch.float16, "cpu")
STEP_LIMIT = 3_000_000


class Dense:
    """attention and its backward: three tiles of keys, the window ends in the first."""

    def __init__(self):
        self.problem = support.problem(FP16, SCHEMES["rerope"](64), 150, heads=2, seed=1, softmax_scale=0.02)
        self.exact = support.exact_and_bound(self.problem)

    def run(self):
        return support.run(self.problem, "triton")

    def within_budget(self, results) -> bool:
        return max(support.excess(results, *self.exact, torch.float16).values()) <= 1


class Forward(Dense):
    """Without the backward."""

    def run(self):
        p = self.problem
        with torch.no_grad():
            out, lse = attention(p.q, p.k, p.v, p.rotary, softmax_scale=0.02, return_lse=True, impl="triton")
        return {"out": out, "lse": lse}


class Decode:
    """One token for three sequences in pages with left padding, in two splits."""

    def __init__(self):
        options = {"leftpad": (3, 0, 40), "capacity": 192, "page_size": 16, "softmax_scale": 0.02}
        self.cache = test_decode.cached(FP16, SCHEMES["rerope"](64), (145, 1, 87), 1, **options)
        self.before = self.cache.k_cache.clone(), self.cache.v_cache.clone()
        self.exact = [support.exact_and_bound(p) for p in self.cache.sequences]

    def run(self):
        self.cache.k_cache.copy_(self.before[0]), self.cache.v_cache.copy_(self.before[1])
        out, lse = self.cache.run("triton", num_splits=2)
        return {"out": out, "lse": lse}

    def within_budget(self, results) -> bool:
        rows = [{name: x[b : b + 1] for name, x in results.items()} for b in range(len(self.exact))]
        return all(max(support.excess(row, *e, torch.float16).values()) <= 1 for row, e in zip(rows, self.exact, strict=True))


@functools.cache
def scenario(kind):
    return kind()


KERNELS = {
    "attention_forward": Forward,
    "attention_decode": Decode,
    "attention_grad_kv": Dense,
    "attention_grad_q": Dense,
    "rotate_rows": Forward,
    "append_rows": Decode,
    "combine_splits": Decode,
}


@functools.cache
def clean(arch: int, kernel: str):
    """(PTX, lines that ran, results) of a run without mutation."""
    machine = driver.Machine.current
    machine.reset(strict=False, step_limit=STEP_LIMIT)
    machine.launches.clear()
    problem = scenario(KERNELS[kernel])
    results = problem.run()
    assert problem.within_budget(results)
    launch = next(launch for launch in machine.launches if launch.kernel == kernel)
    assert not any(launch.findings for launch in machine.launches)
    return machine.modules[launch.function][1], launch.executed_lines, results


def verdict(machine, run, problem, results) -> str:
    """How a mutant was noticed: by a finding, an error, the budget; or "" with "same bits" or "within budget"."""
    machine.launches.clear()
    try:
        got = run()
    except RuntimeError as error:
        return f"error: {error}"
    finally:
        machine.rewrite = None
    findings = [finding for launch in machine.launches for finding in launch.findings]
    if findings:
        return f"finding: {findings[0]}"
    if not problem.within_budget(got):
        return "budget"
    same = all(torch.equal(got[name], results[name]) for name in results)
    return "same bits" if same else "within budget"


def survivors(machine, arch: int, kernel: str, mutation: str, most: int) -> tuple[int, list[str]]:
    """(mutants, those not noticed) of one mutation at up to `most` places of a kernel."""
    text, executed, results = clean(arch, kernel)
    problem, lines, left = scenario(KERNELS[kernel]), text.splitlines(), []
    places = sites(text, executed, MUTATIONS[mutation], most)
    for line in places:
        machine.reset(strict=False, step_limit=STEP_LIMIT)
        changed = mutated(text, line, MUTATIONS[mutation])
        machine.rewrite = lambda name, ptx, changed=changed: changed if ptx == text else ptx
        how = verdict(machine, problem.run, problem, results)
        if how in ("same bits", "within budget"):
            left.append(f"{how}: {kernel} line {line} {lines[line - 1].strip()[:120]}")
    return len(places), left
