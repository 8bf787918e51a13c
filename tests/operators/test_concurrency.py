"""Tests threads, fork and the interpreter's exit. soak.py has the serving loop; test_demo.py and test_generate.py test
interrupts."""

import os
import subprocess
import sys
import threading

import pytest
import support
import torch
from flashrope import PagedKVCache, attention_with_cache
from soak import Serving
from support import SCHEMES

on_cpu = pytest.mark.parametrize(
    "target", [t for t in support.TARGETS if t.impl == "cpu" and t.dtype == torch.float32], ids=str
)
ROUNDS = 12


def together(*jobs):
    """Runs the jobs in threads that start at once. Returns the jobs' results, or raises the exception of one job."""
    start, results = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(n, job):
        start.wait()
        try:
            results[n] = job()
        except BaseException as error:
            results[n] = error

    threads = [threading.Thread(target=run, args=job) for job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@on_cpu
def test_threads_that_train(target, one_thread):
    """Threads that make tables of different schemes at the same time get bitwise the results of one thread."""
    schemes = ("rerope", "leaky", "hope_yarn", "log_n_trained")
    problems = [support.problem(target, SCHEMES[s](16), 60, batch=2, seed=n) for n, s in enumerate(schemes)]
    jobs = [lambda p=p: [support.run(p, target.impl) for _ in range(ROUNDS)] for p in problems]
    found = together(*jobs)
    for p, results in zip(problems, found, strict=True):
        alone = support.run(p, target.impl)
        assert all(torch.equal(x[name], alone[name]) for x in results for name in alone)


@on_cpu
def test_threads_that_read_one_cache(target, one_thread):
    rotary, lengths = SCHEMES["rerope"](16), torch.tensor([90, 30], dtype=torch.int32)
    caches = [support.random((2, 96, 2, 16), target, n) for n in (1, 2)]
    queries = [support.random((2, n + 1, 4, 16), target, n) for n in range(4)]
    jobs = [
        lambda q=q: [attention_with_cache(q, *caches, rotary, lengths, impl=target.impl) for _ in range(ROUNDS)]
        for q in queries
    ]
    for q, results in zip(queries, together(*jobs), strict=True):
        alone = attention_with_cache(q, *caches, rotary, lengths, impl=target.impl)
        assert all(torch.equal(x, alone) for x in results)


@on_cpu
def test_threads_with_a_cache_each(target):
    """Threads that each serve from a cache of their own get right answers. Every answer is compared with float64."""
    types = None, "int8"
    together(*(lambda n=n, each=each: Serving(target, n, each).serve(steps=30) for n, each in enumerate(types)))


@on_cpu
def test_threads_with_one_cache_and_a_lock(target, one_thread):
    """Threads may share a cache if they take turns, as docs/decoding.md says."""
    rotary, lock = SCHEMES["rerope"](16), threading.Lock()
    cache = PagedKVCache(64, 16, 2, 16, target.dtype)

    def generate(seed):
        q, k, v = (support.random((1, 100, heads, 16), target, seed + n) for n, heads in enumerate((4, 2, 2)))
        out = []
        with lock:
            sequence = cache.allocate()
        for n in range(0, 100, 5):
            at = slice(n, n + 5)
            with lock:
                out.append(cache.attend([sequence], q[:, at], rotary, k[:, at], v[:, at], impl=target.impl))
        p = support.Problem(q, k, v, rotary)
        p = p.replace(grad_out=torch.zeros_like(q), grad_lse=q.new_zeros(1, 4, 100))
        support.check_budget({"out": torch.cat(out, 1)}, p, target.dtype)

    together(*(lambda seed=seed: generate(10 * seed) for seed in range(4)))
    assert len(cache.sequences) == 4 and cache.free_pages == 64 - 4 * 7


SCRIPT = """
import os, sys, threading
import torch
import flashrope
from flashrope import PagedKVCache, Rotary, attention
torch.set_num_threads(1)
impl, what = sys.argv[1], sys.argv[2]

def work():
    q, k, v = torch.randn(3, 1, 100, 2, 16, generator=torch.Generator().manual_seed(1)).unbind()
    rotary = Rotary.rope(16).rectify(9)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attention(*leaves, rotary, impl=impl).sum(), leaves)
    cache = PagedKVCache(8, 16, 2, 16, torch.float32)
    with torch.no_grad():
        return [*grads, cache.attend([cache.allocate()], q, rotary, k, v, impl=impl)]
"""
FORKS = """
if what == "after calls":
    work()
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        try:
            torch.save(work(), sys.argv[3] + str(os.getpid()))
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
want = work()
for child in children:
    got = torch.load(sys.argv[3] + str(child), weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
print("done")
"""
ENDS = """
import atexit

def rounds():
    for _ in range(8):
        work()
    os.write(1, b"thread done\\n")

for _ in range(2):
    threading.Thread(target=rounds).start()
atexit.register(lambda: print("atexit", len(work()), flush=True))
if what == "error":
    raise SystemExit("stopped")
"""


def run(first: str, body: str, *words: str):
    command = [sys.executable, "-c", first + SCRIPT + body, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


slow = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.parametrize("impl", [pytest.param("sdpa", marks=slow), "cpu"])
@pytest.mark.parametrize("what", [pytest.param("after import", marks=slow), "after calls"])
def test_fork(tmp_path, what, impl):
    """Children that a process with one thread forks can call attention, as a data loader's workers do."""
    done = run("", FORKS, impl, what, str(tmp_path / "result"))
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]


@slow
@pytest.mark.parametrize("impl", ["sdpa", "cpu"])
@pytest.mark.parametrize("what", ["end", "error"])
def test_the_interpreter_ends_during_calls(what, impl):
    """After the main thread has ended, other threads finish their calls. Then functions registered with atexit make
    calls.

    Daemon threads are not tested. Python stops them at any point. If torch is then inside a noexcept function, the
    process aborts.
    """
    done = run("", ENDS, impl, what)
    assert done.returncode == (what == "error"), (done.returncode, done.stderr[-2000:])
    assert done.stdout.splitlines() == ["thread done", "thread done", "atexit 4"] and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@on_cpu
def test_soak(target, cache_dtype):
    """A short serving loop gives right answers and ends without pages in use. `python -m tests.cache.soak --minutes
    60` runs it for an hour."""
    report = Serving(target, 1, cache_dtype).serve(steps=600)
    assert report["steps"] > 150 and report["pages in use"] == 0
    assert all(report[kind] for kind in ("out of pages", "aborted", "removed", "composed", "full"))
