"""Jobs in processes of their own. Two small models train faster in two processes of one thread than in one of two."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch

DIED = "a worker process died; the system may have run out of memory"
Progress = Callable[[int, Any], None]


class WorkerError(RuntimeError):
    """A job failed; the message is its traceback."""


class Workers:
    """``count`` processes, started with spawn, of ``threads`` threads each; 0 runs the jobs here, one after another.

    Ctrl-C reaches this process alone: the workers are started deaf to it, and end with the ``with`` block or, should
    this process die, with their pipe.
    """

    def __init__(self, count: int, threads: int):
        self.threads = threads
        self._here = count == 0
        self._connections, self._processes = [], []
        if self._here:
            torch.set_num_threads(threads)
            return
        context = multiprocessing.get_context("spawn")
        with _deaf_to_interrupts():
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        with _deaf_to_interrupts():  # a second Ctrl-C must not leave workers behind
            for connection in self._connections:
                connection.close()
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join()

    def map(self, function: Callable, jobs: Sequence[tuple], progress: Progress = lambda job, message: None) -> list:
        """``function(*job, report)`` for every job, in whichever worker is free; the results in the order of the jobs.

        function is a module's own; what it passes to report arrives as progress(job number, message). Raises
        WorkerError.
        """
        if self._here:
            return [
                function(*job, lambda message, number=number: progress(number, message))
                for number, job in enumerate(jobs)
            ]
        results: list = [None] * len(jobs)
        free, pending, busy = list(self._connections), deque(enumerate(jobs)), {}
        while pending or busy:
            while pending and free:
                number, job = pending.popleft()
                connection = free.pop()
                try:
                    connection.send((function, job))
                except (BrokenPipeError, ConnectionResetError):
                    raise WorkerError(DIED) from None
                busy[connection] = number
            for connection in wait(list(busy)):
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


def _serve(connection, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems without signal masks
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent is gone
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
def _deaf_to_interrupts():
    """Holds Ctrl-C back until the end of the block. Processes started inside never hear it: they inherit the blocked
    signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # its own start would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
