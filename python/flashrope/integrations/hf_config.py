"""Reads the rotary scheme of a Hugging Face model configuration.

Nothing here imports transformers: fields are read by attribute.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..rotary.rotary import Rotary
from .dual_chunk import read_chunks
from .families import families_with, family

__all__ = ["rotary_from_config"]

KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "llama_4_scaling_beta",  # see rotary_of_model
        "alpha",
        "finetuned",
        "max_position_embeddings",  # no version reads these two
        "mrope_section",
        "mrope_interleaved",
        "interleaved",  # of qwen3_omni_moe: as mrope_interleaved, and no code reads it
    }
)
REFUSED_KEYS = {
    "xdrope_section": "xdrope_section gives each pair its own coordinate of a multi-dimensional position",
}


def rotary_from_config(config, layer_type: str | None = None, seqlen: int | None = None) -> Rotary:
    """The scheme that a Hugging Face model rotates its queries and keys with.

    Reads the fields of transformers 4.57 (``rope_theta``, ``rope_scaling``, ``partial_rotary_factor``) and of 5
    (``rope_parameters``, also one dict per layer type). Where the two interpret a field differently, 5 decides. Rope
    types: default, linear, dynamic, yarn, llama3, longrope (formerly "su") and proportional.

    Parameters that the family's code does not read (alpha, partial_rotary_factor) are refused.
    ``dual_chunk_attention_config`` (Qwen2.5-1M), which transformers itself does not read, gives ``Rotary.dual_chunk``,
    with ``original_max_position_embeddings`` as its length_scale, and without Qwen's sparse attention.

    Hugging Face multiplies cos and sin by ``attention_factor``; here its square scales the scores, or what the rotated
    channels add to them where not all of them rotate. ``llama_4_scaling_beta`` gives ``Rotary.log_steps``. With
    ``mrope_section`` the scheme needs positions of three coordinates, transformers' position_ids as (batch, seqlen, 3).
    Without it, families whose code implies it are read for text only, where the coordinates are equal.

    Args:
        config: a text model's configuration (``config.get_text_config()`` of a composite one), or any object with its
            fields.
        layer_type: one of the ``layer_types``, for models whose layers differ. A type that does not rotate gives
            ``Rotary.none``. Layers that are skipped by index (``no_rope_layers``) are left to the caller.
        seqlen: tokens of the longest sequence. It matters for "dynamic", whose base grows with it, and for "longrope",
            which has one table up to the training length and one beyond. None: at most the training length, which is
            how transformers builds a model and runs short prompts.

    Raises:
        ValueError: names the field, and why there is no exact counterpart.
    """
    rotary = rotary_of_model(config, layer_type, seqlen)
    params = _parameters(config, getattr(config, "model_type", "") or "", layer_type)
    if params and params.get("llama_4_scaling_beta"):
        return rotary.log_steps(_training_length(params, config), params["llama_4_scaling_beta"], first=0)
    return rotary


def rotary_of_model(config, layer_type: str | None = None, seqlen: int | None = None, chunked: bool = True) -> Rotary:
    """The scheme that the attention of a transformers model needs.

    As ``rotary_from_config``, for callers that run the model's own attention module around it: it scales the query by
    its position itself (``llama_4_scaling_beta``). chunked: False leaves ``dual_chunk_attention_config`` out.
    """
    if seqlen is not None and (not isinstance(seqlen, int) or isinstance(seqlen, bool) or seqlen < 1):
        raise ValueError(f"seqlen: expected None or a positive integer, got {seqlen!r}")
    model_type = getattr(config, "model_type", "") or ""
    of_family = family(model_type)
    _refuse_by_field(config)
    params = _parameters(config, model_type, layer_type)
    head_dim = _head_dim(config, layer_type)
    slides = of_family.sliding_only and getattr(config, "sliding_window", None) is not None
    if params is None or slides and layer_type == "full_attention":
        return Rotary.none(head_dim)
    for key in params:
        if key in REFUSED_KEYS:
            if params[key]:
                raise ValueError(f"config: {REFUSED_KEYS[key]}")
        elif key not in KEYS:
            raise ValueError(
                f"config: rope parameter {key!r} is not known; the known ones are {', '.join(sorted(KEYS))}"
            )

    rope_type = _rope_type(params)
    if rope_type not in RULES:
        raise ValueError(f"config: rope type {rope_type!r} is not known; the known ones are {', '.join(RULES)}")
    partial = params.get("partial_rotary_factor")
    rotary_dim = getattr(config, "rotary_dim", None) if of_family.base else None
    if rotary_dim is None:
        rotary_dim = int(head_dim * (1.0 if partial is None else partial))
    if rope_type == "proportional":
        rotary_dim = head_dim
    _refuse_ignored(params, model_type, rope_type, rotary_dim, head_dim)
    rope = Rotary.rope(head_dim, params["rope_theta"], rotary_dim, interleaved=of_family.interleaved)
    rotary, attention_factor = RULES[rope_type](rope, params, config, seqlen)
    if attention_factor != 1:
        field = "temperature" if rotary.rotary_dim == head_dim else "rotated_scale"
        rotary = dataclasses.replace(rotary, **{field: float(attention_factor) ** 2})
    if chunked and (chunks := read_chunks(config)):
        rotary = rotary.dual_chunk(*chunks.arguments)
    if params.get("mrope_section"):
        rotary = rotary.mrope(list(params["mrope_section"]), _mrope_is_interleaved(model_type, params))
    if of_family.reversed:
        rotary = dataclasses.replace(rotary, frequencies=tuple(-f for f in rotary.frequencies))
    return rotary


def _mrope_is_interleaved(model_type: str, params: dict[str, Any]) -> bool:
    """The code of a family decides; without a model_type, what the parameters say."""
    if order := family(model_type).mrope:
        return order == "interleaved"
    if not model_type and len(params["mrope_section"]) == 3:
        return bool(params.get("mrope_interleaved"))
    raise ValueError(
        f"config: mrope_section gives each pair its own coordinate of a position, in an order that is not known for "
        f"model_type {model_type!r}; for text only, where the coordinates are equal, remove the key"
    )


# ---- which parameters


def _refuse_by_field(config) -> None:
    if getattr(config, "qk_rope_head_dim", None):
        raise ValueError(
            "config: qk_rope_head_dim means multi-head latent attention, whose rotated channels are separate and "
            "shared by all heads; raw q and k do not have that layout"
        )
    if getattr(config, "alibi", False):
        raise ValueError("config: alibi is set: this model adds a bias to its scores and rotates nothing")
    if len(set(getattr(config, "layer_rope_theta", None) or ())) > 1:
        raise ValueError("config: layer_rope_theta gives layers a base each; build their schemes with Rotary.rope")
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "rope", "rotary"):
        raise ValueError(f"config: position_embedding_type is {kind!r}, this model rotates nothing")
    if getattr(config, "image_size", None) is not None and getattr(config, "patch_size", None) is not None:
        raise ValueError(
            "config: image_size and patch_size mean an image encoder, whose positions have two coordinates; "
            "build it with Rotary.axial or Rotary.from_inv_freq"
        )
    if getattr(config, "num_attention_heads", None) is None and getattr(config, "text_config", None) is not None:
        raise ValueError("config: holds a text_config; pass config.get_text_config()")


def _refuse_ignored(params, model_type: str, rope_type: str, rotary_dim: int, head_dim: int) -> None:
    """Refuses parameters that the code of the family does not read. Without a model_type they mean what they say."""
    if rope_type == "dynamic" and params.get("alpha") and model_type and not family(model_type).alpha:
        raise ValueError(
            f"config: alpha = {params['alpha']} is read by {', '.join(families_with('alpha'))} and not by "
            f"{model_type!r}, whose base grows with the length; remove alpha for that, or chain .ntk(alpha) to "
            "Rotary.rope"
        )
    if rotary_dim != head_dim and model_type and not family(model_type).partial:
        raise ValueError(
            f"config: partial_rotary_factor = {params.get('partial_rotary_factor')} is not read by the code of "
            f"{model_type!r} in transformers, which rotates whole heads; remove it for that, or build the scheme with "
            f"Rotary.rope(head_dim={head_dim}, base, rotary_dim={rotary_dim})"
        )


def _parameters(config, model_type: str, layer_type: str | None) -> dict[str, Any] | None:
    """The rope parameters of the layer type, with rope_theta and partial_rotary_factor; None if it does not rotate."""
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {key: value for key, value in given.items() if isinstance(value, dict) or key in layer_types}
    by_layer = by_layer or _older_parameters_by_layer(config, model_type, given)
    if by_layer:
        if layer_type is None or layer_type not in by_layer:
            problem = "rope parameters differ by layer type" if layer_type is None else f"{layer_type!r} is not known"
            raise ValueError(f"layer_type: {problem}; give one of {', '.join(sorted(by_layer))}")
        given = by_layer[layer_type]
        if given is None:
            return None
    elif layer_type is not None and layer_type not in layer_types:
        raise ValueError(
            f"layer_type: {layer_type!r} is not known; "
            + (f"give one of {', '.join(layer_types)}" if layer_types else "this configuration has no layer types")
        )
    params = dict(given)
    if params.get("rope_theta") is None:
        params["rope_theta"] = getattr(config, "rope_theta", None) or family(model_type).base
    if params["rope_theta"] is None:
        raise ValueError(
            "config: neither rope_theta nor rope_parameters with one in it; this model has no rotary embedding, or "
            "its base is not in its configuration"
        )
    if params.get("partial_rotary_factor") is None:
        params["partial_rotary_factor"] = getattr(config, "partial_rotary_factor", None)
    return params


def _older_parameters_by_layer(config, model_type: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Parameters by layer type, of the families that had two tables before rope_parameters had one dict per type."""
    if getattr(config, "rope_local_base_freq", None) is not None:  # gemma3, gemma3n
        return {"full_attention": scaling, "sliding_attention": {"rope_theta": config.rope_local_base_freq}}
    if getattr(config, "global_rope_theta", None) is not None:  # modernbert
        local = getattr(config, "local_rope_theta", None)
        return {
            "full_attention": {"rope_theta": config.global_rope_theta},
            "sliding_attention": {"rope_theta": config.global_rope_theta if local is None else local},
        }
    if model_type == "olmo3":  # only the full layers are scaled
        return {"full_attention": scaling, "sliding_attention": {"rope_theta": scaling.get("rope_theta")}}
    return {}


def _rope_type(params: dict[str, Any]) -> str:
    rope_type = params.get("rope_type") or params.get("type")
    if rope_type is None:
        scaling = sorted(
            key for key in set(params) - {"rope_theta", "partial_rotary_factor"} if params[key] is not None
        )
        if scaling:
            raise ValueError(
                f"config: rope parameters {', '.join(scaling)} come without a rope_type, which gives them a meaning"
            )
        return "default"
    return "longrope" if rope_type == "su" else rope_type


def _head_dim(config, layer_type: str | None) -> int:
    if layer_type == "full_attention" and getattr(config, "global_head_dim", None):  # gemma4's checkpoints
        return config.global_head_dim
    if layer_type is not None and getattr(config, "is_heterogeneous", False):  # transformers 5
        config = config.per_layer_config[layer_type]
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        try:
            head_dim = config.hidden_size // config.num_attention_heads
        except (AttributeError, TypeError):
            raise ValueError("config: neither head_dim nor hidden_size and num_attention_heads") from None
    return head_dim


def _field(params: dict[str, Any], name: str):
    if params.get(name) is None:
        raise ValueError(f"config: rope type {_rope_type(params)!r} needs {name}")
    return params[name]


def _training_length(params: dict[str, Any], config) -> int:
    of_rope = params.get("original_max_position_embeddings")
    of_config = getattr(config, "original_max_position_embeddings", None)
    if of_rope is not None and of_config is not None and of_rope != of_config:
        raise ValueError(
            f"config: original_max_position_embeddings is {of_config} on the configuration and {of_rope} among the "
            "rope parameters, and versions of transformers differ in which they use"
        )
    return of_rope or of_config or _max_length(config)


def _max_length(config) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ValueError("config: max_position_embeddings is missing")
    return length


# ---- one function per rope type: (plain RoPE, parameters, config, seqlen) -> (scheme, attention_factor)


def _default(rope, params, config, seqlen):
    return rope, 1.0


def _linear(rope, params, config, seqlen):
    return rope.interpolate(_field(params, "factor")), 1.0


def _proportional(rope, params, config, seqlen):
    partial = params["partial_rotary_factor"]
    rotated = int((1.0 if partial is None else partial) * rope.head_dim // 2)
    frequencies = rope.frequencies[:rotated] + (0.0,) * (len(rope.frequencies) - rotated)
    rope = dataclasses.replace(rope, frequencies=frequencies)
    factor = params.get("factor")
    return (rope if factor in (None, 1) else rope.interpolate(factor)), 1.0


def _dynamic(rope, params, config, seqlen):
    """NTK-aware by how far seqlen exceeds the training length; with alpha (hunyuan) always by alpha."""
    if params.get("alpha"):
        return rope.ntk(params["alpha"], variant="aware"), 1.0
    factor, length = _field(params, "factor"), _max_length(config)
    growth = factor * max(seqlen or 0, length) / length - (factor - 1)
    return (rope.ntk(growth, variant="aware") if growth > 1 else rope), 1.0


def _yarn(rope, params, config, seqlen):
    length = _training_length(params, config)
    factor = params.get("factor") or _max_length(config) / length
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    truncate = params.get("truncate")
    return rope.yarn(
        factor,
        length,
        beta_fast=params.get("beta_fast") or 32.0,
        beta_slow=params.get("beta_slow") or 1.0,
        temperature=1.0,
        truncate=True if truncate is None else truncate,
    ), attention_factor


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope, params, config, seqlen):
    """By the number of turns that a pair makes over the training length.

    Below low_freq_factor turns, the frequency is divided by factor; above high_freq_factor, it is kept. In between, the
    two are blended linearly in the number of turns.
    """
    length, factor = _training_length(params, config), _field(params, "factor")
    low, high = _field(params, "low_freq_factor"), _field(params, "high_freq_factor")
    if not 0 < low < high:
        raise ValueError(f"config: expected 0 < low_freq_factor < high_freq_factor, got {low} and {high}")
    frequencies = []
    for f in rope.frequencies:
        kept = min(max((length * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - kept) * f / factor + kept * f)
    return dataclasses.replace(rope, frequencies=tuple(frequencies), scaled_by="llama3"), 1.0


def _longrope(rope, params, config, seqlen):
    length = _training_length(params, config)
    which = "long" if seqlen is not None and seqlen > length else "short"
    divisors = _field(params, f"{which}_factor")
    if len(divisors) != len(rope.frequencies):
        raise ValueError(f"config: {which}_factor has {len(divisors)} numbers for {len(rope.frequencies)} pairs")
    attention_factor = params.get(f"{which}_mscale") or params.get("attention_factor")  # phimoe has one for each
    if attention_factor is None:
        factor = params.get("factor") or _max_length(config) / length
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    frequencies = tuple(f / divisor for f, divisor in zip(rope.frequencies, divisors, strict=True))
    return dataclasses.replace(rope, frequencies=frequencies, scaled_by="longrope"), attention_factor


RULES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "mrope": _default,  # of the first Qwen2-VL checkpoints
}
