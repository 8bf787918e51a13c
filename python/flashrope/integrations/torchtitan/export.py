"""``python -m flashrope.integrations.torchtitan.export FOLDER ARGUMENTS``: writes the config.json of exported weights.

FOLDER holds the weights that torchtitan has written with ``--checkpoint.last_save_in_hf``. ARGUMENTS are the arguments
of the training. The config.json contains the options that ``convert`` needs for the trained scheme.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model

from ...console.files import write
from ...schemes.rotary import Rotary
from ..scheme_options import FIELD
from .parts import InnerAttention, NoRotation, head_dim_of, hf_fields

FAMILIES = {
    Llama3Model.Config: ("llama", "LlamaForCausalLM"),
    Qwen3Model.Config: ("qwen3", "Qwen3ForCausalLM"),
}


def save_config(model, folder, **fields: Any) -> dict[str, Any]:
    """Writes config.json next to weights that torchtitan has exported, for ``from_pretrained`` of
    ``flashrope.integrations.transformers`` and for ``flashrope loss``.

    Args:
        model: the configuration of a dense llama3 or qwen3 model after the override, such as ``trainer.model_config``.
        folder: the folder to which torchtitan wrote the weights with ``checkpoint.last_save_in_hf``.
        fields: further fields of the configuration, such as bos_token_id.

    Returns:
        The content of config.json.

    Raises:
        ValueError: the model is not llama3 or qwen3, has experts, lacks the override, or has layers with different
            schemes.
    """
    found = config_of(model) | fields
    write(Path(folder, "config.json"), json.dumps(found, indent=2) + "\n")
    return found


def config_of(model) -> dict[str, Any]:
    """Returns the content of config.json for ``save_config``."""
    if type(model) not in FAMILIES or any(layer.moe is not None for layer in model.layers):
        raise ValueError(f"model: expected a dense Llama3Model or Qwen3Model, got {type(model).__qualname__}")
    model_type, architecture = FAMILIES[type(model)]
    first = model.layers[0]
    attention = first.attention
    inner, rope = attention.inner_attention, attention.rope
    if not isinstance(inner, InnerAttention.Config) or not isinstance(rope, NoRotation.Config):
        raise ValueError(
            "model: expected the override flashrope.integrations.torchtitan.attention, got torchtitan's own"
        )
    schemes = {layer.attention.inner_attention.rotary for layer in model.layers}
    if len(schemes) > 1:
        raise ValueError(f"model: expected one scheme in all layers, got {len(schemes)}")
    head_dim = head_dim_of(attention)
    qkv = attention.qkv_linear
    own = dataclasses.replace(rope.original, max_seq_len=rope.max_seq_len)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": model.dim,
        "intermediate_size": first.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm.eps,
        "hidden_act": "silu",
        "attention_bias": bool((qkv.wq if isinstance(qkv, QKVLinear.Config) else qkv.wqkv).bias),
        "tie_word_embeddings": model.enable_weight_tying,
        **hf_fields(own),
        **_options(inner, head_dim),
    }


def _options(inner: InnerAttention.Config, head_dim: int) -> dict[str, Any]:
    options = dict(inner.options)
    if not options:
        return {}
    from ..transformers.conversion_plan import KEY, SAVED  # only this function needs transformers

    if "rotary" in options:
        options["rotary"] = _in_halves(Rotary.from_text(options["rotary"])).text
    return {FIELD: options, KEY: SAVED}


def _in_halves(rotary: Rotary) -> Rotary:
    """Returns the scheme of exported weights. The export moves channels 2m and 2m + 1 of a head to m and
    m + head_dim / 2."""
    if not rotary.interleaved:
        return rotary
    before = (0.0,) * (rotary.first_channel // 2)
    behind = (0.0,) * (rotary.head_dim // 2 - len(before) - len(rotary.frequencies))
    frequencies = (*before, *rotary.frequencies, *behind)
    return dataclasses.replace(rotary, interleaved=False, frequencies=frequencies, first_channel=0)


def main(arguments: list[str]) -> None:
    """Adds the config.json to a folder of exported weights.

    Raises:
        SystemExit: no folder is given.
        ValueError: ``save_config`` or the overrides do not support the model.
    """
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("expected the folder of the exported weights, then the arguments of the training")
    folder, *rest = arguments
    config = ConfigManager().parse_args(rest)
    model = config.model_spec.model
    model.update_from_config(config=config)
    apply_overrides(config.override, config)
    save_config(model, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
