"""Position-independent caching: prefills passages once and joins them into prompts, in any order.

A converted model caches raw keys, which have no position. So the keys and values of a passage can be used at any
position in a prompt. But the stored keys and values do not depend on the text that precedes the passage in the prompt.
Two options reduce the error from this: ``prefill_passage`` can prefill a passage after the head of the prompt, and
``join_passages`` can recompute the first tokens of a passage after everything that precedes it (EPIC, arXiv
2410.15332). bench/results/reused/README.md measures both options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .caches import MARK, accept_cache, axes_of
from .conversion_plan import ConversionPlan, find_decoder, plan_of
from .layer_schemes import attending_layers
from .versions import CACHE


class Passage(NamedTuple):
    """A text and its keys and values.

    Attributes:
        input_ids: (batch, seqlen), without padding.
        cache: a ``DynamicCache`` of these tokens. A call of the model appends to the cache that it gets, so pass
            ``copy.deepcopy(cache)`` if you need the passage again.
    """

    input_ids: torch.Tensor
    cache: Cache


@torch.no_grad()
def prefill_passage(model, input_ids: torch.Tensor, behind: Passage | None = None) -> Passage:
    """Computes the keys and values of a passage, for ``join_passages``.

    Use it for texts that many prompts contain, such as retrieved documents. Prefill such texts after the head that all
    prompts share. bench/results/reused/README.md measures the gain.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import convert, join_passages, prefill_passage

        model = convert(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        head_ids, *document_ids = torch.randint(3, 60, (3, 1, 10))
        head = prefill_passage(model, head_ids)
        documents = [prefill_passage(model, ids, behind=head) for ids in document_ids]

    Args:
        model: a transformers model after ``convert``.
        input_ids: (batch, seqlen), the tokens of the passage, without padding. All passages of a batch must have the
            same length.
        behind: the text after which the passage is prefilled, such as the head that all prompts share. ``behind`` is
            not changed. None: the passage is prefilled as if nothing preceded it.

    Returns:
        The passage, without the text of ``behind``.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument. ``model`` must be converted. None
            of its layers may have a sliding window, lack attention, have a scheme that depends on the length, or have
            positions of several coordinates.
    """
    decoder, plan = _converted(model)
    _check_ids("input_ids", input_ids)
    cache, seen = _new_cache(decoder, model), 0
    if behind is not None:
        _check_passage("behind", behind, decoder, plan)
        _check_batch("behind", behind, input_ids.shape[0])
        seen = behind.input_ids.shape[1]
        _append(cache, behind.cache, 0)
    _read(decoder, cache, input_ids)
    if seen:
        whole, cache = cache, _new_cache(decoder, model)
        _append(cache, whole, seen)
    return Passage(input_ids, cache)


@torch.no_grad()
def join_passages(model, passages: Sequence[Passage], recompute: int = 0) -> Passage:
    """Joins passages into one prompt, from whose cache ``generate`` can continue.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import convert, join_passages, prefill_passage

        model = convert(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        passages = [prefill_passage(model, ids) for ids in torch.randint(3, 60, (3, 1, 10))]
        prompt = join_passages(model, passages, recompute=4)
        ids = torch.cat([prompt.input_ids, torch.randint(3, 60, (1, 5))], 1)  # and a question
        answer = model.generate(ids, past_key_values=prompt.cache, max_new_tokens=4)

    The result equals the result of one prefill of the whole prompt in three cases: there is one passage; or there is a
    head, prefilled with nothing before it, and one passage that was prefilled after the head; or there is such a head,
    and ``recompute`` is at least the length of every other passage. In all other cases the result is an approximation.

    Args:
        model: the transformers model that prefilled the passages, under the same scheme.
        passages: the passages in the order of the prompt. The call does not change the passages.
        recompute: in every passage but the first, this many first tokens are computed again, after everything that
            precedes them. Each of these passages costs a forward pass over its recomputed tokens. Default: 0.

    Returns:
        The tokens of all passages and their keys and values, in a new ``DynamicCache``.

    Raises:
        TypeError, ValueError: an argument is invalid, as in ``prefill_passage``; or passages are from another
            conversion, of different batch sizes, or in caches other than a ``DynamicCache``.
    """
    decoder, plan = _converted(model)
    if not isinstance(passages, Sequence) or isinstance(passages, Passage) or not passages:
        raise TypeError(f"passages: expected a list of at least one Passage, got {_kind(passages)}")
    if not isinstance(recompute, int) or isinstance(recompute, bool) or recompute < 0:
        raise ValueError(f"recompute: expected an integer of at least 0, got {recompute!r}")
    for number, passage in enumerate(passages):
        name = f"passages[{number}]"
        _check_passage(name, passage, decoder, plan)
        _check_batch(name, passage, passages[0].input_ids.shape[0])
    cache = _new_cache(decoder, model)
    for number, (input_ids, own) in enumerate(passages):
        again = min(recompute, input_ids.shape[1]) if number else 0
        if again:
            _read(decoder, cache, input_ids[:, :again])
        if again < input_ids.shape[1]:
            _append(cache, own, again)
    return Passage(torch.cat([passage.input_ids for passage in passages], 1), cache)


# ---- the steps


def _new_cache(decoder, model) -> DynamicCache:
    return accept_cache(model, DynamicCache(config=decoder.config))


def _read(decoder, cache: Cache, input_ids: torch.Tensor) -> None:
    """Reads tokens after the tokens in the cache, and appends their keys and values to it. Computes no logits."""
    decoder(input_ids, use_cache=True, **{CACHE: cache})


def _append(cache: Cache, other: Cache, first: int) -> None:
    """Appends a copy of the keys and values of another cache, from its token ``first`` on."""
    for index, layer in enumerate(other.layers):
        cache.update(layer.keys[:, :, first:], layer.values[:, :, first:], index)


# ---- checks


def _converted(model) -> tuple[torch.nn.Module, ConversionPlan]:
    """Returns the decoder of a converted model, and the plan of its conversion.

    Raises:
        ValueError: passages of this model cannot be moved to other positions.
    """
    decoder = find_decoder(model)
    plan = plan_of(decoder)
    if plan is None:
        raise ValueError(
            "model: expected a converted model, got a stock one (its cache holds keys that are rotated to their "
            "positions); call convert(model) first"
        )
    config = decoder.config
    if len(attending_layers(config)) < config.num_hidden_layers:
        raise ValueError(
            f"model: layers without attention are not supported (their state has no tokens to cut), got "
            f"{config.model_type!r}"
        )
    if axes_of(decoder) > 1:
        raise ValueError(
            f"model: positions of several coordinates are not supported (a moved passage has no coordinates), got "
            f"{axes_of(decoder)} axes"
        )
    for name, scheme in plan.schemes.items():
        if scheme.window is not None:
            raise ValueError(
                f"model: sliding-window layers are not supported (their cache forgets the first tokens of a passage), "
                f"got a window of {scheme.window} in {name}"
            )
        if scheme.grows_from < math.inf:
            raise ValueError(
                f"model: a scheme that depends on the length is not supported (a prompt is longer than its passages), "
                f"got one that changes beyond {scheme.grows_from:,} tokens in {name}"
            )
    return decoder, plan


def _check_ids(name: str, input_ids: torch.Tensor) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor of token numbers, got {_kind(input_ids)}")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"{name}: expected (batch, seqlen), at least one token, got shape {tuple(input_ids.shape)}")


def _check_passage(name: str, passage: Passage, decoder, plan: ConversionPlan) -> None:
    if not isinstance(passage, Passage):
        raise TypeError(f"{name}: expected a Passage, which prefill_passage returns, got {_kind(passage)}")
    input_ids, cache = passage
    _check_ids(f"{name}.input_ids", input_ids)
    layers: list[Any] = getattr(cache, "layers", None) or []
    other = next((_kind(layer) for layer in layers if type(layer) is not DynamicLayer), None)
    plain = isinstance(cache, DynamicCache) and not getattr(cache, "offloading", False)
    if not plain or other is not None:
        got = f"one with a {other}" if plain else _kind(cache)
        raise TypeError(
            f"{name}.cache: expected a DynamicCache that keeps all tokens in the model's type, got {got}; static, "
            "quantized and offloaded caches are not supported"
        )
    if getattr(cache, MARK, None) != plan.mark:
        raise ValueError(
            f"{name}.cache: expected a cache that this conversion filled, got one that another model or scheme filled, "
            "or one of unknown origin (for a cache that was read from a file, call accept_cache)"
        )
    if len(layers) != decoder.config.num_hidden_layers:
        raise ValueError(
            f"{name}.cache: expected keys in each of {decoder.config.num_hidden_layers} layers, got {len(layers)}"
        )
    for index, layer in enumerate(layers):
        held = tuple(layer.keys.shape[::2][:2]) if layer.is_initialized else (input_ids.shape[0], 0)
        if held != tuple(input_ids.shape):
            raise ValueError(
                f"{name}.cache: expected the keys of its input_ids, {tuple(input_ids.shape)}, got {held} in layer "
                f"{index}; a call of the model appends to the cache that it gets"
            )


def _check_batch(name: str, passage: Passage, batch: int) -> None:
    if passage.input_ids.shape[0] != batch:
        raise ValueError(
            f"{name}: expected a batch of {batch}, as in the other passages, got {passage.input_ids.shape[0]}"
        )


def _kind(value) -> str:
    return type(value).__name__
