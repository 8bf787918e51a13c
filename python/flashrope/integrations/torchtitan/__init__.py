"""torchtitan models on this package's attention: overrides for ``--override.imports``. Written for torchtitan 0.3.0.

``attention`` replaces the rotation and the inner attention of every ``GQAttention`` (llama3, qwen3)::

    --override.imports flashrope.integrations.torchtitan.attention
    --override.imports 'flashrope.integrations.torchtitan.attention={"scheme": "rerope"}'

``save_attention`` makes selective activation checkpointing keep the attention's output, as it does for torchtitan's
own. ``save_config`` writes the config.json of an export to Hugging Face.

parts.py has what is put into a model, export.py writes config.json, from the command line too.
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
        config: of a ``GQAttention`` whose masks are those of packed documents (backends flex, flex_flash and varlen).
        scheme: a scheme of ``flashrope loss --schemes`` by name, with the sequence length as its training length.
            "stock" is the model's own RoPE. Default: "hope" without other options, otherwise "stock".
        given: options of ``flashrope.integrations.transformers.convert``; they override the scheme's.

    Raises:
        TypeError, ValueError: names the option or the part of the model, what was expected and what came.
    """
    check_attention(config)
    rotary, options = read_scheme(given, config)
    inner = derive(config.inner_attention, InnerAttention.Config, rotary=rotary.text, options=options)
    rope = derive(config.rope, NoRotation.Config, original=config.rope, sharding_config=None)
    return derive(config, GQAttention.Config, rope=rope, inner_attention=inner)


@override(target=SelectiveAC.Config, description="selective checkpointing keeps what flashrope's attention returns")
def save_attention(config) -> SavesAttention.Config:
    """Makes selective activation checkpointing keep what attention returns, so that it is not computed again."""
    return derive(config, SavesAttention.Config)


def __getattr__(name: str):
    if name != "save_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .export import save_config  # here, because ``python -m`` runs that module

    return save_config
