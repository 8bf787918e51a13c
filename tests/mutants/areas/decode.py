"""Mutants: Triton: decoding, pages."""

from ..breaks import Group
from ..selections import DECODE

FIRST = ("tests/caches/test_decode.py::test_rows_before_the_first_key_that_see_keys_ahead", *DECODE)

GROUPS = (
    Group(
        "decode",
        "triton_kernels/decode.py",
        FIRST,
        (
            (
                "the first new key overwrites the last old one",
                "        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token\n",
                "        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token - 1\n",
            ),
            (
                "new keys go to a full cache",
                "        exists = (token < count) & (slot < capacity)\n",
                "        exists = token < count\n",
            ),
            (
                "pages that do not exist are written to",
                "    return page, row, exists & (page >= 0) & (page < decode_int(cache.pages))\n",
                "    return page, row, exists & (page >= 0)\n",
            ),
            (
                "values are stored as keys",
                "    tl.store(v_cache.ptr + to_v + channels[None, :], new_v, mask=mask)\n",
                "    tl.store(v_cache.ptr + to_v + channels[None, :], new_k, mask=mask)\n",
            ),
            (
                "the positions of a decode step are not shifted",
                "    shift = tl.maximum(-seq.ahead, 0) if scheme.maps is None else 0\n",
                "    shift = 0\n",
            ),
            (
                "cached keys are rotated one position off",
                "column + keys.shift, column, keys.length)\n",
                "column + keys.shift + 1, column, keys.length)\n",
            ),
            (
                "a split misses its first block",
                "    return blocks.begin + (split - blocks.begin % num_splits + num_splits) % num_splits",
                "    return blocks.begin + num_splits + (split - blocks.begin % num_splits + num_splits) % num_splits",
            ),
            (
                "splits share a block",
                "        for block in tl.range(begin, blocks.end, num_splits):\n",
                "        for block in tl.range(begin, blocks.end, tl.maximum(num_splits - 1, 1)):\n",
            ),
            (
                "queries of a group are mixed up",
                "    token, head = rows // group, program.head_kv * group + rows % group\n",
                "    token, head = rows // group, program.head_kv * group + rows // seq.length_q % group\n",
            ),
            (
                "log n of decoding goes by the row",
                "    scale = query_scale(scheme, rows.token, rows.position, seq.length_k)[:, None]\n",
                "    scale = query_scale(scheme, rows.token, rows.token, seq.length_k)[:, None]\n",
            ),
            (
                "splits are combined without their weights",
                "        weights = tl.exp2((log_sum - finite) * LOG2_E)\n",
                '        weights = tl.where(log_sum > float("-inf"), 1.0, 0.0)\n',
            ),
            (
                "lse of combined splits lacks the maximum",
                "finite + tl.log2(tl.where(empty, 1.0, total)) * LN_2",
                "tl.log2(tl.where(empty, 1.0, total)) * LN_2",
            ),
            (
                "the last split is left out",
                "        at, mask = (first + splits) * rows + lse_row, first + splits < num_splits\n        log_sum",
                "        at, mask = (first + splits) * rows + lse_row, first + splits < num_splits - 1\n        log_sum",
            ),
        ),
    ),
    Group(
        "decode",
        "triton_kernels/decode.py",
        ("tests/caches/test_decode_varlen.py", "-k", "triton and negative_slots"),
        (
            (
                "a negative slot is written to",
                "        exists = (token < count) & (slot >= 0)\n",
                "        exists = token < count\n",
            ),
        ),
    ),
    Group(
        "decode",
        "triton_kernels/kv_cache.py",
        FIRST,
        (
            (
                "left padding is ignored",
                "        first = clamp(tl.load(cache.leftpad + batch), 0, end)\n",
                "        first = clamp(tl.load(cache.leftpad + batch), 0, 0)\n",
            ),
            (
                "new keys are not counted",
                "0, capacity) + new, capacity)",
                "0, capacity), capacity)",
            ),
            (
                "lengths beyond the capacity are believed",
                "    end = tl.minimum(clamp(tl.load(cache.seqlens + batch), 0, capacity) + new, capacity)\n",
                "    end = clamp(tl.load(cache.seqlens + batch), 0, capacity) + new\n",
            ),
            (
                "the page of the next slot is read at page edges",
                "+ slot // PAGE_SIZE)",
                "+ (slot + 1) // PAGE_SIZE)",
            ),
            (
                "another sequence's pages are read",
                "cache.block_table + batch.to(tl.int64) * max_pages",
                "cache.block_table + (batch.to(tl.int64) + 1) * max_pages",
            ),
            (
                "page numbers are not clamped",
                "    return clamp(page, 0, decode_int(cache.pages) - 1).to(tl.int64)\n",
                "    return page.to(tl.int64)\n",
            ),
            (
                "the last page is clamped away",
                "    return clamp(page, 0, decode_int(cache.pages) - 1).to(tl.int64)\n",
                "    return clamp(page, 0, decode_int(cache.pages) - 2).to(tl.int64)\n",
            ),
        ),
    ),
)
