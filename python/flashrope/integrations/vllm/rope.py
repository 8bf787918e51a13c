"""Turns off the rotary embedding of a model that vLLM builds, after comparing its table with the plan's."""

from __future__ import annotations

import math

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none

from ...rotary.rotary import Rotary
from .plan import Plan
from .state import active_plan, check_backend

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a frequency read from a table


class RopeRegistry(dict):
    """The embeddings that vLLM's ``get_rope`` has made in this process, apart by plan.

    An embedding is put in here when it is made. If the configuration in use asks for a scheme, it stops rotating then.

    Attributes:
        raw: digests of the plans for which an embedding was turned off. vLLM clears the dict at an engine's end, which
            may be while another one starts.
    """

    def __init__(self, embeddings=()) -> None:
        super().__init__(embeddings)
        self.raw: set[str] = set()

    def __contains__(self, key) -> bool:
        return super().__contains__(_by_plan(key))

    def __getitem__(self, key):
        return super().__getitem__(_by_plan(key))

    def __setitem__(self, key, embedding) -> None:
        plan = active_plan(get_current_vllm_config_or_none())
        if plan is not None:
            check_backend()
            _turn_off(embedding, plan)
            self.raw.add(plan.digest)
        super().__setitem__(_by_plan(key), embedding)


class RawRotaryEmbedding(nn.Module):
    """Returns q and k as they came."""

    def forward(self, positions, query, key=None, *args, **kwargs):
        return query, key


def _by_plan(key):
    plan = active_plan(get_current_vllm_config_or_none())
    return key if plan is None else (plan.digest, key)


def _turn_off(embedding: nn.Module, plan: Plan) -> None:
    """
    Raises:
        ValueError: the embedding is not one with a table per position, or not that of the model's configuration.
    """
    name = type(embedding).__name__
    table = getattr(embedding, "cos_sin_cache", None)
    if table is None or table.ndim != 2:
        raise ValueError(f"rope: expected a rotary embedding with one table of cos and sin, got {name}")
    if not any(_same(embedding, table, rotary) for rotary in plan.stock):
        schemes = " or ".join(map(repr, plan.stock))
        raise ValueError(
            f"rope: expected the table of the model's configuration, {schemes}; got another one in vLLM's {name}, "
            "which reads the rope parameters differently"
        )
    embedding.__class__ = RawRotaryEmbedding
    del embedding.cos_sin_cache


def _same(embedding, table: torch.Tensor, rotary: Rotary) -> bool:
    """The row of position 1 holds attention_factor * cos(inv_freq), then sin."""
    cos, sin = table[1].detach().double().cpu().chunk(2)
    rounding = RELATIVE_ERROR[table.dtype]
    return (
        embedding.rotary_dim == rotary.rotary_dim
        and embedding.is_neox_style is not rotary.interleaved
        and torch.allclose(torch.atan2(sin, cos), rotary.inv_freq, rtol=rounding, atol=0)
        and math.isclose(float(cos[-1] ** 2 + sin[-1] ** 2), rotary.temperature, rel_tol=2 * rounding)
    )
