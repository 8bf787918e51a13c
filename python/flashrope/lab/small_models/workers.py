"""Runs jobs in worker processes. Two small models train faster in two processes with one thread each than in one
process with two threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch

from ...console.progress import Bar

DIED = "a worker process died; the system may have run out of memory"
Progress = Callable[[int, Any], None]


class WorkerError(RuntimeError):
    """Raised if a job failed. The message is the job's traceback."""


class Workers:
    """A pool of ``count`` processes, started with spawn, with ``threads`` torch threads each.

    If ``count`` is 0, the jobs run one after another in this process, on ``threads`` threads. Otherwise this process
    uses one thread until the ``with`` block ends.

    ``devices``: one device for each process, such as cuda:0 and cuda:1. In a worker, "cuda" means its own GPU, and
    ``device()`` returns that GPU.

    Only this process handles Ctrl-C. The workers ignore it. The workers end with the ``with`` block, or when this
    process dies, which closes their pipes.
    """

    def __init__(self, count: int, threads: int, devices: Sequence[torch.device] = ()):
        if devices and len(devices) != count:
            raise ValueError(f"devices: expected one device for each of {count} processes, got {len(devices)}")
        self.threads = threads
        self._here = count == 0
        self._connections, self._processes = [], []
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads if self._here else 1)
        if self._here:
            return
        context = multiprocessing.get_context("spawn")
        with _interrupts_held():
            for n in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, threads, devices[n] if devices else None), daemon=True
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        torch.set_num_threads(self._threads_before)
        with _interrupts_held():  # so that a second Ctrl-C leaves no worker running
            for connection in self._connections:
                connection.close()
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join()

    def map(self, function: Callable, jobs: Sequence[tuple], progress: Progress = lambda job, message: None) -> list:
        """Runs ``function(*job, report)`` for every job on the next free worker. Returns the results in job order.

        ``function`` must be importable (not a lambda or closure). Each ``report(message)`` becomes
        ``progress(job_number, message)`` in this process. Raises WorkerError if a job fails or a worker dies.
        """
        if self._here:
            return [
                function(*job, lambda message, number=number: progress(number, message))
                for number, job in enumerate(jobs)
            ]
        results: list = [None] * len(jobs)
        free: list[Any] = list(self._connections)
        busy: dict[Any, int] = {}  # connection to job number
        pending = deque(enumerate(jobs))
        while pending or busy:
            while pending and free:
                number, job = pending.popleft()
                connection = free.pop()
                try:
                    connection.send((function, job))
                except (BrokenPipeError, ConnectionResetError):
                    raise WorkerError(DIED) from None
                busy[connection] = number
            ready: list[Any] = wait(list(busy))
            for connection in ready:
                try:
                    kind, message = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise WorkerError(DIED) from None
                if kind == "report":
                    progress(busy[connection], message)
                elif kind == "failed":
                    raise WorkerError(message)
                else:
                    results[busy.pop(connection)] = message
                    free.append(connection)
        return results


def device() -> torch.device | None:
    """Returns the device of this worker process, if it was given one."""
    return _device


_device: torch.device | None = None


def steps_of_jobs(bar: Bar) -> Progress:
    """Returns a callback of ``Workers.map`` for jobs that send (step, loss). The callback counts the steps of all
    jobs."""
    done: Counter[int] = Counter()

    def progress(job: int, message: tuple[int, float]) -> None:
        step, loss = message
        bar.step(step - done[job], f"loss {loss:.3f}")
        done[job] = step

    return progress


def _serve(connection, threads: int, own: torch.device | None) -> None:
    global _device
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there are no signal masks
    torch.set_num_threads(threads)
    _device = own
    if own is not None and own.type == "cuda":
        torch.cuda.set_device(own)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent has exited
        while True:
            function, job = connection.recv()
            try:
                answer = "done", function(*job, lambda message: connection.send(("report", message)))
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception:
                answer = "failed", traceback.format_exc()
            connection.send(answer)


@contextlib.contextmanager
def _interrupts_held():
    """Delays Ctrl-C until the end of the block. Processes that are started in the block inherit the blocked signal and
    never receive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
