"""The schemes that a Hugging Face model can be measured under, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..cli.options import BadInput
from ..integrations.options import read_field
from ..rotary.catalogue import SCHEMES, Lengths, describe_options
from .model import text_config


class Measured(NamedTuple):
    """A scheme of the catalogue on one model. ``apply`` converts the model to it; ``words`` describes its options."""

    name: str
    label: str
    apply: Callable[[], object]
    words: str


def applicable(
    model, names: Sequence[str], train_length: int, longest: int, windows: Sequence[int] = ()
) -> tuple[list[Measured], dict[str, str]]:
    """The schemes that this model can run under, and {label: reason} for the others.

    The model is left as it came. If it was converted before, the schemes are applied on top of that scheme.

    Args:
        names: of SCHEMES.
        train_length, longest: the training length and the longest length to measure, in tokens.
        windows: every scheme with a window is listed once for each of these; default: half the training length.

    Raises:
        BadInput: the model can run under none of the schemes.
    """
    from ..integrations.transformers import convert, revert

    found, skipped = [], {}
    own = read_field(text_config(model))
    converted = bool(own)

    def stock():
        if not converted:
            return model  # revert refuses families that convert refuses
        revert(model)
        return convert(model, **own) if own else model

    for name in names:
        row = SCHEMES[name]
        if name == "stock":
            words = f"as it was saved, {', '.join(own)}" if own else "the library's own attention"
            found.append(Measured(name, row.label, stock, words))
            continue
        chosen = windows if row.reads_window and windows else [None]
        for window in chosen:
            label = f"{row.label}, window {window:,}" if len(chosen) > 1 else row.label
            try:
                options = row.options(Lengths(train_length, longest, window))
                changes = own | options
                convert(model, **changes)
                converted = True
                words = describe_options(options).removeprefix(f"{label} ")
                found.append(Measured(name, label, partial(convert, model, **changes), words))
            except ValueError as error:
                skipped[label] = str(error)
    stock()
    if not found:
        raise BadInput(f"--schemes: none of {', '.join(names)} fits this model: {'; '.join(skipped.values())}")
    return found, skipped


def settings(schemes: Sequence[Measured], skipped: dict[str, str]) -> dict[str, str]:
    """The lines about schemes in a list of settings."""
    facts = {"schemes": "; ".join(f"{scheme.label}: {scheme.words}" for scheme in schemes)}
    if skipped:
        facts["left out"] = "; ".join(f"{label}: {reason}" for label, reason in skipped.items())
    return facts
