"""Hugging Face transformers models on this package's attention: ``convert``, ``revert``, ``suggest``.

A converted model keeps its modules, weights and forward methods. Two functions are registered with the library, one for
attention and one for masks, and the model's configuration names them; a hook on the rotary embedding gives out cos = 1
and sin = 0, so that raw queries and keys come through, and the library's own caches hold raw keys.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...api import attention, attention_varlen, attention_with_cache
from ...rotary import Rotary
from .masks import Packed, check_positions, layout

__all__ = ["FAMILIES", "Suggestion", "convert", "revert", "suggest"]

NAME = "rotary_bands"  # the library gives names with "flash", "/" or "|" a meaning of its own
FIELD = "flashrope"  # of the configuration: what convert was asked for, saved with the model
CHANGES = ("window", "factor", "log_n", "hope_train_length")

# model_type of the decoders that are held against the library's own attention by the tests.
FAMILIES = frozenset(
    {
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
# What an attention function may be asked for and this one does not do.
REFUSED = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "position_bias": "adds a bias to its scores",
    "head_mask": "masks heads",
    "cache": "is served from a paged cache",
}


def convert(model, rotary: Rotary | dict[str, Rotary] | None = None, **changes):
    """Lets a causal language model run on this package's attention, in place; ``revert`` undoes it.

    Without changes the model's own rotary scheme stays and the logits are the same. Caches then hold raw keys: one that
    was filled before converting (or reverting) cannot be used after it.

    Args:
        model: a transformers model, or anything that holds one (PEFT, DDP), of a type in ``FAMILIES``.
        rotary: a scheme to use instead of the model's own, in the layers that rotate; a dict of one per layer type
            where they differ.
        window: ReRoPE: distances count up to window and stay there. With factor: Leaky ReRoPE, they grow by 1 / factor
            beyond.
        log_n: scale queries by max(1, ln(i + 1) / ln(log_n)); True: by the length that the model was trained with.
            Layers with a sliding window see a fixed number of keys and are left alone.
        hope_train_length: HoPE: pairs that turn less than once over this length do not rotate.

    With neither rotary nor changes, those of the last convert are used, which the configuration keeps and
    save_pretrained writes with it; ``revert`` forgets them.

    Returns:
        model.

    Raises:
        TypeError, ValueError: the argument, what was expected and what came; the model is then as it was.
    """
    decoder = _decoder(model)
    config = decoder.config
    asked = _asked(config, rotary, changes)
    modules = _attention_modules(decoder)
    schemes: dict[tuple, _Scheme] = {}
    plan = []
    for module in modules:
        layer_type, window = _layer_type(config, module.layer_idx), _sliding_window(config, module.layer_idx)
        key = layer_type, window, bool(getattr(module, "use_rope", True))
        if key not in schemes:
            schemes[key] = _Scheme(config, *key, asked)
        head_dim = module.head_size if hasattr(module, "head_size") else module.head_dim  # gpt_neox has the former
        if schemes[key].rotary.head_dim != head_dim:
            raise ValueError(
                f"rotary: expected head_dim {head_dim} of layer {module.layer_idx}, got {schemes[key].rotary.head_dim}"
            )
        plan.append((module, schemes[key]))
    if asked.get("log_n") and all(scheme.window for scheme in schemes.values()):
        raise ValueError("log_n: expected a layer that sees all keys, got a sliding window in every layer")

    _check_tables(decoder, {key[0] for key in schemes if key[2]})

    revert(model)
    before = config._attn_implementation
    decoder.set_attn_implementation(NAME)
    for module, scheme in plan:
        module.rotary_bands = scheme
    handles = [embedding.register_forward_hook(_no_rotation) for embedding in _embeddings(decoder)]
    handles.append(decoder.register_forward_pre_hook(_check_forward, with_kwargs=True))
    decoder.rotary_bands = _Conversion(before, handles)
    if any(asked.values()):
        setattr(config, FIELD, {name: _to_text(value) for name, value in asked.items() if value is not None})
    return model


def revert(model):
    """Gives back the stock model: the same functions run on the same weights as before ``convert``. Returns model."""
    decoder = _decoder(model)
    conversion = vars(decoder).pop("rotary_bands", None)
    if conversion is None:
        return model
    for handle in conversion.handles:
        handle.remove()
    for module in decoder.modules():
        vars(module).pop("rotary_bands", None)
    decoder.set_attn_implementation(conversion.attn_implementation)
    vars(decoder.config).pop(FIELD, None)
    return model


class _Conversion(NamedTuple):
    attn_implementation: str
    handles: list


# ---- what a layer computes


class _Scheme:
    """The scheme of the layers that are alike. ``at`` answers for tables that change with the length."""

    def __init__(self, config, layer_type: str | None, window: int | None, rotates: bool, asked: dict):
        self.window = window
        self.build: Callable[[int | None], Rotary] = partial(_rotary, config, layer_type, window, rotates, asked)
        self.rotary = self.build(None)
        self.grows_from = math.inf if asked.get("rotary") or not rotates else _grows_from(config, layer_type)
        self.latest = (0, self.rotary)

    def at(self, seqlen: int) -> Rotary:
        if seqlen <= self.grows_from:
            return self.rotary
        length, rotary = self.latest
        if length != seqlen:
            rotary = self.build(seqlen)
            self.latest = (seqlen, rotary)
        return rotary


def _rotary(config, layer_type, window, rotates, asked, seqlen) -> Rotary:
    rotary = Rotary.from_hf_config(config, layer_type, seqlen) if rotates else Rotary.none(_head_dim(config))
    given = asked.get("rotary")
    if given is not None and rotates and (isinstance(given, dict) or any(rotary.frequencies)):
        given = given[layer_type] if isinstance(given, dict) else given
        if any(given.frequencies) and any(rotary.frequencies) and given.interleaved != rotary.interleaved:
            raise ValueError(
                f"rotary: expected interleaved={rotary.interleaved}, as the model pairs its channels, got "
                f"{given.interleaved}"
            )
        rotary = given
    if asked.get("hope_train_length"):
        rotary = _hope(rotary, asked["hope_train_length"])
    if asked.get("window") is not None and any(rotary.frequencies):
        rotary = rotary.rectify(asked["window"], asked.get("factor"))
    if window is not None:
        if any(band.slope != 1 for band in rotary.bands):
            raise ValueError(
                "window: expected a model whose layers see all keys, got layers with a sliding window of "
                f"{window}, beyond which there is nothing to rectify"
            )
        return rotary.local(window)
    if asked.get("log_n"):
        rotary = rotary.log_n(asked["log_n"], clip=True)
    return rotary


def _hope(rotary: Rotary, train_length: float) -> Rotary:
    """HoPE on a model's own table: a pair goes by the frequency it had before any interpolation."""
    if not train_length > 0:
        raise ValueError(f"hope_train_length: expected a positive length, got {train_length!r}")
    plain = rotary.frequencies
    if rotary.base is not None:
        plain = [rotary.base ** (-2 * m / rotary.exponent_dim) for m in range(len(rotary.frequencies))]
    theta = tuple(
        f if abs(g) >= 2 * math.pi / train_length else 0.0 for f, g in zip(rotary.frequencies, plain, strict=True)
    )
    return dataclasses.replace(rotary, frequencies=theta)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
    """The attention function: query (batch, heads, seqlen, head_dim), key and value with what the cache holds before
    them."""
    scheme = getattr(module, "rotary_bands", None)
    _check_call(module, scheme, dropout, sliding_window, kwargs)
    if query.dtype != value.dtype:  # autocast: the rotary embedding works in float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seqlen = q.shape[1]
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None and lengths.shape[0] > 2 and not isinstance(attention_mask, Packed):
        raise ValueError(
            "cu_seq_lens_q: expected position_ids beside it, which start anew in every sequence, got "
            f"{lengths.shape[0] - 1} sequences and none"
        )
    if attention_mask is None:
        return attention(q, k[:, :seqlen], v[:, :seqlen], scheme.at(seqlen), softmax_scale=scaling), None
    if isinstance(attention_mask, Packed):
        cu_seqlens, longest = attention_mask
        out = attention_varlen(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            scheme.at(longest),
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            softmax_scale=scaling,
        )
        return out.unflatten(0, q.shape[:2]), None
    if attention_mask.dtype is not torch.int32 or attention_mask.shape != (3, 1, 1, q.shape[0]):
        raise ValueError(
            "attention_mask: expected None or (batch, keys) of zeros and ones, got a mask of shape "
            f"{tuple(attention_mask.shape)} and type {attention_mask.dtype}, which the kernels cannot express"
        )
    first, end, position = attention_mask.view(3, -1).unbind()
    rotary = scheme.rotary
    if scheme.grows_from < math.inf and (scheme.window or k.shape[1] > scheme.grows_from):
        rotary = scheme.at(int(position.max()) + seqlen)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _attend_ragged(q, k, v, rotary, first, end, scaling), None
    return attention_with_cache(q, k, v, rotary, end, cache_leftpad=first, softmax_scale=scaling), None


def _attend_ragged(q, k, v, rotary, first, end, scaling):
    """With gradients: the keys of every sequence picked out and packed."""
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    slot = torch.arange(seqlen_k, device=q.device)
    held = (slot >= first[:, None]) & (slot < end[:, None])
    cu_seqlens_q = torch.arange(0, batch * seqlen_q + 1, seqlen_q, dtype=torch.int32, device=q.device)
    cu_seqlens_k = torch.nn.functional.pad(held.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
    out = attention_varlen(
        q.flatten(0, 1), k[held], v[held], rotary, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, softmax_scale=scaling
    )
    return out.view(q.shape)


def _check_call(module, scheme, dropout, sliding_window, kwargs) -> None:
    if scheme is None:
        raise ValueError(
            f"model: layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) was not converted; call "
            "convert(model)"
        )
    if dropout:
        raise ValueError(f"attention_dropout: expected 0, got {dropout}; there is no dropout inside the kernels")
    if sliding_window != scheme.window:
        raise ValueError(
            f"sliding_window: layer {module.layer_idx} was converted with {scheme.window}, its forward asks for "
            f"{sliding_window}; call convert(model) after changing the configuration"
        )
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: expected None, got {type(kwargs[name]).__name__}; layer {module.layer_idx} {reason}"
            )
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: expected a causal model, got False")


# ---- hooks
def _check_forward(module, args, kwargs) -> None:
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation: expected {NAME!r} in a converted model, got "
            f"{module.config._attn_implementation!r}, under which nothing would rotate; call revert(model) first"
        )
    check_positions(module, args, kwargs)


def _no_rotation(module, args, output):
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


# ---- reading a model


def _embeddings(decoder) -> list[torch.nn.Module]:
    return [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]


def _decoder(model) -> PreTrainedModel:
    """The module that holds the layers and the rotary embedding."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch module, got {type(model).__name__}")
    found = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and any(type(child).__name__.endswith("RotaryEmbedding") for child in module.children())
    ]
    if len(found) != 1:
        raise ValueError(
            f"model: expected one transformers decoder with a rotary embedding, found {len(found)} in "
            f"{type(model).__name__}"
        )
    decoder, kind = found[0], found[0].config.model_type
    if kind in FAMILIES and not hasattr(sys.modules[type(decoder).__module__], "create_causal_mask"):
        raise ValueError(
            "model: expected one that asks AttentionMaskInterface for its masks, got "
            f"{type(decoder).__name__}, which makes them itself in transformers {transformers.__version__}"
        )
    if kind not in FAMILIES:
        sinks = ", which has attention sinks" if kind == "gpt_oss" else ""
        raise ValueError(
            "model: expected one of the types that were held against the library's own attention, "
            f"{', '.join(sorted(FAMILIES))}; got {kind!r}{sinks}"
        )
    return decoder


def _attention_modules(decoder) -> list[torch.nn.Module]:
    config = decoder.config
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"model: expected scores without a cap, got attn_logit_softcapping = {config.attn_logit_softcapping}"
        )
    modules = [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    if len(modules) != config.num_hidden_layers:
        raise ValueError(f"model: expected {config.num_hidden_layers} attention modules, found {len(modules)}")
    ahead = getattr(config, "use_bidirectional_attention", False)
    if ahead or not all(getattr(module, "is_causal", False) for module in modules):
        raise ValueError("model: expected causal attention in every layer, got layers that see keys ahead")
    return modules


def _check_tables(decoder, layer_types) -> None:
    """The model's own tables must be those its configuration is read as: versions of transformers differ in some
    fields."""
    held = [
        (getattr(embedding, name), getattr(embedding, name.replace("original_inv_freq", "attention_scaling")))
        for embedding in _embeddings(decoder)
        for name in [*vars(embedding), *dict(embedding.named_buffers())]
        if name.endswith("original_inv_freq")
    ]  # inv_freq may have grown with the length
    for layer_type in layer_types:
        rotary = Rotary.from_hf_config(decoder.config, layer_type)
        if any(rotary.frequencies) and not any(_same_table(rotary, *table) for table in held):
            raise ValueError(
                "model: expected a rotary embedding of the frequencies that its configuration gives, "
                f"{rotary!r}; got other ones in transformers {transformers.__version__}, which reads the rope "
                "parameters differently"
            )


def _same_table(rotary: Rotary, inv_freq: torch.Tensor, attention_scaling: float) -> bool:
    rounding = 1e-5 if inv_freq.dtype == torch.float32 else 1e-2
    return (
        inv_freq.numel() == len(rotary.frequencies)
        and torch.allclose(inv_freq.detach().double().cpu(), rotary.inv_freq, rtol=rounding, atol=0)
        and math.isclose(attention_scaling**2, rotary.temperature, rel_tol=1e-5)
    )


def _layer_type(config, layer: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[layer] if types else None


def _sliding_window(config, layer: int) -> int | None:
    """As the layer's forward will ask for it; the attention function compares."""
    kind = _layer_type(config, layer)
    slides = getattr(config, "use_sliding_window", True) if kind is None else kind == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _grows_from(config, layer_type) -> float:
    """The length from which the table depends on the length."""
    params = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    params = params.get(layer_type, params) or {}
    kind = params.get("rope_type") or params.get("type")
    if kind == "dynamic" and not params.get("alpha"):
        return config.max_position_embeddings
    if kind in ("longrope", "su"):
        if (
            int(transformers.__version__.split(".")[0]) < 5
            and getattr(config, "original_max_position_embeddings", None) is None
        ):
            raise ValueError(
                "config: expected original_max_position_embeddings beside the rope parameters, where transformers "
                f"{transformers.__version__} looks for the length that longrope's tables change at"
            )
        return (
            params.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
    return math.inf


def _asked(config, rotary, changes: dict) -> dict:
    unknown = sorted(set(changes) - set(CHANGES))
    if unknown:
        raise TypeError(f"{unknown[0]}: convert takes rotary, {', '.join(CHANGES)}")
    if rotary is None and not any(value is not None and value is not False for value in changes.values()):
        saved = getattr(config, FIELD, None) or {}
        rotary, changes = _from_text(saved.get("rotary")), {name: saved.get(name) for name in CHANGES}
    for each in rotary.values() if isinstance(rotary, dict) else [rotary]:
        if each is not None and not isinstance(each, Rotary):
            raise TypeError(f"rotary: expected a Rotary or a dict of one per layer type, got {type(each).__name__}")
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    if isinstance(rotary, dict) and sorted(rotary) != layer_types:
        raise ValueError(f"rotary: expected the layer types {layer_types}, got {sorted(rotary)}")
    if changes.get("factor") is not None and changes.get("window") is None:
        raise ValueError("factor: expected a window beside it, beyond which distances grow by 1 / factor")
    if changes.get("log_n") is True:
        changes = changes | {"log_n": _train_length(config)}
    return {"rotary": rotary, **changes}


def _to_text(value):
    if isinstance(value, dict):
        return {name: rotary.text for name, rotary in value.items()}
    return value.text if isinstance(value, Rotary) else value


def _from_text(value):
    if isinstance(value, dict):
        return {name: Rotary.from_text(text) for name, text in value.items()}
    return None if value is None else Rotary.from_text(value)


# ---- which scheme for which length


class Suggestion(NamedTuple):
    """changes: what to give to ``convert``; reason: why, in a sentence or two."""

    changes: dict
    reason: str


def suggest(model_or_config, target_length: int) -> Suggestion:
    """What lets a model read target_length tokens without training: ``convert(model, **suggest(model,
    32768).changes)``.

    ReRoPE with a window of half the training length, and log n by that length, never below 1. In the ablation of
    ReRoPE's source (training length 512, read at 4096, log n not trained with) windows of a quarter and a half of the
    training length give 82.3% and 82.4%, an eighth 78.6%, three quarters 76.4%, and the training length itself 7.1%.

    Raises:
        ValueError: the model's layers slide, or its configuration does not tell the training length.
    """
    config = getattr(model_or_config, "config", model_or_config)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not isinstance(target_length, int) or isinstance(target_length, bool) or target_length < 1:
        raise ValueError(f"target_length: expected a positive integer, got {target_length!r}")
    length = _train_length(config)
    if target_length <= length:
        return Suggestion({}, f"{target_length} tokens are within the {length} that the model was trained with")
    sliding = [_sliding_window(config, layer) for layer in range(config.num_hidden_layers)]
    if any(sliding):
        raise ValueError(
            "model_or_config: expected layers that see all keys, got sliding windows of "
            f"{max(filter(None, sliding))} in {sum(map(bool, sliding))} of {len(sliding)} layers"
        )
    window = max(length // 2, 1)
    return Suggestion(
        {"window": window, "log_n": length},
        f"ReRoPE with window {window}, half of the training length {length}: no distance beyond the window is ever "
        "seen, and a quarter to a half of the training length is where its ablations are best; log n by "
        f"{length}, at least 1, keeps attention as sharp over {target_length} keys and changes nothing within "
        "the training length",
    )


def _train_length(config) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError(f"config: expected max_position_embeddings to tell the training length, got {length!r}")
    return length


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, layout)
