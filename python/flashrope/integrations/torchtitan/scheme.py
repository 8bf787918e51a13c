"""Reads the options of the override."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from ...rotary.catalogue import SCHEMES, Lengths, apply_options
from ...rotary.rotary import Rotary
from ..options import read_options, to_json
from .rope import rotary_of
from .targets import head_dim_of

LENGTHS = ("hope_train_length", "cope", "log_n")  # options that hold a training length


def read_scheme(given: Mapping[str, Any], attention) -> tuple[Rotary, dict[str, Any]]:
    """The scheme of an attention layer, and the options that ``convert`` takes for it, as JSON.

    Raises:
        TypeError, ValueError: names the option, what was expected and what came.
    """
    head_dim = head_dim_of(attention)
    seqlen = attention.rope.max_seq_len  # torchtitan has set it to training.seq_len
    own = rotary_of(attention.rope, head_dim)
    options = _read(given, seqlen)
    for name in LENGTHS:
        length = options.get(name, seqlen)
        length = length.get("train_length", seqlen) if isinstance(length, dict) else length
        if length != seqlen:
            warnings.warn(
                f"{name}: expected the training's seq_len {seqlen}, got {length}; the model would be trained with "
                "one length and its scheme computed from another",
                stacklevel=2,
            )
    rotary = options.get("rotary", own)
    for name in ("head_dim", "interleaved"):
        if getattr(rotary, name) != getattr(own, name):
            raise ValueError(
                f"rotary: expected {name} {getattr(own, name)}, as in the model, got {getattr(rotary, name)}"
            )
    if rotary.axes > 1:
        raise ValueError(f"rotary: expected positions of one coordinate, got a scheme of {rotary.axes} axes")
    return apply_options(rotary, options), to_json(options)


def _read(given: Mapping[str, Any], seqlen: int) -> dict[str, Any]:
    given = dict(given)
    name = given.pop("scheme", None)
    if name is None:
        name = "stock" if given else "hope"
    if name not in SCHEMES:
        close = difflib.get_close_matches(str(name), SCHEMES, n=1)
        raise ValueError(
            f"scheme: expected one of {', '.join(SCHEMES)}, got {name!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    lengths = Lengths(seqlen, seqlen, given.get("window"), given.get("factor"))
    return read_options({**SCHEMES[name].options(lengths), **given}, None, lambda config, name: seqlen)
