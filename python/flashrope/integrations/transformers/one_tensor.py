"""Caches of one tensor per layer, for layers whose values are channels of their keys.

``SharedKeysCache`` is for Gemma 4's layers with one projection for keys and values: k = k_norm(p) and v = v_norm(p),
where v_norm has no weight. So k is v times the weight of k_norm, channel by channel. The cache holds only v, and the
kernels compute k by multiplying v with the weight.

``LatentCache`` is for latent attention. A row of this cache holds a latent, followed by the rotary channels that all
heads share, not yet rotated. If a call has few new tokens, latents are not expanded to keys and values. Instead, the
projection of latents to keys is applied to the queries (absorbed), and the projection of latents to values is applied
to the output. All heads then read the rows as keys, and the latents in them as values.

A layer stores its tensor as keys, and a tensor without channels as values. So the operations of transformers on rows
(cropping, selecting sequences, copying) work as they do for other caches.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...backends.registry import load_backend, resolve_impl
from ...calls.checks import MAX_HEAD_DIM, MAX_SHARED_HEAD_DIM
from ...schemes.families import families_with, family
from ...schemes.rotary import Rotary
from .caches import MARK
from .layer_schemes import layer_type_of
from .versions import CACHE

# Projections are absorbed for at most this many new tokens. From about 170 on, expanding latents takes less work.
ABSORBED_ROWS = 128
# Attribute of values whose products with the weight of k_norm are the keys. Its value: how many of the keys are
# constants, because they were cached without gradients.
UNWEIGHTED = "_flashrope_unweighted"
# Attribute of latents that ``expand`` has not expanded. Its value: the rows that contain the latents.
UNEXPANDED = "_flashrope_unexpanded"


class _CacheOfConverted(DynamicCache):
    """A cache that only a converted model can read."""

    def update(self, *args, **kwargs):
        """Appends the keys and values of a layer.

        Raises:
            ValueError: the model is not converted.
        """
        if getattr(self, MARK, None) is None:
            raise ValueError(
                f"{CACHE}: a {type(self).__name__} is not supported by a stock model (its attention does not read raw "
                "keys); call convert(model) first"
            )
        return super().update(*args, **kwargs)


class _OneTensor(DynamicLayer):
    """Rows of one tensor, (batch, heads_kv, seqlen, channels)."""

    def append(self, rows: torch.Tensor) -> torch.Tensor:
        """Appends rows. Returns all rows of the cache."""
        return super().update(rows, rows[..., :0])[0]


# ---- one projection for keys and values


class SharedKeysCache(_CacheOfConverted):
    """Holds one tensor for each layer of Gemma 4 whose keys and values come from one projection.

    Use it if memory limits the length or the batch. Layers with one projection see all tokens. In this cache they take
    half the bytes that they take in a ``DynamicCache``. All other layers are stored as in a ``DynamicCache``. Keys are
    computed as cached values times the weight of k_norm. In float16 and bfloat16, keys are therefore rounded once more
    than the model's own keys. A k_norm or v_norm with hooks, or with an offloaded weight, raises an error. This cache
    has not been run on a GPU.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import SharedKeysCache, convert

        model = convert(AutoModelForCausalLM.from_pretrained("google/gemma-4-31b-it"))
        prompt = torch.randint(3, 60, (1, 12))
        text = model.generate(prompt, past_key_values=SharedKeysCache(model.config), max_new_tokens=4)

    Args:
        config: the configuration of the model.

    Raises:
        ValueError: the model has no layer with one projection, or layers that read another layer's keys.
    """

    def __init__(self, config):
        config = config.get_text_config()
        if not getattr(config, "attention_k_eq_v", False):
            raise ValueError(
                "config: expected a model with one projection for keys and values (attention_k_eq_v of Gemma 4 12B, "
                f"26B and 31B), got {config.model_type!r} without one"
            )
        if config.num_kv_shared_layers:
            raise ValueError(
                "config: num_kv_shared_layers is not supported with attention_k_eq_v (a layer that reads another "
                f"layer's keys does not have the weight of its k_norm), got {config.num_kv_shared_layers}"
            )
        super().__init__(config=config)
        for layer in range(config.num_hidden_layers):
            if layer_type_of(config, layer) != "sliding_attention":
                self.layers[layer] = _SharedKeys()


class _SharedKeys(_OneTensor):
    def update(self, key_states, value_states, *args, **kwargs):
        held = self.keys
        constant = 0 if held is None or held.requires_grad else self.get_seq_length()
        rows = self.append(value_states)
        values = rows.view_as(rows)
        setattr(values, UNWEIGHTED, constant)
        return values, values


def holds_unweighted(value: torch.Tensor) -> bool:
    """Whether the layer's keys are these values times the weight of k_norm. value: the values that the layer passes to
    the attention function."""
    return hasattr(value, UNWEIGHTED)


def key_weight_of(module) -> torch.Tensor:
    """Returns the key_weight of a layer with one projection, (head_dim,) float32: its keys are its values times this
    weight.

    Raises:
        ValueError: the output of k_norm is not the output of v_norm times the weight of k_norm.
    """
    k_norm, v_norm = module.k_norm, module.v_norm
    reasons = {"k_norm": changed(k_norm) or unreadable(k_norm.weight), "v_norm": changed(v_norm)}
    if type(k_norm).forward is not type(v_norm).forward:
        reasons["k_norm"] = f"is a {type(k_norm).__name__}, and v_norm a {type(v_norm).__name__}"
    for name, reason in reasons.items():
        if reason:
            raise ValueError(
                f"{CACHE}: a SharedKeysCache is not supported by layer {module.layer_idx} (it computes keys from "
                f"values and the weight of k_norm), got a {name} that {reason}; use a DynamicCache"
            )
    return k_norm.weight.float()


def weighted_keys(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the keys of a layer with one projection. Keys that are constants give the weight no gradient.

    Args:
        values: the values of the layer, for which ``holds_unweighted`` is true.
        weight: the result of ``key_weight_of``.
    """
    constant = getattr(values, UNWEIGHTED)
    old, new = values[..., :constant, :].float() * weight.detach(), values[..., constant:, :].float() * weight
    return torch.cat((old, new), dim=-2).to(values.dtype)


# ---- weights that are read without calling their module


def changed(module: torch.nn.Module) -> str:
    """Returns what may change the output of a module beside the forward of its class, or ""."""
    if hasattr(module, "_hf_hook"):
        return "has a hook of accelerate"
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "has a forward of its own"
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if any(hooks) or not torch.compiler.is_compiling() and torch.nn.modules.module._has_any_global_hook():
        return "has hooks"
    return ""


def unreadable(weight: Any) -> str:
    """Returns why a weight is not a plain tensor that holds numbers, or ""."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):  # such as a quantized or a sharded weight
        return f"stores its weight as a {type(weight).__name__}"
    return "has its weight on the meta device" if weight.is_meta else ""


# ---- latents


class LatentCache(_CacheOfConverted):
    """Holds the latents of a model with latent attention, which a converted model reads without expanding them.

    Use it for decoding. With transformers' own caches, every step computes the keys and values of all heads for all
    cached tokens. With this cache, a step reads the latents directly. Latents are still expanded in prefills, in calls
    with gradients or with more than 128 new tokens, and on devices whose kernels do not support keys of this head_dim.
    They are also expanded if the projection of latents is not a plain linear layer, because it has hooks or because its
    weight is quantized or offloaded.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import LatentCache, convert

        model = convert(AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V2-Lite"))
        prompt = torch.randint(3, 60, (1, 12))
        text = model.generate(prompt, past_key_values=LatentCache(model.config), max_new_tokens=4)

    Args:
        config: the configuration of the model.

    Raises:
        ValueError: the model is not of a family with latent attention that ``convert`` supports.
    """

    def __init__(self, config):
        config = config.get_text_config()
        if not family(config.model_type).latent:
            raise ValueError(
                f"config: expected a model with latent attention, one of {', '.join(families_with('latent'))}, got "
                f"{config.model_type!r}"
            )
        super().__init__(config=config)
        self.layers = [_Latents() if type(layer) is DynamicLayer else layer for layer in self.layers]


class _Latents(_OneTensor):
    """Rows of (batch, 1, seqlen, kv_lora_rank + qk_rope_head_dim)."""

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise ValueError(
                f"{CACHE}: expected latents in one head that all heads share, got {key_states.shape[1]} heads; "
                "this version of transformers caches the keys and values of all heads, for which use a DynamicCache"
            )
        old, new, rank = self.get_seq_length(), key_states.shape[-2], key_states.shape[-1]
        rows = self.append(torch.cat((key_states, value_states), dim=-1))
        latents, rotary = rows[..., :rank], rows[..., rank:]
        if (
            old
            and new <= ABSORBED_ROWS
            and not (torch.is_grad_enabled() and rows.requires_grad)
            and _serves(rows, rank)
        ):
            setattr(latents, UNEXPANDED, rows)
        return latents, rotary


def _serves(rows: torch.Tensor, rank: int) -> bool:
    """Whether the kernels of the device support keys with the head_dim of these rows."""
    width = rows.shape[-1]
    if rank % 8 or width % 8 or width > MAX_HEAD_DIM and width != MAX_SHARED_HEAD_DIM:
        return False
    return not load_backend(resolve_impl(None, rows)).unsupported_reason(rows, cached=True)


def expand(module, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of all heads, or (rows, latents) if the attention function reads them unexpanded.

    This function replaces expand_kv of an attention module.
    """
    rows = getattr(latents, UNEXPANDED, None)
    if rows is None or not _can_absorb(module):
        return type(module).expand_kv(module, latents, rotary)
    return rows, latents


def _can_absorb(module) -> bool:
    """Whether the output of kv_b_proj is a product with its weight, and this call needs no gradients."""
    projection = module.kv_b_proj
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        return False
    if changed(projection) or unreadable(projection.weight):
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()))


def holds_latents(module, value: torch.Tensor) -> bool:
    """Whether the value that a layer passes to the attention function consists of latents that ``expand`` has not
    expanded."""
    return "expand_kv" in vars(module) and hasattr(value, UNEXPANDED)


def absorb(module, query: torch.Tensor) -> torch.Tensor:
    """Returns queries whose products with rows are the scores, (batch, heads, seqlen, rank + rotary channels). The
    returned queries are ``query`` after the projection of latents to keys was applied."""
    nope, (keys, _) = module.qk_nope_head_dim, _projections(module)
    latent = torch.einsum("bhnd,hdr->bhnr", query[..., :nope], keys.to(query.dtype))
    return torch.cat((latent, query[..., nope:]), dim=-1)


def project_values(module, out: torch.Tensor) -> torch.Tensor:
    """Projects the output of attention from latents (batch, seqlen, heads, rank) to the values of every head."""
    return torch.einsum("bnhr,hvr->bnhv", out, _projections(module)[1].to(out.dtype))


def _projections(module) -> Any:
    """Returns the projections of latents to keys and to values, (heads, channels, rank) each."""
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    return module.kv_b_proj.weight.unflatten(0, (-1, sum(widths))).split(widths, dim=1)


def latent_scheme(module, rotary: Rotary) -> Rotary:
    """Returns the layer's scheme for cached rows (the latent, then rotary channels) that are used as keys. Only the
    rotary channels rotate."""
    return _behind(rotary, module.kv_lora_rank, module.kv_lora_rank + module.qk_rope_head_dim)


@lru_cache(maxsize=1024)
def _behind(rotary: Rotary, first_channel: int, head_dim: int) -> Rotary:
    return dataclasses.replace(rotary, head_dim=head_dim, first_channel=first_channel)
