"""Runs torchtitan models on this package's attention, with overrides for ``--override.imports`` (torchtitan 0.3.0).

``attention`` replaces the rotation and the inner attention of every ``GQAttention`` (llama3, qwen3)::

    --override.imports flashrope.integrations.torchtitan.attention
    --override.imports 'flashrope.integrations.torchtitan.attention={"scheme": "rerope"}'

``save_attention`` makes selective activation checkpointing keep the attention's output, as it does for torchtitan's own
attention. ``save_config`` writes the config.json of an export to Hugging Face.

parts.py has the modules that are put into a model. export.py writes config.json, also from the command line.
"""

from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import GQAttention

from .parts import AnyAttention, InnerAttention, NoRotation, SavesAttention, check_attention, read_scheme

__all__ = ["attention", "save_attention", "save_config"]


@override(target=AnyAttention, description="flashrope's attention, which rotates inside")
def attention(config, **given) -> GQAttention.Config:
    """Runs an attention layer on ``flashrope.attention``, or on ``flashrope.attention_varlen`` for packed documents.

    Args:
        config: the configuration of a ``GQAttention`` with masks for packed documents (backends flex, flex_flash and
            varlen).
        scheme: the name of a scheme of ``flashrope loss --schemes``. Its training length is the sequence length.
            "stock" is the model's own RoPE. Default: "hope" if there are no other options, otherwise "stock".
        given: options of ``flashrope.integrations.transformers.convert``, which override the options of the scheme.

    Raises:
        TypeError, ValueError: an option or a part of the model is not supported. The message names the option or the
            part.
    """
    check_attention(config)
    rotary, options = read_scheme(given, config)
    inner = derive(config.inner_attention, InnerAttention.Config, rotary=rotary.text, options=options)
    rope = derive(config.rope, NoRotation.Config, original=config.rope, sharding_config=None)
    return derive(config, GQAttention.Config, rope=rope, inner_attention=inner)


@override(target=SelectiveAC.Config, description="selective checkpointing keeps what flashrope's attention returns")
def save_attention(config) -> SavesAttention.Config:
    """Makes selective activation checkpointing keep the results of attention, so that they are not recomputed."""
    return derive(config, SavesAttention.Config)


def __getattr__(name: str):
    if name != "save_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .export import save_config  # imported on first use, because ``python -m`` runs that module

    return save_config
