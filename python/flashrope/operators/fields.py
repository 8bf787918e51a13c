"""Passes nested NamedTuples to torch operators as flat lists of leaves, and builds the schema for them.

A field is a tensor, an int, a float, a bool, a Rotary or another NamedTuple. Tensors and bools may be None. A Rotary
travels as its text. If a field may be an int or a NamedTuple, it has a leaf for the int, followed by the leaves of the
NamedTuple. The int is 0 if the field is a NamedTuple. If a NamedTuple is None, its leaves are None for tensors, 0 for
ints and False for bools. The tensors of a NamedTuple come first, so that autograd saves one slice of the arguments.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch

from ..calls.cache_tables import CacheLayer, CachePositions, CacheTables, Packed
from ..calls.records import AttentionCall, CacheCall
from ..schemes.rotary import Rotary


class Field(NamedTuple):
    """The types that a field of a NamedTuple may have."""

    name: str
    kinds: tuple[type, ...]  # keys of KINDS
    nested: Any = None  # a class of NamedTuples, or None
    optional: bool = False


# The types of leaves, and their names in a schema.
KINDS = {torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", Rotary: "str"}


def _fields_of(cls) -> tuple[Field, ...]:
    found = []
    for name, hint in get_type_hints(cls).items():
        options = get_args(hint) or (hint,)
        kinds = tuple(each for each in options if each in KINDS)
        nested = [each for each in options if hasattr(each, "_fields")]
        found.append(Field(name, kinds, nested[0] if nested else None, NoneType in options))
    return tuple(sorted(found, key=lambda field: torch.Tensor not in field.kinds))


# Filled when this file is imported, because torch.compile does not trace type hints.
FIELDS = {cls: _fields_of(cls) for cls in (AttentionCall, CacheCall, CacheLayer, CacheTables, CachePositions, Packed)}


def schema_of(cls, written: tuple[str, ...] = (), optional: bool = False, absent: tuple[str, ...] = ()) -> str:
    """Returns the part of an operator's schema for this NamedTuple. written: names of tensors that the operator writes
    to. optional: whether all tensors may be None. absent: names of further tensors that may be None."""
    parts = []
    for field in FIELDS[cls]:
        mark = "?" if optional or field.optional or field.name in absent else ""
        for kind in field.kinds:
            alias = f"({field.name}!)" if field.name in written else ""
            may_be_none = mark if kind is torch.Tensor else "?" if kind is bool and field.optional else ""
            parts.append(f"{KINDS[kind]}{alias}{may_be_none} {field.name}")
        if field.nested is not None:
            parts.append(schema_of(field.nested, written, optional or field.optional or bool(field.kinds)))
    return ", ".join(parts)


def flatten(cls, value) -> list:
    """Returns the leaves of a NamedTuple of this class. If value is None, the leaves are None, 0 or False."""
    leaves: list = []
    for field in FIELDS[cls]:
        own = None if value is None else getattr(value, field.name)
        for kind in field.kinds:
            leaves.append(_leaf(field, kind, own))
        if field.nested is not None:
            leaves += flatten(field.nested, own if hasattr(own, "_fields") else None)
    return leaves


def _leaf(field: Field, kind: type, own):
    if kind is Rotary:
        return own.text
    if kind is torch.Tensor or own is None and field.optional and kind is bool:
        return own
    return kind(0) if own is None or field.nested is not None and hasattr(own, "_fields") else own


def unflatten(cls, leaves) -> tuple[Any, list]:
    """Undoes ``flatten``: returns the NamedTuple that is made of the first leaves, and the remaining leaves."""
    rest, values = list(leaves), {}
    for field in FIELDS[cls]:
        own: Any = rest.pop(0) if field.kinds else None
        if field.nested is not None:
            count = len(flatten(field.nested, None))
            nested = rest[:count]
            rest = rest[count:]
            if any(isinstance(x, torch.Tensor) for x in nested):
                own = unflatten(field.nested, nested)[0]
        values[field.name] = Rotary.from_text(own) if Rotary in field.kinds else own
    return cls(**values), rest
