"""Defines the torch.library operators: their schemas, their implementations, and result shapes for tracing.

torch.compile and torch.export do not look into the operators. An operator takes the scheme as the text of its Rotary,
which is one constant in a graph and can be read in an exported program. ``autograd.py`` defines the gradients.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from ..backends.registry import check_backend, load_backend
from ..calls.cache_tables import CacheLayer, CacheTables
from ..calls.memory import check_append
from ..calls.plans import attend_once, options_of
from ..calls.records import AttentionCall, CacheCall, Kept, RotateCall, accumulation_type, lse_shape, out_shape
from ..calls.visible import store_positions
from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import inverted, over_rotated_keys
from .fields import schema_of, unflatten

OPERATORS = torch.ops.flashrope
LIBRARY = torch.library.Library("flashrope", "DEF")


# rotated_k, table: tensors that the forward saves for the backward (calls.Kept). A tensor is empty if it is not saved.
LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {schema_of(AttentionCall)}, str impl) -> "
    "(Tensor out, Tensor lse, Tensor rotated_k, Tensor table)"
)
LIBRARY.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor rotated_k, Tensor table, {schema_of(AttentionCall)}, str impl) -> "
    "(Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


# A call over a cache uses two operators: the first writes to the cache, and the second only reads it. If values are
# channels of the keys, v and new_v are None, because an operator must not get the same memory in two arguments that it
# writes.
LIBRARY.define(
    f"append_to_cache({schema_of(CacheLayer, written=('k', 'v', 'k_scale', 'v_scale'), absent=('v',))}, "
    "Tensor new_k, Tensor? new_v, "
    f"{schema_of(CacheTables, written=('slot_positions',))}, str? rotary, str impl) -> ()"
)
LIBRARY.define(
    f"attention_with_cache(Tensor q, {schema_of(CacheLayer)}, {schema_of(CacheCall)}, str impl) -> "
    "(Tensor out, Tensor lse)"
)
LIBRARY.define("rotate(Tensor x, Tensor? positions, str rotary, bool inverse, str impl) -> Tensor")


# ---- what the operators do


def attention(q, k, v, *arguments):
    call, (impl,) = unflatten(AttentionCall, arguments)
    out, lse, kept = load_backend(impl).forward(q, k, v, call)
    return out, lse, *(kept or Kept(k.new_empty(0), k.new_empty(0, dtype=torch.float32)))


def attention_backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, table, *arguments):
    (call, (impl,)), kept = unflatten(AttentionCall, arguments), Kept(rotated_k, table)
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    return load_backend(impl).backward(grad_out, grad_lse, q, k, v, out, lse, kept, call)


def append_to_cache(layer: CacheLayer, k, v, tables: CacheTables, rotary: Rotary | None, impl: str) -> None:
    """Checks new keys and values and writes them to the cache. rotary: the scheme that rotates k first, or None."""
    check_append(layer, k, v, tables)
    if tables.positions is not None and tables.positions.slot_positions is not None:
        store_positions(layer.k, tables, k.shape[-3])
    if rotary is None:
        load_backend(impl).append_to_cache(layer, k, v, tables)
    else:
        load_backend(impl).append_to_cache(layer, k, v, tables, over_rotated_keys(rotary))
    count_write(layer)


def count_write(layer: CacheLayer) -> None:
    """Tells autograd that keys and values of a layer were written, because backends write without its knowledge. Then
    autograd raises an error for a graph that still needs the former values."""
    increment_version([x for x in layer.rows if x is not None])


def _append_to_cache(*arguments):
    layer, (k, v, *rest) = unflatten(CacheLayer, arguments)
    tables, (rotary, impl) = unflatten(CacheTables, rest)
    append_to_cache(layer, k, v, tables, None if rotary is None else Rotary.from_text(rotary), impl)


def _cached(arguments) -> tuple[CacheLayer, CacheCall, str]:
    """Returns the layer, the call and the backend from the operator's arguments after q."""
    layer, rest = unflatten(CacheLayer, arguments)
    call, (impl,) = unflatten(CacheCall, rest)
    return layer, call, impl


def _attention_with_cache(q, *arguments):
    layer, call, impl = _cached(arguments)
    return attend_once(load_backend(impl), q, layer, call)


def rotate(x, positions, rotary: Rotary, inverse: bool, impl: str):
    """Rotates x by its positions. inverse: rotates by the negative angles, for the gradient."""
    rotary = over_rotated_keys(rotary)
    if inverse:
        rotary = inverted(rotary)
    if not rotary.changes_channels or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    if x.stride(-1) != 1:  # such as the gradient of a sum, expanded with stride 0
        x = x.contiguous()
    return load_backend(impl).rotate(x, RotateCall(rotary, positions))


def _rotate(x, positions, rotary, inverse, impl):
    return rotate(x, positions, Rotary.from_text(rotary), inverse, impl)


LIBRARY.impl("rotate", _rotate, "CompositeExplicitAutograd")
LIBRARY.impl("append_to_cache", _append_to_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention_with_cache", _attention_with_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", attention_backward, "CompositeExplicitAutograd")


# ---- shapes, for tracing


@torch.library.register_fake("flashrope::attention", lib=LIBRARY)
def _(q, k, v, *arguments):
    call, (impl,) = unflatten(AttentionCall, arguments)
    check_backend(impl, q)
    out = q.new_empty(out_shape(q, v))
    lse = q.new_empty(lse_shape(q), dtype=accumulation_type(q))
    shapes = load_backend(impl).kept_shapes(k, call)
    return out, lse, k.new_empty(shapes.rotated_k), k.new_empty(shapes.table, dtype=torch.float32)


@torch.library.register_fake("flashrope::attention_backward", lib=LIBRARY)
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@torch.library.register_fake("flashrope::append_to_cache", lib=LIBRARY)
def _(*_):
    return None


@torch.library.register_fake("flashrope::attention_with_cache", lib=LIBRARY)
def _(q, *arguments):
    layer, call, impl = _cached(arguments)
    check_backend(impl, q, True, call.tables.positions, options_of(layer, call.rotated_keys))
    out = q.new_empty(out_shape(q, layer.v))
    return out, q.new_empty(lse_shape(q), dtype=accumulation_type(q))


@torch.library.register_fake("flashrope::rotate", lib=LIBRARY)
def _(x, positions, rotary, inverse, impl):
    check_backend(impl, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
