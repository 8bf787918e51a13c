"""Broken CUDA C++ kernels: nvcc's PTX with one line changed. Triton's kernels: ``test_executed_mutants.py``."""

import pytest
import torch
from flashrope.backends import cuda

from . import extension
from .test_cuda_kernels import BF16, COEFFICIENT, FP16, SCHEMES, Cache, operators, random
from .test_executed_mutants import OTHER_SHIFT, PADDING, REASONS, REPLICA, check_every_kind, check_middle_ones

__all__ = ["operators"]  # the fixture that every test here uses


class OfNvcc:
    def source(self, machine, launch):
        return extension.operators(machine).ptx

    def use(self, machine, text, changed):
        extension.operators(machine).use(changed)

    def restore(self, machine):
        extension.operators(machine).use(extension.operators(machine).ptx)


class Halves(OfNvcc):
    """Three tokens in pages with left padding; one band rotates keys and one does not; two copies under way."""

    options = dict(rotary=SCHEMES["rerope"](64), dtype=FP16, page_size=16, leftpad=[3, 0, 40], capacity=192, group=8)

    def __init__(self):
        self.cache = Cache(
            **self.options, lengths=[145, 3, 87], seqlen_q=3, heads_kv=1, num_splits=2, softmax_scale=0.02, seed=1
        )

    def run(self):
        return dict(zip(("out", "lse"), self.cache.run(), strict=True))

    def within_budget(self, results):
        return self.cache.largest_error(results["out"], results["lse"]) <= COEFFICIENT


class Interleaved(Halves):
    """Contiguous, two bands that rotate keys; one copy under way."""

    options = dict(rotary=SCHEMES["leaky_interleaved_yarn"](128), dtype=FP16, group=4)


class Append(OfNvcc):
    """Into pages, of which one does not exist, and behind the last slot."""

    def __init__(self):
        self.cache = Cache(SCHEMES["rope"](96), BF16, [31, 95, 0, 96, 5], 96, page_size=16)
        self.cache.layout.block_table[4, 0] = -1
        self.new = [random(5, 4, 2, 96, dtype=BF16, seed=i) for i in (7, 8)]
        self.expected = self.run()

    def run(self):
        caches = [x.nan_to_num(nan=-77.0) for x in (self.cache.k, self.cache.v)]
        cuda.append_to_cache(*caches, *self.new, self.cache.layout._replace(seqlen_new=4))
        return dict(zip("kv", caches, strict=True))

    def within_budget(self, results):
        return all(torch.equal(results[name], self.expected[name]) for name in results)


KERNELS = {
    "halves": (Halves, "split_kernel"),
    "interleaved": (Interleaved, "split_kernel"),
    "combine": (Halves, "combine_kernel"),
    "append": (Append, "append_kernel"),
}
EQUAL = "the two sides are never equal here, or the same follows from both"
BOTH = "both ways give the same: 64-bit and 32-bit division, a logarithm that is multiplied by zero, " + REPLICA
NVCC_REASONS = REASONS | {
    "bar.warp.sync removed": "of the two in the loop one is enough where every band, or only one, rotates the keys",
    "branch inverted": BOTH,
    "branch never taken": BOTH,
    "shuffle from lane 4 further": PADDING,
    "parameter 4 bytes off": "the neighbouring parameter has the same value here",
    "other comparison inverted": EQUAL,
    "greater becomes greater or equal": EQUAL,
    "multiply without add": "of a number that is zero here, or a small term of a logarithm's series; or " + PADDING,
    "minimum becomes maximum": "a clamp of numbers that need none, or that are equal",
}
ALL_SPLITS = (
    "barrier removed",
    "global load 16 bytes off",
    "shared load 16 bytes off",
    "cp.async.wait_group removed",
    "cp.async.wait_group weakened",
    "copy to 16 bytes further",
    "copy from 16 bytes further",
    "copy from one element further",
    "ldmatrix 16 bytes off",
    ".trans lost",
    "A's registers swapped",
    "B's registers swapped",
    "other comparison inverted",
    "comparison inverted",
)
QUICK = {
    "halves": ALL_SPLITS,
    "interleaved": ALL_SPLITS,
    "combine": (
        "global load 16 bytes off",
        "global store 16 bytes off",
        "shuffle from lane 4 further",
        "branch inverted",
    ),
    "append": ("global load 16 bytes off", "global store 16 bytes off", "parameter 4 bytes off"),
}


def test_mutants(machine):
    cases = [(*KERNELS[name], mutation) for name in QUICK for mutation in QUICK[name]]
    assert check_middle_ones(machine, cases) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_mutants_of_every_kind(machine, name):
    """At up to six places of each kind: a survivor has a reason, and changes no bit but by another softmax shift."""
    check_every_kind(machine, *KERNELS[name], NVCC_REASONS, (*OTHER_SHIFT, "multiply without add"))
