"""The options of a conversion in the configurations of a model: writing, deleting, and keeping them to one model."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..scheme_options import FIELD
from .conversion_plan import KEY, SAVED, scheme_of
from .layer_schemes import LayerScheme


def write_options(model: torch.nn.Module, config, options: dict[str, Any]) -> None:
    """Writes options, which must not be empty, to the decoder's configuration. Writes the name of the attention to the
    configurations of the decoder and of all models that contain it."""
    setattr(config, FIELD, options)
    for each in _configurations(model, config):
        vars(each)[KEY] = SAVED  # hidden by a property of the class, so only to_dict and save_pretrained read it


def delete_options(model: torch.nn.Module, config) -> None:
    vars(config).pop(FIELD, None)
    for each in _configurations(model, config):
        vars(each).pop(KEY, None)


def separate_configuration(model: torch.nn.Module, decoder: PreTrainedModel) -> bool:
    """Gives a model a copy of its configuration if another living model has the same object, so that the options and
    the attention in the configuration are those of one model. Returns whether there was such a model.

    model: a model or a part of one that holds the decoder. The whole model gets the copy.
    """
    if not _may_be_shared(model, decoder):
        return False
    living = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and "config" in vars(each)]
    roots = [model, *(each for each in living if any(module is decoder for module in each.modules()))]
    own = {id(module): module for root in roots for module in root.modules()}
    shared = {id(config): config for root in roots for config in _configurations(root, decoder.config)}
    if not any(id(each) not in own and id(each.config) in shared for each in living):
        return False
    copies: dict[int, Any] = {}
    for config in shared.values():
        copy.deepcopy(config, copies)
    for module in own.values():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]
    return True


def _may_be_shared(model: torch.nn.Module, decoder: PreTrainedModel) -> bool:
    """Whether more objects refer to the decoder's configuration than the model has. This is a quick test, because a
    search of all objects takes a tenth of a second."""
    modules = list(model.modules())
    held = sum(value is decoder.config for module in modules for value in vars(module).values())
    held += len({id(each) for module in modules if isinstance(each := scheme_of(module), LayerScheme)})
    return sys.getrefcount(decoder.config) - 1 > held  # the argument of getrefcount is one more


def _configurations(model: torch.nn.Module, config) -> list:
    """Returns the configurations of the decoder and of the models that contain it. Saving writes the configuration of
    the outermost model."""
    around = [
        module.config
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and any(isinstance(each, PreTrainedModel) and each.config is config for each in module.modules())
    ]
    return list({id(each): each for each in [config, *around]}.values())
