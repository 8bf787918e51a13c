"""The same call gives the same bits when it is repeated and in another process. Where docs/numerics.md says so, the
bits are also the same with other numbers of threads and at other addresses."""

import hashlib
import os
import subprocess
import sys

import pytest
import support
import torch
from flashrope import attention_varlen, attention_with_cache
from support import SCHEMES

DTYPES = (torch.float32, torch.bfloat16)
CPU = [t for t in support.TARGETS if t.impl in ("cpu", "sdpa") and t.dtype in DTYPES]


def moved(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Returns a copy of x that starts ``elements`` elements into its allocation, to vary the alignment."""
    room = x.new_empty(x.numel() + elements)
    return room[elements:].view(x.shape).copy_(x)


def results(target: support.Target, elements: int = 0) -> list[torch.Tensor]:
    """Returns results of forward, backward, packed sequences and decoding. elements: how far into its memory each input
    starts."""
    found = []
    for n, scheme in enumerate(("rerope", "yarn_leaky_local_log_n")):
        p = support.problem(target, SCHEMES[scheme](24), 90, batch=2, heads=4, seed=n)
        p = p.replace(**{name: moved(getattr(p, name), elements) for name in ("q", "k", "v", "grad_out")})
        found += support.run(p, target.impl).values()
        cu = torch.tensor([0, 50, 90], dtype=torch.int32)
        q, k, v = (moved(x[0], elements) for x in (p.q, p.k, p.v))
        found += attention_varlen(q, k, v, p.rotary, cu, cu, 50, 50, return_lse=True, impl=target.impl)
        for rows in (1, 5):
            lengths, q = torch.tensor([90, 33], dtype=torch.int32), moved(p.q[:, :rows], elements)
            found += attention_with_cache(q, p.k, p.v, p.rotary, lengths, return_lse=True, impl=target.impl)
    return found


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def digest(tensors) -> str:
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("target", CPU, ids=str)
def test_again(target):
    want = results(target)
    assert all(same(results(target), want) for _ in range(4))


COMPILED = pytest.mark.parametrize("target", [t for t in CPU if t.impl == "cpu"], ids=str)


@COMPILED
@pytest.mark.usefixtures("compiled")
def test_at_other_addresses(target):
    """With the compiled kernels, results are the same if inputs start 1 to 15 elements after a multiple of 64 bytes.
    Torch's products would depend on the address."""
    want = results(target)
    assert all(same(results(target, elements), want) for elements in (1, 2, 3, 8, 15))


@COMPILED
@pytest.mark.usefixtures("compiled")
def test_with_other_threads(target):
    """With the compiled kernels, results are the same for other numbers of threads. Torch's products would depend on
    how the work is divided among threads."""
    want, before = results(target), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert same(results(target), want)
    finally:
        torch.set_num_threads(before)


# --cpu-target may select other kernels than a new process loads by default.
SAME_KERNELS = """
from flashrope.backends.cpu import loader
library = loader.open_target("{}")
loader.load = lambda: library
"""
SCRIPT = """
import sys
import torch
import support
import test_reproducible
threads, repeats, impl = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
for dtype in test_reproducible.DTYPES:
    target = support.Target(impl, dtype, "cpu")
    print(*sorted({test_reproducible.digest(test_reproducible.results(target)) for _ in range(repeats)}))
"""


def digests(threads: int, repeats: int, impl: str = "cpu", first: str = "") -> list[str]:
    """Computes the results several times in another process. Returns the different digests of each type, separated by
    spaces."""
    here = os.path.dirname(__file__)
    tests = os.pathsep.join([here, os.path.dirname(here)])
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": tests}
    command = [sys.executable, "-c", first + SCRIPT, str(threads), str(repeats), impl]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_in_another_process(compiled, one_thread):
    here = [digest(results(support.Target("cpu", dtype, "cpu"))) for dtype in DTYPES]
    assert digests(2, 2, "cpu", SAME_KERNELS.format(compiled.path.stem)) == here


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["sdpa", "cpu"])
def test_a_thousand_times(impl):
    """Five processes with 200 repeats each give the same digests. With the compiled kernels, the processes have
    different numbers of threads."""
    found = [digests(threads if impl == "cpu" else 1, 200, impl) for threads in (1, 1, 2, 3, 4)]
    assert all(x == found[0] for x in found) and not any(" " in line for line in found[0]), found
