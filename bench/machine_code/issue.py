"""Simulates how one multiprocessor issues a piece of machine code, clock by clock. No constant was fitted to measured
times.

Each of the four schedulers issues one instruction per clock. The instructions of a warp issue in order. A scheduler
takes the warp that it issued from last if that warp is ready, and otherwise the first warp that is ready. An
instruction waits for five things: the stall count of the preceding instruction, the scoreboards that its control bits
name (Jia et al. 2018, arXiv 1804.06826), its pipe, a place in the queue of memory instructions, and, at a barrier, the
other warps of its block. All memory instructions together move 128 bytes per clock. Bank conflicts, misses in the
instruction cache, contention in L2, and HGMMA are not modelled. sm_90 is not simulated because its kernels use HGMMA.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SCHEDULERS = 4
SCOREBOARDS = 6
# The kinds of a scheduler's clocks. In a clock of the kind "issue" it issued an instruction. In any other clock all its
# warps waited, and the kind is what the warp that issued next was waiting for.
WAITS = ("issue", "tensor", "shared", "fp32", "mufu", "memory", "barrier", "other")


@dataclass(frozen=True)
class Rates:
    """Holds the clocks that a scheduler's pipe needs per warp instruction, and latencies in clocks.

    The pipe's clocks come from the CUDA C++ Programming Guide ("Arithmetic Instructions"), and for HMMA from the peak
    in the data sheet. The latencies come from microbenchmarks such as Abdelkhalik et al. 2022 (arXiv 2208.11174). The
    memory queue's depth, its issue interval and a barrier's clocks are assumptions, because no source publishes them.
    The ranking of tiles is the same for all queue depths of 4 to 16 and all memory latencies of 350 to 700 clocks.
    """

    hmma: float = 8  # for a product 16x8x16
    fp32: float = 2
    integer: float = 2
    mufu: float = 8
    hmma_latency: int = 33
    fixed_latency: int = 5
    mufu_latency: int = 23
    shared_latency: int = 22
    l1_latency: int = 38
    memory_latency: int = 466
    barrier: int = 20
    queue: int = 8
    queue_interval: int = 2


RATES = {
    80: Rates(),
    # The professional cards (A10, A40, L40S); GeForce cards take twice as long for products summed in float32.
    86: Rates(hmma=16, fp32=1),
    89: Rates(hmma=16, fp32=1),
}


@dataclass(frozen=True)
class Instruction:
    """Holds a decoded instruction.

    pipe: the pipe that executes the instruction. busy: for how many clocks it occupies the pipe. transfer: for how many
    clocks it then moves data. latency: clocks from the end of the transfer until the result is available. kind: the
    entry of ``WAITS`` that a wait for this instruction counts as. write: the scoreboard that it holds until its result
    is available, or None. read: the scoreboard that it holds until its operands are read, or None. waits: the
    scoreboards that must be free before it issues.
    """

    opcode: str
    pipe: str
    busy: float
    latency: float
    kind: str
    transfer: float = 0
    stall: int = 1
    write: int | None = None
    read: int | None = None
    waits: tuple[int, ...] = ()
    groups: int | None = None  # how many cp.async groups may be outstanding; None: it does not wait for groups

    @property
    def copies(self) -> bool:
        return self.opcode.startswith("LDGSTS")


@dataclass
class Steady:
    """Describes the steady state of a loop. clocks: the mean time in which every resident block passes through the code
    once. waits: {entry of ``WAITS``: its share of the schedulers' clocks}. The shares add up to 1."""

    clocks: float
    waits: dict[str, float]


# The first match decides: (pattern, pipe, kind of wait).
_PIPES = (
    (r"HMMA", "tensor", "tensor"),
    (r"(?:FFMA|FMUL|FADD)\b|FFMA2|HFMA2|HADD2|HMUL2", "fma", "fp32"),
    (r"IMAD", "fma", "other"),
    (r"MUFU|F2F\.|F2I|I2F\b|POPC|FLO", "mufu", "mufu"),
    (r"LDSM|LDS\b|STS\b|SHFL|ATOMS", "memory", "shared"),
    (r"LDGSTS|LDG\b|LD\.|ATOM|RED|STG|ST\.|LDL|STL|CCTL", "memory", "memory"),
    (r"LDGDEPBAR|DEPBAR", "none", "memory"),
    (r"BAR|BRA|NOP|WARPSYNC|BSSY|BSYNC|MEMBAR|ERRBAR|S2R|CS2R|EXIT|YIELD", "none", "other"),
    (r"U[A-Z]|R2UR|S2UR", "uniform", "other"),
    (r"", "alu", "other"),
)


def instruction(opcode: str, operands: str = "", control: int = 1 << 41, rates: Rates = RATES[80]) -> Instruction:
    """Decodes one instruction. control: the upper half of its encoding. The default encodes a stall of 1 and no
    scoreboards."""
    pipe, kind = next((pipe, kind) for pattern, pipe, kind in _PIPES if re.match(pattern, opcode))
    write, read = control >> 46 & 7, control >> 49 & 7
    found = Instruction(
        opcode,
        pipe,
        {"tensor": rates.hmma, "fma": rates.fp32, "mufu": rates.mufu, "alu": rates.integer, "uniform": 2}.get(pipe, 1),
        {"tensor": rates.hmma_latency, "mufu": rates.mufu_latency}.get(pipe, rates.fixed_latency),
        kind,
        stall=max(1, control >> 41 & 15),
        write=write if write < SCOREBOARDS and control >> 46 & 63 else None,
        read=read if read < SCOREBOARDS and control >> 46 & 63 else None,
        waits=tuple(at for at in range(SCOREBOARDS) if control >> 52 + at & 1),
    )
    if opcode.startswith("HMMA.1688"):
        return replace(found, busy=rates.hmma / 2)
    if opcode.startswith("IMAD"):
        return replace(found, busy=rates.integer)
    if pipe == "memory":
        return replace(found, busy=rates.queue_interval, transfer=_transfer(opcode), latency=_latency(opcode, rates))
    if opcode.startswith("DEPBAR"):
        allowed = re.search(r"SB\d,\s*(0x[0-9a-f]+)", operands)
        return replace(found, groups=int(allowed[1], 16) if allowed else 0)
    return found


def decoded(
    opcodes: Sequence[str], operands: Sequence[str], controls: Sequence[int], rates: Rates
) -> list[Instruction]:
    return [instruction(*each, rates) for each in zip(opcodes, operands, controls, strict=True)]


def _transfer(opcode: str) -> float:
    """Returns how many clocks the 32 threads of a warp need to move their data, at 128 bytes per clock."""
    if opcode.startswith("LDSM"):
        return int(opcode[-1]) if opcode[-1] in "124" else 1
    size = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return max(1, int(size[1]) / 32 if size else 1)


def _latency(opcode: str, rates: Rates) -> int:
    if opcode.startswith(("LDS", "STS", "SHFL", "ATOMS", "RED", "STG", "ST.", "CCTL")):
        return rates.shared_latency  # a store is done when its data have left the multiprocessor
    return rates.memory_latency if opcode.startswith(("LDGSTS", "ATOM")) else rates.l1_latency


@dataclass(eq=False)
class _Warp:
    block: int
    scheduler: int
    ready: float  # the clock at which its next instruction may issue, as far as that depends on this warp only
    reason: str = "other"  # the entry of WAITS that the wait until `ready` counts as
    at: int = 0
    boards: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "other")] * SCOREBOARDS)
    copied: float = 0  # the clock at which all copies so far have arrived
    groups: deque = field(default_factory=lambda: deque(maxlen=8))
    waiting: bool = False  # whether the warp waits at a barrier


class Multiprocessor:
    """Simulates `blocks` blocks of `warps` warps. Each warp runs through `code` repeatedly.

    offset: how many clocks each block starts after the preceding block. Real blocks do not run in step either.
    """

    def __init__(self, code: Sequence[Instruction], warps: int, blocks: int, rates: Rates, offset: float = 0):
        self.code, self.rates = list(code), rates
        self.warps = [
            _Warp(block, warp % SCHEDULERS, offset * block) for block in range(blocks) for warp in range(warps)
        ]
        self.of_block = [[warp for warp in self.warps if warp.block == block] for block in range(blocks)]
        self.of_scheduler = [[warp for warp in self.warps if warp.scheduler == at] for at in range(SCHEDULERS)]
        self.pipes: list[dict[str, float]] = [{} for _ in range(SCHEDULERS)]
        self.queues: list[deque[float]] = [deque() for _ in range(SCHEDULERS)]
        self.shared_free = 0.0
        self.last: list[_Warp | None] = [None] * SCHEDULERS
        self.issued = [-1.0] * SCHEDULERS  # clock of the last instruction
        self.wake = [0.0] * SCHEDULERS
        self.now, self.count = 0.0, 0  # the current clock, the number of instructions issued so far
        self.spent = dict.fromkeys(WAITS, 0.0)

    def run(self, warm_up: int, passes: int) -> Steady:
        """Measures `passes` passes, after `warm_up` passes that are not counted.

        A pass ends when the number of issued instructions is the length of the code times the number of warps. It does
        not matter which warps issued them.
        """
        every = len(self.code) * len(self.warps)
        self._run(warm_up * every)
        begin, self.spent = self.now, dict.fromkeys(WAITS, 0.0)
        self._run((warm_up + passes) * every)
        whole = sum(self.spent.values())
        return Steady((self.now - begin) / passes, {name: clocks / whole for name, clocks in self.spent.items()})

    def _run(self, until: int) -> None:
        while self.count < until:
            now = min(self.wake)
            self._step(self.wake.index(now), now)

    def _step(self, scheduler: int, now: float) -> None:
        """Issues one instruction, or finds out when to try again."""
        queue, pipes = self.queues[scheduler], self.pipes[scheduler]
        while queue and queue[0] <= now:
            queue.popleft()
        again = float("inf")
        last = self.last[scheduler]
        candidates = self.of_scheduler[scheduler]
        for warp in candidates if last is None else (last, *candidates):
            if warp.waiting:
                continue
            then = warp.ready
            if then <= now:
                what = self.code[warp.at]
                then, reason = max(then, pipes.get(what.pipe, 0)), warp.reason
                if then > now:
                    reason = what.kind
                elif what.pipe == "memory" and len(queue) >= self.rates.queue:
                    then, reason = queue[0], "shared"
                if then <= now:
                    self._issue(warp, what, scheduler, now)
                    self.wake[scheduler] = now + 1
                    return
                if then > warp.ready:
                    warp.reason = reason
            again = min(again, then)
        self.wake[scheduler] = again

    def _issue(self, warp: _Warp, what: Instruction, scheduler: int, now: float) -> None:
        self.now, self.count = now, self.count + 1
        self.spent["issue"] += 1
        self.spent[warp.reason] += now - self.issued[scheduler] - 1
        self.last[scheduler], self.issued[scheduler] = warp, now
        if what.pipe != "none":
            self.pipes[scheduler][what.pipe] = now + what.busy
        if what.pipe == "memory":
            self.shared_free = max(now + 4, self.shared_free) + what.transfer
            self.queues[scheduler].append(self.shared_free)
            done, read = self.shared_free + what.latency, self.shared_free
        else:
            done, read = now + what.latency, now + 4
        if what.write is not None:
            warp.boards[what.write] = max(warp.boards[what.write], (done, what.kind))
        if what.read is not None:
            warp.boards[what.read] = max(warp.boards[what.read], (read, "shared" if what.transfer else what.kind))
        if what.copies:
            warp.copied = max(warp.copied, done)
        if what.opcode.startswith("LDGDEPBAR"):
            warp.groups.append(warp.copied)
        warp.ready, warp.reason = now + what.stall, what.kind
        warp.at += 1
        if warp.at == len(self.code):
            warp.at = 0
        if what.opcode.startswith("BAR"):
            self._barrier(warp, now)
        else:
            self._look_ahead(warp)

    def _barrier(self, warp: _Warp, now: float) -> None:
        warp.waiting = True
        block = self.of_block[warp.block]
        if all(each.waiting for each in block):
            for each in block:
                each.waiting = False
                each.ready, each.reason = max(each.ready, now + self.rates.barrier), "barrier"
                self._look_ahead(each)
                self.wake[each.scheduler] = min(self.wake[each.scheduler], max(each.ready, now))

    def _look_ahead(self, warp: _Warp) -> None:
        """Computes when the warp's next instruction can issue, as far as that depends on this warp only."""
        following = self.code[warp.at]
        waited = [(warp.ready, warp.reason), *(warp.boards[at] for at in following.waits)]
        if following.groups is not None and len(warp.groups) > following.groups:
            waited.append((warp.groups[len(warp.groups) - following.groups - 1], "memory"))
        warp.ready, warp.reason = max(waited, key=lambda each: each[0])


WARM_UP, PASSES, OFFSETS = 2, 4, 5


def steady(code: Sequence[Instruction], warps: int, blocks: int, rates: Rates) -> Steady:
    """Returns the steady state of a loop that all blocks of a multiprocessor run repeatedly.

    The result is the mean over several offsets between the blocks' starts, evenly spread over a pass, because nothing
    synchronizes the blocks.
    """
    alone = Multiprocessor(code, warps, 1, rates).run(WARM_UP, PASSES)
    if blocks == 1:
        return alone
    found = [
        Multiprocessor(code, warps, blocks, rates, alone.clocks * at / OFFSETS).run(WARM_UP, PASSES)
        for at in range(OFFSETS)
    ]
    waits = {name: sum(each.waits[name] for each in found) / OFFSETS for name in WAITS}
    return Steady(sum(each.clocks for each in found) / OFFSETS, waits)
