"""Applies a ``ConversionPlan`` to a model, and undoes it.

A converted model keeps its modules, weights and forward methods. Its configuration names an attention function and a
mask function of this package, which are registered with transformers. A hook on its rotary embedding returns cos = 1
and sin = 0, so raw queries and keys reach the attention function, and the library's own caches hold raw keys.

A saved model cannot be mistaken for a stock model. ``"flashrope"`` in its configuration holds the options of
``convert``. ``"_attn_implementation"`` names an attention that only this package registers. Without this package,
transformers 4.57 to 5.24 raise an error that quotes this name when they load the model. If this package is imported,
the model loads, but its forward raises an error until the model is converted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..scheme_options import as_keywords
from . import attending  # noqa: F401  registers the attention and the masks
from .caches import COORDINATES, axes_of, check_cache, mark_returned, read_coordinates
from .checkpointing import watch_backward
from .configurations import delete_options, write_options
from .continuous_batching import SUPPORTED, with_pages
from .conversion_plan import NAME, SAVED, ConversionPlan, scheme_of
from .embeddings import ATTRIBUTE, check_embedding, no_rotation, rotary_embeddings
from .layer_schemes import LayerScheme
from .one_tensor import expand
from .positions import add_length, check_positions
from .shared_layers import count_rows, drops_rows
from .versions import arguments_of, with_arguments


class Applied(NamedTuple):
    """The record of a conversion, stored on the decoder.

    Attributes:
        attn_implementation: the name of the model's own attention, which ``undo`` restores.
        handles: the handles of the hooks.
        embeddings: the names of the rotary embeddings that are not in a layer, whose name a wrapper may change.
    """

    plan: ConversionPlan
    attn_implementation: str
    handles: list[RemovableHandle]
    embeddings: tuple[str, ...]


def apply(model, decoder: Any, plan: ConversionPlan) -> None:
    """Applies a plan of this model. An earlier conversion is undone first."""
    if not undo(model, decoder):
        choose_stock_attention(model, names=(SAVED, NAME))
    attn_implementation = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    for name, scheme in plan.schemes.items():
        module = decoder.get_submodule(name)
        setattr(module, ATTRIBUTE, scheme)
        if hasattr(module, "expand_kv"):
            module.expand_kv = partial(expand, module)
        module.extra_repr = partial(_describe_layer, type(module).extra_repr(module), scheme)
    embeddings = rotary_embeddings(decoder)
    handles = [embedding.register_forward_hook(no_rotation) for embedding in embeddings.values()]
    handles.append(decoder.register_forward_pre_hook(check_forward, with_kwargs=True))
    handles.append(decoder.register_forward_hook(mark_returned, with_kwargs=True))
    handles.append(decoder.register_forward_hook(watch_backward))
    setattr(
        decoder,
        ATTRIBUTE,
        Applied(
            plan, attn_implementation, handles, tuple(name for name in embeddings if not name.startswith("layers."))
        ),
    )
    decoder.extra_repr = partial(_describe_decoder, type(decoder).extra_repr(decoder), as_keywords(plan.options))
    if plan.field:
        write_options(model, decoder.config, dict(plan.field))


def undo(model, decoder) -> bool:
    """Undoes the plan that was applied to a model. Returns whether there was such a plan."""
    applied = vars(decoder).pop(ATTRIBUTE, None)
    if applied is None:
        return False
    choose_stock_attention(model)
    if applied.plan.field:
        delete_options(model, decoder.config)
    for handle in applied.handles:
        handle.remove()
    # Looks at all modules, because a wrapper may have changed the names of the layers since the conversion.
    for module in decoder.modules():
        if scheme_of(module) is not None:
            delattr(module, ATTRIBUTE)
            vars(module).pop("extra_repr", None)
            vars(module).pop("expand_kv", None)
    vars(decoder).pop("extra_repr", None)
    decoder.set_attn_implementation(applied.attn_implementation)
    return True


def check_forward(module, args, kwargs) -> tuple | None:
    """Checks the arguments of the decoder, and completes the arguments of continuous batching. It is a forward
    pre-hook."""
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation: expected {NAME!r} in a converted model, got "
            f"{module.config._attn_implementation!r}, with which nothing would rotate; call revert(model) first"
        )
    given = arguments_of(module, args, kwargs)
    for x in (given.get("inputs_embeds"), given.get("input_ids")):
        if x is not None:
            for name in module._flashrope.embeddings:
                check_embedding(module.get_submodule(name), x.device)
    if SUPPORTED and isinstance(kwargs.get("cu_seq_lens_k"), dict):
        return args, with_pages(kwargs)
    check_cache(module, given)
    if axes_of(module) > 1:
        places = read_coordinates(module, given)
        return args, kwargs | {COORDINATES: places} | add_length(module, given, places.queries)
    added = check_positions(module, given) | add_length(module, given, given.get("position_ids"))
    if drops_rows(module):
        added |= count_rows(given)
    return with_arguments(module, args, kwargs, added) if added else None


# ---- texts for print(model)


def _describe_decoder(stock: str, options: str) -> str:
    return "\n".join(
        filter(None, [stock, f"converted by flashrope: {options or 'the same scheme, raw keys in the cache'}"])
    )


def _describe_layer(stock: str, scheme: LayerScheme) -> str:
    return "\n".join(filter(None, [stock, f"flashrope: {scheme.rotary!r}"]))


# ---- the attention of stock models


def choose_stock_attention(model: torch.nn.Module, asked: str | None = None, names=(SAVED,)) -> None:
    """Sets the attention of modules whose configuration names one of ``names``. asked: the attention to set. None: the
    attention that transformers prefers.

    Raises:
        ValueError, ImportError: the model or the machine does not support this attention. transformers raises it.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation in names:
            module.config._attn_implementation_internal = module.get_correct_attn_implementation(asked)
