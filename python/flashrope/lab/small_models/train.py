"""Trains a model with AdamW, linear warm-up, cosine decay and gradient clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ... import Rotary, attention
from .model import Attend, LanguageModel
from .state import load, save


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run. Lengths are in tokens. One token is one byte."""

    steps: int
    batch_size: int
    train_length: int
    learning_rate: float = 3e-3
    final_fraction: float = 0.05  # learning rate at the last step, as a fraction of the peak
    warmup: float = 0.1  # fraction of the steps during which the learning rate rises
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    compile: bool = False
    micro_batch: int = 0  # sequences per forward pass, with gradients accumulated over the batch. 0: the whole batch


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The number of processes that train one model together, in the default group of torch.distributed, and the rank of
    this process."""

    rank: int = 0
    world: int = 1


@dataclasses.dataclass(frozen=True)
class Trained:
    """The outcome of one training run."""

    loss: float  # mean over the last tenth of the steps, nats per token
    seconds: float
    tokens_per_second: float  # excludes the first step, which compiles kernels and builds tables
    losses: tuple[float, ...] = ()  # the loss of every step, including steps before an interruption


def train(
    model: LanguageModel,
    rotary: Rotary,
    batches: Iterable[torch.Tensor] | Callable[[int], Iterable[torch.Tensor]],
    config: TrainConfig,
    attend: Attend = attention,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    state: Path | None = None,
    save_every: int = 0,
    ranks: Ranks = Ranks(),
) -> Trained:
    """Trains ``model`` in place. On a GPU the forward pass runs under bfloat16 autocast.

    With several ``ranks``, each process trains on its own rows of every batch (DistributedDataParallel). The result
    equals the result of one process up to rounding. All processes must be given the same model, batches and state. Rank
    0 writes the state.

    Args:
        batches: an iterable of int64 (batch_size, train_length + 1) on the model's device, or of pairs (inputs,
            targets), each (batch_size, seqlen). Targets of -100 are ignored. With ``state``, a function that takes the
            number of finished steps and returns such an iterable.
        attend: called as attend(q, k, v, rotary).
        progress: called as progress(step, loss), every step on a CPU and about fifty times on a GPU.
        state: a file to which the run is saved every ``save_every`` steps. If the file exists, training resumes from
            it, with the same result as without the interruption. The caller deletes the file.

    Raises RuntimeError if the loss is not finite, and ValueError if there are more ranks than rows of a batch.
    """
    device = next(model.parameters()).device
    if config.batch_size < ranks.world:
        raise ValueError(f"batch_size: expected at least {ranks.world}, a row for each rank, got {config.batch_size}")
    replica = torch.nn.parallel.DistributedDataParallel(model) if ranks.world > 1 else None
    forward = torch.compile(replica or model) if config.compile else replica or model
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_fraction(step, config))
    report_every = max(config.steps // 50, 1) if device.type == "cuda" else 1  # reading the loss synchronizes
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    losses, done, first_step = [], 0, 0.0
    if state is not None and state.exists():
        saved = load(state, device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        losses = list(saved["losses"])
        done = len(losses)
    start = time.perf_counter()
    for step, batch in zip(
        range(done + 1, config.steps + 1), batches(done) if callable(batches) else batches, strict=False
    ):
        loss = _gradients(forward, rotary, attend, batch, config.micro_batch, device, ranks, replica)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        if step == done + 1 and config.steps > step:
            loss.item()
            first_step = time.perf_counter() - start
        if step % report_every == 0 or step == config.steps:
            value = losses[-1].item()
            if not math.isfinite(value):
                raise RuntimeError(
                    f"training diverged: the loss is {value} at step {step}; a lower learning rate may help"
                )
            progress(step, value)
        if state is not None and save_every and step % save_every == 0 and ranks.rank == 0:
            save(state, {"losses": torch.stack(losses), **{name: part.state_dict() for name, part in parts.items()}})
    seconds = time.perf_counter() - start
    timed = max(config.steps - done - 1, 1) * config.batch_size * config.train_length
    last = torch.stack(losses[-max(config.steps // 10, 1) :])
    speed = timed / max(seconds - first_step, 1e-9)
    return Trained(last.mean().item(), seconds, speed, tuple(torch.stack(losses).tolist()))


def _gradients(
    forward,
    rotary: Rotary,
    attend: Attend,
    batch,
    micro_batch: int,
    device: torch.device,
    ranks: Ranks = Ranks(),
    replica: torch.nn.parallel.DistributedDataParallel | None = None,
) -> torch.Tensor:
    """Accumulates the gradients of the mean loss over the targets of the whole batch, and returns that loss."""
    inputs, targets = batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])
    counted = (targets >= 0).sum()
    inputs, targets = (rows.tensor_split(ranks.world)[ranks.rank] for rows in (inputs, targets))
    parts = list(zip(*(rows.split(micro_batch or len(inputs)) for rows in (inputs, targets)), strict=True))
    total = torch.zeros((), device=device)
    for n, (part, wanted) in enumerate(parts):
        alone = replica.no_sync() if replica and n + 1 < len(parts) else contextlib.nullcontext()
        with alone:
            with autocast(device):
                logits = forward(part, rotary, attend)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum") / counted
            (ranks.world * loss).backward()  # times world, because the replicas average gradients over the ranks
        total += loss.detach()
    if replica:
        torch.distributed.all_reduce(total)
    return total


def learning_rate_fraction(step: int, config: TrainConfig) -> float:
    """Returns the fraction of the peak learning rate at ``step``, counted from 0."""
    warmup = max(round(config.warmup * config.steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(config.steps - warmup, 1), 1.0)
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


def autocast(device: torch.device):
    """Returns bfloat16 autocast for a GPU, and for other devices a context that does nothing."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
