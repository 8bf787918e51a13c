"""Code that both caches share: storage, the open step, plans, and uploads to the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..backends.names import CACHE_DTYPES
from ..calls.autocast import autocast
from ..calls.cache_tables import LAYER_OPTIONS, CacheLayer, CacheTables
from ..calls.checks import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_NARROW_HEAD_DIM,
    MAX_SHARED_HEAD_DIM,
    check_tensor,
)
from ..calls.foreign_keywords import refuse_unknown
from ..calls.plans import options_of
from ..operators.cache_plan import CachePlan, plan_cache, plan_checked
from ..operators.functional import attention_with_cache
from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import one_rotation
from .new_tokens import NewTokens, check_integer, count_new, new_tensors

# OPTIONS: arguments that attend passes on to a plan. TRACKED: arguments that the cache itself sets.
OPTIONS = ("causal", "softmax_scale", "num_splits", "impl", "validate")
TRACKED = (
    "block_table",
    "cache_seqlens",
    "rotated_keys",
    "k_scale",
    "v_scale",
    "page_positions",
    "page_first",
    "page_lengths",
    "slot_positions",
    "positions",
)


class OpenStep(Protocol):
    """The attributes of a ``Step`` that a cache uses."""

    sequences: list[int] | None
    new: NewTokens
    given_leftpad: list[int] | None
    thread: int  # the thread that opened the step
    selected: Any
    padding: list[int]
    changes: Any


class Cache:
    """Holds the storage of all layers, and the open step if there is one.

    Opening a step calls ``_begin``, which returns the tables of the step. Leaving the step calls ``_commit``, or
    ``_undo`` if the step failed.
    """

    k: torch.Tensor
    v: torch.Tensor
    layers: int
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    rotated_keys: tuple[Rotary, ...] | None  # the scheme of every layer, if keys are stored rotated
    dtype: torch.dtype
    cache_dtype: str | None
    heads_kv: int
    head_dim: int
    head_dim_v: int
    values: slice | None
    _layers: list[tuple[torch.Tensor, torch.Tensor]]
    _scales: list[tuple[torch.Tensor, torch.Tensor]] | None
    _cache_layers: list[CacheLayer]
    _open: OpenStep | None

    def _allocate(
        self,
        shape: tuple[int, int],
        heads_kv,
        head_dim,
        dtype,
        device,
        layers,
        rotated_keys,
        cache_dtype,
        head_dim_v,
        values,
    ):
        self.layers, self._open = check_integer("layers", layers, 1), None
        self.rotated_keys = check_schemes(rotated_keys, head_dim, self.layers)
        self.dtype, self.cache_dtype = dtype, check_cache_dtype(cache_dtype)
        shape_of_all = shape if self.layers == 1 else (self.layers, *shape)
        self.values = check_values(values, head_dim, head_dim_v, rotated_keys, cache_dtype)
        storage = allocate_storage(
            shape_of_all, heads_kv, head_dim, dtype, device, cache_dtype, head_dim_v, self.values
        )
        self.k, self.v, *scales = storage
        self.heads_kv, self.head_dim, self.head_dim_v = int(heads_kv), int(head_dim), self.v.shape[-1]
        if cache_dtype is not None:
            self.head_dim_v = self.head_dim
        self.k_scale, self.v_scale = scales or (None, None)
        self._make_views()

    def _make_views(self) -> None:
        """Makes the views of the storage: one per layer, and the values if they are channels of the keys."""
        with torch.inference_mode(False):
            if self.values is not None:
                self.v = self.k[..., self.values]
            self._layers = self._by_layer(self.k, self.v)
            self._scales = None
            if self.k_scale is not None and self.v_scale is not None:
                self._scales = self._by_layer(self.k_scale, self.v_scale)
        self._cache_layers = [CacheLayer(*self._layers[n], *self.scales(n)) for n in range(self.layers)]

    def _by_layer(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(k, v)] if self.layers == 1 else list(zip(k.unbind(), v.unbind(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without views, because pickle would give every view memory of its own."""
        self.refuse_in_step("pickle and copy")
        views = {"_layers", "_scales", "_cache_layers", *(() if self.values is None else ("v",))}
        return {name: x for name, x in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_cache_dtype(state["cache_dtype"])
        self.__dict__.update(made_outside_inference_mode(state))
        self._make_views()

    def layer(self, layer: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v of one layer as four-dimensional views. layer may be None if the cache has one layer."""
        return self._layers[self.index(layer)]

    def scales(self, layer: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Returns k_scale and v_scale of one layer, or (None, None) if the cache is not quantized."""
        if self._scales is None:
            return None, None
        return self._scales[self.index(layer)]

    def cache_layer(self, layer: int | None = None) -> CacheLayer:
        """Returns one layer for ``plan_cache``: k, v and the scales of a quantized cache."""
        return self._cache_layers[self.index(layer)]

    def index(self, layer: int | None) -> int:
        """Returns the number of a layer. None stands for the only layer."""
        if type(layer) is int and 0 <= layer < self.layers or layer is None and self.layers == 1:
            return layer or 0
        return check_integer("layer", layer, 0, self.layers - 1)

    def rotary_of(self, layer: int | None) -> Rotary | None:
        """Returns the scheme that rotates the layer's keys when they are written, or None if they stay raw."""
        return None if self.rotated_keys is None else self.rotated_keys[layer or 0]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of k and v and of their scales, in all layers. v counts only if it has its own memory."""
        return sum(x.nbytes for x in self._stored)

    @property
    def _stored(self) -> list[torch.Tensor]:
        """Returns k, then v unless it is a view of k, then k_scale and v_scale if the cache is quantized."""
        v = self.v if self.values is None else None
        return [x for x in (self.k, v, self.k_scale, self.v_scale) if x is not None]

    def refuse_in_step(
        self, call: str, remedy: str = "leave its with statement first, or call discard_step() if that is impossible"
    ) -> None:
        """Raises if a step is open. remedy: what to do if this thread has opened it."""
        if self._open is None:
            return
        if self._open.thread != threading.get_ident():
            raise RuntimeError(
                f"{call}: not supported while another thread has a step of this cache open (a cache has no lock); hold "
                "one threading.Lock around every call and every step of this cache"
            )
        raise RuntimeError(f"{call}: not supported while a step is open; {remedy}")

    def discard_step(self) -> None:
        """Undoes the open step, as if its with statement had raised. Does nothing if no step is open.

        Use it for a step whose with statement cannot be left any more, for example after ``__enter__`` was called by
        hand.
        """
        if self._open is not None:
            step, self._open = self._open, None
            self._undo(step)

    def refuse_new(self, call: str) -> None:
        """Raises if a call may not write to one layer: in an open step, or in a cache of several layers."""
        self.refuse_in_step(call, "pass k and v to the methods of the step")
        if self.layers > 1:
            raise ValueError(
                f"k: expected None, because a cache of {self.layers} layers takes k and v in a step: "
                "with cache.step(...) as step, step.attend(..., layer=...)"
            )

    def _begin(self, step: OpenStep) -> CacheTables:
        """Looks up what the step needs, makes room for its tokens and returns its tables."""
        raise NotImplementedError

    def _commit(self, step: OpenStep) -> None:
        raise NotImplementedError

    def _undo(self, step: OpenStep) -> None:
        raise NotImplementedError

    def attend_planned(
        self, plans: dict[tuple, CachePlan], tables: CacheTables, q, rotary, k, v, layer: int | None, options: dict
    ):
        """Attends over one layer, with a plan that is shared by layers with equal options.

        plans: the plans of a step, by their options. options: keyword arguments of ``attend``.
        """
        given = {name: options.pop(name) for name in LAYER_OPTIONS if name in options}
        own = self.cache_layer(layer)._replace(**given)
        sinks, return_lse = options.pop("sinks", None), options.pop("return_lse", False)
        q, k, v = autocast(q, k, v)
        check_tensor("q", q)
        key = (rotary, tables.new, q.shape, q.dtype, *options_of(own, False), *options.items())
        if (plan := plans.get(key)) is None:
            if options:
                tables = self._with_options(tables, options)
            if self.rotated_keys is not None:
                check_scheme(rotary, self.rotated_keys[layer or 0], layer)
            chosen = {name: options[name] for name in OPTIONS if name in options}
            rotated = self.rotated_keys is not None
            plan = plans[key] = plan_checked(q, own, k, v, tables, rotary, **chosen, rotated_keys=rotated)
            if sinks is None:  # the tensors were checked with the plan
                return plan._run(q, own, k, v, None, return_lse)
        elif self.rotated_keys is not None:
            check_scheme(rotary, self.rotated_keys[layer or 0], layer)
        return plan._attend(q, own, k, v, sinks, return_lse)

    def _with_options(self, tables: CacheTables, options: dict) -> CacheTables:
        """Returns the tables with cache_leftpad from the options. Raises an error for options that attend does not
        accept."""
        for name in TRACKED:
            if name in options:
                raise TypeError(f"{name}: not accepted by attend(); the cache tracks it")
        leftpad = options.get("cache_leftpad")
        if leftpad is not None:
            why = "the cache remembers its left padding" if tables.leftpad is not None else ""
            if self.rotated_keys is not None and not why:
                why = "padding would move keys that are already rotated (use the argument leftpad of a step)"
            if why:
                raise ValueError(f"cache_leftpad: expected None, because {why}, got a tensor")
            tables = tables._replace(leftpad=leftpad)
        unknown = {name: x for name, x in options.items() if name not in (*OPTIONS, "cache_leftpad")}
        if unknown:
            refuse_unknown(attention_with_cache, unknown)
        return tables

    def append_plan(
        self, plans: dict[tuple, CachePlan], tables: CacheTables, k, layer: int | None, impl: str | None
    ) -> CachePlan:
        """Returns the plan for writing new keys and values to a layer without attending to them."""
        rotary = self.rotary_of(layer)
        key = ("append", rotary, k.dtype, impl)
        if key not in plans:
            plans[key] = plan_cache(
                tables,
                like=self.cache_layer(layer),
                rotary=rotary or Rotary.none(self.head_dim),
                seqlen_q=1 if tables.packed is None else k.shape[0],
                heads_q=self.heads_kv,
                dtype=k.dtype,
                rotated_keys=rotary is not None,
                impl=impl,
            )
        return plans[key]

    def _append(self, step, k, v, impl: str | None) -> None:
        """Appends k and v to all layers in one step. With several layers they have a leading dimension of layers."""
        with step:
            for layer in range(self.layers):
                own = [x if x is None or self.layers == 1 else x[layer] for x in (k, v)]
                step.append(*own, layer, impl)

    def _new_of(self, k, v, seqlen_new, batch: int) -> int | Sequence[int]:
        """Returns the argument seqlen_new for the step of ``append`` or ``attend``: the given list for packed k and v,
        or the number of rows that each sequence has in k."""
        packed = seqlen_new is not None
        if packed and (not isinstance(seqlen_new, Sequence) or isinstance(seqlen_new, str)):
            raise TypeError(
                "seqlen_new: expected None, or a list with the number of tokens of every sequence in packed k and v, "
                f"got {seqlen_new!r}"
            )
        if self.layers == 1:
            return seqlen_new if packed else count_new(k, v, self, batch)
        for name, x in new_tensors(k, v, self):
            check_tensor(name, x)
            if x.ndim != 5 - packed or x.shape[0] != self.layers:
                rows = "total_new" if packed else "sequences, seqlen_new"
                raise ValueError(
                    f"{name}: expected shape ({self.layers}, {rows}, heads_kv, head_dim), got {tuple(x.shape)}"
                )
        return seqlen_new if packed else k.shape[2]


def allocate_storage(
    shape: tuple[int, ...], heads_kv, head_dim, dtype, device, cache_dtype=None, head_dim_v=None, values=None
) -> list[torch.Tensor]:
    """Checks the arguments and returns k and v, (*shape, heads_kv, head_dim) and (*shape, heads_kv, head_dim_v). If
    cache_dtype is given, k_scale and v_scale follow, (*shape, heads_kv). values: the channels of k that v is a view of.
    None: v has its own memory.

    On the CPU the memory layout is heads-first, so that the keys of a head are contiguous: decoding reads them in half
    the time. On a GPU it is rows-first, except for the scales.
    """
    largest, why = (MAX_HEAD_DIM, "") if cache_dtype is None else (MAX_NARROW_HEAD_DIM, f" in a cache of {cache_dtype}")
    heads_kv, head_dim = check_integer("heads_kv", heads_kv, 1), check_integer("head_dim", head_dim, 8)
    if values is not None and head_dim == MAX_SHARED_HEAD_DIM:
        pass
    elif head_dim % 8 or head_dim > largest:
        why += f", or {MAX_SHARED_HEAD_DIM} with values=" if cache_dtype is None else ""
        raise ValueError(f"head_dim: expected a multiple of 8 up to {largest}{why}, got {head_dim}")
    head_dim_v = head_dim if head_dim_v is None else check_integer("head_dim_v", head_dim_v, 8)
    if head_dim_v % 8 or head_dim_v > head_dim:
        raise ValueError(f"head_dim_v: expected a multiple of 8 up to head_dim = {head_dim}, got {head_dim_v}")
    if cache_dtype is not None and head_dim_v != head_dim:
        raise ValueError(
            f"head_dim_v: expected head_dim = {head_dim} in a cache of {cache_dtype} (quantized values need the "
            f"head_dim of the keys), got {head_dim_v}"
        )
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype!r}")
    try:
        kind = (torch.get_default_device() if device is None else torch.device(device)).type
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a torch.device, its name or None, got {device!r}") from None
    stored = dtype if cache_dtype is None else torch.int8
    rows: list[tuple[tuple[int, ...], torch.dtype]] = [((x,), stored) for x in (head_dim, head_dim_v)]
    if values is not None:
        rows = rows[:1]
    if cache_dtype is not None:
        rows += [((), torch.float32)] * 2
    *outer, slots = shape
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside it
        storage = [
            torch.empty(*outer, heads_kv, slots, *row, dtype=x, device=device).transpose(len(outer), len(outer) + 1)
            if kind == "cpu" or not row
            else torch.empty(*shape, heads_kv, *row, dtype=x, device=device)
            for row, x in rows
        ]
        return storage if values is None else [storage[0], storage[0][..., values]]


def check_values(values, head_dim, head_dim_v, rotated_keys, cache_dtype) -> slice | None:
    """Returns the argument ``values`` as a slice with a start and a stop.

    Raises:
        TypeError, ValueError: the argument is invalid. The message says what was expected.
    """
    if values is None:
        return None
    if not isinstance(values, slice):
        raise TypeError(f"values: expected None, or a slice of the channels of the keys, got {values!r}")
    start, stop, step = values.indices(check_integer("head_dim", head_dim, 8))
    width = stop - start
    if step != 1 or width % 8 or not 8 <= width <= MAX_HEAD_DIM:
        raise ValueError(
            f"values: expected a slice of 8, 16, ..., {MAX_HEAD_DIM} consecutive channels of head_dim {head_dim}, "
            f"got {values!r}"
        )
    for name, given in (("head_dim_v", head_dim_v), ("rotated_keys", rotated_keys), ("cache_dtype", cache_dtype)):
        if given is not None:
            raise ValueError(f"{name}: not supported with values (they are channels of the raw keys), got {given!r}")
    return slice(start, stop)


def check_cache_dtype(cache_dtype: str | None) -> str | None:
    if cache_dtype is not None and not (isinstance(cache_dtype, str) and cache_dtype in CACHE_DTYPES):
        raise ValueError(f"cache_dtype: expected None or 'int8', got {cache_dtype!r}")
    return cache_dtype


def check_schemes(rotated_keys, head_dim: int, layers: int) -> tuple[Rotary, ...] | None:
    """Returns the scheme of every layer from the argument rotated_keys.

    Raises:
        TypeError, ValueError: the argument is invalid. The message says what was expected.
    """
    if rotated_keys is None:
        return None
    schemes = (rotated_keys,) * layers if isinstance(rotated_keys, Rotary) else rotated_keys
    if not isinstance(schemes, Sequence) or isinstance(schemes, str) or len(schemes) != layers:
        expected = "a Rotary" + (f", or a list of {layers}, one per layer" if layers > 1 else "")
        raise TypeError(f"rotated_keys: expected {expected}, or None for raw keys, got {rotated_keys!r}")
    for layer, rotary in enumerate(schemes):
        if not isinstance(rotary, Rotary):
            raise TypeError(f"rotated_keys: expected a Rotary for layer {layer}, got {type(rotary).__name__}")
        if rotary.head_dim != head_dim:
            raise ValueError(
                f"rotated_keys: expected head_dim {head_dim}, the head_dim of the cache, got {rotary.head_dim}"
            )
        if head_dim > MAX_NARROW_HEAD_DIM:
            raise ValueError(f"rotated_keys: not supported beyond head_dim {MAX_NARROW_HEAD_DIM} yet, got {head_dim}")
        if rotary.axis:
            raise ValueError("rotated_keys: axial schemes are not supported (this cache does not store positions)")
        one_rotation(rotary, "so that its keys can be stored rotated")
    return tuple(schemes)


def check_scheme(rotary, own: Rotary, layer: int | None) -> None:
    """Raises ValueError if rotary is not the scheme by which the layer's keys were rotated."""
    if rotary == own:
        return
    hint = ""
    if isinstance(rotary, Rotary) and rotary.frequencies != own.frequencies:
        hint = ", and tables that depend on the length, such as those of dynamic NTK and longrope"
    raise ValueError(
        f"rotary: expected {own!r}, by which the keys of layer {layer or 0} are rotated, got {rotary!r}; a cache of "
        f"raw keys (rotated_keys=None) accepts other schemes{hint}"
    )


def describe(cache: Cache) -> str:
    layers = f", layers={cache.layers}" if cache.layers > 1 else ""
    values = f", head_dim_v={cache.head_dim_v}" if cache.head_dim_v != cache.head_dim else ""
    if cache.values is not None:
        values = f", values={cache.values.start}:{cache.values.stop}"
    keys = ", rotated keys" if cache.rotated_keys else ""
    codes = f", cache_dtype={cache.cache_dtype!r}" if cache.cache_dtype else ""
    return (
        f"heads_kv={cache.heads_kv}, head_dim={cache.head_dim}{values}, dtype={cache.dtype}, "
        f"device={str(cache.k.device)!r}{layers}{codes}{keys}"
    )


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the values on the device. The values are copied from pinned memory, so that the host does not
    wait."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def made_outside_inference_mode(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an unpickled or copied object. Tensors that were made in inference mode are copied, because
    they could not be written outside of it."""
    with torch.inference_mode(False):
        return {name: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x for name, x in state.items()}
