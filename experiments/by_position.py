"""The loss by position in windows of 8 times the training length.

A scheme that uses a longer context has a lower loss at later positions (Su 2023, ReRoPE: "longer context, lower loss"),
one that only survives has a level one, and one that fails has a rising one.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from flashrope.small_models.data import as_tokens
from flashrope.small_models.train import autocast

from .tasks import Result, Subject, windows_of

TASK = "loss-by-position"
ENDS = (0.5, 1, 1.5, 2, 3, 4, 6, 8)  # of the parts of a window, in training lengths
WINDOWS_PER_SAMPLE = 5  # the loss of a few positions varies more than that of a window


@torch.no_grad()
def measure(subject: Subject) -> list[Result]:
    """The mean loss in nats per byte over the positions of each part of the windows; ``at`` is the part's end."""
    ends = [round(end * subject.unit) for end in ENDS]
    windows = windows_of(dataclasses.replace(subject, samples=WINDOWS_PER_SAMPLE * subject.samples), ends[-1])
    total = torch.zeros(ends[-1], dtype=torch.float64)
    for tokens in as_tokens(windows, subject.device).split(max(subject.batch_tokens // ends[-1], 1)):
        with autocast(tokens.device):
            logits = subject.model(tokens[:, :-1], subject.scheme.rotary, subject.attend)
        losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        total += losses.double().sum(0).cpu()
    mean = total / len(windows)
    return [
        Result(TASK, end, mean[start:end].mean().item(), len(windows))
        for start, end in zip((0, *ends), ends, strict=False)
    ]
