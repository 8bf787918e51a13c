"""Defines the calls with which candidates are checked and timed, and the passes and shapes that a user can name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from ...backends import reference
from ...backends import triton as backend
from ...backends import tuned_tiles as store
from ...calls.cache_tables import CacheLayer, CacheTables
from ...calls.plans import attend_once
from ...calls.records import AttentionCall, CacheCall
from ...schemes.cos_sin import padded_pairs
from ...schemes.rotary import Rotary

PAGE_SIZE = 256
WINDOW = 512  # ReRoPE's window in timed calls
CHUNK = 512  # tokens of a prompt that are prefilled at once over a cache
# Sizes for the check. CHECK_SEQLEN is several tiles long, but no multiple of a tile's rows. The window ends inside a
# tile.
CHECK_SEQLEN, CHECK_WINDOW, CHECK_CHUNK = 323, 96, 150
# For each pass: the directions of its kernels, and the cache layouts with which it is timed.
PASSES = {
    "forward": (("forward",), ("",)),
    "backward": (("grad_kv", "grad_q"), ("",)),
    "atomic": (("grad_qkv",), ("",)),
    "decode": (("decode",), ("contiguous", "paged")),
    "prefill": (("forward",), ("contiguous", "paged")),
}
Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A call in one direction: q (batch, seqlen, heads, head_dim), k and v (batch, seqlen, heads_kv, head_dim).

    cache: "contiguous" or "paged" for a call over a KV cache of seqlen keys. In the direction "decode" the call has one
    query for each sequence, and in the direction "forward" a chunk of queries.
    """

    direction: str
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    bands: int = 1
    cache: str = ""
    chunk: int = CHUNK
    num_splits: int = 0  # number of splits of the keys in decoding; 0: chosen from the shapes

    def __post_init__(self):
        for name in ("batch", "seqlen", "heads", "heads_kv", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.heads % self.heads_kv:
            raise ValueError(f"heads: expected a multiple of heads_kv = {self.heads_kv}, got {self.heads}")
        if self.head_dim > 256 or self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number up to 256, got {self.head_dim}")

    @property
    def shape_class(self) -> store.ShapeClass:
        grouped, block_d = self.heads > self.heads_kv, 2 * padded_pairs(self.head_dim)
        of_type = (block_d, self.dtype.itemsize, self.bands > 1, self.cache, grouped)
        return store.ShapeClass(self.direction, *of_type, store.max_keys(self.seqlen))

    @property
    def kernels(self) -> tuple:
        """Returns a key that is equal for workloads that run the same compiled kernels."""
        return self.shape_class._replace(max_keys=0)

    def replace(self, **changes) -> Workload:
        return dataclasses.replace(self, **changes)

    def check(self) -> Workload:
        """Returns the same kind of call, small enough for the dense reference. In the direction "decode" the keys are
        split in two, because another kernel combines the results of several splits."""
        sizes = {"batch": 2, "seqlen": CHECK_SEQLEN, "heads": 2, "heads_kv": 1 if self.heads > self.heads_kv else 2}
        splits = 2 if self.direction == "decode" else 0
        return self.replace(**sizes, chunk=CHECK_CHUNK, num_splits=splits)

    @property
    def seqlen_q(self) -> int:
        if self.direction == "decode":
            return 1
        return min(self.chunk, self.seqlen) if self.cache else self.seqlen

    def rotary(self, window: int) -> Rotary:
        rope = Rotary.rope(self.head_dim)
        return rope.rectify(window) if self.bands > 1 else rope

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Returns q, k and v with normally distributed random numbers."""
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
        return [
            torch.randn(self.batch, seqlen, heads, self.head_dim, device=device, dtype=self.dtype, generator=generator)
            for seqlen, heads in (
                (self.seqlen_q, self.heads),
                (self.seqlen, self.heads_kv),
                (self.seqlen, self.heads_kv),
            )
        ]

    def call(self, device: torch.device, window: int = WINDOW) -> Callable[[], Results]:
        """Returns a function that runs this direction on the Triton backend and returns the tensors that it fills."""
        q, k, v = self.tensors(device)
        if self.cache:
            k, v, call = self._cache_call(k, v, window)
            return lambda: attend_once(backend, q, CacheLayer(k, v), call)
        call = self._attention_call(window)
        if self.direction == "forward":
            return lambda: backend.forward(q, k, v, call)[:2]
        out, lse, kept = backend.forward(q, k, v, call)
        grad_out = torch.randn_like(out) if device.type == "meta" else _like(out)
        return lambda: backend.backward(grad_out, None, q, k, v, out, lse, kept, call)

    def exact(self, device: torch.device, window: int = WINDOW) -> Results:
        """Returns the results that the function returned by ``call`` should give, computed in float64 by the reference
        backend."""
        tensors = self.tensors(device)
        q, k, v = (x.double() for x in tensors)
        if self.cache:
            k, v, call = self._cache_call(k, v, window)
            return reference.attention_with_cache(q, CacheLayer(k, v), call)
        call = self._attention_call(window)
        out, lse, _ = reference.forward(q, k, v, call)
        if self.direction == "forward":
            return out, lse
        grad_out = _like(tensors[0]).double()
        return reference.backward(grad_out, None, q, k, v, out, lse, None, call)

    def _attention_call(self, window: int) -> AttentionCall:
        return AttentionCall(
            self.rotary(window),
            causal=True,
            softmax_scale=self.head_dim**-0.5,
            max_seqlen_q=self.seqlen,
            max_seqlen_k=self.seqlen,
            deterministic=self.direction != "grad_qkv",
        )

    def _cache_call(self, k: torch.Tensor, v: torch.Tensor, window: int):
        """Returns k and v as caches, and the call. Pages are in the order of their numbers, except that the first two
        are swapped."""
        seqlens, table = torch.full((self.batch,), self.seqlen, dtype=torch.int32, device=k.device), None
        if self.cache == "paged":
            pages = -(-self.seqlen // PAGE_SIZE)
            k, v = (
                torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * PAGE_SIZE - self.seqlen)).reshape(
                    self.batch * pages, PAGE_SIZE, self.heads_kv, self.head_dim
                )
                for x in (k, v)
            )
            order = torch.arange(self.batch * pages, dtype=torch.int32, device=k.device)
            if len(order) > 1:
                order[:2] = order[:2].flip(0)
                k, v = (torch.cat((x[1:2], x[:1], x[2:])) for x in (k, v))
            table = order.view(self.batch, pages)
        call = CacheCall(self.rotary(window), True, self.head_dim**-0.5, CacheTables(seqlens, table), self.num_splits)
        return k, v, call


def _like(x: torch.Tensor) -> torch.Tensor:
    """Returns normally distributed random numbers in the shape and type of x, which are the same for every call."""
    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)


# ---- what to tune

TOKENS = 16384  # tokens per batch; the batch has TOKENS / seqlen sequences
SEQLENS, CAPACITIES = (1024, 4096, 16384), (4096, 65536)  # one length per class of lengths; two capacities of caches
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
CACHE_BATCH = 4


def parse_shape(text: str) -> tuple[int, ...]:
    """Returns (batch, seqlen, heads, heads_kv, head_dim) of "8x4096x32x8x128".

    Raises ValueError if text does not have this form.
    """
    numbers = tuple(int(word) if word.isascii() and word.isdigit() else 0 for word in text.split("x"))
    if len(numbers) != 5 or not all(numbers):
        raise ValueError(f"expected BATCHxSEQLENxHEADSxHEADS_KVxHEAD_DIM, such as 8x4096x32x8x128, got {text!r}")
    return numbers


def sensible_shapes(run: str) -> list[tuple[int, ...]]:
    """Returns the shapes with which a pass is timed by default: heads are grouped, and every class of lengths has one
    shape."""
    if run in ("decode", "prefill"):
        return [(CACHE_BATCH, capacity, HEADS, HEADS_KV, HEAD_DIM) for capacity in CAPACITIES]
    return [(TOKENS // seqlen, seqlen, HEADS, HEADS_KV, HEAD_DIM) for seqlen in SEQLENS]


def chosen(
    passes: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, bands: Sequence[int]
) -> list[Workload]:
    """Returns one workload for each class of shapes. Workloads with the same kernels follow one another."""
    found: dict[store.ShapeClass, Workload] = {}
    for run in passes:
        for direction, cache, count in itertools.product(*PASSES[run], bands):
            for batch, seqlen, heads, heads_kv, head_dim in shapes or sensible_shapes(run):
                workload = Workload(direction, batch, seqlen, heads, heads_kv, head_dim, dtype, count, cache)
                found.setdefault(workload.shape_class, workload)
    return list(found.values())
