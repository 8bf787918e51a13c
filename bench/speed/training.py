"""Makes training steps for the model of ``flashrope demo``: forward, loss, backward, clipping and AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from flashrope.lab.small_models.model import LanguageModel, ModelConfig
from flashrope.lab.small_models.presets import PRESETS
from torch.nn.functional import cross_entropy

from .cpu_cases import Entry
from .problem import Problem

PRESET = PRESETS["cpu"]
SIZES = ((PRESET.batch, PRESET.train_length), (1, 4096))  # (batch, seqlen)


def training_problem(batch: int, seqlen: int) -> Problem:
    """Returns the problem that one layer's attention solves. HoPE's train_length is seqlen, and ReRoPE's window is
    seqlen / 4."""
    head_dim, cpu = PRESET.width // PRESET.heads, torch.device("cpu")
    sizes = (batch, seqlen, PRESET.heads, PRESET.heads, head_dim, torch.float32, cpu)
    return Problem(*sizes, window=seqlen // 4, train_length=seqlen)


def training_steps(chosen: list[Entry], p: Problem) -> dict[str, Callable[[], float]]:
    """Returns {name of an entry: training step with the attention of that entry}. All entries start from the same
    weights and use the same tokens. A step returns the loss before its update."""
    model = LanguageModel(ModelConfig(PRESET.width, PRESET.layers, PRESET.heads))
    tokens = torch.randint(model.config.vocab_size, (p.batch, p.seqlen + 1))
    return {each.name: partial(_step, *_trained(model), each.contestant.prepare(p), tokens) for each in chosen}


def tokens_per_second(times: dict[str, list[float]], p: Problem) -> str:
    return ", ".join(f"{name} {1e3 * p.batch * p.seqlen / median(of):,.0f}" for name, of in times.items())


def _trained(model: LanguageModel) -> tuple[LanguageModel, torch.optim.Optimizer]:
    model = copy.deepcopy(model)
    return model, torch.optim.AdamW(model.parameters(), lr=PRESET.learning_rate, fused=True)


def _step(model: LanguageModel, optimizer: torch.optim.Optimizer, attend: Callable, tokens: torch.Tensor) -> float:
    logits = model(tokens[:, :-1], None, lambda q, k, v, _: attend(q, k, v))
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
