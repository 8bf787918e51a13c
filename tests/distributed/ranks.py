"""Provides ranks for the tests: gloo processes that stay alive between tests and run the functions that they are sent.

The ranks find one another through a file, so no port is used. After a function that fails or takes too long, the
processes are replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

RANKS = 4
SECONDS = 240  # time limit of a function: a longer run means that it hangs, even on a slow machine


class Failed(AssertionError):
    """Raised if a rank fails. The message is the rank's traceback."""


def on_ranks(body):
    """Turns a function into a test that runs it on four ranks at the same time, with the test's parameters and
    fixtures."""

    @functools.wraps(body)
    def test(ranks, **arguments):
        ranks(_run, body.__module__, body.__name__, arguments)

    signature = inspect.signature(body)
    ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature.replace(parameters=[ranks, *signature.parameters.values()])
    return test


def _run(module: str, name: str, arguments: dict):
    """Runs the body of a test of ``on_ranks``."""
    return getattr(importlib.import_module(module), name).__wrapped__(**arguments)


class Ranks:
    def __init__(self, count: int = RANKS):
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="flashrope-ranks-")
        self._started = 0
        self._processes, self._connections = [], []

    def __call__(self, function, *args, seconds: float = SECONDS) -> list:
        """Runs function(*args) on every rank at the same time. Returns the results in the order of the ranks. Raises
        Failed."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results, waiting, end = [None] * self.count, list(self._connections), time.monotonic() + seconds
        while waiting:
            ready = wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                late = [self._connections.index(connection) for connection in waiting]
                self.stop()
                raise Failed(f"{function.__name__} {args}: ranks {late} have not answered within {seconds} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    ok, results[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    ok, results[rank] = False, "died"
                if not ok:
                    self.stop()
                    raise Failed(f"{function.__name__} {args}, rank {rank} of {self.count}: {results[rank]}")
                waiting.remove(connection)
        return results

    def _start(self) -> None:
        self._started += 1
        store = Path(self._folder.name, f"store-{self._started}")
        context = multiprocessing.get_context("forkserver")  # torch is imported once, not by every rank
        preload = ["flashrope.integrations.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
        context.set_forkserver_preload(["pytest", *preload])
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []


def _serve(rank: int, count: int, store: str, connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:  # all tests have ended
            return
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)


@functools.cache
def mesh(ranks: int):
    """Returns a one-dimensional mesh of 2 ranks or of all ranks. If there are several meshes of 2 ranks, all of them do
    the same work."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("others", "ranks"))["ranks"]


@functools.cache
def first(ranks: int):
    """Returns a group of the first `ranks` ranks, or None on the other ranks."""
    import torch.distributed as dist

    group = dist.new_group(range(ranks))
    return group if dist.get_rank() < ranks else None


@functools.cache
def alone():
    """Returns a group that has only this rank."""
    import torch.distributed as dist

    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
