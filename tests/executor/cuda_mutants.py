"""Broken CUDA C++ kernels, as ``mutants.py`` has them of Triton's: nvcc's PTX with one line changed."""

import pytest
import torch

from flashrope.backends import cuda

from . import extension
from .cuda_kernels import BF16, COEFFICIENT, FP16, SCHEMES, Cache, operators, random
from .driver import Machine
from .mutants import OTHER_SHIFT, PADDING, REASONS, survivors
from .mutations import MUTATIONS

__all__ = ["operators"]  # a fixture of every test here


class OfNvcc:
    def source(self, machine, launch):
        return extension.operators(machine).ptx

    def use(self, machine, text, changed):
        extension.operators(machine).use(changed)

    def restore(self, machine):
        extension.operators(machine).use(extension.operators(machine).ptx)


class Halves(OfNvcc):
    """One token for three sequences in pages with left padding, two windows, two splits; three copies under way."""

    options = dict(rotary=SCHEMES["rerope"](64), dtype=FP16, page_size=16, leftpad=[3, 0, 40], capacity=192)

    def __init__(self):
        self.cache = Cache(
            **self.options, lengths=[145, 1, 87], group=4, heads_kv=1, num_splits=2, softmax_scale=0.02, seed=1
        )

    def run(self):
        return dict(zip(("out", "lse"), self.cache.run(), strict=True))

    def within_budget(self, results):
        return self.cache.largest_error(results["out"], results["lse"]) <= COEFFICIENT


class Interleaved(Halves):
    """Several tokens, contiguous; two copies under way."""

    options = dict(rotary=SCHEMES["leaky_interleaved_yarn"](128), dtype=FP16, seqlen_q=3)


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
QUICK = {}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_mutants_of_every_kind(machine, arch, name):
    """At up to six places of each kind: a survivor has a reason, and changes no bit but by another softmax shift."""
    total, left = 0, []
    for mutation in MUTATIONS:
        count, some = survivors(machine, *KERNELS[name], mutation, 6)
        print(mutation, count, some)
        total, left = total + count, left + some
    print(f"{name} sm_{arch}: {total} mutants, {len(left)} survive")
    assert 0
