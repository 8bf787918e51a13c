"""Measures the loss as a function of the context length, always on the same target bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ... import Rotary, attention
from .model import Attend, LanguageModel
from .train import autocast


@dataclasses.dataclass(frozen=True)
class ContextLoss:
    """Losses in nats per token at one context length."""

    context_length: int
    last: float  # mean over the last ``targets`` tokens of every window
    last_stderr: float  # standard error of ``last`` over the windows
    mean: float  # mean over all tokens of every window


@torch.no_grad()
def loss_by_context(
    model: LanguageModel,
    rotary: Rotary,
    windows: torch.Tensor,
    context_lengths: Sequence[int],
    targets: int,
    batch_tokens: int = 16384,
    attend: Attend = attention,
) -> list[ContextLoss]:
    """Returns the loss of ``model`` under ``rotary`` at each context length.

    ``windows`` is int64 (count, longest context + 1). At context length c the last c + 1 tokens of each window are
    used. So every context length predicts the same last ``targets`` tokens, with more or fewer tokens before them.
    Positions start at 0 at every length.

    Raises ValueError if a context length is longer than the windows allow or shorter than ``targets``.
    """
    losses = []
    for length in context_lengths:
        if not targets <= length < windows.shape[1]:
            raise ValueError(f"context_lengths: expected {targets} to {windows.shape[1] - 1}, got {length}")
        pieces = []
        for tokens in windows[:, -(length + 1) :].split(max(batch_tokens // length, 1)):
            with autocast(windows.device):
                logits = model(tokens[:, :-1], rotary, attend)
            pieces.append(F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none"))
        per_token = torch.cat(pieces).double()
        last = per_token[:, -targets:].mean(dim=1)
        stderr = last.std().item() / len(last) ** 0.5 if len(last) > 1 else float("nan")
        losses.append(ContextLoss(length, last.mean().item(), stderr, per_token.mean().item()))
    return losses
