"""Lists the cases of the gate: which kernels it compiles, for which architectures, sizes, types and schemes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch
import triton
from flashrope import Rotary
from flashrope.backends import triton as backend
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.backends.triton import deterministic as score_grads
from flashrope.backends.triton import launcher
from flashrope.calls.cache_tables import CacheLayer, CachePositions, CacheTables
from flashrope.calls.plans import attend_once
from flashrope.calls.records import AttentionCall, CacheCall
from flashrope.lab.tuning.candidates import CONTENDERS
from flashrope.triton_kernels.configs import Tile

from .architectures import AMD, NEWER
from .offline import Launch, caught_launches

KERNELS = ("rotate_rows", "attention_forward", "attention_statistics", "attention_grad_kv", "attention_grad_q")
DECODE_KERNELS = ("append_rows", "plan_shares", "attention_decode", "combine_shares")
SPLIT_KERNELS = ("append_rows", "attention_decode", "combine_splits")
CHUNK_KERNELS = ("append_rows", "rotate_cached_rows", "attention_chunks")
ATOMIC_KERNELS = (*KERNELS[:-1], "attention_finish_grad_q")
ORDER = (
    "rotate_rows",
    "rotate_cached_rows",
    *KERNELS[1:2],
    CHUNK_KERNELS[-1],
    *KERNELS[2:],
    ATOMIC_KERNELS[-1],
    "place_slots",
    "place_tokens",
    *DECODE_KERNELS,
    "combine_splits",
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH, SEQLEN, HEADS_Q, HEADS_KV, WINDOW, PAGE_SIZE = 2, 4096, 40, 8, 1024, 256  # no head count is a multiple of 16


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Holds everything that selects a specialisation of a kernel, except sizes and dtype."""

    name: str
    rotary: Callable[[int], Rotary]
    causal: bool = True
    packed: bool = False  # sequences are packed, with cu_seqlens
    positions: bool = False
    aligned: bool = True  # tensors are aligned to 16 bytes
    grad_lse: bool = False
    cache: str = ""  # "contiguous" or "paged": the call is attention_with_cache; "": it is attention
    seqlen_q: int = 1  # queries per sequence in a call with a cache
    deterministic: bool = True
    recomputed: bool = False  # the dQ kernel recomputes the gradients of scores; backward then has seven products
    head_dim_v: int = 0  # head_dim of v; 0: the same as that of q and k
    quantized: bool = False  # the cache is int8
    page_size: int = PAGE_SIZE  # rows of a page in a paged cache without explicit positions
    placed: int = 0  # rows of a page in a cache with explicit positions; 0: no explicit positions
    stored: bool = False  # the cache stores positions
    shared_values: int = 0  # how many leading channels of the keys serve as the values; 0: v is separate
    weighted: bool = False  # keys have weights
    heads: tuple[int, int] = (40, 8)  # heads_q, heads_kv; neither is a multiple of 16
    num_splits: int = 0  # into how many splits decoding divides the keys; 0: it divides them into shares
    seqlen: int = SEQLEN  # queries and keys of a sequence in a call without a cache
    tile: tuple[str, Tile] | None = None  # a direction and the tile that it takes; None: all take their defaults


ONE_BAND = Scheme("rope", Rotary.rope)
LONG = Scheme("rope long", Rotary.rope, deterministic=False, seqlen=4 * SEQLEN)  # not a "short" tile of configs.py
TWO_BANDS = Scheme("rerope", lambda head_dim: Rotary.rope(head_dim).rectify(WINDOW))
TWO_SIDED = Scheme("two-sided", TWO_BANDS.rotary, causal=False)
NOPE = Scheme("nope", Rotary.none)
PACKED = Scheme("packed", lambda head_dim: Rotary.rope(head_dim, interleaved=True), packed=True, grad_lse=True)
POSITIONS = Scheme("positions", lambda head_dim: Rotary.rope(head_dim, rotary_dim=head_dim // 2), positions=True)
UNALIGNED = Scheme("unaligned", Rotary.rope, aligned=False)
DECODE = tuple(
    Scheme(f"{scheme.name} {cache}", scheme.rotary, cache=cache)
    for cache in ("contiguous", "paged")
    for scheme in (ONE_BAND, TWO_BANDS)
)


def with_splits(scheme: Scheme) -> Scheme:
    """Returns a copy of the scheme whose call asks for four splits."""
    return dataclasses.replace(scheme, name=f"{scheme.name} splits", num_splits=4)


SPLITS = tuple(with_splits(DECODE[n]) for n in (0, 3, 1, 2))
SMALL_PAGES = tuple(dataclasses.replace(scheme, name=f"{scheme.name} 16", page_size=16) for scheme in DECODE[2:])
WIDE = Scheme("rerope wide", TWO_BANDS.rotary, cache="paged", seqlen_q=16)  # 16 queries, as in speculative decoding
CHUNKS = tuple(
    Scheme(f"{scheme.name} {cache} chunk", scheme.rotary, cache=cache, seqlen_q=512)
    for cache in ("contiguous", "paged")
    for scheme in (ONE_BAND, TWO_BANDS)
)
PARTIAL = Scheme(
    "rerope partial",
    lambda head_dim: Rotary.rope(head_dim, rotary_dim=head_dim // 2).rectify(WINDOW),
    cache="contiguous",
)


def few_rotate(head_dim: int) -> Rotary:
    """Returns a scheme that rotates at most half of the channels.

    At head_dim 64 it is HoPE, which rotates the first half of the pairs. At head_dim 512 it rotates the first quarter
    of the pairs, like Gemma 4's global layers. At any other head_dim it rotates the last 64 channels.
    """
    if head_dim == 64:
        return Rotary.hope(64, 512)
    if head_dim == 512:
        return Rotary.p_rope(512, 0.25, base=1e6)
    return Rotary.rope(head_dim, rotary_dim=64, first_channel=head_dim - 64)


TRAINED = Scheme("few", few_rotate)  # these calls have no cache
TRAINED_BANDS = Scheme("few rerope", lambda head_dim: few_rotate(head_dim).rectify(WINDOW))
PARTS = tuple(Scheme(f"parts {cache}", few_rotate, cache=cache) for cache in ("contiguous", "paged"))
FEW_CHUNKS = tuple(
    Scheme(f"{scheme.name} {cache} chunk", scheme.rotary, cache=cache, seqlen_q=512)
    for cache in ("contiguous", "paged")
    for scheme in (TRAINED, TRAINED_BANDS)
)
SHARED = tuple(  # values that are keys without their weights, as in Gemma 4's larger models
    Scheme(f"shared {scheme.name}", scheme.rotary, cache=scheme.cache, shared_values=512, weighted=True)
    for scheme in (*PARTS, Scheme("rerope paged", lambda head_dim: few_rotate(head_dim).rectify(WINDOW), cache="paged"))
)
SHARED_ALL = Scheme("shared rerope paged", TWO_BANDS.rotary, cache="paged", shared_values=128, weighted=True)
LATENT = tuple(  # multi-head latent attention over its latent cache, with 16 and with 128 query heads
    Scheme(f"latent {cache}{kind}", lambda d: Rotary.rope(d, rotary_dim=64, first_channel=512), cache=cache,
           shared_values=512, heads=(heads, 1))
    for kind, heads in (("", 16), (" many heads", 128))
    for cache in ("contiguous", "paged")
)  # fmt: skip
MAPS = (  # position maps per band: the first scheme has two bands, the second has three over chunks of 1024
    Scheme("self-extend", lambda head_dim: Rotary.rope(head_dim).self_extend(WINDOW, 8)),
    Scheme("dual-chunk", lambda head_dim: Rotary.rope(head_dim).dual_chunk(WINDOW + 256, 256)),
)
MAPS_DECODE = tuple(Scheme(f"{scheme.name} paged", scheme.rotary, cache="paged") for scheme in MAPS)
SEVEN = tuple(Scheme(f"{scheme.name} seven", scheme.rotary, recomputed=True) for scheme in (ONE_BAND, TWO_BANDS))
ATOMIC = tuple(Scheme(f"{scheme.name} atomic", scheme.rotary, deterministic=False) for scheme in (ONE_BAND, TWO_BANDS))


def scheme_of(direction: str, banded: bool) -> Scheme:
    """Returns the scheme with which the tiles of a direction are compared."""
    one, several = {"decode": DECODE[:2], "grad_qkv": ATOMIC}.get(direction, (ONE_BAND, TWO_BANDS))
    return several if banded else one


def with_tile(direction: str, banded: bool, tile: Tile) -> Scheme:
    scheme = scheme_of(direction, banded)
    name = f"{scheme.name} {'x'.join(map(str, tile[:4]))}{' late' if tile.lagged else ''}"
    return dataclasses.replace(scheme, name=name, tile=(direction, tile))


VALUES = tuple(  # multi-head latent attention
    Scheme(name, lambda head_dim: Rotary.rope(head_dim, rotary_dim=64), head_dim_v=128, deterministic=deterministic)
    for name, deterministic in (("v 128", True), ("v 128 atomic", False))
)
CACHED_VALUES = tuple(  # the expanded cache of multi-head latent attention
    dataclasses.replace(VALUES[0], name=f"v 128 {cache}{kind}", cache=cache, seqlen_q=seqlen_q)
    for cache in ("contiguous", "paged")
    for kind, seqlen_q in (("", 1), (" chunk", 512))
)
QUANTIZED = tuple(dataclasses.replace(scheme, name=f"{scheme.name} int8", quantized=True) for scheme in DECODE)
QUANTIZED_CHUNKS = tuple(
    dataclasses.replace(scheme, name=f"{scheme.name} int8", quantized=True) for scheme in (CHUNKS[0], CHUNKS[3])
)
PLACED = tuple(
    dataclasses.replace(DECODE[n], name=f"{DECODE[n].name} placed {rows}", placed=rows)
    for n in (2, 3)
    for rows in (256, 16)
)
STORED = tuple(
    dataclasses.replace(scheme, name=f"{scheme.name} stored", stored=True)
    for scheme in (
        PLACED[2],
        dataclasses.replace(
            PLACED[0],
            name="mrope paged placed 256",
            rotary=lambda head_dim: Rotary.rope(head_dim).mrope((head_dim // 4, head_dim // 8, head_dim // 8)),
        ),
    )
)
PLACED_MAPS = tuple(dataclasses.replace(each, name=f"{each.name} placed 256", placed=256) for each in MAPS_DECODE)
SHORT = (ONE_BAND, DECODE[3], TWO_BANDS, DECODE[2], CHUNKS[3], QUANTIZED[2])
VARIANTS = (TWO_SIDED, NOPE, PACKED, POSITIONS, UNALIGNED)


@dataclasses.dataclass(frozen=True)
class Case:
    arch: int | str
    head_dim: int
    dtype: str
    scheme: Scheme

    @property
    def kernels(self) -> set[str]:
        """Returns the names of the kernels that the case must launch."""
        if self.scheme.placed:
            by_position = self.scheme.stored and not self.scheme.rotary(self.head_dim).axis
            return {*SPLIT_KERNELS, "place_tokens", *(["place_slots"] if by_position else [])}
        if self.scheme.cache:
            if self.scheme in (*CHUNKS, *FEW_CHUNKS, *QUANTIZED_CHUNKS, *CACHED_VALUES[1::2]):
                return set(CHUNK_KERNELS)
            return set(DECODE_KERNELS if self.takes_shares else SPLIT_KERNELS)
        if not self.scheme.deterministic:
            return set(ATOMIC_KERNELS)
        return set(KERNELS) - ({"rotate_rows"} if self.scheme.name == "nope" else set())

    @property
    def takes_shares(self) -> bool:
        """Whether decoding must divide the keys into shares rather than splits."""
        scheme, wide = self.scheme, self.scheme in (WIDE, *LATENT[2:])
        if scheme.num_splits:
            return False
        if self.dtype == "fp32":
            return self.head_dim in (32, 64)
        if scheme in LATENT:
            return scheme.cache == "paged" or not wide
        if self.head_dim >= 256:
            return scheme in PARTS
        return self.head_dim == 128 or (self.head_dim == 64 and not wide and not scheme.quantized)

    def launches(self) -> list[Launch]:
        """Returns the launches of forward and backward, or of one call with a cache."""
        scheme, seqlen = self.scheme, self.scheme.seqlen
        rows = (BATCH * seqlen,) if scheme.packed else (BATCH, seqlen)

        def tensor(*shape, dtype=DTYPES[self.dtype]):
            return torch.empty(shape, dtype=dtype, device="meta")

        if scheme.cache:
            return self._cache_launches(tensor)

        def heads(count, width=self.head_dim):
            return tensor(*rows, count, width + (0 if scheme.aligned else 1))[..., :width]

        q, k, v = heads(HEADS_Q), heads(HEADS_KV), heads(HEADS_KV, scheme.head_dim_v or self.head_dim)
        rotary = scheme.rotary(self.head_dim)
        cu_seqlens = tensor(BATCH + 1, dtype=torch.int32) if scheme.packed else None
        positions = tensor(BATCH, seqlen, dtype=torch.float32) if scheme.positions else None
        given = (positions, cu_seqlens, cu_seqlens, seqlen, seqlen, scheme.deterministic)
        call = AttentionCall(rotary, scheme.causal, self.head_dim**-0.5, *given)
        forced = tiles.forced(*scheme.tile) if scheme.tile else contextlib.nullcontext()
        with caught_launches(launcher, self.arch) as launches, score_grads.forced(not scheme.recomputed), forced:
            out, lse, kept = backend.forward(q, k, v, call)
            grad_lse = torch.empty_like(lse) if scheme.grad_lse else None
            backend.backward(torch.empty_like(out), grad_lse, q, k, v, out, lse, kept, call)
        return launches

    def _cache_launches(self, tensor) -> list[Launch]:
        scheme, page_size = self.scheme, self.scheme.placed or self.scheme.page_size
        pages = SEQLEN // page_size
        rows = (BATCH, SEQLEN) if scheme.cache == "contiguous" else (BATCH * pages, page_size)
        q, new = (tensor(BATCH, scheme.seqlen_q, heads, self.head_dim) for heads in scheme.heads)
        cache, seqlens = tensor(*rows, scheme.heads[1], self.head_dim), tensor(BATCH, dtype=torch.int32)
        new_v, cache_v = (tensor(*x.shape[:-1], scheme.head_dim_v or self.head_dim) for x in (new, cache))
        scales = (None, None)
        if scheme.quantized:
            cache, cache_v = (tensor(*rows, HEADS_KV, self.head_dim, dtype=torch.int8) for _ in "kv")
            scales = (tensor(rows[0], HEADS_KV, rows[1], dtype=torch.float32).transpose(1, 2),) * 2  # KVCache's strides
        table = tensor(BATCH, pages, dtype=torch.int32) if scheme.cache == "paged" else None
        rotary, positions = scheme.rotary(self.head_dim), None
        if scheme.placed:
            axes = (rotary.axes,) if rotary.axis else ()
            stored = tensor(*rows, *axes, dtype=torch.float32) if scheme.stored else None
            positions = CachePositions(table, table, table, stored)
        if scheme.shared_values:
            new_v, cache_v = None, cache[..., : scheme.shared_values]
        weight = tensor(self.head_dim, dtype=torch.float32) if scheme.weighted else None
        tables = CacheTables(seqlens, table, None, scheme.seqlen_q, positions)
        layer = CacheLayer(cache, cache_v, *scales, key_weight=weight)
        call = CacheCall(rotary, scheme.causal, self.head_dim**-0.5, tables, scheme.num_splits)
        with caught_launches(launcher, self.arch) as launches:
            backend.append_to_cache(layer, new, new_v, tables)
            attend_once(backend, q, layer, call)
        return launches


def cases(quick: bool, every_target: bool = False) -> list[Case]:
    """Returns the cases to compile.

    The main architectures are covered in bf16 with one and two bands. Every other choice occurs once, mostly for the
    kernel in which registers are scarcest. fp16 is left out because it compiles to the same figures as bf16. The other
    targets get forward, backward and decoding at head_dim 128.

    quick: return fewer cases. every_target: give the other targets all cases of sm_80, sm_86 or sm_90.
    """
    others, main = (*NEWER, *AMD), _main_cases(quick)
    if every_target:
        return main + list(dict.fromkeys(dataclasses.replace(case, arch=arch) for arch in others for case in main))
    return main + [Case(arch, 128, "bf16", scheme) for arch in others for scheme in (SHORT[:2] if quick else SHORT)]


def contenders() -> list[Case]:
    """Returns one case for each tile of ``CONTENDERS``, which were chosen with Triton 3.6."""
    if not triton.__version__.startswith("3.6."):
        return []
    return [
        Case({"sm80": 80, "sm90": 90}[family], block_d, "bf16", with_tile(direction, banded, tile))
        for (family, direction, block_d, banded), contending in CONTENDERS.items()
        for tile in contending
    ]


def _main_cases(quick: bool) -> list[Case]:

    def grid(archs, head_dims, dtype, *schemes):
        return [Case(arch, head_dim, dtype, scheme) for arch in archs for head_dim in head_dims for scheme in schemes]

    main = grid((80, 90), (64, 128), "bf16", ONE_BAND, TWO_BANDS, *SEVEN, *ATOMIC, *DECODE, *CHUNKS)
    main += grid((80, 90), (128,), "bf16", *SPLITS[:2])
    main += [*grid((90,), (128,), "bf16", LONG), *contenders()]
    if quick:
        return main + grid((80, 90), (128,), "bf16", *QUANTIZED)
    wide = grid((80, 90), (256,), "bf16", ONE_BAND) + grid((80,), (256,), "bf16", TWO_BANDS)
    wide += grid((80, 90), (192,), "bf16", *VALUES) + grid((86,), (192,), "bf16", VALUES[0])
    wide += grid((80, 86, 89, 90, 100, 120, "gfx942"), (512,), "bf16", TRAINED, TWO_BANDS)
    wide += grid((80, 86, 90, 120), (512,), "bf16", *ATOMIC)
    wide += grid((80,), (320, 384, 448), "bf16", ONE_BAND, TWO_BANDS, *ATOMIC)  # several tiles per head
    wide += grid((86, 90, 120), (320, 448), "bf16", ONE_BAND)
    wide += grid((86, 90, 120), (384,), "bf16", TWO_BANDS, ATOMIC[0])
    padded = grid((80, 90), (96,), "bf16", ONE_BAND) + grid((80,), (32,), "bf16", ONE_BAND)
    types = grid((80, 90), (128,), "fp16", ONE_BAND) + grid((80,), (64, 128), "fp32", ONE_BAND)
    variants = grid((80,), (128,), "bf16", NOPE, PACKED, POSITIONS) + grid((80,), (64,), "bf16", TWO_SIDED)
    variants += grid((80,), (64, 128), "bf16", UNALIGNED)
    small_shared = grid((86,), (64, 128, 256), "bf16", TWO_BANDS) + grid((86,), (128, 256), "bf16", ONE_BAND)
    small_shared += grid((86,), (64, 128, 256), "bf16", TRAINED, TRAINED_BANDS)
    cache = grid((80, 90), (64, 128), "bf16", WIDE) + grid((80, 90), (96, 256), "bf16", DECODE[0], DECODE[-1])
    cache += (
        grid((80,), (128,), "bf16", PARTIAL, SPLITS[2])
        + grid((80,), (64,), "bf16", *SPLITS[1:3])
        + grid((90,), (64,), "bf16", *SPLITS, *SMALL_PAGES)
        + grid((90,), (128,), "bf16", *SPLITS[2:], *SMALL_PAGES)
        + grid((90,), (32,), "bf16", *DECODE[::3])
        + grid((80,), (64,), "bf16", SMALL_PAGES[1])
        + grid((80,), (128,), "fp32", DECODE[-1])
        + grid((86,), (64, 128), "bf16", DECODE[-1], CHUNKS[-1])
        + grid((80, 86, 90), (256,), "bf16", *CHUNKS[2:])
        + grid((80, 90), (64, 128, 256), "bf16", *PARTS)
        + grid((86, 89, 100, 120, "gfx942"), (256,), "bf16", *PARTS)
        + grid((80, 86, 89, 90, 100, 120, "gfx942"), (512,), "bf16", *PARTS, DECODE[2])
        + grid((80, 90), (512,), "bf16", DECODE[3], WIDE)
        + grid((80, 86, 90), (192,), "bf16", *CACHED_VALUES)
        + grid((80, 86, 89, 90, 100, 120, "gfx942"), (512,), "bf16", *SHARED)
        + grid((80, 86, 89, 90, 100, 120, "gfx942"), (576,), "bf16", *LATENT)
        + grid((80, 90), (128,), "bf16", SHARED_ALL)
        + grid((80, 86, 90, 120), (512,), "bf16", CHUNKS[0], *CHUNKS[2:])
        + grid((80, 90), (64, 128), "bf16", FEW_CHUNKS[-1])
        + grid((80, 86, 90, 120), (512,), "bf16", *FEW_CHUNKS[1::2])
    )
    codes = grid((80, 90), (128,), "bf16", *QUANTIZED, *QUANTIZED_CHUNKS) + grid((80,), (64,), "bf16", QUANTIZED[-1])
    codes += grid((80,), (128,), "fp16", QUANTIZED[1])
    codes += grid((86,), (128,), "bf16", *QUANTIZED_CHUNKS)
    maps = grid((80, 90), (64, 128), "bf16", *MAPS, *MAPS_DECODE) + grid((86,), (128,), "bf16", *MAPS, MAPS_DECODE[-1])
    placed = grid((80, 90), (64, 128), "bf16", *PLACED, *STORED, *PLACED_MAPS)
    return main + wide + padded + types + variants + small_shared + cache + codes + maps + placed
