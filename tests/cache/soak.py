"""Runs a serving loop over a paged cache for any length of time, and checks every answer.

The loop has random arrivals, prompts in chunks, forks, drafts, cancelled requests, removed tokens, and prompts to which
a copy of another prompt or of themselves is appended.

    python -m tests.cache.soak --minutes 60

Every answer is compared with the reference in float64, within the error budget of support.py. After every step,
including refused ones, the tables and pages of all sequences are compared bit by bit with what they should hold. Once a
minute, and at the end, the script prints the number of requests, steps and tokens so far, the pages in use and the
memory of the process. The run fails if an answer is wrong, if a page is lost, or if memory grows after the first fifth
of the run.
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
from flashrope import OutOfPages, Rotary
from paged_oracle import Held

PAGES, PAGE, LAYERS, HEADS_KV, GROUP, D = 44, 16, 2, 2, 2, 16
SCHEMES = (  # (layer 0, layer 1)
    (Rotary.rope(D).rectify(21).log_n(40), Rotary.rope(D).local(50)),
    (Rotary.hope(D, 100).rectify(30, 4.0), Rotary.none(D)),
    (Rotary.rope(D).yarn(4.0, 64), Rotary.rope(D).rectify(9)),
)
KINDS = (
    "requests",
    "steps",
    "ragged",
    "tokens",
    "forks",
    "cancelled",
    "aborted",
    "out of pages",
    "removed",
    "composed",
    "full",
)
MAX_SEQLEN = 176  # more than a prompt and its answer, less than composed prompts
MOST_GROWTH = 48 << 20  # bytes by which memory may grow after the first fifth of the run


@dataclasses.dataclass
class Request:
    """A sequence of the cache, and what is left to do for it."""

    sequence: int
    prompt: int
    to_generate: int


class Serving:
    """One paged cache and its requests."""

    def __init__(self, target: support.Target, seed: int, cache_dtype: str | None = None):
        self.choose = random.Random(seed)
        options = dict(seed=seed, queries=2**20, cache_dtype=cache_dtype, max_seqlen=MAX_SEQLEN)
        heads, schemes = (HEADS_KV * GROUP, HEADS_KV), SCHEMES[seed % len(SCHEMES)]
        self.held = Held(target, PAGES, PAGE, heads, schemes, **options)
        self.cache = self.held.cache
        self.running: list[Request] = []
        self.counts = dict.fromkeys(KINDS, 0)
        for _ in range(10):  # these sequences stay empty, so that the requests get the last rows of the block table
            self.held.allocate()

    def length(self, request: Request) -> int:
        return len(self.held.tokens[request.sequence].positions)

    # ---- what happens in a step

    def arrive(self) -> None:
        prompt, tokens = self.choose.randrange(1, 120), self.choose.randrange(1, 40)
        self.running.append(Request(self.held.allocate(), prompt, tokens))
        self.counts["requests"] += 1

    def fork(self, request: Request) -> None:
        self.running.append(dataclasses.replace(request, sequence=self.held.fork(request.sequence)))
        self.counts["forks"] += 1

    def end(self, request: Request) -> None:
        self.held.free(request.sequence)
        self.running.remove(request)

    def advance(self, requests: list[Request], counts: int | list[int], abort: bool) -> bool:
        """Gives every request tokens in all layers, and checks the answers. Returns whether the step was completed.

        counts: one number for all requests, or one for each, in a ragged step. abort: the step ends in an error.
        """
        free, lengths = self.cache.free_pages, self.cache.lengths
        try:
            self.held.write([x.sequence for x in requests], counts, fails=abort)
        except OutOfPages:
            assert (self.cache.free_pages, self.cache.lengths) == (free, lengths)
            raise
        if abort:
            assert (self.cache.free_pages, self.cache.lengths) == (free, lengths)
            self.counts["aborted"] += 1
            return False
        self.counts["steps"] += 1
        self.counts["ragged"] += isinstance(counts, list)
        self.counts["tokens"] += sum(counts) if isinstance(counts, list) else counts * len(requests)
        return True

    def edit(self, request: Request) -> None:
        """Removes tokens of a request, or appends a copy of another request's tokens or of its own. If the block table
        has no room, the request ends."""
        choose = self.choose
        try:
            if choose.random() < 0.5:
                start, stop = sorted(choose.randint(0, self.length(request)) for _ in "ab")
                self.held.remove(request.sequence, start, stop, choose.random() < 0.7)
                self.counts["removed"] += 1
            else:
                other = choose.choice((request, choose.choice(self.running)))
                self.held.extend(request.sequence, other.sequence)
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
            self.end(choose.choice(self.running))  # the user has left
            self.counts["cancelled"] += 1
            return
        prompts = [x for x in self.running if x.prompt]
        try:
            if prompts and choose.random() < 0.5:
                request = choose.choice(prompts)
                rows = min(request.prompt, 50)
                request.prompt -= rows * self.advance([request], rows, choose.random() < 0.1)
                return
            ready = [x for x in self.running if not x.prompt]
            if not ready:
                return
            some = choose.sample(ready, choose.randint(1, len(ready)))
            filled: list[Request] = []
            drafts, counts = [choose.choice((1, 1, 1, 4))] * len(some), None
            if choose.random() < 0.5:  # a ragged step: drafts of several lengths, and the next chunk of a prompt
                filled, drafts = prompts[:1], [choose.choice((1, 1, 1, 4)) for _ in some]
                counts = [*(min(x.prompt, 50) for x in filled), *drafts]
            if not self.advance([*filled, *some], counts or drafts[0], choose.random() < 0.05):
                return
            for request in filled:
                request.prompt -= min(request.prompt, 50)
        except OutOfPages:
            self.counts["out of pages"] += 1
            self.end(choose.choice(self.running))
            return
        except ValueError as error:
            self.no_room(error, max(self.running, key=lambda x: len(self.cache._sequences[x.sequence].pages)))
            return
        for request, rows in zip(some, drafts, strict=True):
            rejected = choose.randrange(rows)
            self.held.truncate(request.sequence, self.length(request) - rejected)
            request.to_generate -= rows - rejected
            if request.to_generate <= 0:
                self.end(request)

    def look(self) -> int:
        """Checks every sequence. Returns the number of pages in use."""
        self.held.look()
        return self.pages_in_use()

    def pages_in_use(self) -> int:
        return self.cache.pages - self.cache.free_pages

    def serve(self, steps: int = 0, minutes: float = 0.0, every: float = 0.0, show=lambda line: None) -> dict:
        """Runs for a number of steps or of minutes, then ends all requests. every: seconds between two lines of
        output."""
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
        report = self.counts | {
            "most pages": most,
            "pages in use": self.pages_in_use(),
            "largest error": self.held.worst,
        }
        return report | {"memory growth": growth}

    def line(self, seconds: float, most: int) -> str:
        counts = ", ".join(f"{name} {number:,}" for name, number in self.counts.items())
        pages = f"pages in use {self.pages_in_use()} of {PAGES} (at most {most})"
        return f"{seconds:6.0f} s: {counts}; {pages}; memory {resident() / 2**20:.0f} MiB"


def resident() -> int:
    """Returns how many bytes of memory this process holds."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--impl", default="cpu", choices=("cpu", "triton"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--cache-dtype", choices=("int8",))
    options = parser.parse_args()
    device = "cuda" if options.impl == "triton" and torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    serving = Serving(
        support.Target(options.impl, getattr(torch, options.dtype), device), options.seed, options.cache_dtype
    )
    report = serving.serve(minutes=options.minutes, every=60, show=lambda line: print(line, flush=True))
    print(serving.line(60 * options.minutes, report["most pages"]))
    allowed = support.COEFFICIENT[serving.held.target.dtype]
    print(f"all answers right, largest error {report['largest error']:.2f} of {allowed:.0f} allowed;", end=" ")
    print(f"memory grew by {report['memory growth'] / 2**20:.1f} MiB after the first fifth")


if __name__ == "__main__":
    main()
