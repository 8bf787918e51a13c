"""The loss by position in windows of 8 times the training length.

A scheme that uses a longer context has a lower loss at later positions (Su 2023, ReRoPE: "longer context, lower loss"),
one that only survives has a level one, and one that fails has a rising one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashrope.demo.data import as_tokens
from flashrope.demo.train import autocast

from .tasks import MULTIPLES, Result, Subject, windows_of

TASK, BEFORE = "loss-by-position", "loss-at-training-length"


@torch.no_grad()
def measure(subject: Subject) -> list[Result]:
    """The mean loss in nats per byte over half a training length of positions, ``at`` being where they end; and at the
    longest length, once more the loss of those that end at the training length."""
    length, part = MULTIPLES[-1] * subject.unit, subject.unit // 2
    windows = as_tokens(windows_of(subject, length), subject.device)
    total = torch.zeros(length, dtype=torch.float64)
    for tokens in windows.split(max(subject.batch_tokens // length, 1)):
        with autocast(tokens.device):
            logits = subject.model(tokens[:, :-1], subject.scheme.rotary, subject.attend)
        losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        total += losses.double().sum(0).cpu()
    means = (total / len(windows)).view(-1, part).mean(1).tolist()
    found = [Result(TASK, (at + 1) * part, mean, len(windows)) for at, mean in enumerate(means)]
    before = next(each for each in found if each.at == subject.unit)
    return [*found, Result(BEFORE, length, before.value, before.samples)]
