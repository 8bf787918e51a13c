"""Finds the schemes under which a Hugging Face model can be measured."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...console import report
from ...console.hardware import hardware
from ...console.options import BadInput
from ...integrations.scheme_options import FIELD, read_field, read_options
from ...schemes.catalogue import SCHEMES, Lengths, add_options, describe_options, name_options
from ...schemes.rotary import Rotary
from .checkpoint import cache_facts, describe, rope_type_by_length, text_config
from .streaming import PIECE, KeptTokens


class Measured(NamedTuple):
    """A scheme of the catalogue on one model.

    apply: a function that converts the model to the scheme.
    words: a description of the scheme's options.
    same_until: up to this length, in tokens, the scheme computes the same as the model's own scheme. 0: at no length.
    kept: the tokens that stay in the cache while the model reads. None: all tokens.
    """

    name: str
    label: str
    apply: Callable[[], object]
    words: str
    same_until: int = 0
    kept: KeptTokens | None = None


SINKS = 4  # number of attention sinks (StreamingLLM, table 2)


def applicable(
    model,
    names: Sequence[str],
    train_length: int,
    longest: int,
    windows: Sequence[int] = (),
    given: Sequence[str] = (),
    all_converted: bool = False,
    sinks: int | None = None,
) -> tuple[list[Measured], dict[str, str]]:
    """Returns the schemes that this model can run under, and {label: reason} for the schemes that it cannot run under.

    The model is unchanged afterwards. If it was converted before, "stock" is the scheme that it had, every other scheme
    is applied on top of that scheme, and a label names all options of its scheme. Equal schemes are listed once, under
    the first name.

    Args:
        names: names in SCHEMES.
        train_length, longest: the training length and the longest length to measure, in tokens.
        windows: every scheme with a window is listed once for each of these windows. Default: half the training length.
        given: schemes that replace the model's scheme: the text of a Rotary, a file with that text, or the folder of a
            saved model.
        all_converted: whether the model's own scheme also runs on this package's attention.
        sinks: if given, also list the model's own scheme with a cache that keeps the first 4 tokens and this many last
            tokens.

    Raises:
        BadInput: the model cannot run under any of the schemes, or cannot run under one of ``given``.
    """
    search = _Search(model, all_converted)
    for name in names:
        if name == "stock":
            search.add_stock()
            continue
        chosen = windows if SCHEMES[name].reads_window and windows else [None]
        for window in chosen:
            search.add_named(name, Lengths(train_length, longest, window), several=len(chosen) > 1)
    for each in given:
        search.add_given(each)
    if sinks:
        search.add_sinks(sinks)
    search.stock()
    if not search.found:
        raise BadInput(f"--schemes: none of {', '.join(names)} fits this model: {'; '.join(search.skipped.values())}")
    return search.found, search.skipped


class _Search:
    """Applies one scheme after another to a model, and records under which schemes the model can run."""

    def __init__(self, model, all_converted: bool):
        self.model, self.all_converted = model, all_converted
        self.own = read_field(text_config(model))  # the options of an earlier conversion, {} for a stock model
        self.converted = bool(self.own)
        self.found: list[Measured] = []
        self.skipped: dict[str, str] = {}
        self.seen: dict[tuple, str] = {}  # {layers under a scheme: its label}
        self.stock_label = ""

    def convert(self, changes: dict[str, Any]):
        """Converts the model with these options only. Reverts first, because convert keeps the options of the previous
        scheme or warns that it drops them."""
        from ...integrations.transformers import convert

        model = convert(self.revert(), **changes)
        self.converted = True
        return model

    def revert(self):
        from ...integrations.transformers import revert

        return revert(self.model) if self.converted else self.model  # raises for families that convert does not support

    def stock(self):
        """Puts the model back under its own scheme."""
        model = self.revert()
        return self.convert(self.own) if self.own or self.all_converted else model

    def own_scheme(self):
        """Converts the model and keeps its own scheme."""
        return self.convert(self.own)

    def _add(self, name: str, asked: str, label: str, apply: Callable[[], object], words: str) -> None:
        apply()
        key = _layers(self.model) or (name,)  # no layers: a stock model that was not converted
        if key in self.seen:
            self.skipped[asked] = f"the same scheme as {self.seen[key]}"
            return
        self.seen[key] = label
        own_layers = next((x for x, of in self.seen.items() if of == self.stock_label and isinstance(x[0], tuple)), ())
        until = 0 if label == self.stock_label else _same_until(key, own_layers)
        self.found.append(Measured(name, label, apply, words, until))

    def add_stock(self) -> None:
        row = SCHEMES["stock"]
        self.stock_label = label = name_options(self.own) or row.label
        words = "its own scheme, converted" if self.all_converted else "the library's own attention"
        try:
            self._add("stock", row.label, label, self.stock, "as it was saved" if self.own else words)
        except ValueError as error:
            raise BadInput(f"--cache-dtype: expected a model that convert supports; {error}") from None
        if not self.own:
            self.seen |= _stock_layers(self.model, label)

    def add_named(self, name: str, lengths: Lengths, several: bool) -> None:
        """Adds a scheme of SCHEMES. several: whether the scheme is measured with several windows. Its label then names
        the window."""
        row, own = SCHEMES[name], self.own
        label = asked = f"{row.label}, window {lengths.window:,}" if several else row.label
        try:
            options = row.options(lengths)
            changes = add_options(own, options)
            words = describe_options(options).removeprefix(f"{label} ")
            if own:
                new = {option: value for option, value in options.items() if own.get(option) != value}
                on_top = own.items() <= changes.items()
                label = f"{name_options(own)}; + {name_options(new)}" if on_top and new else name_options(changes)
            self._add(name, asked, label, partial(self.convert, changes), words)
        except ValueError as error:
            self.skipped[asked] = str(error)

    def add_given(self, each: str) -> None:
        """Adds a scheme of --rotary."""
        label, changes = _read_given(each, self.model)
        names = (*self.seen.values(), *self.skipped)
        if repeated := sum(label == name or name.startswith(f"{label} (") for name in names):
            label = f"{label} ({repeated + 1})"
        words = "a scheme of your own" if "rotary" in changes else each
        try:
            self._add("rotary", label, label, partial(self.convert, changes), words)
        except (TypeError, ValueError) as error:
            raise BadInput(f"--rotary: {label}: {error}") from None

    def add_sinks(self, sinks: int) -> None:
        """Adds the model's own scheme with a cache that keeps the first tokens and the last ``sinks`` tokens."""
        label, kept = f"window {sinks:,} with {SINKS} sinks", KeptTokens(SINKS, sinks)
        try:
            check_streams(self.model)
            self.own_scheme()
            words = f"StreamingLLM: its own scheme, read in pieces of {PIECE} tokens"
            self.found.append(Measured("sinks", label, self.own_scheme, words, SINKS + sinks, kept))
        except ValueError as error:
            self.skipped[label] = str(error)


def settings(
    args: argparse.Namespace,
    model,
    train_length: int,
    schemes: Sequence[Measured],
    skipped: dict[str, str],
    **measured: str,
) -> dict[str, str]:
    """Returns and prints the settings of a measurement. measured: entries about the text and what is measured."""
    facts = {
        "model": describe(model, args.model, train_length),
        "schemes": "; ".join(f"{scheme.label}: {scheme.words}" for scheme in schemes),
        **({"left out": "; ".join(f"{label}: {reason}" for label, reason in skipped.items())} if skipped else {}),
        **measured,
        **cache_facts(args.cache_dtype),
        "machine": f"{hardware(model.device)}, torch {torch.__version__}",
    }
    print(report.lines(facts) + "\n", flush=True)
    return facts | {"command": args.command_line}


def check_streams(model) -> None:
    """Checks that a model can read text in pieces, with a cache that is cut between two pieces.

    Raises:
        ValueError: the model cannot be read in this way.
    """
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
    if kinds:
        raise ValueError(f"a cache with layers of the type {', '.join(sorted(kinds))} is not supported")
    if kind := rope_type_by_length(model):
        raise ValueError(f"rope type {kind} is not supported, its frequencies depend on the length")


def _layers(model) -> tuple:
    """Returns the schemes of a converted model's layers, for comparing models, or () if it is not converted."""
    layers = [module._flashrope for module in model.modules() if hasattr(module, "_flashrope")]
    return tuple((each.rotary, each.grows_from) for each in layers if hasattr(each, "rotary"))


def _stock_layers(model, label: str) -> dict[tuple, str]:
    """Returns {the schemes of the stock model's layers: label}, or {} if the model cannot be converted."""
    from ...integrations.transformers import convert, revert

    try:
        layers = _layers(convert(model))
    except ValueError:
        return {}
    revert(model)
    return {layers: label}


def _same_until(layers: tuple, own: tuple) -> int:
    """Returns the length in tokens up to which two models with these layers compute the same results."""
    if len(layers) != len(own) or not all(isinstance(each, tuple) for each in (*layers, *own)):
        return 0
    lengths = [min(same_length(a, b), from_a, from_b) for (a, from_a), (b, from_b) in zip(layers, own, strict=True)]
    return int(min(lengths, default=0))


def same_length(first: Rotary, second: Rotary) -> float:
    """Returns the number of tokens up to which two schemes give the same scores, or inf if they are the same.

    Schemes with different bands agree up to the first distance at which the bands differ. log n with a floor of 1 has
    no effect up to its training length.
    """
    table = ("head_dim", "frequencies", "interleaved", "axis", "temperature", "rotated_scale", "length_scale")
    if any(getattr(first, name) != getattr(second, name) for name in (*table, "log_steps_scale")):
        return 0
    until = math.inf
    scales = first.log_n_scale, second.log_n_scale
    if scales[0] != scales[1]:
        for scale in scales:
            if scale is not None:
                until = min(until, scale[0] if scale[1] else 0)
    for one, other in itertools.zip_longest(first.bands, second.bands):
        if one == other:
            continue
        if one and other and one[2:] == other[2:] and one.start == other.start:
            return min(until, one.stop, other.stop)
        return min(until, *(band.start for band in (one, other) if band))
    return until


def _read_given(given: str, model) -> tuple[str, dict[str, Any]]:
    """Returns (label, options of ``convert``) of a value of --rotary.

    Raises:
        BadInput: the value is neither the text of a Rotary, nor a file or folder with such a text.
    """
    path = Path(given)
    if given.lstrip().startswith("{"):
        return "own Rotary", {"rotary": _rotary(given)}
    if path.is_file():
        return path.stem, {"rotary": _rotary(path.read_text(encoding="utf-8"))}
    try:
        saved = json.loads((path / "config.json").read_text(encoding="utf-8")).get(FIELD)
    except (OSError, ValueError):
        saved = None
    if not saved:
        raise BadInput(
            "--rotary: expected the text of a Rotary, a file with it, or the folder of a model that was saved with a "
            f"scheme, got {given[:60]!r}"
        )
    try:
        options = read_options(saved, text_config(model))
    except (TypeError, ValueError) as error:
        raise BadInput(f"--rotary: {given}: {error}") from None
    return f"{path.name}: {name_options(options)}", options


def _rotary(text: str) -> Rotary:
    try:
        return Rotary.from_text(text.strip())
    except (TypeError, ValueError) as error:
        raise BadInput(f"--rotary: {error}") from None
