"""Computes the forward of many queries over a KV cache, such as the next chunk of a prompt.

Raw keys and values are read in place, with or without pages. If a band rotates keys, ``rotate_cached_rows`` first
writes a rotated copy of them. The loops are in ``forward.py``. Sequences with few queries use ``decode.py``.
"""

import triton
import triton.language as tl

from ..arguments import decode_int
from ..attention.forward import attend_bands, query_tile, store_result
from ..attention.keys import CachedKeys, CopiedKeys, Keys, key_scales
from ..rotating.pairs import key_channels
from ..rows import head_view, value_channels
from ..tiles import copied_keys, find_cached_sequence, packed_row, query_program


@triton.jit(do_not_specialize=["seqlen_q", "rows_copied", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"])
def attention_chunks(
    q,
    k_cache,
    rotated_k,
    v_cache,
    result,
    scheme,
    cu_seqlens_q,
    cache,
    seqlen_q,
    rows_copied,
    max_seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    VARIANT: tl.constexpr,
):
    """Computes attention of queries that are the last tokens of cached sequences. With packed queries it skips
    sequences that the decode kernel serves.

    q: TensorView. k_cache, v_cache: TensorViews (batch or page, row, head). rotated_k: TensorView (copy, row, head).
    rows_copied: how many of a sequence's last keys rotated_k holds, the argument `rows` of copied_keys. result, scheme,
    cache: see arguments.py."""
    batch, head, first = query_program(max_seqlen_q, heads_q, VARIANT)
    seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
    skip = first >= seq.length_q
    if cu_seqlens_q is not None:
        skip |= seq.length_q <= decode_int(cache.decode_seqlen)
    if skip:
        return
    tile = query_tile(first, seq, packed_row(cu_seqlens_q, batch, seq.start_q, seqlen_q), scheme, VARIANT)
    head_kv = head // (heads_q // heads_kv)
    queries = head_view(q, batch, seq.start_q + first, head, VARIANT)
    if VARIANT.page_size > 0:
        k_rows, v_rows = head_view(k_cache, 0, 0, head_kv, VARIANT), head_view(v_cache, 0, 0, head_kv, VARIANT)
    else:
        k_rows = head_view(k_cache, batch, seq.start_k, head_kv, VARIANT)
        v_rows = head_view(v_cache, batch, seq.start_k, head_kv, VARIANT)
    row, first_copied = copied_keys(cache, cu_seqlens_q, seq, rows_copied)
    copied = CopiedKeys(rotated_k, row - first_copied, first_copied)
    scales = None
    if VARIANT.code_vec > 0:
        scales = key_scales(cache, head_kv)
    cached = CachedKeys(cache, scales, batch, seq.start_k)
    raw = Keys(k_rows, v_rows, key_channels(VARIANT), value_channels(VARIANT), 0, seq.length_k, cached)
    state = attend_bands(queries, tile, seq, raw, copied, head_kv, scheme, table_rows, VARIANT)
    store_result(state, result, cu_seqlens_q, seq, tile.rows, head, heads_q, seqlen_q, raw.channels_v, VARIANT)
