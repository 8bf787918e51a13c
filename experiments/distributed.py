"""Trains one model in several processes, which ``torchrun`` starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from flashrope.console.options import BadInput
from flashrope.lab.small_models.train import Ranks
from torch import distributed


def ranks() -> Ranks:
    """Returns this process's rank and the number of ranks from torchrun's environment. Without torchrun there is one
    rank."""
    if "LOCAL_RANK" not in os.environ:
        return Ranks()
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def own_device(chosen: torch.device) -> torch.device:
    """Returns the device of this rank. If there are several GPUs, it is the GPU with the rank's local number. Raises
    BadInput if there are too few GPUs."""
    if chosen.type != "cuda":
        return chosen
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if chosen.index is not None or local >= count:
        raise BadInput(
            f"--device: expected cuda and a GPU for each process of torchrun, got {chosen} and {count} GPUs for "
            f"{os.environ['LOCAL_WORLD_SIZE']} processes"
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def group(device: torch.device) -> Iterator[None]:
    """Joins the process group of all ranks within the context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def first_says(value):
    """Returns the value of rank 0 on all ranks of the group. Outside a group, returns the value itself."""
    if not distributed.is_initialized():
        return value
    holder = [value]
    distributed.broadcast_object_list(holder)
    return holder[0]
