"""Loads models that were saved after ``convert`` with options, and converts them as they were."""

from __future__ import annotations

import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ..options import FIELD
from .conversion import convert
from .plan import FAMILIES
from .saved import choose_stock_attention

__all__ = ["from_pretrained", "register_auto_classes"]

AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


def from_pretrained(
    pretrained_model_name_or_path, *args, auto_class=AutoModelForCausalLM, untested: bool = False, **kwargs
):
    """Loads a model with transformers and converts it: with the options that it was saved with, otherwise with its own
    scheme.

    Args:
        pretrained_model_name_or_path, args, kwargs: those of transformers' from_pretrained. attn_implementation is what
            ``revert`` returns to.
        auto_class: the class whose from_pretrained is called, such as AutoModel or LlamaForCausalLM.
        untested: as in ``convert``.

    Returns:
        What transformers returns: the model, or with output_loading_info=True the model and a dict.

    Raises:
        TypeError, ValueError: as ``convert`` does.
    """
    loaded = auto_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    choose_stock_attention(model, kwargs.get("attn_implementation"))
    convert(model, untested=untested)
    return loaded


def register_auto_classes(*model_types: str) -> None:
    """Makes transformers' AutoModel classes, and with them ``pipeline``, convert models that were saved with options.

    Models without options stay stock models, and other classes (``LlamaForCausalLM.from_pretrained``) are not affected.
    It holds for this process, through ``AutoModel.register`` and its siblings. ``revert`` gives such a model the
    attention that transformers prefers, whatever attn_implementation asked for.

    Args:
        model_types: of ``FAMILIES``; none: all of them, which imports their modules.

    Raises:
        ValueError: a model type is not in ``FAMILIES``, or this version of transformers (5.17) registers nothing for
            model types of its own.
    """
    unknown = sorted(set(model_types) - FAMILIES)
    if unknown:
        raise ValueError(f"model_types: expected some of {', '.join(sorted(FAMILIES))}; got {unknown[0]!r}")
    for model_type in model_types or sorted(FAMILIES):
        if model_type not in CONFIG_MAPPING:  # newer than this transformers
            continue
        config_class = CONFIG_MAPPING[model_type]
        for auto_class in (getattr(transformers, name) for name in AUTO_CLASSES):
            if config_class in auto_class._model_mapping:
                stock = auto_class._model_mapping[config_class]
                if isinstance(stock, type) and not hasattr(stock, LOADS):
                    auto_class.register(config_class, _loader(stock), exist_ok=True)
                    _check_registered(auto_class, config_class)


def _check_registered(auto_class, config_class) -> None:
    if not hasattr(auto_class._model_mapping[config_class], LOADS):
        raise ValueError(
            f"transformers: expected a version whose {auto_class.__name__}.register takes {config_class.__name__}, got "
            f"{transformers.__version__}, which ignores it; use flashrope.integrations.transformers.from_pretrained"
        )


LOADS = "_converts_saved_models"


def _loader(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that stands for stock where models are loaded. It makes models of stock itself."""

    def load(cls, *args, **kwargs):
        loaded = stock.from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        choose_stock_attention(model)
        if getattr(model.config, FIELD, None):
            convert(model)
        return loaded

    def build(cls, *args, **kwargs):
        return stock._from_config(*args, **kwargs)

    methods = {"from_pretrained": classmethod(load), "_from_config": classmethod(build), LOADS: True}
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "__qualname__": stock.__name__, **methods})
