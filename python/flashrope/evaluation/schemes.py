"""The schemes that a Hugging Face model can be measured under, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .. import Rotary
from ..cli.options import BadInput
from ..rotary.fitting import dual_chunk_for, self_extend_for
from .model import text_config
from .names import NAMES


class Scheme(NamedTuple):
    """apply: puts the model under this scheme. words: what that means, for the list of settings."""

    name: str
    label: str
    apply: Callable[[], object]
    words: str


def applicable(
    model, names: Sequence[str], train_length: int, longest: int, windows: Sequence[int] = ()
) -> tuple[list[Scheme], dict[str, str]]:
    """(the schemes that this model can run under, {label: why it cannot} for the others).

    The model is left as it came. A scheme that ``convert`` gave it stays in force: the others change that one.

    Args:
        names: of NAMES.
        train_length, longest: the training length and the longest length to measure, in tokens.
        windows: of ReRoPE, Leaky ReRoPE and Self-Extend, a scheme for each; default: half the training length.

    Raises:
        BadInput: no scheme is left.
    """
    from ..integrations.transformers import convert, revert

    found, skipped = [], {}
    own = _own(model)
    converted = bool(own)

    def stock():
        if not converted:
            return model  # revert refuses families that convert refuses
        revert(model)
        return convert(model, **own) if own else model

    for name in names:
        if name == "stock":
            words = f"as it was saved, {', '.join(own)}" if own else "the library's own attention"
            found.append(Scheme(name, NAMES[name], stock, words))
            continue
        for label, make in _changes(model, own, name, train_length, longest, windows):
            try:
                changes, words = make()
                changes = own | changes
                convert(model, **changes)
                converted = True
                found.append(Scheme(name, label, lambda changes=changes: convert(model, **changes), words))
            except ValueError as error:
                skipped[label] = str(error)
    stock()
    if not found:
        raise BadInput(f"--schemes: none of {', '.join(names)} fits this model: {'; '.join(skipped.values())}")
    return found, skipped


def settings(schemes: Sequence[Scheme], skipped: dict[str, str]) -> dict[str, str]:
    """The lines about schemes in a list of settings."""
    facts = {"schemes": "; ".join(f"{scheme.label}: {scheme.words}" for scheme in schemes)}
    if skipped:
        facts["left out"] = "; ".join(f"{label}: {reason}" for label, reason in skipped.items())
    return facts


def _own(model) -> dict:
    """The options of ``convert`` in the configuration."""
    own = dict(getattr(text_config(model), "flashrope", None) or {})
    if isinstance(own.get("rotary"), dict):
        raise BadInput("--model: expected one scheme for all layers, got a model that was saved with one by layer type")
    return own | {"rotary": Rotary.from_text(own["rotary"])} if "rotary" in own else own


def _changes(
    model, own: dict, name: str, train_length: int, longest: int, windows: Sequence[int]
) -> Iterator[tuple[str, Callable]]:
    """(label, function that returns the arguments of convert and a description) of every scheme of this name. ``own``
    are the arguments that the model has without it."""
    config, factor = text_config(model), max(longest / train_length, 1.0)

    def trained() -> Rotary:
        return own.get("rotary") or Rotary.from_hf_config(config)

    if name in ("yarn", "ntk"):

        def scaled():
            rotary = trained().yarn(factor, train_length) if name == "yarn" else trained().ntk(factor)
            return {"rotary": rotary}, f"factor {factor:g}"

        yield NAMES[name], scaled
    elif name == "log-n":
        yield NAMES[name], lambda: ({"log_n": train_length}, f"by {train_length:,}")
    elif name == "cope":
        words = f"pairs with less than one turn over {train_length:,} tokens rotate less"
        yield NAMES[name], lambda: ({"clip": train_length}, words)
    elif name == "hope":
        words = f"pairs with less than one turn over {train_length:,} tokens do not rotate"
        yield NAMES[name], lambda: ({"hope_train_length": train_length}, words)
    elif name.startswith("dual-chunk"):
        yield NAMES[name], lambda: _with_log_n(name, train_length, *_dual_chunk(train_length))
    else:
        chosen = windows or [max(train_length // 2, 1)]
        for window in chosen:
            label = f"{NAMES[name]}, window {window:,}" if len(chosen) > 1 else NAMES[name]
            if name.startswith("self-extend"):
                yield (
                    label,
                    lambda window=window: _with_log_n(name, train_length, *_self_extend(train_length, longest, window)),
                )
            else:
                yield label, lambda window=window: _rectified(config, name, train_length, longest, window)


def _self_extend(train_length: int, longest: int, window: int) -> tuple[dict, str]:
    window, group = self_extend_for(train_length, longest, window)
    return {"self_extend": (window, group)}, f"window {window:,}, groups of {group:,}"


def _dual_chunk(train_length: int) -> tuple[dict, str]:
    chunk_size, local_size = dual_chunk_for(train_length)
    return {"dual_chunk": (chunk_size, local_size)}, f"chunk size {chunk_size:,}, local size {local_size:,}"


def _with_log_n(name: str, train_length: int, changes: dict, words: str) -> tuple[dict, str]:
    if not name.endswith("log-n"):
        return changes, words
    return changes | {"log_n": train_length}, f"{words}, log n by {train_length:,}"


def _rectified(config, name: str, train_length: int, longest: int, window: int) -> tuple[dict, str]:
    from ..integrations.transformers import suggest

    suggest(config, longest)  # raises if the layers of this model do not support it
    if name == "rerope-plain":
        return {"window": window}, f"window {window:,}"
    changes, words = {"window": window, "log_n": train_length}, f"window {window:,}, log n by {train_length:,}"
    if name == "leaky":
        # The longest distance maps to halfway between the window and the training length.
        factor = float(max(2 * math.ceil((longest - window) / max(train_length - window, 1)), 2))
        return changes | {"factor": factor}, f"factor {factor:g}, {words}"
    return changes, words
