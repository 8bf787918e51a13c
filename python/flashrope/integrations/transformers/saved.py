"""What a changed model leaves in its saved configuration, so that it is never taken for a stock model.

``"flashrope"`` holds the options of ``convert``. ``"_attn_implementation"`` names an attention that only this package
registers: transformers 4.57 to 5.23 refuse to load such a model without it, and show the name. Where this package is
imported the model loads, and its first forward is refused until it is converted.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..options import FIELD

KEY = "_attn_implementation"  # 4.57 and 5.0 do not read "attn_implementation"
# transformers gives names with "flash", "/" or "|" a meaning of its own.
SAVED = (
    "Flashrope converted this model: load it with from_pretrained of Flashrope.integrations.transformers (in lower "
    f'case), or delete "{KEY}" from its config.json for the stock model'
)

NOT_CONVERTED = (
    "model: expected a converted model, got one that was loaded or built from the configuration of a converted one; "
    "call convert(model), load it with flashrope.integrations.transformers.from_pretrained, or call revert(model) for "
    "the stock model"
)


def write_options(model: torch.nn.Module, config, options: dict[str, Any]) -> None:
    """Leaves options, which are not empty, in the decoder's configuration, and the name in those of all models."""
    setattr(config, FIELD, options)
    for each in _configurations(model, config):
        vars(each)[KEY] = SAVED  # a property of the class: only to_dict and save_pretrained read this


def delete_options(model: torch.nn.Module, config) -> None:
    vars(config).pop(FIELD, None)
    for each in _configurations(model, config):
        vars(each).pop(KEY, None)


def choose_stock_attention(model: torch.nn.Module, asked: str | None = None, names=(SAVED,)) -> None:
    """Gives modules whose configuration has one of names the attention asked for; None: what transformers prefers.

    Raises:
        ValueError, ImportError: from transformers, if the model or this machine does not have it.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation in names:
            module.config._attn_implementation_internal = module.get_correct_attn_implementation(asked)


def _configurations(model: torch.nn.Module, config) -> list:
    """The decoder's configuration, and those of the models around it, which are written in its stead."""
    around = [
        module.config
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and any(isinstance(each, PreTrainedModel) and each.config is config for each in module.modules())
    ]
    return list({id(each): each for each in [config, *around]}.values())


def _refuse(*args, **kwargs):
    raise ValueError(NOT_CONVERTED)


AttentionInterface.register(SAVED, _refuse)
AttentionMaskInterface.register(SAVED, _refuse)
