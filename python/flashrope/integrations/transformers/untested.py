"""Checks models of types that the tests do not cover: the converted model must have the stock model's outputs."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from transformers import PreTrainedModel

from .applying import apply, choose_stock_attention, undo
from .conversion_plan import SAVED, ConversionPlan
from .versions import CACHE, cache_of

SEQLEN, PADDING = 24, 3
CALLS = (9, 10, 11, SEQLEN)  # with a cache: how many tokens have been read after each call
TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}  # allowed differences, relative to the largest output
SENSITIVITY = 5  # without rotation the outputs must change by more than this multiple of the tolerance


def accept(model, decoder, own: ConversionPlan) -> None:
    """Compares a stock model with its conversion under two plans: its own schemes, and its own schemes without
    rotation.

    The outputs under the first plan must equal the stock model's, and the outputs under the second must differ. The
    outputs are compared on random tokens, with and without a cache, with and without padding. The model is unchanged
    afterwards.

    Raises:
        ValueError: the comparison failed. The message names the model type, the case and the difference. Or weights of
            the model are offloaded, so that the comparison cannot vary them.
    """
    offloaded = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if offloaded is not None:
        raise ValueError(
            "untested: expected weights in memory, because the comparison with the stock model varies them, got "
            f"{offloaded} on the meta device; call convert before the weights are offloaded"
        )
    model_type = decoder.config.model_type
    unrotated = dataclasses.replace(
        own, schemes={name: scheme.without_rotation() for name, scheme in own.schemes.items()}
    )
    with contextlib.ExitStack() as restore:
        _prepare(model, restore)
        stock = _outputs(model, decoder)
        restore.callback(undo, model, decoder)
        apply(model, decoder, own)
        found = _outputs(model, decoder)
        apply(model, decoder, unrotated)
        without = _forward(model, decoder, _tokens(model, decoder), None)
    tolerance = TOLERANCE[without.dtype] * float(stock["uncached"].abs().max())
    for case, expected in stock.items():
        off = float((found[case] - expected).abs().max())
        if not off <= tolerance:
            raise ValueError(
                f"model: expected {model_type!r} to give the same outputs when converted, got a difference of "
                f"{off:.2g} ({case}), more than {tolerance:.2g}; its attention is not what flashrope computes"
            )
    moved = float((without - stock["uncached"]).abs().max())
    if not moved >= SENSITIVITY * tolerance:
        raise ValueError(
            f"model: expected outputs of {model_type!r} that depend on its rotary embedding, got outputs that change "
            f"by {moved:.2g} without rotation, not more than by rounding; load trained weights"
        )


def _prepare(model, restore: contextlib.ExitStack) -> None:
    """Prepares a model for the comparison: turns off gradients and dropout, and changes parameters that are constant
    vectors. With constant weights, the order of a norm and the rotation would make no difference. ``restore`` undoes
    all of this."""
    restore.enter_context(torch.no_grad())
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == SAVED:
            restore.callback(setattr, module.config, "_attn_implementation_internal", SAVED)
    choose_stock_attention(model)
    for module in model.modules():
        if module.training:
            restore.callback(setattr, module, "training", True)
            module.training = False
    for parameter in model.parameters():
        if parameter.ndim == 1 and parameter.numel() > 1 and bool((parameter == parameter[0]).all()):
            restore.callback(parameter.copy_, parameter.clone())
            parameter.add_(torch.arange(parameter.numel(), device=parameter.device).cos().to(parameter.dtype) / 2)


def _tokens(model, decoder) -> torch.Tensor:
    size = decoder.config.vocab_size
    low, high = (100, 1000) if size > 1000 else (3, size)  # image models have special tokens outside this range
    ids = torch.randint(low, high, (2, SEQLEN), generator=torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def _outputs(model, decoder) -> dict[str, torch.Tensor]:
    ids = _tokens(model, decoder)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return {
        "uncached": _forward(model, decoder, ids, None),
        "cached": _forward(model, decoder, ids, None, CALLS),
        "padded": _forward(model, decoder, ids, mask),
        "padded, cached": _forward(model, decoder, ids, mask, CALLS),
    }


def _forward(model, decoder, ids, mask, calls=None) -> torch.Tensor:
    """Returns the model's outputs (batch, seqlen, outputs): logits if it has any, else hidden states. Rows of padding
    are 0."""
    parts, cache = [], None
    for start, end in zip((0, *(calls or ())), calls or (SEQLEN,), strict=False):
        seen = None if mask is None else mask[:, :end]
        out = model(ids[:, start:end], attention_mask=seen, use_cache=calls is not None, **{CACHE: cache})
        cache = cache_of(out)
        logits = getattr(out, "logits", None)
        parts.append(out.last_hidden_state if logits is None else logits)
    joined = torch.cat(parts, 1)
    return joined if mask is None else joined * mask[..., None]
