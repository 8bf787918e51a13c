"""A serving loop for as long as one likes: random arrivals, prompts in chunks, forks, drafts, cancelled requests,
removed tokens, prompts that are composed of others and of themselves.

    python -m tests.caches.soak --minutes 60

Every answer is compared with the reference in float64, within the error budget of support.py. After every step, refused
ones included, the tables and pages of all sequences are compared bit by bit with what they should hold. Once a minute,
and at the end, it prints the requests, steps and tokens so far, the pages in use and the memory of the process. It
fails if an answer is wrong, if a page is lost, or if memory grows after the first fifth.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import sys
import time

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import support
import torch
from flashrope import OutOfPages, PagedKVCache, Rotary
from paged_oracle import Tokens, look

PAGES, PAGE, LAYERS, HEADS_KV, GROUP, D = 44, 16, 2, 2, 2, 16
SCHEMES = (  # of layer 0 and of layer 1
    (Rotary.rope(D).rectify(21).log_n(40), Rotary.rope(D).local(50)),
    (Rotary.hope(D, 100).rectify(30, 4.0), Rotary.none(D)),
    (Rotary.rope(D).yarn(4.0, 64), Rotary.rope(D).rectify(9)),
)
KINDS = ("requests", "steps", "tokens", "forks", "cancelled", "aborted", "out of pages", "removed", "composed", "full")
MAX_SEQLEN = 176  # more than a prompt and its answer, less than composed ones
MOST_GROWTH = 48 << 20  # bytes of memory, after the first fifth


@dataclasses.dataclass
class Request:
    """A sequence of the cache, what it should hold, and what is left to do."""

    sequence: int
    tokens: Tokens
    prompt: int
    to_generate: int


class Serving:
    """One paged cache and its requests."""

    def __init__(self, target: support.Target, seed: int, cache_dtype: str | None = None):
        self.target, self.choose = target, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.schemes = SCHEMES[seed % len(SCHEMES)]
        self.cache_dtype, options = (
            cache_dtype,
            {"layers": LAYERS, "cache_dtype": cache_dtype, "max_seqlen": MAX_SEQLEN},
        )
        self.cache = PagedKVCache(PAGES, PAGE, HEADS_KV, D, target.dtype, target.device, **options)
        for x in (self.cache.k, self.cache.v) if cache_dtype is None else (self.cache.k_scale, self.cache.v_scale):
            x.fill_(torch.nan)
        self.running: list[Request] = []
        self.counts = dict.fromkeys(KINDS, 0)
        self.idle = [self.cache.allocate() for _ in range(10)]  # the others have the last rows of the block table
        self.nothing = Tokens([], *(support.kept(self.new(LAYERS, 0, HEADS_KV, D), cache_dtype) for _ in "kv"))
        self.worst = 0.0

    def new(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.target.device, self.target.dtype)

    # ---- what happens in a step

    def arrive(self) -> None:
        prompt, tokens = self.choose.randrange(1, 120), self.choose.randrange(1, 40)
        self.running.append(Request(self.cache.allocate(), self.nothing, prompt, tokens))
        self.counts["requests"] += 1

    def fork(self, request: Request) -> None:
        self.running.append(dataclasses.replace(request, sequence=self.cache.fork(request.sequence)))
        self.counts["forks"] += 1

    def end(self, request: Request) -> None:
        self.cache.free(request.sequence)
        self.running.remove(request)

    def advance(self, requests: list[Request], rows: int, abort: bool) -> None:
        """Gives every request that many tokens, in all layers, and checks the answers; abort: raises instead."""
        free, lengths = self.cache.free_pages, self.cache.lengths
        k, v = (self.new(len(requests), LAYERS, rows, HEADS_KV, D) for _ in "kv")
        queries = self.new(LAYERS, len(requests), rows, HEADS_KV * GROUP, D)
        try:
            with self.cache.step([x.sequence for x in requests], rows) as step:
                results = [
                    step.attend(q, rotary, k[:, n], v[:, n], n, return_lse=True, impl=self.target.impl)
                    for n, (q, rotary) in enumerate(zip(queries, self.schemes, strict=True))
                ]
                if abort:
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, OutOfPages) as error:
            assert self.cache.free_pages == free
            assert self.cache.lengths == lengths
            if isinstance(error, OutOfPages):
                raise
            self.counts["aborted"] += 1
            return
        self.counts["steps"] += 1
        self.counts["tokens"] += rows * len(requests)
        for b, request in enumerate(requests):
            rows = [support.kept(x[b], self.cache_dtype) for x in (k, v)]
            now = request.tokens = request.tokens.followed_by(*rows, range(queries.shape[2]))
            places = now.places(queries.shape[2])
            for n, (out, lse) in enumerate(results):
                self.check(self.schemes[n], queries[n, b], now.k[n], now.v[n], out[b], lse[b], places)

    def check(self, rotary, q, k, v, out, lse, places) -> None:
        zeros = torch.zeros_like(q)[None], torch.zeros_like(lse)[None]
        p = support.Problem(q[None], k[None], v[None], rotary, grad_out=zeros[0], grad_lse=zeros[1], places=places)
        ratios = support.check_budget({"out": out[None], "lse": lse[None]}, p, self.target.dtype)
        self.worst = max(self.worst, *ratios.values())

    def edit(self, request: Request) -> None:
        """Removes tokens, or appends those of a request, itself perhaps. A table without room ends the request."""
        choose, tokens = self.choose, request.tokens
        try:
            if choose.random() < 0.5:
                start, stop = sorted(choose.randint(0, len(tokens.positions)) for _ in "ab")
                close = choose.random() < 0.7
                self.cache.remove(request.sequence, start, stop, close)
                request.tokens = tokens.without(start, stop, close)
                self.counts["removed"] += 1
            else:
                other = choose.choice((request, choose.choice(self.running)))
                self.cache.extend(request.sequence, other.sequence)
                added = other.tokens
                request.tokens = tokens.followed_by(added.k, added.v, added.positions, moved=True)
                self.counts["composed"] += 1
        except ValueError as error:
            self.no_room(error, request)

    def no_room(self, error: ValueError, request: Request) -> None:
        assert "no room for" in str(error), error
        self.look()
        self.counts["full"] += 1
        self.end(request)

    def step(self) -> None:
        choose = self.choose
        if not self.running or (len(self.running) < 12 and choose.random() < 0.4):
            self.arrive()
        if choose.random() < 0.1:
            self.fork(choose.choice(self.running))
        if choose.random() < 0.12:
            self.edit(choose.choice(self.running))
            return
        if choose.random() < 0.06:
            self.end(choose.choice(self.running))  # the user has gone
            self.counts["cancelled"] += 1
            return
        prompts = [x for x in self.running if x.prompt]
        try:
            if prompts and choose.random() < 0.5:
                request = choose.choice(prompts)
                rows = min(request.prompt, 50)
                aborted = self.counts["aborted"]
                self.advance([request], rows, choose.random() < 0.1)
                request.prompt -= rows * (aborted == self.counts["aborted"])
                return
            ready = [x for x in self.running if not x.prompt]
            if not ready:
                return
            some, draft = choose.sample(ready, choose.randint(1, len(ready))), choose.choice((1, 1, 1, 4))
            before = self.counts["aborted"]
            self.advance(some, draft, choose.random() < 0.05)
            if self.counts["aborted"] > before:
                return
        except OutOfPages:
            self.counts["out of pages"] += 1
            self.end(choose.choice(self.running))
            return
        except ValueError as error:
            self.no_room(error, max(self.running, key=lambda x: len(self.cache._sequences[x.sequence].pages)))
            return
        for request in some:
            rejected = choose.randrange(draft)
            length = len(request.tokens.positions) - rejected
            self.cache.truncate(request.sequence, length)
            request.tokens = request.tokens.parts(slice(0, length))
            request.to_generate -= draft - rejected
            if request.to_generate <= 0:
                self.end(request)

    def look(self) -> int:
        """Looks at every sequence. Returns the number of pages that they hold."""
        look(self.cache, {n: self.nothing for n in self.idle} | {x.sequence: x.tokens for x in self.running})
        return self.pages_in_use()

    def pages_in_use(self) -> int:
        return self.cache.pages - self.cache.free_pages

    def serve(self, steps: int = 0, minutes: float = 0.0, every: float = 0.0, show=lambda line: None) -> dict:
        """Runs for that many steps, or minutes, then ends all requests. every: seconds between two lines."""
        start, shown, memory = time.monotonic(), time.monotonic(), 0
        most, n = 0, 0
        while n < steps if steps else time.monotonic() - start < 60 * minutes:
            self.step()
            most = max(most, self.look())
            n += 1
            now = time.monotonic()
            if every and now - shown > every:
                show(self.line(now - start, most))
                shown = now
            if not memory and now - start > 12 * minutes:
                memory = resident()
        for request in list(self.running):
            self.end(request)
        growth = resident() - memory if memory else 0
        assert growth <= MOST_GROWTH, f"memory grew by {growth >> 20} MiB after the first fifth"
        report = self.counts | {"most pages": most, "pages in use": self.pages_in_use(), "largest error": self.worst}
        return report | {"memory growth": growth}

    def line(self, seconds: float, most: int) -> str:
        counts = ", ".join(f"{name} {number:,}" for name, number in self.counts.items())
        pages = f"pages in use {self.pages_in_use()} of {PAGES} (at most {most})"
        return f"{seconds:6.0f} s: {counts}; {pages}; memory {resident() / 2**20:.0f} MiB"


def resident() -> int:
    """Bytes of memory that this process holds."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--impl", default="cpu", choices=("cpu", "triton"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--cache-dtype", choices=("int8", "int4"))
    options = parser.parse_args()
    device = "cuda" if options.impl == "triton" and torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    serving = Serving(
        support.Target(options.impl, getattr(torch, options.dtype), device), options.seed, options.cache_dtype
    )
    report = serving.serve(minutes=options.minutes, every=60, show=lambda line: print(line, flush=True))
    print(serving.line(60 * options.minutes, report["most pages"]))
    allowed = support.COEFFICIENT[serving.target.dtype]
    print(f"all answers right, largest error {report['largest error']:.2f} of {allowed:.0f} allowed;", end=" ")
    print(f"memory grew by {report['memory growth'] / 2**20:.1f} MiB after the first fifth")


if __name__ == "__main__":
    main()
