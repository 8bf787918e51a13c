"""The training loop: AdamW, linear warm-up, cosine decay, gradient clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from .. import Rotary, attention
from .model import Attend, LanguageModel


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What one training run does. Lengths are in tokens; one token is one byte."""

    steps: int
    batch_size: int
    train_length: int
    learning_rate: float = 3e-3
    final_fraction: float = 0.05  # of the learning rate, at the last step
    warmup: float = 0.1  # of the steps
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    compile: bool = False


@dataclasses.dataclass(frozen=True)
class Trained:
    loss: float  # mean over the last tenth of the steps, nats per token
    seconds: float
    tokens_per_second: float  # without the first step, which compiles kernels and builds tables


def train(model: LanguageModel, rotary: Rotary, batches: Iterable[torch.Tensor], config: TrainConfig, attend: Attend = attention,
          progress: Callable[[int, float], None] = lambda step, loss: None) -> Trained:
    """Train in place. batches yields int64 (batch_size, train_length + 1) on the model's device; progress(step, loss) is
    called some fifty times or more. On a GPU the forward pass runs under bfloat16 autocast.

    Raises RuntimeError where the loss is not finite.
    """
    device = next(model.parameters()).device
    forward = torch.compile(model) if config.compile else model
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_fraction(step, config))
    report_every = max(config.steps // 50, 1) if device.type == "cuda" else 1  # reading the loss waits for the GPU
    losses, first_step = [], 0.0
    start = time.perf_counter()
    for step, batch in zip(range(1, config.steps + 1), batches, strict=False):
        with autocast(device):
            logits = forward(batch[:, :-1], rotary, attend)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step == 1 and config.steps > 1:
            loss.item()
            first_step = time.perf_counter() - start
        if step % report_every == 0 or step == config.steps:
            value = losses[-1].item()
            if not math.isfinite(value):
                raise RuntimeError(f"training diverged: the loss is {value} at step {step}; a lower learning rate may help")
            progress(step, value)
    seconds = time.perf_counter() - start
    timed = max(config.steps - 1, 1) * config.batch_size * config.train_length
    last = torch.stack(losses[-max(config.steps // 10, 1):])
    return Trained(last.mean().item(), seconds, timed / (seconds - first_step))


def learning_rate_fraction(step: int, config: TrainConfig) -> float:
    """Fraction of the peak learning rate at a step counted from 0."""
    warmup = max(round(config.warmup * config.steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(config.steps - warmup, 1), 1.0)
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


def autocast(device: torch.device):
    """bfloat16 autocast on a GPU, nothing elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
