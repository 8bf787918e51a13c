"""Launches the Triton kernels: allocates, picks tiles, passes tables. CPU tensors run in Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, lru_cache

import torch

try:
    import triton
    from triton.compiler import CompiledKernel

    from ...triton_kernels import configs
    from ...triton_kernels.backward import attention_delta, attention_grad_kv, attention_grad_q
    from ...triton_kernels.decode import append_rows, attention_decode, combine_splits
    from ...triton_kernels.forward import attention_forward
    from ...triton_kernels.tiles import POINTERS, Angles, Layout, Scales, Slots, encoded, strided
    from ...triton_kernels.turn import turn_cached_rows, turn_rows

    IMPORT_ERROR = ""
except ImportError as error:  # no wheel for this platform
    IMPORT_ERROR = str(error)

from ...cos_sin import band_rotations, coarse_rows, padded_pairs, position_table, resident, two_level_table
from ...rotary import Rotary
from ..base import CacheCall, AttentionCall, aligned, distance, multiprocessors


@cache  # Triton decided when the kernels were imported
def interpreted() -> bool:
    return not IMPORT_ERROR and bool(triton.knobs.runtime.interpret)


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    if IMPORT_ERROR:
        return f"triton cannot be imported ({IMPORT_ERROR})"
    if q.dtype == torch.float64:
        return "the Triton kernels compute in float32; float64 has impl='reference' or, on the CPU, impl='cpu'"
    if interpreted() or q.device.type == "meta":
        return ""
    if not q.is_cuda:
        return f"the Triton kernels need a CUDA device, q is on {q.device} (on the CPU set TRITON_INTERPRET=1 before the start)"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        capability = torch.cuda.get_device_capability(q.device)
        return f"the Triton kernels need compute capability 8.0 or newer, {q.device} has {capability}"
    return ""


_compiled: dict[
    tuple, tuple
] = {}  # (what Triton compiled, the constants that follow its arguments) of every launch so far


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """The one place where kernels start; the compile gate puts itself here. options: constants by name, and the
    compiler's.

    Triton looks at every argument of every launch for the kernel that it compiled for such: several times the work of
    the launch itself, and in decoding, where kernels are short, most of the time. _traits tells the same apart."""
    if interpreted():
        kernel[grid](*args, **options)
        return
    key = (kernel.__name__, triton.runtime.driver.active.get_current_device(), *_traits(args), *options.items())
    if known := _compiled.get(key):
        compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return
    compiled = kernel[grid](*args, **options)
    if isinstance(compiled, CompiledKernel):  # not where a hook of Triton's took over, or a thread still compiles
        _compiled[key] = compiled, [options[name] for name in kernel.arg_names[len(args) :]]


def _traits(args: tuple) -> list:
    """What Triton specialises our kernels by: the types, how pointers are aligned, whether an integer needs 64 bits. It
    looks at no integer more closely (see their do_not_specialize, and ``encoded``)."""
    traits = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            traits.append(arg >> 31)
            continue
        for x in arg[: POINTERS[kind]] if kind in POINTERS else (arg,):
            traits += (None,) if x is None else (x.dtype, x.data_ptr() & 15)
    return traits


def cdiv(a: int, b: int) -> int:
    """triton.cdiv is a function of the kernels too, which costs the host several microseconds a call."""
    return -(-a // b)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall):
    """(out like q and contiguous, lse float32, turned keys); shapes are those of ``AttentionCall`` and ``rotated_k_shape``."""
    q, k, v = map(_within_reach, (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(call.lse_shape(q), dtype=torch.float32, device=q.device)
    rotated_k = k.new_empty(rotated_k_shape(k, call))
    if call.cu_seqlens_q is not None or _nothing_to_do(q, k, call):
        out.zero_()  # rows that no sequence holds
        lse.fill_(float("-inf"))
    if not _nothing_to_do(q, k, call):
        with _device(q):
            plan = _Plan(q, k, v, call)
            plan.turn(k, rotated_k, plan.key_slots, keys=True)
            plan.attend(q, k, rotated_k, v, out, lse)
    return out, lse, rotated_k


def backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, call: AttentionCall):
    """Gradients of raw q, k and v, like them and contiguous; one of grad_out and grad_lse may be None."""
    q, k, v = map(_within_reach, (q, k, v))
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if call.cu_seqlens_q is not None or _nothing_to_do(q, k, call):
        for grad in (grad_q, grad_k, grad_v):
            grad.zero_()
    if not _nothing_to_do(q, k, call):
        grad_out = torch.zeros_like(out) if grad_out is None else _within_reach(grad_out)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        with _device(q):
            plan = _Plan(q, k, v, call, grad_out)
            turned_q = q.new_empty(len(call.bands), _rows(q), *q.shape[-2:])
            plan.turn(q, turned_q, plan.query_slots, keys=False)
            delta = plan.delta(out, grad_out, grad_lse, lse)
            plan.grad_kv(turned_q, k, rotated_k, v, grad_out, lse, delta, grad_k, grad_v)
            plan.grad_q(turned_q, k, rotated_k, v, grad_out, lse, delta, grad_q)
    return grad_q, grad_k, grad_v


def append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) to the slots behind cache_seqlens. What has no place is
    dropped."""
    batch, seqlen_new, heads_kv, head_dim = k.shape
    if not k.numel() or not k_cache.numel() or (block_table is not None and not block_table.numel()):
        return
    layout = Layout(head_dim, 1 << (head_dim - 1).bit_length(), 0, False, _vector(k_cache, v_cache, k, v))
    grid = (cdiv(seqlen_new * heads_kv, configs.APPEND_ROWS) * batch,)
    slots, page_size = _slots(k_cache, cache_seqlens, block_table, None, seqlen_new)
    with _device(k):
        launch(
            append_rows,
            grid,
            *map(strided, (k_cache, v_cache, k, v)),
            slots,
            heads_kv,
            LAYOUT=layout,
            PAGE_SIZE=page_size,
            BLOCK_M=configs.APPEND_ROWS,
            **configs.options(configs.APPEND_WARPS),
        )


def attention_with_cache(q, k_cache, v_cache, call: CacheCall):
    """(out like q and contiguous, lse float32 (batch, heads_q, seqlen_q))."""
    batch, seqlen_q, heads_q, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, seqlen_q, dtype=torch.float32, device=q.device)
    if not q.numel() or not k_cache.numel() or not call.capacity(k_cache) or not call.bands:
        return out.zero_(), lse.fill_(float("-inf"))
    with _device(q):
        (_prefill if _is_prefill(q, k_cache, v_cache, call) else _decode)(q, k_cache, v_cache, call, out, lse)
    return out, lse


def _is_prefill(q, k_cache, v_cache, call: CacheCall) -> bool:
    """Whether the forward kernel serves: keys are turned once, not once per tile of queries, in a workspace (for each
    slope that turns keys) that is never larger than the cache. num_splits asks for the decode kernel, whose bits do not
    depend on chunks."""
    if call.num_splits or q.shape[1] <= configs.DECODE_SEQLEN:
        return False
    turned_rows = q.shape[0] * _turned_rows(q.shape[1], k_cache, call)
    return turned_rows <= k_cache.shape[0] * k_cache.shape[1] and _near(k_cache) and _near(v_cache)


def _turned_rows(seqlen_q: int, k_cache, call: CacheCall) -> int:
    """Keys of a sequence, the last ones, that bands which turn keys reach from seqlen_q queries."""
    stops = [stop for _, stop in _key_reach(call.rotary, call.causal)]
    return max(min(call.capacity(k_cache), seqlen_q + max(stops) - 1), 0) if stops else 0


def _prefill(q, k_cache, v_cache, call: CacheCall, out, lse) -> None:
    """Fills out and lse, in two launches."""
    q = _within_reach(q)
    (batch, seqlen_q, heads_q, head_dim), heads_kv, rotary = q.shape, k_cache.shape[2], call.rotary
    bands, num_bands = _resident_bands(rotary, call.causal, q.device)
    turns, rows = _key_reach(rotary, call.causal), _turned_rows(seqlen_q, k_cache, call)
    layout = _layout(rotary, _vector(q, k_cache, v_cache))
    slots, page_size = _call_slots(k_cache, call)
    table = two_level_table(rotary, call.causal, coarse_rows(max(seqlen_q, call.capacity(k_cache))), q.device)
    rotated_k = k_cache
    if rows:
        rotated_k = k_cache.new_empty(len(turns), batch * rows, heads_kv, head_dim)
        grid = (cdiv(rows, configs.TURN_ROWS) * batch, cdiv(heads_kv, configs.TURN_HEADS), len(turns))
        launch(
            turn_cached_rows,
            grid,
            strided(k_cache),
            strided(rotated_k),
            _integers(turns, q.device),
            slots,
            Angles(table, None),
            seqlen_q,
            rows,
            table.shape[1],
            heads_kv,
            LAYOUT=layout,
            PAGE_SIZE=page_size,
            BLOCK_M=configs.TURN_ROWS,
            HEADS_PER_PROGRAM=configs.TURN_HEADS,
            **configs.options(configs.TURN_WARPS),
        )
    tile = configs.tile("forward", _capability(q.device), layout.block_d, q.element_size(), num_bands)
    grid = (cdiv(seqlen_q, tile.block_m) * batch * heads_q,)
    launch(
        attention_forward,
        grid,
        strided(q),
        strided(k_cache),
        strided(rotated_k),
        strided(v_cache),
        out,
        lse,
        Angles(table, None),
        bands,
        None,
        None,
        seqlen_q,
        rows,
        seqlen_q,
        table.shape[1],
        heads_q,
        heads_kv,
        Scales(call.score_scale, *call.log_n),
        slots,
        LAYOUT=layout,
        NUM_BANDS=num_bands,
        KEY_TURNS=_turning_bands(rotary, call.causal) if page_size else 0,
        PAGE_SIZE=page_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **configs.options(tile.num_warps, num_stages=tile.num_stages),
    )


def _decode(q, k_cache, v_cache, call: CacheCall, out, lse) -> None:
    """Fills out and lse, in one launch or, with several splits, two."""
    (batch, seqlen_q, heads_q, head_dim), heads_kv = q.shape, k_cache.shape[2]
    rotary, device, capacity = call.rotary, q.device, call.capacity(k_cache)
    bands, num_bands = _resident_bands(rotary, call.causal, device)
    layout = _layout(rotary, _vector(q, k_cache, v_cache))
    slots, page_size = _call_slots(k_cache, call)
    rows = seqlen_q * (heads_q // heads_kv)
    direction = "decode wide" if not call.num_splits and rows > configs.WIDE_ROWS else "decode"
    tile = configs.tile(direction, _capability(device), layout.block_d, q.element_size(), num_bands)
    programs = cdiv(rows, tile.block_m) * heads_kv * batch
    num_splits = call.num_splits or configs.num_splits(programs, capacity, multiprocessors(device))
    num_splits = min(num_splits, cdiv(capacity, tile.block_n))
    partial, partial_lse = out, lse
    if num_splits > 1:
        partial = torch.empty(num_splits, batch, seqlen_q, heads_q, head_dim, dtype=torch.float32, device=device)
        partial_lse = torch.empty(num_splits, batch, heads_q, seqlen_q, dtype=torch.float32, device=device)
    table = two_level_table(rotary, call.causal, coarse_rows(max(seqlen_q, capacity)), device)
    launch(
        attention_decode,
        (programs * num_splits,),
        strided(q),
        strided(k_cache),
        strided(v_cache),
        partial,
        partial_lse,
        Angles(table, None),
        bands,
        slots,
        seqlen_q,
        table.shape[1],
        heads_q,
        heads_kv,
        num_splits,
        Scales(call.score_scale, *call.log_n),
        LAYOUT=layout,
        NUM_BANDS=num_bands,
        KEY_TURNS=_turning_bands(rotary, call.causal),
        PAGE_SIZE=page_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **configs.options(tile.num_warps, num_stages=tile.num_stages),
    )
    if num_splits > 1:
        launch(
            combine_splits,
            (batch * seqlen_q * heads_q,),
            partial,
            partial_lse,
            out,
            lse,
            seqlen_q,
            heads_q,
            num_splits,
            LAYOUT=Layout(head_dim, layout.block_d, 0, False, 1),
            BLOCK_S=configs.COMBINE_SPLITS,
            **configs.options(configs.COMBINE_WARPS),
        )


def rotated_k_shape(k: torch.Tensor, call: AttentionCall) -> tuple[int, ...]:
    """(slots, rows, heads_kv, head_dim): the keys once for every slope that turns them."""
    slots = _key_slots(call.rotary, call.causal)
    return (len(slots), _rows(k), *k.shape[-2:]) if slots else (0,)


class _Plan:
    """The arguments that the launches of one call share."""

    def __init__(self, q, k, v, call: AttentionCall, grad_out=None):
        self.call = call
        self.heads_q, self.heads_kv = q.shape[-2], k.shape[-2]
        self.packed = call.cu_seqlens_q is not None
        self.batch = call.cu_seqlens_q.shape[0] - 1 if self.packed else q.shape[0]
        self.seqlen_q, self.seqlen_k = q.shape[-3], k.shape[-3]
        self.max_seqlen_q = min(call.max_seqlen_q, self.seqlen_q)
        self.max_seqlen_k = min(call.max_seqlen_k, self.seqlen_k)
        self.cu_seqlens = (call.cu_seqlens_q, call.cu_seqlens_k)

        rotary = call.rotary
        self.bands, self.num_bands = _resident_bands(rotary, call.causal, q.device)
        self.key_slots = _key_slots(rotary, call.causal)
        self.query_slots = band_rotations(rotary, call.causal).query
        if call.positions is None:
            coarse = coarse_rows(max(self.seqlen_q, self.seqlen_k))
            self.angles = Angles(two_level_table(rotary, call.causal, coarse, q.device), None)
        else:
            self.angles = Angles(position_table(rotary, call.positions), _scalar_positions(call.positions))
        self.table_rows = self.angles.table.numel() // (self.angles.table.shape[0] * 2 * padded_pairs(rotary))
        self.scales = Scales(call.score_scale, *call.log_n)
        self.capability = _capability(q.device)
        self.itemsize = q.element_size()
        self.layout = _layout(rotary, _vector(q, k, v) if grad_out is None else _vector(q, k, v, grad_out))

    def options(self, direction: str):
        tile = configs.tile(direction, self.capability, self.layout.block_d, self.itemsize, self.num_bands)
        return tile, dict(
            LAYOUT=self.layout,
            NUM_BANDS=self.num_bands,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            **configs.options(tile.num_warps, num_stages=tile.num_stages),
        )

    def turn(self, x, out, slots, keys: bool) -> None:
        """Fills out (slot, row, head, head_dim) with x at every slot's turn."""
        if not slots:
            return
        lengths = (self.seqlen_q, self.seqlen_k, self.max_seqlen_q)
        cu_seqlens = self.cu_seqlens
        scales = self.scales
        if keys:
            lengths = (self.seqlen_k, self.seqlen_q, self.max_seqlen_k)
            cu_seqlens = cu_seqlens[::-1]
            scales = Scales(1.0, 0.0, 1.0)
        heads = x.shape[-2]
        grid = (cdiv(lengths[2], configs.TURN_ROWS) * self.batch, cdiv(heads, configs.TURN_HEADS), len(slots))
        launch(
            turn_rows,
            grid,
            strided(x),
            strided(out),
            _integers(slots, x.device),
            self.angles,
            *cu_seqlens,
            *lengths,
            self.table_rows,
            heads,
            scales,
            LAYOUT=self.layout,
            BLOCK_M=configs.TURN_ROWS,
            HEADS_PER_PROGRAM=configs.TURN_HEADS,
            **configs.options(configs.TURN_WARPS),
        )

    def attend(self, q, k, rotated_k, v, out, lse) -> None:
        tile, options = self.options("forward")
        grid = (cdiv(self.max_seqlen_q, tile.block_m) * self.batch * self.heads_q,)
        launch(
            attention_forward,
            grid,
            strided(q),
            strided(k),
            self._turned(rotated_k, k),
            strided(v),
            out,
            lse,
            self.angles,
            self.bands,
            *self.cu_seqlens,
            self.seqlen_q,
            self.seqlen_k,
            self.max_seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            self.scales,
            Slots(*(None,) * 6),
            KEY_TURNS=0,
            PAGE_SIZE=0,
            **options,
        )

    def delta(self, out, grad_out, grad_lse, lse):
        delta = torch.empty_like(lse)
        grid = (cdiv(self.max_seqlen_q, configs.DELTA_ROWS) * self.batch * self.heads_q,)
        launch(
            attention_delta,
            grid,
            out,
            strided(grad_out),
            grad_lse,
            delta,
            self.cu_seqlens[0],
            self.seqlen_q,
            self.max_seqlen_q,
            self.heads_q,
            LAYOUT=self.layout,
            BLOCK_M=configs.DELTA_ROWS,
            **configs.options(configs.DELTA_WARPS),
        )
        return delta

    def grad_kv(self, turned_q, k, rotated_k, v, grad_out, lse, delta, grad_k, grad_v) -> None:
        tile, options = self.options("grad_kv")
        grid = (cdiv(self.max_seqlen_k, tile.block_n) * self.batch * self.heads_kv,)
        launch(
            attention_grad_kv,
            grid,
            strided(turned_q),
            strided(k),
            self._turned(rotated_k, k),
            strided(v),
            strided(grad_out),
            lse,
            delta,
            grad_k,
            grad_v,
            self.angles,
            self.bands,
            *self.cu_seqlens,
            self.seqlen_q,
            self.seqlen_k,
            self.max_seqlen_k,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            self.scales,
            **options,
        )

    def grad_q(self, turned_q, k, rotated_k, v, grad_out, lse, delta, grad_q) -> None:
        tile, options = self.options("grad_q")
        grid = (cdiv(self.max_seqlen_q, tile.block_m) * self.batch * self.heads_q,)
        launch(
            attention_grad_q,
            grid,
            strided(turned_q),
            strided(k),
            self._turned(rotated_k, k),
            strided(v),
            strided(grad_out),
            lse,
            delta,
            grad_q,
            self.angles,
            self.bands,
            *self.cu_seqlens,
            self.seqlen_q,
            self.seqlen_k,
            self.max_seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            self.scales,
            **options,
        )

    def _turned(self, rotated_k, k):
        return strided(rotated_k if self.key_slots else k)


@lru_cache(maxsize=1024)
def _key_slots(rotary: Rotary, causal: bool) -> tuple[int, ...]:
    """The table slot of every slot of rotated_k: the keys once for each slope that turns them."""
    return tuple(dict.fromkeys(slot for slot in band_rotations(rotary, causal).key if slot))


@lru_cache(maxsize=1024)
def _key_reach(rotary: Rotary, causal: bool) -> tuple[tuple[int, int], ...]:
    """For every slot of rotated_k its table slot, and where the last band that uses it stops."""
    turns = list(zip(band_rotations(rotary, causal).key, rotary.bands_for(causal), strict=True))
    return tuple(
        (slot, max(distance(band.stop) for key, band in turns if key == slot)) for slot in _key_slots(rotary, causal)
    )


@lru_cache(maxsize=1024)
def _turning_bands(rotary: Rotary, causal: bool) -> int:
    """Bit b tells whether band b turns its keys."""
    return sum((key > 0) << index for index, key in enumerate(band_rotations(rotary, causal).key))


@lru_cache(maxsize=1024)
def _bands(rotary: Rotary, causal: bool):
    """The rows of band_fields."""
    key_slots = _key_slots(rotary, causal)
    _, *turns = band_rotations(rotary, causal)
    return tuple(
        (
            distance(band.start),
            distance(band.stop),
            query,
            key,
            key_slots.index(key) if key else -1,
            query_step,
            key_step,
        )
        for band, query, key, query_step, key_step in zip(rotary.bands_for(causal), *turns, strict=True)
    )


@lru_cache(maxsize=1024)
def _resident_bands(rotary: Rotary, causal: bool, device: torch.device) -> tuple[torch.Tensor, int]:
    """int32 (bands, 7), the rows of band_fields, and their number."""
    bands = _bands(rotary, causal)
    return _integers(bands, device), len(bands)


@lru_cache(maxsize=1024)
def _integers(values, device: torch.device) -> torch.Tensor:
    return resident(lambda: torch.tensor(values, dtype=torch.int32), device)


def _rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] if x.ndim == 4 else x.shape[0]


def _slots(k_cache, cache_seqlens, block_table, cache_leftpad, seqlen_new: int) -> tuple[Slots, int]:
    """(slots, PAGE_SIZE) for the kernels; PAGE_SIZE is 0 for a contiguous cache."""
    pages, page_size, _, _ = k_cache.shape
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    return (
        Slots(cache_seqlens, block_table, cache_leftpad, encoded(seqlen_new), encoded(capacity), encoded(pages)),
        0 if block_table is None else page_size,
    )


def _call_slots(k_cache, call: CacheCall) -> tuple[Slots, int]:
    return _slots(k_cache, call.cache_seqlens, call.block_table, call.cache_leftpad, call.seqlen_new)


def _vector(*tensors: torch.Tensor) -> int:
    """Elements that all pointers and strides are a multiple of: a vector of 16 bytes, or 1."""
    return 16 // tensors[0].element_size() if all(map(aligned, tensors)) else 1


@lru_cache(maxsize=1024)
def _layout(rotary: Rotary, vec: int) -> Layout:
    return Layout(
        rotary.head_dim,
        2 * padded_pairs(rotary),
        rotary.rotary_dim if any(rotary.frequencies) else 0,
        rotary.interleaved,
        vec,
    )


def _near(x: torch.Tensor) -> bool:
    """Whether elements of a tile of up to 128 rows can be counted in 32 bits."""
    return x.stride(-3) < 2**24 or x.shape[-3] == 1


def _within_reach(x: torch.Tensor) -> torch.Tensor:
    return x if _near(x) else x.contiguous()


def _scalar_positions(positions: torch.Tensor) -> torch.Tensor:
    """float32 (batch, seqlen) for log n; an axial scheme has none and passes its first axis unread."""
    return (positions if positions.ndim == 2 else positions[..., 0]).to(torch.float32).contiguous()


def _nothing_to_do(q, k, call: AttentionCall) -> bool:
    return q.numel() == 0 or k.numel() == 0 or not call.bands


def _capability(device: torch.device) -> int:
    if device.type == "cuda":
        return _capability_of(device)
    return 80 if interpreted() else triton.runtime.driver.active.get_current_target().arch  # of the gate's choice


@cache
def _capability_of(device: torch.device) -> int:
    major, minor = (8, 0) if interpreted() else torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _device(x: torch.Tensor):
    """Within, x's device is the current one."""
    here = not x.is_cuda or torch.cuda.current_device() == x.get_device()
    return nullcontext() if here else torch.cuda.device(x.device)
