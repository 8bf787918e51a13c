"""Reads the rotary scheme of a Hugging Face model configuration, as steps that build it.

Nothing here imports transformers: fields are read by attribute. ``rotary.build`` makes the scheme from the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .dual_chunk import read_chunks
from .families import Family, families_with, family

CHUNK_ARGUMENTS = ("chunk_size", "local_size", "length_scale")  # arguments of ``Rotary.dual_chunk``

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
        "llama_4_scaling_beta",  # read by config_steps; model_steps leaves this scale to the model's code
        "alpha",
        "finetuned",
        "max_position_embeddings",  # no version of transformers reads this key or "finetuned"
        "mrope_section",
        "mrope_interleaved",
        "interleaved",  # in qwen3_omni_moe, next to mrope_interleaved; no code reads it
    }
)
REFUSED_KEYS = {
    "xdrope_section": "xdrope_section is not supported (it gives each pair its own coordinate of a position)",
}


class ConfigStep(NamedTuple):
    """One step of building a scheme.

    Attributes:
        name: the name of a method of ``Rotary``. The first step makes a Rotary, and every other step changes it.
        arguments: the arguments of the method.
    """

    name: str
    arguments: Mapping[str, Any]


def config_steps(config, layer_type: str | None = None, seqlen: int | None = None) -> list[ConfigStep]:
    """Returns the steps for ``Rotary.from_hf_config``, with the same arguments and errors."""
    steps = model_steps(config, layer_type, seqlen)
    model_type = getattr(config, "model_type", "") or ""
    params = _parameters(config, model_type, layer_type)
    # In this scheme q and k have the channel order from before the model reorders them.
    if family(model_type).reorders and getattr(config, "rope_interleave", True):
        steps[0] = ConfigStep("rope", {**steps[0].arguments, "interleaved": True})
    if params and params.get("llama_4_scaling_beta"):
        length, beta = _training_length(params, config), params["llama_4_scaling_beta"]
        steps.append(ConfigStep("log_steps", {"floor_scale": length, "attn_scale": beta, "first": 0}))
    return steps


def model_steps(
    config, layer_type: str | None = None, seqlen: int | None = None, chunked: bool = True
) -> list[ConfigStep]:
    """Returns the steps that build the scheme for the attention of a transformers model.

    The model's own module scales queries by their positions (``llama_4_scaling_beta``), so no step scales them. The
    modules of latent attention reorder interleaved channels before the attention function sees them, so these channels
    have half pairing in the scheme. The other arguments are those of ``Rotary.from_hf_config``.

    Args:
        chunked: False ignores ``dual_chunk_attention_config``.
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
        return [ConfigStep("none", {"head_dim": head_dim})]
    for key in params:
        if key in REFUSED_KEYS:
            if params[key]:
                raise ValueError(f"config: {REFUSED_KEYS[key]}")
        elif key not in KEYS:
            raise ValueError(
                f"config: rope parameter {key!r} is not known; known parameters are {', '.join(sorted(KEYS))}"
            )

    rope_type = _rope_type(params)
    if rope_type not in RULES:
        raise ValueError(f"config: rope type {rope_type!r} is not known; known types are {', '.join(RULES)}")
    rotary_dim = _rotary_dim(config, params, of_family, head_dim)
    if rope_type == "proportional":
        rotary_dim = head_dim
    rope = {"head_dim": head_dim, "base": params["rope_theta"], "rotary_dim": rotary_dim}
    if of_family.latent:
        _check_latent(config, params, rotary_dim)
        rope["first_channel"] = config.qk_nope_head_dim
    else:
        _refuse_ignored(params, model_type, rope_type, rotary_dim, head_dim)
    changes, attention_factor = RULES[rope_type](rotary_dim // 2, params, config, seqlen)
    steps = [ConfigStep("rope", rope | {"interleaved": of_family.interleaved}), *changes]
    if attention_factor != 1:
        field = "temperature" if rotary_dim == head_dim else "rotated_scale"
        steps.append(ConfigStep("_with", {field: float(attention_factor) ** 2}))
    if chunked and (chunks := read_chunks(config)):
        steps.append(ConfigStep("dual_chunk", dict(zip(CHUNK_ARGUMENTS, chunks.arguments, strict=False))))
    if sections := params.get("mrope_section"):
        order = _mrope_is_interleaved(model_type, params)
        steps.append(ConfigStep("mrope", {"sections": list(sections), "interleaved": order}))
    if of_family.reversed:
        steps.append(ConfigStep("_divide_table", {"divisors": (-1,) * (rotary_dim // 2)}))
    return steps


def _rotary_dim(config, params: dict[str, Any], of_family: Family, head_dim: int) -> int:
    rotary_dim = getattr(config, "rotary_dim", None) if of_family.base else None
    if rotary_dim is not None:
        return rotary_dim
    partial = params.get("partial_rotary_factor")
    if of_family.latent and not of_family.partial:  # in mistral4 the factor is for the whole head
        head_dim = config.qk_rope_head_dim
    return int(head_dim * (1.0 if partial is None else partial))


def _check_latent(config, params: dict[str, Any], rotary_dim: int) -> None:
    """Raises ValueError for a latent attention if only some of its qk_rope_head_dim channels would rotate."""
    if rotary_dim != config.qk_rope_head_dim:
        raise ValueError(
            f"config: partial_rotary_factor = {params.get('partial_rotary_factor')} would rotate {rotary_dim} of "
            f"qk_rope_head_dim = {config.qk_rope_head_dim} channels, which is not what the code of "
            f"{config.model_type!r} in transformers does"
        )


def _mrope_is_interleaved(model_type: str, params: dict[str, Any]) -> bool:
    """Whether mrope interleaves its axes. The model type decides. The parameters decide only if there is no
    model_type."""
    if order := family(model_type).mrope:
        return order == "interleaved"
    if not model_type and len(params["mrope_section"]) == 3:
        return bool(params.get("mrope_interleaved"))
    raise ValueError(
        f"config: mrope_section assigns a coordinate of the position to each pair, and the order of the pairs is not "
        f"known for model_type {model_type!r}; for text only, where the coordinates are equal, remove the key"
    )


# ---- which parameters


def _refuse_by_field(config) -> None:
    if getattr(config, "qk_rope_head_dim", None) and not family(getattr(config, "model_type", None) or "").latent:
        raise ValueError(
            "config: qk_rope_head_dim means multi-head latent attention, whose layout of channels is known only "
            f"for model_type {', '.join(families_with('latent'))}, got {getattr(config, 'model_type', None)!r}; "
            "build the scheme with Rotary.rope(head_dim, base, rotary_dim, interleaved, first_channel)"
        )
    if getattr(config, "alibi", False):
        raise ValueError("config: alibi is set: this model adds a bias to its scores and rotates nothing")
    if len(set(getattr(config, "layer_rope_theta", None) or ())) > 1:
        raise ValueError(
            "config: layer_rope_theta gives every layer its own base; build their schemes with Rotary.rope"
        )
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "rope", "rotary"):
        raise ValueError(f"config: position_embedding_type is {kind!r}, this model rotates nothing")
    if getattr(config, "image_size", None) is not None and getattr(config, "patch_size", None) is not None:
        raise ValueError(
            "config: image_size and patch_size mean an image encoder, whose positions have two coordinates; "
            "build it with Rotary.axial or Rotary.from_inv_freq"
        )
    if getattr(config, "num_attention_heads", None) is None and getattr(config, "text_config", None) is not None:
        raise ValueError(
            "config: expected the configuration of a text model, got one that holds a text_config; pass "
            "config.get_text_config()"
        )


def _refuse_ignored(params, model_type: str, rope_type: str, rotary_dim: int, head_dim: int) -> None:
    """Raises ValueError for parameters that the code of the family does not read. Without a model_type, all parameters
    are used."""
    if rope_type == "dynamic" and params.get("alpha") and model_type and not family(model_type).alpha:
        raise ValueError(
            f"config: alpha = {params['alpha']} is read by {', '.join(families_with('alpha'))} and not by "
            f"{model_type!r}, whose base grows with the length; remove alpha to get that base, or chain .ntk(alpha) to "
            "Rotary.rope"
        )
    if rotary_dim != head_dim and model_type and not family(model_type).partial:
        raise ValueError(
            f"config: partial_rotary_factor = {params.get('partial_rotary_factor')} is not read by the code of "
            f"{model_type!r} in transformers, which rotates whole heads; remove the field to do the same, or build the "
            f"scheme with Rotary.rope(head_dim={head_dim}, base, rotary_dim={rotary_dim})"
        )


def _parameters(config, model_type: str, layer_type: str | None) -> dict[str, Any] | None:
    """Returns the rope parameters of the layer type, including rope_theta and partial_rotary_factor, or None if the
    layer type does not rotate."""
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
            "config: expected rope_theta, on the configuration or in rope_parameters, got none; this model has no "
            "rotary embedding, or its base is not in its configuration"
        )
    if params.get("partial_rotary_factor") is None:
        params["partial_rotary_factor"] = getattr(config, "partial_rotary_factor", None)
    return params


def _older_parameters_by_layer(config, model_type: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns {layer type: parameters} for families whose configurations had two sets of fields before rope_parameters
    had one dict per layer type."""
    if getattr(config, "rope_local_base_freq", None) is not None:  # gemma3, gemma3n
        return {"full_attention": scaling, "sliding_attention": {"rope_theta": config.rope_local_base_freq}}
    if getattr(config, "global_rope_theta", None) is not None:  # modernbert
        local = getattr(config, "local_rope_theta", None)
        return {
            "full_attention": {"rope_theta": config.global_rope_theta},
            "sliding_attention": {"rope_theta": config.global_rope_theta if local is None else local},
        }
    if model_type == "olmo3":  # only layers with full attention are scaled
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
                f"config: rope parameters {', '.join(scaling)} come without a rope_type, so their meaning is unknown"
            )
        return "default"
    return "longrope" if rope_type == "su" else rope_type


def _head_dim(config, layer_type: str | None) -> int:
    """Returns the number of channels of a query and of a key."""
    if family(getattr(config, "model_type", None) or "").latent:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    if layer_type == "full_attention" and getattr(config, "global_head_dim", None):  # checkpoints of gemma4
        return config.global_head_dim
    if layer_type is not None and getattr(config, "is_heterogeneous", False):  # transformers 5
        config = config.per_layer_config[layer_type]
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        try:
            head_dim = config.hidden_size // config.num_attention_heads
        except (AttributeError, TypeError):
            raise ValueError("config: expected head_dim, or hidden_size and num_attention_heads, got neither") from None
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
            "rope parameters, and versions of transformers differ in which of the two they use"
        )
    return of_rope or of_config or _max_length(config)


def _max_length(config) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ValueError("config: max_position_embeddings is missing")
    return length


# ---- one function per rope type: (pairs, parameters, config, seqlen) -> (steps that change RoPE, attention_factor)


def _default(pairs, params, config, seqlen):
    return [], 1.0


def _linear(pairs, params, config, seqlen):
    return [ConfigStep("interpolate", {"factor": _field(params, "factor")})], 1.0


def _proportional(pairs, params, config, seqlen):
    partial, factor = params["partial_rotary_factor"], params.get("factor")
    rotated = int((1.0 if partial is None else partial) * pairs)
    steps = [ConfigStep("_divide_table", {"divisors": (1,) * rotated + (math.inf,) * (pairs - rotated)})]
    return steps if factor in (None, 1) else [*steps, ConfigStep("interpolate", {"factor": factor})], 1.0


def _dynamic(pairs, params, config, seqlen):
    """Returns NTK-aware steps. The factor depends on how far seqlen exceeds the training length, or is always alpha
    (hunyuan)."""
    if params.get("alpha"):
        return [ConfigStep("ntk", {"factor": params["alpha"]})], 1.0
    factor, length = _field(params, "factor"), _max_length(config)
    growth = factor * max(seqlen or 0, length) / length - (factor - 1)
    return [ConfigStep("ntk", {"factor": growth})] if growth > 1 else [], 1.0


def _yarn(pairs, params, config, seqlen):
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
    arguments = {
        "factor": factor,
        "train_length": length,
        "beta_fast": params.get("beta_fast") or 32.0,
        "beta_slow": params.get("beta_slow") or 1.0,
        "temperature": 1.0,
        "truncate": True if truncate is None else truncate,
    }
    return [ConfigStep("yarn", arguments)], attention_factor


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(pairs, params, config, seqlen):
    length, factor = _training_length(params, config), _field(params, "factor")
    low, high = _field(params, "low_freq_factor"), _field(params, "high_freq_factor")
    if not 0 < low < high:
        raise ValueError(f"config: expected 0 < low_freq_factor < high_freq_factor, got {low} and {high}")
    return [ConfigStep("_llama3", {"factor": factor, "train_length": length, "low": low, "high": high})], 1.0


def _longrope(pairs, params, config, seqlen):
    length = _training_length(params, config)
    which = "long" if seqlen is not None and seqlen > length else "short"
    divisors = _field(params, f"{which}_factor")
    if len(divisors) != pairs:
        raise ValueError(f"config: {which}_factor has {len(divisors)} numbers for {pairs} pairs")
    # phimoe has one attention factor for each table.
    attention_factor = params.get(f"{which}_mscale") or params.get("attention_factor")
    if attention_factor is None:
        factor = params.get("factor") or _max_length(config) / length
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return [ConfigStep("_divide_table", {"divisors": tuple(divisors), "scaled_by": "longrope"})], attention_factor


RULES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "mrope": _default,  # in the first Qwen2-VL checkpoints
}
