"""``plan_cache``: attention over a cache, planned once for a step and run for every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..backends.registry import check_backend, load_backend, resolve_impl
from ..calls.autocast import autocast, autocast_hint
from ..calls.cache_tables import CacheLayer, CacheTables, Packed
from ..calls.checks import (
    DTYPES,
    MAX_NARROW_HEAD_DIM,
    check_cache,
    check_int32,
    check_no_gradient,
    check_num_splits,
    check_options,
    check_rotated_keys,
    check_sinks,
    check_slot_mapping,
    check_tensor,
    refuse_beside_wide_heads,
    validate_tables,
)
from ..calls.memory import AppendCheck, Unwritten, address, check_apart
from ..calls.plans import Queries, options_of
from ..calls.position_checks import check_cached_positions, validate_positions
from ..calls.records import CacheCall, out_shape
from ..calls.visible import store_positions
from ..schemes.lowered import UNBOUNDED
from ..schemes.rotary import Rotary
from . import torch_library
from .autograd import check_no_tangents, is_plain, transforming
from .fields import flatten
from .sinks import add_sinks
from .torch_library import OPERATORS

__all__ = ["CachePlan", "plan_cache"]


def plan_cache(
    tables: CacheTables,
    *,
    like: CacheLayer,
    rotary: Rotary,
    seqlen_q: int,
    heads_q: int,
    dtype: torch.dtype | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    rotated_keys: bool = False,
    impl: str | None = None,
    validate: bool = False,
) -> CachePlan:
    """Plans attention over a cache once for all layers of a step.

    Use it where several layers share lengths, block table and scheme: a plan checks the tables, chooses tiles and
    builds cos and sin once, and ``attend`` does what differs by layer. For one layer, ``attention_with_cache`` plans
    and attends in one call. ``KVCache.step`` and ``PagedKVCache.step`` make plans themselves. FlashInfer's plan and run
    divide the work in the same way.

    Example:
        layers = [CacheLayer(*(torch.zeros(2, 512, 2, 64) for _ in "kv")) for _ in range(4)]
        tables = CacheTables(torch.zeros(2, dtype=torch.int32), new=1)  # two empty sequences get one token each
        plan = plan_cache(tables, like=layers[0], rotary=Rotary.rope(64), seqlen_q=1, heads_q=8)
        q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))  # in a model they differ by layer
        outs = [plan.attend(q, layer, k, v) for layer in layers]
        tables.seqlens.add_(1)
        plan.refresh()  # now the plan is valid for the next step

    Args:
        tables: the lengths, block table and positions of the sequences, the same in all layers.
        like: any layer. All layers must have the shapes, strides, dtypes and device of this layer.
        rotary: the scheme. Layers with a different scheme need a separate plan.
        seqlen_q: rows of q per sequence. With ``Packed`` queries: rows of all sequences together.
        heads_q: heads of q, a multiple of heads_kv.
        dtype: the type of q, k, v and out. Default: the dtype of the cache. A quantized cache has no such default, so
            dtype must be given.
        rotated_keys: the cache holds rotated keys, as ``rotate`` returns them. New keys are rotated once, when they are
            written, and a step rotates only queries. The scheme must be one that ``rotate`` accepts. All plans over a
            cache need the same scheme and the same leftpad. No plan can check the scheme and the padding of earlier
            plans. ``KVCache`` and ``PagedKVCache`` check them. impl="cuda" does not support rotated keys. Packed rows
            outside every sequence have no position, so their slot_mapping should be negative.
        causal, softmax_scale, num_splits, impl, validate: as in ``attention_with_cache``.

    Returns:
        The plan, which may be made before a CUDA graph is captured. Making it waits for the device only if validate is
        True.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected.
    """
    if not isinstance(tables, CacheTables):
        raise TypeError(f"tables: expected CacheTables, got {type(tables).__name__}")
    if not isinstance(like, CacheLayer):
        raise TypeError(f"like: expected a CacheLayer, got {type(like).__name__}")
    asked, dtype = dtype, dtype or (like.k.dtype if isinstance(like.k, torch.Tensor) else None)
    if dtype not in DTYPES:
        needed = f" (a cache of {dtype} does not say the type of q)" if asked is None else ""
        raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64{needed}, got {asked!r}")
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: expected a flashrope.Rotary, got {type(rotary).__name__}")
    batch = () if tables.packed else (tables.seqlens.shape[0],)
    # An expanded row takes the place of q, because only q's shape, dtype and device matter.
    row = torch.zeros(rotary.head_dim, dtype=dtype, device=like.k.device)
    q = row.expand(*batch, seqlen_q, heads_q, rotary.head_dim)
    return plan_checked(
        q, like, None, None, tables, rotary, causal, softmax_scale, num_splits, impl, validate, rotated_keys
    )


def plan_checked(
    q,
    layer: CacheLayer,
    k,
    v,
    tables: CacheTables,
    rotary: Rotary,
    causal: bool = True,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    impl: str | None = None,
    validate: bool = False,
    rotated_keys: bool = False,
) -> CachePlan:
    """Checks all tensors of a call and returns its plan. k, v: None if they are not known yet."""
    new, positions = tables.new, tables.positions
    packed = new if isinstance(new, Packed) else None
    lengths = () if packed is None else (packed.cu_seqlens_q, packed.max_seqlen_q)
    paged, scales = tables.block_table is not None, (layer.k_scale, layer.v_scale)
    capacity, _ = check_cache(q, layer.k, layer.v, k, v, rotary, paged, lengths, scales, positions is not None)
    if packed is not None and packed.slot_mapping is not None:
        check_slot_mapping(packed.slot_mapping, q)
    if rotated_keys is not False:
        check_rotated_keys(rotated_keys, rotary)
        if rotated_keys and layer.first_value is not None:
            raise ValueError(
                "rotated_keys: expected False, because v_cache is a view of k_cache and values are channels of raw "
                "keys, got True"
            )
    if rotary.head_dim > MAX_NARROW_HEAD_DIM:
        refuse_beside_wide_heads(rotary.head_dim, layer.k_scale is not None, rotated_keys, positions is not None)
    scale, num_splits = check_options(causal, softmax_scale, q), check_num_splits(num_splits)
    batch = q.shape[0] if packed is None else packed.cu_seqlens_q.shape[0] - 1
    check_int32("cache_seqlens", tables.seqlens, q, "q", (batch,))
    if tables.leftpad is not None:
        check_int32("cache_leftpad", tables.leftpad, q, "q", (batch,))
    if tables.block_table is not None:
        check_int32("block_table", tables.block_table, q, "q", (batch, "max_pages"))
        capacity *= tables.block_table.shape[1]
    if capacity > UNBOUNDED:  # distances are 32-bit numbers in the kernels
        name = "k_cache" if tables.block_table is None else "block_table"
        raise ValueError(f"{name}: expected room for at most {UNBOUNDED} tokens a sequence, got {capacity}")
    impl = resolve_impl(impl, q, cached=True)
    if positions is not None:
        check_cached_positions(positions, q, layer.k, rotary, tables, rotated_keys)
    if layer.key_weight is not None:
        check_key_weight(layer.key_weight, q, rotated_keys)
    options = options_of(layer, rotated_keys)
    # A graph cannot import modules; the operators do this check at tracing. resolve_impl has checked q.
    if (options or positions is not None) and not torch.compiler.is_compiling():
        check_backend(impl, q, True, positions, options)
    if validate:
        validate_tables(tables, capacity, layer.k)
        if positions is not None:
            validate_positions(tables, layer.k, layer.k.shape[1])
    call = CacheCall(rotary, causal, scale, tables, num_splits, rotated_keys)
    return CachePlan(call, impl, Queries.of(q), layer)


class CachePlan:
    """Attention over a cache for the layers of a step, made by ``plan_cache``.

    A plan is valid until one of its tables is written. ``refresh`` makes it valid again. A plan holds a workspace that
    all layers share. So all calls of a plan must run in one thread and on one stream, and the plan must live as long as
    any CUDA graph that captured its calls. In a CUDA graph, call ``refresh`` first inside the capture, then ``attend``
    for every layer. A replay then reads what the tables hold at that time.
    """

    __slots__ = (
        "_call",
        "_impl",
        "_queries",
        "_layer",
        "_first_value",
        "_tables",
        "_backend",
        "_written",
        "_stored",
        "_guard",
        "_check_memory",
        "watches",
    )

    def __init__(self, call: CacheCall, impl: str, queries: Queries, like: CacheLayer):
        self._call, self._impl, self._queries, self._tables = call, impl, queries, call.tables
        self._layer, self._first_value = like, like.first_value
        self._backend: Any = None  # the backend's plan, made by the first plain call
        self._written: set[int] = set()  # addresses of the keys of layers that hold the new tokens
        self._stored = False  # whether slot_positions holds the positions of the new tokens
        self._check_memory = AppendCheck()
        self.watches = True  # whether to check that no table was written; a plan for one call skips the check
        self._guard: Unwritten | None = None  # made by the first call

    def __reduce__(self):
        """Copies and pickles a plan as it was made, because the backend's plan holds addresses of this process."""
        return CachePlan, (self._call, self._impl, self._queries, self._layer)

    @property
    def tables(self) -> CacheTables:
        return self._tables

    def refresh(self) -> None:
        """Makes the plan valid after its tables were written. The next call computes again what depends on their
        values, and every layer may bring new keys again."""
        self._backend, self._guard, self._stored = None, None, False
        self._written.clear()

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Writes the new keys and values of a layer. ``attend`` without k and v then attends to these keys, too.

        Args:
            layer, k, v: as in ``attend``.

        Raises:
            TypeError, ValueError: as in ``attend``.
        """
        k, v = autocast(k, v)
        self._check_layer(layer)
        self._check_new(k, v)
        if not k.shape[-3]:
            return
        new = (k,) if v is None else (k, v)
        self._check_tables()
        if is_plain(layer.k, layer.v, *new, self._tables.seqlens):
            self._write(self._planned(), layer, k, v)
            return
        if transforming():
            check_no_tangents(layer.k, layer.v, *new)
        self._write(None, layer, k, v)

    def attend(
        self,
        q: torch.Tensor,
        layer: CacheLayer,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ):
        """Writes the new keys and values of a layer, if given, then attends to all its keys.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim), of the plan's shape.
            layer: the caches of the layer.
            k, v: (batch, seqlen_new, heads_kv, head_dim), or packed (total_q, heads_kv, head_dim). None: the layer
                holds the new tokens already, from ``append`` or an earlier ``attend``. v is also None if the layer's v
                is a view of channels of its k.
            sinks, return_lse: as in ``attention_with_cache``.
            out: a contiguous tensor to write the result to, with q's device, dtype and shape but the head_dim of the
                values, in memory that no other tensor of the call uses. It has no gradient. None: the result is a new
                tensor.

        Returns:
            out; with return_lse (out, lse), as in ``attention_with_cache``.

        Raises:
            TypeError, ValueError: an argument is invalid or does not fit the plan. The message names the argument and
                says what was expected.
        """
        q, k, v = autocast(q, k, v)
        return self._attend(q, layer, k, v, sinks, return_lse, out)

    def _attend(self, q, layer: CacheLayer, k, v, sinks, return_lse: bool, out=None):
        """Does what ``attend`` does, after autocast has been applied."""
        expected, new = self._queries, k is not None or v is not None
        check_tensor("q", q)
        if q.shape != expected.shape or q.dtype != expected.dtype or q.device != expected.device:
            _refuse("q", q, expected.shape, expected.dtype, expected.device)
        if q.stride(-1) != 1:
            raise ValueError(f"q: expected a contiguous last dimension, got stride {q.stride(-1)}")
        self._check_layer(layer)
        if new:
            self._check_new(k, v)
        if torch.is_grad_enabled() and q.requires_grad:
            check_no_gradient("q", q)
        if sinks is not None:
            check_sinks(sinks, q)
            check_no_gradient("sinks", sinks)
        if out is not None:
            self._check_out(out, q, layer, k, v, sinks)
        return self._run(q, layer, k, v, sinks, return_lse, out)

    # ---- without checks

    def _run(self, q, layer: CacheLayer, k, v, sinks, return_lse: bool, out=None):
        """Does what ``attend`` does, after its arguments were checked."""
        new = () if k is None or not k.shape[-3] else (k,) if v is None else (k, v)
        given = out
        self._check_tables()
        if is_plain(q, layer.k, layer.v, self._tables.seqlens, *new):
            plan = self._planned()
            if new:
                self._write(plan, layer, k, v)
            out, lse = plan.attend(q, layer, given)
            if given is not None:
                increment_version(given)  # backends write without autograd's knowledge
        else:
            if transforming():
                check_no_tangents(q, layer.k, layer.v, *new)
            if new:
                self._write(None, layer, k, v)
            leaves = *flatten(CacheLayer, layer), *flatten(CacheCall, self._call)
            result, lse = OPERATORS.attention_with_cache(q, *leaves, self._impl)
            out = result if out is None else out.copy_(result)
        if sinks is not None:
            results, lse = add_sinks(out, lse, sinks, gradients=False)
            out = results if given is None else given.copy_(results)
        return (out, lse) if return_lse else out

    def _write(self, plan, layer: CacheLayer, k, v) -> None:
        """Writes new keys and values with the backend's plan, or by the operator if plan is None."""
        at = address(layer.k)
        if at in self._written:
            raise ValueError(
                "k: expected new keys once for every layer, got new keys of this layer again; pass None, or for the "
                "next tokens call refresh() or make another plan"
            )
        if plan is None:
            self._write_by_operator(layer, k, v)
        else:
            self._write_by_plan(plan, layer, k, v)
        if at:
            self._written.add(at)

    def _write_by_operator(self, layer: CacheLayer, k, v) -> None:
        rotary = self._call.rotary.text if self._call.rotated_keys else None
        own = flatten(CacheLayer, layer)
        if v is None:
            own[CacheLayer._fields.index("v")] = None
        leaves = *own, k, v, *flatten(CacheTables, self._tables)
        OPERATORS.append_to_cache(*leaves, rotary, self._impl)

    def _write_by_plan(self, plan, layer: CacheLayer, k, v) -> None:
        tables = self._tables
        self._check_memory(layer, k, v, tables)
        if tables.positions is not None and tables.positions.slot_positions is not None and not self._stored:
            store_positions(layer.k, tables, k.shape[-3])
            self._stored = True
        plan.append(layer, k, v)
        torch_library.count_write(layer)

    def _planned(self):
        """Returns the backend's plan, made at the first call."""
        if self._backend is None:
            self._backend = load_backend(self._impl).plan_cache(self._call, self._layer, self._queries)
        return self._backend

    def _check_tables(self) -> None:
        """Raises if a table was written since the first call, which remembers the tables."""
        if not self.watches or torch.compiler.is_compiling():
            return
        if self._guard is None:
            self._guard = Unwritten(_watched(self._tables))
        elif self._guard.broken():
            raise ValueError(
                "tables: expected tables that are unchanged since the plan was made, got a table that was written; "
                "call refresh()"
            )

    def _check_out(self, out, q, layer: CacheLayer, k, v, sinks) -> None:
        check_tensor("out", out)
        shape = out_shape(q, layer.v)
        if out.shape != shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
            raise ValueError(
                f"out: expected a contiguous tensor of shape {shape}, {q.dtype} on {q.device}, got shape "
                f"{tuple(out.shape)}, {out.dtype} on {out.device}"
            )
        if out.requires_grad:
            raise ValueError("out: expected a tensor that does not require grad, got one that requires it")
        if address(out):
            named = {"q": q, "k": k, "v": v, "sinks": sinks}
            named |= {f"layer.{name}": x for name, x in layer._asdict().items()}
            named |= {f"tables.{name}": x for name, x in self._tables._asdict().items()}
            check_apart("out", out, {name: x for name, x in named.items() if isinstance(x, torch.Tensor)})

    def _check_layer(self, layer: CacheLayer) -> None:
        """Raises if the layer differs from the plan's layer in anything except its addresses."""
        if layer is self._layer:
            return
        if not isinstance(layer, CacheLayer):
            raise TypeError(f"layer: expected a CacheLayer, got {type(layer).__name__}")
        for name, x, own in zip(CacheLayer._fields, layer, self._layer, strict=True):
            if x is None and own is None:
                continue
            if not isinstance(x, torch.Tensor) or own is None:
                expected = "None" if own is None else "a tensor"
                raise TypeError(f"layer.{name}: expected {expected} as in the plan, got {type(x).__name__}")
            if x.shape != own.shape or x.dtype != own.dtype or x.device != own.device:
                _refuse(f"layer.{name}", x, own.shape, own.dtype, own.device)
            if x.stride() != own.stride():
                raise ValueError(f"layer.{name}: expected strides {own.stride()} as in the plan, got {x.stride()}")
            if x.requires_grad:
                check_no_gradient(f"layer.{name}", x)
        if self._first_value is not None and layer.first_value != self._first_value:
            raise ValueError(
                f"layer.v: expected a view of layer.k that starts at channel {self._first_value}, as in the plan, got "
                "another tensor"
            )

    def _check_new(self, k, v) -> None:
        queries, tables, own = self._queries, self._tables, self._layer.k
        new, rows = tables.new, tuple(queries.shape[:1])
        if not isinstance(new, Packed):
            rows = (*rows, new)
        elif not new.appends and new.slot_mapping is None:
            raise ValueError("k: expected None (tables.new neither appends keys nor has a slot_mapping), got a tensor")
        widths: tuple[int, ...] = queries.shape[-1], out_shape(queries, self._layer.v)[-1]
        if v is None and (self._first_value is not None or torch.compiler.is_compiling()):
            widths = widths[:1]
        elif self._first_value is not None and not torch.compiler.is_compiling():
            raise ValueError("v: expected None, because layer.v is a view of channels of layer.k, got a tensor")
        for name, x, width in zip("kv", (k, v), widths, strict=False):
            shape = (*rows, own.shape[2], width)
            check_tensor(name, x)
            if x.shape != shape or x.dtype != queries.dtype or x.device != queries.device:
                _refuse(name, x, shape, queries.dtype, queries.device)
            if x.stride(-1) != 1:
                raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
            if x.requires_grad:
                check_no_gradient(name, x)

    def __repr__(self) -> str:
        call, queries = self._call, self._queries
        return f"CachePlan({call.rotary!r}, q {tuple(queries.shape)} {queries.dtype}, impl={self._impl!r})"


def _watched(tables: CacheTables) -> list[torch.Tensor]:
    """Returns the tables that must not be written while a plan is in use. slot_positions is not among them, because
    the plan itself writes it."""
    new, positions = tables.new, tables.positions
    found: list[Any] = [tables.seqlens, tables.block_table, tables.leftpad]
    if isinstance(new, Packed):
        found += (new.cu_seqlens_q, new.slot_mapping)
    if positions is not None:
        found += (*positions[:3], positions.queries)
    return [x for x in found if x is not None]


def _refuse(name: str, x: torch.Tensor, shape, dtype, device) -> None:
    """Raises an error that says how a tensor differs from what the plan expects."""
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype} as in the plan, got {x.dtype}{autocast_hint(x)}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} as in the plan, got {x.device}")
    raise ValueError(f"{name}: expected shape {tuple(shape)} as in the plan, got {tuple(x.shape)}")


def check_key_weight(key_weight, q, rotated_keys: bool) -> None:
    """Checks the key_weight of a layer."""
    if rotated_keys:
        raise ValueError("key_weight: not supported for rotated_keys (it multiplies raw keys), got a tensor")
    shape = (q.shape[-1],)
    if not isinstance(key_weight, torch.Tensor) or key_weight.dtype != torch.float32:
        got = key_weight.dtype if isinstance(key_weight, torch.Tensor) else type(key_weight).__name__
        raise TypeError(f"key_weight: expected a float32 tensor, got {got}")
    if tuple(key_weight.shape) != shape or key_weight.device != q.device:
        raise ValueError(
            f"key_weight: expected shape {shape} on {q.device}, got {tuple(key_weight.shape)} on {key_weight.device}"
        )
    check_no_gradient("key_weight", key_weight)
