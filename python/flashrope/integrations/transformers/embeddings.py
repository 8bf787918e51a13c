"""The rotary embeddings of a decoder: comparing their tables with the configuration, and switching their rotation off.

A table is a tensor whose name ends in inv_freq. transformers keeps the table for short inputs under a name that ends in
original_inv_freq. The other table is the one that the stock model rotates with. Both may be buffers or attributes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch
import transformers
from transformers import PreTrainedModel

from ...schemes.hugging_face import model_steps
from ...schemes.rotary import Rotary, build
from .layer_schemes import grows_from

# A conversion sets this attribute to its ``Applied`` record on the decoder, and to a ``LayerScheme`` on every layer.
ATTRIBUTE = "_flashrope"
TABLE, FIRST_TABLE = "inv_freq", "original_inv_freq"
ROUNDING = 1e-5  # relative error of transformers' float32 frequencies
CASTS = torch.float16, torch.bfloat16  # a cast rounds the tables, also if the model is cast back


def rotary_embeddings(decoder: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns the rotary embeddings of a decoder by name."""
    return {name: module for name, module in decoder.named_modules() if is_rotary_embedding(module)}


def is_rotary_embedding(module: torch.nn.Module) -> bool:
    """Whether a module is a rotary embedding of text. The rotary embeddings of a vision tower, which have "Vision" in
    their class names, are not converted."""
    name = type(module).__name__
    return name.endswith("RotaryEmbedding") and "Vision" not in name


# ---- tables


def tables_of(embedding: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tables of a rotary embedding by name, also if two names have one tensor."""
    held = {**vars(embedding), **embedding._buffers}
    return {name: x for name, x in held.items() if name.endswith(TABLE) and isinstance(x, torch.Tensor)}


def check_tables(decoder: PreTrainedModel, layer_types: dict[str | None, bool]) -> None:
    """Compares the frequency tables of the model with the tables that follow from its configuration. Tables on the meta
    device have no values and are not compared.

    Args:
        layer_types: {type of layers that attend: whether any of them rotates}.

    Raises:
        ValueError: the tables differ, because a table was edited or has no values yet, or because this version of
            transformers reads a field differently.
    """
    own = {layer_type: build(model_steps(decoder.config, layer_type)) for layer_type in layer_types}
    grown = [scheme for layer_type in layer_types for scheme in _grown(decoder, layer_type)]
    found: set[str | None] = set()
    for embedding in rotary_embeddings(decoder).values():
        for name, table in tables_of(embedding).items():
            matching = {layer_type for layer_type, rotary in own.items() if table.is_meta or _holds(table, rotary)}
            if name.endswith(FIRST_TABLE):
                scale = getattr(embedding, name.replace(FIRST_TABLE, "attention_scaling"))
                matching = {each for each in matching if _scales(scale, own[each])}
                found |= matching
            elif not matching and any(_holds(table, rotary) for rotary in grown):
                continue
            if not matching:
                raise _other_table(f"in {name} of {type(embedding).__name__}", next(iter(own.values())))
    for layer_type, rotates in layer_types.items():
        if rotates and any(own[layer_type].frequencies) and layer_type not in found:
            raise _other_table("in every table", own[layer_type])


def _other_table(got: str, expected: Rotary) -> ValueError:
    return ValueError(
        f"model: expected a rotary embedding of the frequencies that its configuration gives, {expected!r}; got other "
        f"frequencies {got}; to convert with an edited table, pass rotary=Rotary.from_inv_freq(table, head_dim); "
        "tables of a model from to_empty have no values: call convert before to_empty, or pass "
        f"rotary=Rotary.from_hf_config(config); otherwise transformers {transformers.__version__} reads the rope "
        "parameters differently"
    )


def _grown(decoder: PreTrainedModel, layer_type: str | None) -> Iterator[Rotary]:
    """Yields the schemes whose tables transformers may have put in place for longer inputs."""
    first = grows_from(decoder.config, layer_type)
    if first < math.inf:
        lengths = {first + 1}
        for embedding in rotary_embeddings(decoder).values():
            lengths |= {int(x) for name, x in vars(embedding).items() if name.endswith("max_seq_len_cached")}
        for length in lengths:
            yield build(model_steps(decoder.config, layer_type, int(length)))


def _holds(table: torch.Tensor, rotary: Rotary) -> bool:
    """Whether a table holds the frequencies of a scheme, rounded to its type."""
    if table.numel() != len(rotary.frequencies):
        return False
    held, exact = table.detach().cpu(), rotary.inv_freq.abs()
    low, high = exact * (1 - ROUNDING), exact * (1 + ROUNDING)
    return any(bool(((low.to(dtype) <= held) & (held <= high.to(dtype))).all()) for dtype in {held.dtype, *CASTS})


def _scales(attention_scaling: float, rotary: Rotary) -> bool:
    return math.isclose(attention_scaling**2, rotary.temperature * rotary.rotated_scale, rel_tol=1e-5)


def fill_tables(embedding: torch.nn.Module, device: torch.device) -> None:
    """Replaces tables on the meta device by the tables of the configuration. Tables are not saved with the weights, so
    weights that are assigned to a model on the meta device leave its tables there. A converted model does not use their
    values, but the rotary embedding runs."""
    if device.type == "meta" or not any(table.is_meta for table in tables_of(embedding).values()):
        return
    with torch.device("cpu"):
        made = tables_of(type(embedding)(embedding.config))  # type: ignore[arg-type]
    for name, table in tables_of(embedding).items():
        if table.is_meta:
            setattr(embedding, name, made[name].to(device))


# ---- rotation


def no_rotation(module, args, output):
    """Returns cos = 1 and sin = 0, or 1 + 0i if the embedding returned a complex tensor. It is the forward hook of the
    rotary embedding."""
    if not torch.compiler.is_compiling() and _serves_stock_model():
        return None
    if isinstance(output, torch.Tensor):  # deepseek_v2
        return torch.ones_like(output)
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def _serves_stock_model() -> bool:
    """Whether a stock model calls a rotary embedding that it shares with a converted model. An embedding does not know
    its models, so this looks for them among the running functions. If no model runs, as in a backward pass, the answer
    is no."""
    frame, calls = sys._getframe(2), False
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, PreTrainedModel):
            if ATTRIBUTE in vars(caller):
                return False
            calls = True
        frame = frame.f_back  # type: ignore[assignment]
    return calls


def check_embedding(embedding: torch.nn.Module, device: torch.device) -> None:
    """Checks before a forward that a rotary embedding, or one that it wraps, does not rotate, and makes it run on this
    device.

    Raises:
        ValueError: the embedding was replaced after ``convert``.
    """
    if not any(no_rotation in module._forward_hooks.values() for module in embedding.modules()):
        raise ValueError(
            f"model: expected the rotary embedding that the model had at its convert, got another "
            f"{type(embedding).__name__}, with which queries and keys would rotate twice; call convert(model) again"
        )
    fill_tables(embedding, device)
