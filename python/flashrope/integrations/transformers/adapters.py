"""PEFT adapters of converted models: their folders carry the model's options.

An adapter is trained for the scheme of its model, but PEFT saves no configuration of the model. So the options are
written to adapter_config.json, by PEFT's models and by transformers' own. Without this package, PEFT warns about the
fields that it does not know, and their names say what to do. In a process that has called ``convert`` or
``from_pretrained`` of this package, loading an adapter compares its options with those of the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...console.files import replacing
from ..scheme_options import FIELD, as_keywords

LOAD_WITH = "load this adapter with from_pretrained of flashrope.integrations.transformers"
# Adapters that need what a converted model does not have, by PEFT's names, and the reason for each.
REFUSED = {
    "PREFIX_TUNING": "its prefixes are keys after their rotation, and a converted model caches keys before it",
    "CARTRIDGE": "its prefixes are keys after their rotation, and a converted model caches keys before it",
    "ADAPTION_PROMPT": "it rotates queries itself, with the cos and sin of the stock model",
}


@dataclass
class Exchange:
    """The saving or loading of an adapter.

    Attributes:
        options: the options of the adapter's model, as its configuration holds them.
        compares: whether an adapter with other options is warned about.
        found: the options of the adapters that were loaded, as their folders hold them.
    """

    options: Mapping[str, Any]
    compares: bool = True
    found: list[dict[str, Any]] = field(default_factory=list)


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextlib.contextmanager
def collecting_options() -> Iterator[list[dict[str, Any]]]:
    """Collects the options of the adapters that are loaded in this context, and warns about none of them."""
    follow_adapters()
    exchange = Exchange({}, compares=False)
    token = EXCHANGE.set(exchange)
    try:
        yield exchange.found
    finally:
        EXCHANGE.reset(token)


def check_adapters(model: torch.nn.Module) -> None:
    """Checks that a model has no adapter that a converted model does not support.

    Raises:
        ValueError: it has one. The message names its type.
    """
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for each in configs.values() if isinstance(configs, dict) else ():
            _check_type(each)


def _check_type(peft_config) -> None:
    name = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    if name in REFUSED:
        raise ValueError(
            f"peft_config: {name} is not supported in a converted model ({REFUSED[name]}), got "
            f"{type(peft_config).__name__}; use LoRA or prompt tuning, or call revert(model) first"
        )


def follow_adapters() -> None:
    """Makes PEFT and transformers save the options of a model with its adapters, and compare them when they load an
    adapter. Models without options are not affected."""
    if find_spec("peft") is None:
        return
    try:
        from peft import PeftModel
        from peft.config import PeftConfigMixin
    except ImportError:  # a version of PEFT for another version of transformers: there are no adapters
        return
    for owner in (PeftModel, PreTrainedModel):
        _wrap(owner, "save_pretrained", _exchange)
        _wrap(owner, "load_adapter", _exchange)
    _wrap(PeftModel, "from_pretrained", _exchange)
    _wrap(PeftConfigMixin, "save_pretrained", _write)
    _wrap(PeftConfigMixin, "from_peft_type", _read)
    _wrap(PeftModel, "__init__", _check)
    _wrap(PeftModel, "add_adapter", _check)


def _wrap(owner: type, name: str, around: Callable) -> None:
    """Replaces a method by one that calls around(the method, its arguments). Does so once."""
    stock = getattr(owner, name)
    of_class = hasattr(stock, "__func__")
    function = stock.__func__ if of_class else stock
    if hasattr(function, "_flashrope"):
        return

    @functools.wraps(function)
    def method(*args, **kwargs):
        return around(function, *args, **kwargs)

    method._flashrope = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(method) if of_class else method)


def _exchange(stock, *args, **kwargs):
    """Saves or loads the adapter of the first model among the arguments."""
    if EXCHANGE.get() is not None:
        return stock(*args, **kwargs)
    token = EXCHANGE.set(Exchange(_options_of(_model_among(args, kwargs))))
    try:
        return stock(*args, **kwargs)
    finally:
        EXCHANGE.reset(token)


def _write(stock, config, save_directory, **kwargs):
    stock(config, save_directory, **kwargs)
    exchange = EXCHANGE.get()
    if exchange is not None and exchange.options:
        from peft.utils import CONFIG_NAME

        path = Path(save_directory) / CONFIG_NAME
        content = json.loads(path.read_text()) | {FIELD: exchange.options, f"{FIELD}: {LOAD_WITH}": True}
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=2, sort_keys=True))


def _read(stock, cls, **kwargs):
    options = kwargs.get(FIELD)
    if options is not None:
        kwargs = {name: value for name, value in kwargs.items() if not name.startswith(FIELD)}
        exchange = EXCHANGE.get()
        if exchange is not None:
            exchange.found.append(options)
        if exchange is None or exchange.compares and _text(exchange.options) != _text(options):
            had = "no model" if exchange is None else f"a model with {as_keywords(exchange.options) or 'no options'}"
            warnings.warn(
                f"adapter: expected a model with {as_keywords(options)}, with which the adapter was saved, got "
                f"{had}; {LOAD_WITH}, or call convert(model, {as_keywords(options)})",
                stacklevel=2,
            )
    return stock(cls, **kwargs)


def _check(stock, *args, **kwargs):
    """Refuses an adapter of a converted model by its type."""
    model = _model_among(args[1:], kwargs) or args[0]
    if any("_flashrope" in vars(module) for module in model.modules() if isinstance(module, PreTrainedModel)):
        for each in (*args, *kwargs.values()):
            if hasattr(each, "peft_type") and not isinstance(each, torch.nn.Module):
                _check_type(each)
    return stock(*args, **kwargs)


def _model_among(args, kwargs) -> torch.nn.Module | None:
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.nn.Module)), None)


def _options_of(model: torch.nn.Module | None) -> dict[str, Any]:
    """Returns the options in the configuration of a model's decoder, or {}."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, PreTrainedModel) and getattr(module.config, FIELD, None):
            return getattr(module.config, FIELD)
    return {}


def _text(options: Mapping[str, Any]) -> str:
    """Returns options in a form that is equal before and after JSON."""
    return json.dumps(options, sort_keys=True)
