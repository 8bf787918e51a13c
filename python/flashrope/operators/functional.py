"""The public calls: argument checks, then the operator."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Never

import torch
import torch.nn.functional as F

from ..backends.cache_tables import CacheLayer, CachePositions, CacheTables, Packed
from ..backends.calls import AttentionCall
from ..backends.registry import resolve_impl
from ..rotary.rotary import Rotary
from ..rotary.rotated import one_rotation
from . import autograd
from .autocast import autocast
from .cache_plan import plan_checked
from .checks import (
    MANY_HEADS,
    check_cu_seqlens,
    check_differentiable_positions,
    check_no_gradient,
    check_options,
    check_outside_context_parallel,
    check_packed_positions,
    check_positions,
    check_rotated,
    check_sinks,
    check_tensors,
    warn_of_layout,
    warn_of_rows_without_keys,
    warn_of_short_caches,
)
from .foreign_keywords import refuse_unknown
from .sinks import add_sinks

__all__ = ["attention", "attention_varlen", "attention_varlen_with_cache", "attention_with_cache", "rotate"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    positions: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    deterministic: bool | None = None,
    sinks: torch.Tensor | None = None,
    **unknown: Never,
):
    """Computes softmax attention over raw q, k and v, and rotates queries and keys by the scheme inside the kernel.

    Use it in training, and for a prefill without a cache. Sequences of different lengths are packed without padding in
    ``attention_varlen``. To keep the keys for later tokens, use ``KVCache`` or ``attention_with_cache``. Gradients are
    those of raw q, k and v. Shapes and most names are flash-attn's; causal is True by default.

    Example:
        q, k, v = (torch.randn(2, 300, heads, 64, requires_grad=True) for heads in (8, 2, 2))  # raw
        rotary = Rotary.hope(head_dim=64, train_length=512)
        out = attention(q, k, v, rotary)  # (2, 300, 8, 64)
        out.sum().backward()

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32; float64 where the backend supports it.
            Shapes that can only be (batch, heads, seqlen, head_dim) warn. With as many key heads and at most 128 tokens
            they cannot be told from a model's, and pass.
        k, v: (batch, seqlen_k, heads_kv, head_dim), same dtype and device as q. heads_q is a multiple of heads_kv. v
            may have a different head_dim, as in multi-head latent attention: a multiple of 8 up to 256.
        rotary: the scheme. Its head_dim must equal q's.
        causal: query row r attends to keys 0 to r + seqlen_k - seqlen_q (bottom-right alignment). With fewer keys than
            queries the first rows see no key, and the first such call warns. False: every row attends to all keys.
        softmax_scale: factor on the scores. Default: head_dim ** -0.5, with the head_dim of q and k.
        positions: (batch, seqlen) or (batch, seqlen, axes), used as positions instead of 0, 1, 2, ... Needs a scheme of
            one band and seqlen_q == seqlen_k. Causality and windows still go by index.
        sinks: (heads_q,), any float type, attention sinks as in gpt-oss: a learned logit per head that joins every
            row's softmax and has no value. It is neither scaled nor rotated, and gets a gradient.
        return_lse: also return the log-sum-exp of the scores.
        impl: the backend, "triton", "cpu" or "reference". None picks by device.
        deterministic: True: gradients are bitwise reproducible. False: the Triton backend's gradient of q may differ
            from run to run by rounding. Its backward then does five matrix products instead of seven and adds that
            gradient up by float32 atomics, in a workspace of q's size (head_dim rounded up to a power of two) for every
            band. It raises under ``torch.use_deterministic_algorithms(True)``. None follows PyTorch: reproducible under
            that setting, which is read when the backward runs. Otherwise it takes the backward that is predicted to be
            faster for the shape (atomics for head_dim 33 to 128 in 16 bits). The other backends are always
            reproducible. Default: None.

    Returns:
        out, like q but as wide as v, contiguous. With return_lse: (out, lse), lse (batch, heads_q, seqlen_q), natural
        log, float32, or float64 for float64 inputs. A row with no keys gets out 0 and lse -inf. With sinks, lse counts
        them: such a row's lse is its head's sink.

    Raises:
        TypeError, ValueError: the argument, what was expected and what came. No check synchronises with the device.
    """
    if unknown:
        refuse_unknown(attention, unknown)
    q, k, v = autocast(q, k, v)
    shape_q, shape_k = check_tensors(q, k, v, rotary, rank=4)
    if shape_k[0] != shape_q[0]:
        raise ValueError(f"k: expected batch {shape_q[0]} as in q, got {shape_k[0]}")
    if not torch.compiler.is_compiling() and (causal and shape_q[1] > shape_k[1] or shape_q[2] > MANY_HEADS):
        if not warn_of_layout(shape_q, shape_k) and causal and shape_q[1] > shape_k[1]:
            seqlen_q, seqlen_k = shape_q[1], shape_k[1]
            warn_of_rows_without_keys("attention", seqlen_q - seqlen_k, seqlen_q, seqlen_k)
    if positions is not None:
        positions = check_positions(positions, q, k, rotary)
    elif rotary.axis:
        raise ValueError(f"positions: expected shape (batch, seqlen, {rotary.axes}) for an axial scheme, got None")
    softmax_scale = check_options(causal, softmax_scale, q, deterministic)
    call = AttentionCall(rotary, causal, softmax_scale, positions, None, None, shape_q[1], shape_k[1], deterministic)
    return _attend(q, k, v, call, sinks, return_lse, impl)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    positions: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    deterministic: bool | None = None,
    sinks: torch.Tensor | None = None,
    **unknown: Never,
):
    """Computes ``attention`` for packed sequences of different lengths.

    Use it in training and for prompts, where padding would waste time: sequences lie one after another in one row, and
    tokens attend within their own sequence. Positions start at 0 in each. The name, the shapes and the order of the
    arguments after rotary are flash-attn's.

    Example:
        q, k, v = (torch.randn(40, heads, 64) for heads in (8, 2, 2))  # sequences of 12 and 28 tokens
        cu_seqlens = torch.tensor([0, 12, 40], dtype=torch.int32)
        out = attention_varlen(q, k, v, Rotary.rope(64), cu_seqlens, cu_seqlens, max_seqlen_q=28, max_seqlen_k=28)

    Args:
        q: (total_q, heads_q, head_dim). Sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: (total_k, heads_kv, head_dim). v may have a different head_dim, as in ``attention``.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device, non-decreasing from 0. The host does not read
            values that lie on a GPU; the kernels clamp them to the buffers.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Rows beyond them are not computed.
        positions: (total_q,) or (total_q, axes), as in ``attention``, of the packed tokens. Needs total_q == total_k
            and cu_seqlens_q equal to cu_seqlens_k, which is not checked where they lie on a GPU.
        rotary, causal, softmax_scale, sinks, return_lse, impl, deterministic: as in ``attention``.

    Returns:
        out like q, as wide as v. With return_lse: (out, lse), lse (heads_q, total_q), of the dtype in ``attention``.
        Rows outside every sequence get 0 and -inf, or the sink.

    Raises:
        TypeError, ValueError: as in ``attention``.
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, rotary, rank=3)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, "q", max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k, "k", max_seqlen_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: expected shape {tuple(cu_seqlens_q.shape)} as cu_seqlens_q, got {tuple(cu_seqlens_k.shape)}"
        )
    if positions is not None:
        positions = check_packed_positions(positions, q, k, rotary, cu_seqlens_q, cu_seqlens_k)
    elif rotary.axis:
        raise ValueError(f"positions: an axial scheme needs them, shape (total, {rotary.axes})")
    softmax_scale, lengths = check_options(causal, softmax_scale, q, deterministic), (max_seqlen_q, max_seqlen_k)
    call = AttentionCall(rotary, causal, softmax_scale, positions, cu_seqlens_q, cu_seqlens_k, *lengths, deterministic)
    return _attend(q, k, v, call, sinks, return_lse, impl)


def rotate(
    x: torch.Tensor,
    rotary: Rotary,
    positions: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    **unknown: Never,
) -> torch.Tensor:
    """Rotates queries or keys by their positions, as ``attention`` does inside. Differentiable in x.

    Use it to fill a cache that ``attention_with_cache`` reads with ``rotated_keys=True``, and for kernels that take
    rotated q and k. The other calls of this package take raw q and k and rotate them themselves.

    Example:
        q, k = (torch.randn(2, 300, 8, 64) for _ in "qk")
        rotary = Rotary.hope(64, train_length=512)
        scores = torch.einsum("bihd,bjhd->bhij", rotate(q, rotary), rotate(k, rotary))  # before softmax_scale, masking

    The dot product of a rotated query and key is the scheme's score, before everything that acts on scores:
    softmax_scale, temperature, log n and the other scales of queries, and masking. If the scheme has a
    ``rotated_scale``, x is multiplied by its square root, so that the product carries the full factor. That root is
    Hugging Face's attention_factor. Computed in float32 (float64 for float64 inputs) and rounded once.

    Args:
        x: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim), of a type in ``attention``.
        rotary: a scheme in which queries and keys have one rotation each, which RoPE, HoPE, NoPE, PI, NTK, YaRN, CoPE,
            axial schemes and mrope have, with or without a sliding window.
        positions: (batch, seqlen), (seqlen,) or, packed, (total,), of any real type; one more dimension, axes, for
            axial schemes, which need them. None: rows of a sequence are at 0, 1, 2, ...; packed rows need positions.
            New keys of a cache: ``cache_seqlens[:, None] - cache_leftpad[:, None] + torch.arange(seqlen_new)``.
        impl: as in ``attention``.

    Returns:
        Like x, contiguous, a tensor of its own.

    Raises:
        TypeError, ValueError: the argument, what was expected and what came. ReRoPE, Leaky ReRoPE, Self-Extend and dual
            chunk attention, which rotate a query or a key in several ways, are refused by name.
    """
    if unknown:
        refuse_unknown(rotate, unknown)
    (x,) = autocast(x)
    positions = check_rotated(x, rotary, positions)
    one_rotation(rotary, "which rotate applies")
    impl = resolve_impl(impl, x)
    if positions is not None:
        check_differentiable_positions(positions, impl)
    if x.ndim == 3:
        return autograd.rotate(x[None], positions, rotary, impl)[0]
    return autograd.rotate(x, positions, rotary, impl)


def _attend(q, k, v, call: AttentionCall, sinks, return_lse: bool, impl: str | None):
    if sinks is not None:
        check_sinks(sinks, q)
    impl = resolve_impl(impl, q)
    if call.positions is not None:
        check_differentiable_positions(call.positions, impl)
    if type(F.scaled_dot_product_attention) is not BuiltinFunctionType:  # replaced, by context_parallel or by a test
        check_outside_context_parallel()
    out, lse = autograd.attention(q, k, v, call, impl)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def attention_with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rotary: Rotary,
    cache_seqlens: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    num_splits: int | None = None,
    validate: bool = False,
    sinks: torch.Tensor | None = None,
    rotated_keys: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    page_positions: torch.Tensor | None = None,
    page_first: torch.Tensor | None = None,
    page_lengths: torch.Tensor | None = None,
    slot_positions: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **unknown: Never,
):
    """Writes new raw keys and values to a cache, then attends to all keys in it.

    Use it for decoding, for verifying drafts and for prefilling in chunks, over a cache that you allocate yourself.
    ``KVCache`` and ``PagedKVCache`` count tokens and pages for you. Where several layers share lengths and block table,
    ``plan_cache`` does once per step what this call does in every layer. If the number of queries differs between
    sequences, use ``attention_varlen_with_cache``. There are no gradients: in training use ``attention``. Shapes and
    most names are those of flash-attn's flash_attn_with_kvcache.

    The cache holds each raw key once, whatever the scheme. Keys are rotated between the load and the product, and only
    where the scheme needs it (ReRoPE: the last ``window``).

    Example:
        k_cache, v_cache = (torch.zeros(2, 512, 2, 64) for _ in "kv")  # (batch, capacity, heads_kv, head_dim)
        lengths = torch.zeros(2, dtype=torch.int32)
        q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))  # one new token of each sequence
        out = attention_with_cache(q, k_cache, v_cache, Rotary.rope(64), lengths, k=k, v=v)
        lengths += 1  # the call writes to the caches, not to the lengths

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). With n cached and new keys, row r is at position n - seqlen_q + r.
        k_cache, v_cache: (batch, capacity, heads_kv, head_dim), or with block_table (pages, page_size, heads_kv,
            head_dim). Written in place. What is written must not overlap itself, k or v in memory. head_dim is a
            multiple of 8 up to 512. Beyond 256, quantized caches, rotated_keys and explicit positions are refused.
        cache_seqlens: (batch,) int32, the slots in use before this call, left padding included. Not changed.
        k, v: (batch, seqlen_new, heads_kv, head_dim), or both None if the cache is complete.
        block_table: (batch, max_pages) int32, the page of every page_size slots of a sequence. Entries beyond a
            sequence's length may hold anything. page_size is a power of two, at least 16.
        cache_leftpad: (batch,) int32, the first valid slot of each sequence. Positions count from it.
        num_splits: number of splits along the keys (flash-decoding). None: the fastest division. An explicit number
            also fixes the tile sizes, which makes results batch-invariant (Triton and CUDA): bitwise identical for any
            other sequences in the batch and any division of a sequence's tokens into calls.
        validate: check the tables first, which synchronises with the device. Without it, lengths are clamped to the
            capacity and page numbers to the cache, and new keys without a slot are dropped: nothing outside the
            buffers is touched and other sequences stay right, but a sequence with a wrong entry has no valid result.
        impl: as in ``attention``, and "cuda" if the extension was built (float16, bfloat16, seqlen_q up to 64).
        rotated_keys: the cache holds keys as ``rotate`` gives them: k is rotated once, when it is written, and a step
            rotates queries only. For schemes that ``rotate`` takes. All calls over a cache need the same scheme and the
            same cache_leftpad, which the call cannot check; ``KVCache`` and ``PagedKVCache`` do. On CUDA C++ only
            causal calls, or one query token; there the Triton kernel rotates k.
        k_scale, v_scale: float32, the caches' shape without its last dimension, any strides; written in place. The
            caches then hold codes: int8, or uint8 (..., head_dim / 2) with two 4-bit codes a byte. q, k, v and out keep
            their float type. A new row x of K or V, which are quantized when they are written, becomes codes
            ``c = round(x / s)`` and the scale ``s = max(abs(x)) / 127`` (4 bits: 7), ties to even; with channel 2 i in
            the low half of byte i, channel 2 i + 1 in the high half, both plus 8. Attention is that over ``s * c``. A
            row of zeros has s = 0; a NaN makes s NaN; infinities count as the largest finite number of k's dtype. With
            rotated_keys, keys are rotated before. Not on CUDA C++.
        page_positions, page_first, page_lengths: (batch, max_pages) int32, one value per block-table entry. Rows
            [page_first, page_first + page_lengths) of the entry's page are visible, and row r has position
            page_positions + r. Because keys are stored unrotated, a page can be reused at any position. The tables
            describe the pages as they are once the new keys are written. cache_seqlens still counts slots, hidden ones
            too. Defaults: page_first 0, all rows of a page, and as position of a slot its number minus cache_leftpad.
            Positions must not decrease along a sequence; equal ones are allowed. A query sees keys up to its own in
            the order of the slots. Distances, windows and log n go by position.
        slot_positions: float32 (pages, page_size) or (batch, capacity); for axial schemes, which need it, one more
            dimension, axes. The position of every slot, to which page_positions is added. Written in place for new
            keys. A contiguous cache takes only this.
        positions: (batch, seqlen_q), int32, int64 or float32; for axial schemes (batch, seqlen_q, axes). Positions of
            the queries and of the new keys. None: they follow the last key.
        rotary, causal, softmax_scale, sinks, return_lse: as in ``attention``. With any of the five position arguments
            (page_positions, page_first, page_lengths, slot_positions, positions), rotated_keys is not supported, and
            impl is "cpu", "triton" or "reference". "triton" takes positions from -(2**29 - 1) to 2**29 - 1, with a
            resolution of 2**-31.
            Self-Extend and dual chunk attention map the positions that the tables give.

    Returns:
        out, like q and contiguous. With return_lse: (out, lse), lse (batch, heads_q, seqlen_q), of the dtype in
        ``attention``.

    Raises:
        TypeError, ValueError: as in ``attention``; with validate also the sequence and the entry.
    """
    if unknown:
        refuse_unknown(attention_with_cache, unknown)
    layer = CacheLayer(k_cache, v_cache, k_scale, v_scale)
    explicit = CachePositions.of(page_positions, page_first, page_lengths, slot_positions, positions)
    new = k.shape[1] if isinstance(k, torch.Tensor) and k.ndim == 4 else 0
    tables = CacheTables(cache_seqlens, block_table, cache_leftpad, new, explicit)
    options = causal, softmax_scale, num_splits, impl, validate, rotated_keys
    return _attend_with_cache(q, layer, k, v, tables, rotary, options, sinks, return_lse)


def attention_varlen_with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rotary: Rotary,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    max_seqlen_q: int,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    num_splits: int | None = None,
    validate: bool = False,
    sinks: torch.Tensor | None = None,
    rotated_keys: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    page_positions: torch.Tensor | None = None,
    page_first: torch.Tensor | None = None,
    page_lengths: torch.Tensor | None = None,
    slot_positions: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **unknown: Never,
):
    """Writes new raw keys and values to a cache, then attends, for packed queries of different numbers per sequence.

    Use it in a server, whose batches hold one-token steps, drafts, chunks and whole prompts at once. Where every
    sequence has the same number of queries, ``attention_with_cache`` is simpler. The host reads no length, so a
    captured CUDA graph serves every batch of the same shapes.

    Example:
        k_pages, v_pages = (torch.zeros(16, 16, 2, 64) for _ in "kv")  # (pages, page_size, heads_kv, head_dim)
        tables = {"block_table": torch.arange(16, dtype=torch.int32).view(2, 8)}
        q, k, v = (torch.randn(21, heads, 64) for heads in (8, 2, 2))  # one token, and a prompt of 20
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 21], [7, 0]))
        out = attention_varlen_with_cache(q, k_pages, v_pages, Rotary.rope(64), starts, lengths, 20, k=k, v=v, **tables)

    Args:
        q: (total_q, heads_q, head_dim). Sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], its last tokens.
        k_cache, v_cache: (sequences, capacity, heads_kv, head_dim), or with block_table (pages, page_size, heads_kv,
            head_dim). Written in place.
        cu_seqlens_q: (sequences + 1,) int32, non-decreasing from 0. A sequence may have no rows.
        cache_seqlens: (sequences,) int32, slots in use, left padding included. Where this call appends k and v: before
            it. Without k, and with slot_mapping: the new tokens included.
        max_seqlen_q: upper bound of the sequences' rows. Rows beyond it are not computed.
        k, v: (total_q, heads_kv, head_dim), the new raw keys and values of q's tokens, or both None.
        slot_mapping: (total_q,) int32 or int64, the slot of the whole cache, page * page_size + row, that each new key
            and value goes to, for engines that place tokens. Negative: nowhere. None: behind cache_seqlens.
        block_table, cache_leftpad, num_splits, validate: as in ``attention_with_cache``.
        rotary, causal, softmax_scale, sinks, return_lse: as in ``attention``.
        k_scale, v_scale, page_positions, page_first, page_lengths, slot_positions: as in ``attention_with_cache``.
        positions: (total_q,) or (total_q, axes); else as there. With slot_mapping and slot_positions, new keys need it.
        rotated_keys: as in ``attention_with_cache``. Rows outside every sequence have no position, so slot_mapping
            should send them nowhere.
        impl: as in ``attention_with_cache``; "cuda" needs max_seqlen_q up to 64, and to append pages or a contiguous
            cache whose capacity is a multiple of 16.

    Returns:
        out like q. With return_lse: (out, lse), lse (heads_q, total_q), of the dtype in ``attention``. Rows outside
        every sequence get 0 and -inf, or the sink.

    Raises:
        TypeError, ValueError: as in ``attention_with_cache``.
    """
    if unknown:
        refuse_unknown(attention_varlen_with_cache, unknown)
    layer = CacheLayer(k_cache, v_cache, k_scale, v_scale)
    explicit = CachePositions.of(page_positions, page_first, page_lengths, slot_positions, positions)
    new = Packed(cu_seqlens_q, max_seqlen_q, slot_mapping, k is not None and slot_mapping is None)
    tables = CacheTables(cache_seqlens, block_table, cache_leftpad, new, explicit)
    options = causal, softmax_scale, num_splits, impl, validate, rotated_keys
    return _attend_with_cache(q, layer, k, v, tables, rotary, options, sinks, return_lse)


def _attend_with_cache(q, layer: CacheLayer, k, v, tables: CacheTables, rotary, options, sinks, return_lse: bool):
    """Plans one call and runs it. options: the arguments of ``plan_checked`` after rotary."""
    plan = plan_checked(q, layer, k, v, tables, rotary, *options)
    plan.watches, new, causal = False, tables.new, options[0]
    if isinstance(new, Packed):
        if k is None and new.slot_mapping is not None:
            raise ValueError("slot_mapping: expected k and v to place, got none")
    elif causal and q.shape[1] > 1 and q.shape[1] > new and not torch.compiler.is_compiling():
        warn_of_short_caches("attention_with_cache", tables, q.shape[1], stacklevel=4)
    if sinks is not None:
        check_sinks(sinks, q)
        check_no_gradient("sinks", sinks)
    return plan._run(q, layer, k, v, sinks, return_lse)
