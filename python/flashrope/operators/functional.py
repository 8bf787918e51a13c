"""Defines the public calls, which check their arguments and then run the operators."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Never

import torch
import torch.nn.functional as F

from ..backends.registry import resolve_impl
from ..calls.autocast import autocast
from ..calls.cache_tables import CacheLayer, CacheTables, Packed
from ..calls.checks import (
    MANY_HEADS,
    check_cu_seqlens,
    check_no_gradient,
    check_options,
    check_outside_context_parallel,
    check_sinks,
    check_tensors,
    warn_of_layout,
    warn_of_rows_without_keys,
    warn_of_short_caches,
)
from ..calls.foreign_keywords import refuse_unknown
from ..calls.position_checks import (
    check_differentiable_positions,
    check_packed_positions,
    check_positions,
    check_rotated,
)
from ..calls.records import AttentionCall
from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import one_rotation
from . import autograd
from .cache_plan import plan_checked
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
    """Computes softmax attention over raw q, k and v, and rotates queries and keys by the scheme.

    "Fused" means that the Triton kernels rotate queries in registers, and keys once into a copy that the backward
    reuses.

    Use it in training, and for a prefill without a cache. For packed sequences of different lengths, use
    ``attention_varlen``. To keep the keys for later tokens, use ``KVCache`` or ``attention_with_cache``. Gradients are
    with respect to raw q, k and v. Shapes and most argument names are the same as in flash-attn, but causal is True by
    default.

    Example:
        q, k, v = (torch.randn(2, 300, heads, 64, requires_grad=True) for heads in (8, 2, 2))  # raw
        rotary = Rotary.hope(head_dim=64, train_length=512)
        out = attention(q, k, v, rotary)  # (2, 300, 8, 64)
        out.sum().backward()

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32; float64 if the backend supports it. If
            the shapes look like (batch, heads, seqlen, head_dim), the call warns. The call cannot recognize this order
            with at most 128 tokens if heads_kv equals heads_q or causal is False.
        k, v: (batch, seqlen_k, heads_kv, head_dim), same dtype and device as q. heads_q is a multiple of heads_kv. v
            may have a different head_dim, as in multi-head latent attention: a multiple of 8 up to 512.
        rotary: the scheme. Its head_dim must equal q's.
        causal: query row r attends to keys 0 to r + seqlen_k - seqlen_q (bottom-right alignment). With fewer keys than
            queries the first rows see no key, and the first such call warns. False: every row attends to all keys.
        softmax_scale: factor on the scores. Default: head_dim ** -0.5, with the head_dim of q and k.
        positions: (batch, seqlen) or (batch, seqlen, axes), used as positions instead of 0, 1, 2, .... The scheme must
            have one band, and seqlen_q must equal seqlen_k. The causal mask and windows still compare indices.
        sinks: (heads_q,), any float type, attention sinks as in gpt-oss: a learned logit per head that joins every
            row's softmax and has no value. The logit is neither scaled nor rotated. sinks gets a gradient.
        return_lse: also return the log-sum-exp of the scores.
        impl: the backend. "triton": the Triton kernels. "sdpa": PyTorch's kernels over rotated q and k. "cpu": the
            compiled kernels for the CPU. "reference": plain PyTorch. None: the one that is expected to be the fastest
            for the call; on a GPU this is "triton", or "sdpa" for the calls that docs/kernels.md lists.
        deterministic: True: gradients are bitwise reproducible. For head_dim 33 to 128 in 16 bits, the Triton backend
            then stores the gradients of the scores for some heads at a time, in a workspace of up to 1.25 GiB. False:
            the Triton backend's gradient of q may differ from run to run by rounding. The backend accumulates this
            gradient with float32 atomics. For every band it takes a workspace of q's size, with head_dim rounded up to
            a power of two. False raises an error under ``torch.use_deterministic_algorithms(True)``. None, the default:
            gradients are reproducible under that setting, which is read when the backward runs. Without the setting,
            the Triton backend runs the backward that is predicted to be faster for long sequences. In 16 bits with
            head_dim 33 to 128 or above 256, this is the backward with atomics (docs/numerics.md has the exceptions). In
            float32 with head_dim above 256, sm_86, sm_89 and sm_120 have only the backward with atomics. "cpu" and
            "reference" are always reproducible. "sdpa" is not on a GPU, and refuses True there.

    Returns:
        out, like q but with the head_dim of v, contiguous. With return_lse: (out, lse). lse is (batch, heads_q,
        seqlen_q), a natural log, float32, or float64 for float64 inputs. A row that sees no key has out 0 and lse -inf.
        lse includes the sinks. With sinks, the lse of a row that sees no key is the sink of its head.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected. No
            check synchronises with the device.
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

    Use it in training and for prompts if padding would waste time. Sequences follow one another in the first dimension,
    and tokens attend within their own sequence. Positions start at 0 in each sequence. The name, the shapes and the
    order of the arguments after rotary are the same as in flash-attn.

    Example:
        q, k, v = (torch.randn(40, heads, 64) for heads in (8, 2, 2))  # sequences of 12 and 28 tokens
        cu_seqlens = torch.tensor([0, 12, 40], dtype=torch.int32)
        out = attention_varlen(q, k, v, Rotary.rope(64), cu_seqlens, cu_seqlens, max_seqlen_q=28, max_seqlen_k=28)

    Args:
        q: (total_q, heads_q, head_dim). Sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: (total_k, heads_kv, head_dim). v may have a different head_dim, as in ``attention``.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device, non-decreasing from 0. On a GPU the host does
            not read them. The kernels clamp them to the buffers.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Rows beyond them are not computed.
        positions: (total_q,) or (total_q, axes), the positions of the packed tokens, as in ``attention``. total_q must
            equal total_k, and cu_seqlens_q must equal cu_seqlens_k. On a GPU the call does not check that these two are
            equal.
        rotary, causal, softmax_scale, sinks, return_lse, impl, deterministic: as in ``attention``.

    Returns:
        out, like q but with the head_dim of v. With return_lse: (out, lse). lse is (heads_q, total_q), with the dtype
        that ``attention`` gives it. Rows outside every sequence have out 0 and lse -inf. With sinks, the lse of such a
        row is the sink of its head.

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
            f"cu_seqlens_k: expected shape {tuple(cu_seqlens_q.shape)}, the shape of cu_seqlens_q, got "
            f"{tuple(cu_seqlens_k.shape)}"
        )
    if positions is not None:
        positions = check_packed_positions(positions, q, k, rotary, cu_seqlens_q, cu_seqlens_k)
    elif rotary.axis:
        raise ValueError(f"positions: expected shape (total, {rotary.axes}) for an axial scheme, got None")
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
    """Rotates queries or keys by their positions, as ``attention`` does inside its kernel. The result is differentiable
    in x.

    Use it to fill a cache that a plan of ``plan_cache(..., rotated_keys=True)`` reads, and for kernels that take
    rotated q and k. The other calls of this package take raw q and k and rotate them themselves.

    Example:
        q, k = (torch.randn(2, 300, 8, 64) for _ in "qk")
        rotary = Rotary.hope(64, train_length=512)
        scores = torch.einsum("bihd,bjhd->bhij", rotate(q, rotary), rotate(k, rotary))  # before softmax_scale, masking

    The dot product of a rotated query and key is the scheme's score, before everything that acts on scores:
    softmax_scale, temperature, log n and the other scales of queries, and masking. If the scheme has a
    ``rotated_scale``, x is multiplied by the square root of this factor, so that the dot product carries the full
    factor. The square root is Hugging Face's attention_factor. The rotation is computed in float32 (float64 for float64
    inputs) and rounded once.

    Args:
        x: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim), of a dtype that ``attention`` accepts.
        rotary: a scheme in which queries and keys have one rotation each: RoPE, HoPE, NoPE, PI, NTK, YaRN, CoPE, axial
            schemes and mrope, with or without a sliding window.
        positions: (batch, seqlen) or (seqlen,), or (total,) if x is packed, of any real type. Axial schemes need
            positions with one more dimension, axes. None: the rows of a sequence have the positions 0, 1, 2, .... A
            packed x needs positions. The positions of new keys of a cache are ``cache_seqlens[:, None] -
            cache_leftpad[:, None] + torch.arange(seqlen_new)``.
        impl: as in ``attention``.

    Returns:
        A new contiguous tensor of x's shape and dtype, with all channels, rotated or not.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected.
            ReRoPE, Leaky ReRoPE, Self-Extend and dual chunk attention are not accepted, because they rotate a query or
            a key in several ways.
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
    if type(F.scaled_dot_product_attention) is not BuiltinFunctionType:  # context_parallel or a test has replaced it
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
    **unknown: Never,
):
    """Writes new raw keys and values to a cache, then attends to all keys in it.

    Use it for decoding, for verifying drafts and for prefilling in chunks, over a cache that you allocate yourself.
    ``KVCache`` and ``PagedKVCache`` count tokens and pages for you. ``plan_cache`` is for engines: it does once per
    step what this call repeats in every layer, and it takes quantized caches, rotated keys and explicit positions. If
    the number of queries differs between sequences, use ``attention_varlen_with_cache``. There are no gradients: in
    training use ``attention``. Shapes and most argument names are the same as in flash-attn's flash_attn_with_kvcache.

    The cache holds each raw key once, whatever the scheme. Kernels rotate keys after loading them, and only where the
    scheme needs it (with ReRoPE, the last ``window`` keys).

    Example:
        k_cache, v_cache = (torch.zeros(2, 512, 2, 64) for _ in "kv")  # (batch, capacity, heads_kv, head_dim)
        lengths = torch.zeros(2, dtype=torch.int32)
        q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))  # one new token of each sequence
        out = attention_with_cache(q, k_cache, v_cache, Rotary.rope(64), lengths, k=k, v=v)
        lengths += 1  # the call writes to the caches, not to the lengths

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). If n is the number of cached and new keys together, row r is at
            position n - seqlen_q + r.
        k_cache, v_cache: (batch, capacity, heads_kv, head_dim), or with block_table (pages, page_size, heads_kv,
            head_dim). The call writes to them in place. In memory they must not overlap each other, k or v, and no two
            of their elements may share an address. head_dim is a multiple of 8 up to 512. v_cache may
            have a smaller head_dim than k_cache, except with impl="cuda". v_cache may also be a view of channels of
            k_cache, such as ``k_cache[..., :512]``: the values are then channels of the raw keys, v is None, and memory
            holds each row once. head_dim may then be 576, with at most 512 of its channels as values.
        cache_seqlens: (batch,) int32, the slots in use before this call, left padding included. The call does not
            change them.
        k, v: (batch, seqlen_new, heads_kv, head_dim), with the head_dim of their caches, or both None if the cache is
            complete. v is None if v_cache is a view of k_cache.
        block_table: (batch, max_pages) int32. Entry n of a sequence is the page that holds its slots n * page_size to
            (n + 1) * page_size - 1. Entries beyond a sequence's length may hold anything. page_size is a power of two,
            at least 16.
        cache_leftpad: (batch,) int32, the first valid slot of each sequence. Without explicit positions, the token in
            this slot has position 0.
        num_splits: number of splits along the keys (flash-decoding). None: the backend chooses the number for speed. An
            explicit number also fixes the tile sizes, which makes results batch-invariant (Triton and CUDA): bitwise
            identical for any other sequences in the batch and any division of a sequence's tokens into calls.
        validate: check the tables first, which synchronises with the device. Without it, lengths are clamped to the
            capacity and page numbers to the cache, and new keys without a slot are dropped. So a wrong entry causes no
            access outside the buffers, and the results of other sequences stay right. The result of the sequence with
            the wrong entry is undefined.
        impl: as in ``attention``, and "cuda" if the extension was built (float16, bfloat16, head_dim 64, 96, 128 or
            256, seqlen_q up to 64).
        rotary, causal, softmax_scale, sinks, return_lse: as in ``attention``.

    Returns:
        out, like q but with the head_dim of v_cache, contiguous. With return_lse: (out, lse). lse is (batch, heads_q,
        seqlen_q), with the dtype that ``attention`` gives it.

    Raises:
        TypeError, ValueError: as in ``attention``. With validate, the message also names the sequence and the entry.
    """
    if unknown:
        refuse_unknown(attention_with_cache, unknown)
    new = k.shape[1] if isinstance(k, torch.Tensor) and k.ndim == 4 and not k.is_nested else 0
    tables = CacheTables(cache_seqlens, block_table, cache_leftpad, new)
    options = causal, softmax_scale, num_splits, impl, validate
    return plan_and_attend(q, CacheLayer(k_cache, v_cache), k, v, tables, rotary, options, sinks, return_lse)


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
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    num_splits: int | None = None,
    validate: bool = False,
    sinks: torch.Tensor | None = None,
    **unknown: Never,
):
    """Writes new raw keys and values to a cache, then attends with packed queries, any number of queries per sequence.

    Use it in a server, whose batches mix one-token steps, drafts, chunks and whole prompts. If every sequence has the
    same number of queries, ``attention_with_cache`` is simpler. The host reads no length, so a captured CUDA graph
    serves every batch of the same shapes. Engines that assign slots pass a slot_mapping to ``plan_cache``.

    Example:
        k_pages, v_pages = (torch.zeros(16, 16, 2, 64) for _ in "kv")  # (pages, page_size, heads_kv, head_dim)
        tables = {"block_table": torch.arange(16, dtype=torch.int32).view(2, 8)}
        q, k, v = (torch.randn(21, heads, 64) for heads in (8, 2, 2))  # one token, and a prompt of 20
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 21], [7, 0]))
        out = attention_varlen_with_cache(q, k_pages, v_pages, Rotary.rope(64), starts, lengths, 20, k=k, v=v, **tables)

    Args:
        q: (total_q, heads_q, head_dim). Rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) are the last tokens of sequence b.
        k_cache, v_cache: (sequences, capacity, heads_kv, head_dim), or with block_table (pages, page_size, heads_kv,
            head_dim). The call writes to them in place. The limits of head_dim are those of ``attention_with_cache``.
        cu_seqlens_q: (sequences + 1,) int32, non-decreasing from 0. A sequence may have no rows.
        cache_seqlens: (sequences,) int32, slots in use, left padding included. If this call appends k and v, the count
            is from before the call. Without k, the count includes the new tokens.
        max_seqlen_q: upper bound of the number of q rows of a sequence. Rows beyond it are not computed.
        k, v: (total_q, heads_kv, head_dim), the new raw keys and values of q's tokens, or both None. v is None if
            v_cache is a view of k_cache.
        block_table, cache_leftpad, num_splits, validate: as in ``attention_with_cache``.
        rotary, causal, softmax_scale, sinks, return_lse: as in ``attention``.
        impl: as in ``attention_with_cache``. "cuda" needs max_seqlen_q up to 64. To append, it also needs pages, or a
            contiguous cache whose capacity is a multiple of 16.

    Returns:
        out, like q but with the head_dim of v_cache. With return_lse: (out, lse). lse is (heads_q, total_q), with the
        dtype that ``attention`` gives it. Rows outside every sequence have out 0 and lse -inf. With sinks, the lse of
        such a row is the sink of its head.

    Raises:
        TypeError, ValueError: as in ``attention_with_cache``.
    """
    if unknown:
        refuse_unknown(attention_varlen_with_cache, unknown)
    new = Packed(cu_seqlens_q, max_seqlen_q, appends=k is not None)
    tables = CacheTables(cache_seqlens, block_table, cache_leftpad, new)
    options = causal, softmax_scale, num_splits, impl, validate
    return plan_and_attend(q, CacheLayer(k_cache, v_cache), k, v, tables, rotary, options, sinks, return_lse)


def plan_and_attend(q, layer: CacheLayer, k, v, tables: CacheTables, rotary, options, sinks, return_lse: bool):
    """Plans one call and runs it, without autocast. options: the arguments of ``plan_checked`` after rotary."""
    plan = plan_checked(q, layer, k, v, tables, rotary, *options)
    plan.watches, causal = False, options[0]
    fewer = tables.packed is None and 1 < q.shape[1] > tables.seqlen_new
    if causal and fewer and not torch.compiler.is_compiling():
        warn_of_short_caches("attention_with_cache", tables, q.shape[1], stacklevel=4)
    if sinks is not None:
        check_sinks(sinks, q)
        check_no_gradient("sinks", sinks)
    return plan._run(q, layer, k, v, sinks, return_lse)
