"""Refuses the backward of a forward before ``convert`` or ``revert`` under gradient checkpointing.

A checkpoint computes its layers again in the backward. After ``convert`` they have another scheme, so the gradients
would belong to neither of the two.
"""

from __future__ import annotations

from functools import partial

import torch

from .conversion_plan import plan_of
from .layer_schemes import LayerScheme

MIXED = (
    "model: expected the backward of a forward under the model's present scheme, got one of a forward before the last "
    "convert or revert; gradient checkpointing would compute its layers again under another scheme; run the forward "
    "again"
)


def watch_backward(decoder, args, output) -> None:
    """Makes the backward of this forward check that the decoder still has its scheme. It is the decoder's forward
    hook."""
    hidden = output[0]
    if not torch.compiler.is_compiling() and hidden.requires_grad and _has_checkpoints(decoder):
        hidden.register_hook(partial(_check_plan, decoder, plan_of(decoder).mark))  # type: ignore[union-attr]


def _has_checkpoints(decoder: torch.nn.Module) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper"
        for module in decoder.modules()
    )


def _check_plan(decoder, mark: str, grad: torch.Tensor) -> None:
    plan = plan_of(decoder)
    if plan is None or plan.mark != mark:
        raise ValueError(MIXED)


def check_recomputed(scheme: LayerScheme) -> None:
    """Checks a call of a layer that may belong to a backward. The stock model's forward is not watched, so a scheme
    remembers that a forward ran under it.

    Raises:
        ValueError: a backward computes the layer again, and no forward has run under its scheme.
    """
    if torch.compiler.is_compiling() or scheme.has_run:
        return
    if torch._C._current_graph_task_id() != -1:  # a backward is running
        raise ValueError(MIXED)
    scheme.has_run = True
