"""Mutants: CPU backend, its C++ kernels."""

from ..breaks import Group

CPU = (
    "tests/kernels/test_cpu.py",
    "tests/rotary/test_bands.py",
    "tests/operators/test_accuracy.py",
    "tests/operators/test_varlen.py",
    "-k",
    "cpu and not compiled",
)
CPU_DECODE = (
    "tests/kernels/test_cpu.py",
    "tests/caches/test_decode.py",
    "tests/caches/test_cache.py",
    "-k",
    "cpu and not compiled",
)
SCALES = ("tests/rotary/test_query_scales.py",)
CPU_COMPILED = ("tests/kernels/test_cpu_compiled.py::test_tiles",)

GROUPS = (
    Group(
        "cpu",
        "python/flashrope/backends/cpu/pieces.py",
        CPU,
        (
            (
                "the triangle of a band is one row short",
                "causal=True, width=banded, **again))",
                "causal=True, width=max(banded - 1, 0), **again))",
            ),
            (
                "the corner before a chunk is one key short",
                "corner = min(rows, width) - 1  #",
                "corner = max(min(rows, width) - 2, 0)  #",
            ),
            (
                "the rectangle between corner and chunk is dropped",
                "        pieces.append(clipped(x, rows, x - width + 1 + corner, width - 1 - corner, **again))\n",
                "\n",
            ),
            (
                "rows that see all keys see one too few",
                "            clipped(first, width - first, 0, first),\n",
                "            clipped(first, width - first, 1, first - 1),\n",
            ),
            (
                "keys ahead start at the row's own",
                "_past_pieces(max(1 - stop, 1), 1 - start, seqlen_q, seqlen_k, ahead)",
                "_past_pieces(max(1 - stop, 0), 1 - start, seqlen_q, seqlen_k, ahead)",
            ),
            (
                "merged pieces lack their weights",
                "        weight = (scatter_tile(piece_lse, piece) - total).exp_()[..., None]\n",
                "        weight = (scatter_tile(piece_lse, piece) * 0).exp_()[..., None]\n",
            ),
            (
                "reversed pieces are put back as they are",
                "    return x.flip(3) if piece.reversed else x\n\n\ndef attn_mask",
                "    return x\n\n\ndef attn_mask",
            ),
            (
                "the mask of a narrow band is one key wide",
                "unseen = (distance < 0) | (distance >= piece.width)",
                "unseen = (distance < 0) | (distance > piece.width)",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/rotation.py",
        (*SCALES, *CPU),
        (
            (
                "a growing table starts at the wrong row",
                "x[first - low : first - low + rows] for x",
                "x[first - low + 1 : first - low + rows + 1] for x",
            ),
            (
                "gradients of the CPU are rotated forth, not back",
                "target.addcmul_(swapped, sin, value=-1)",
                "target.addcmul_(swapped, sin)",
            ),
            (
                "keys are scaled by log n",
                "factors = QueryFactors.of(call) if is_query else KEY_FACTORS",
                "factors = QueryFactors.of(call)",
            ),
            (
                "queries of the CPU lack the factor on rotated channels",
                "return cls(call.rotary.query_scale.by_position, call.rotary.rotated_scale)",
                "return cls(call.rotary.query_scale.by_position)",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/calls.py",
        SCALES,
        (
            (
                "log n of the CPU counts from 0",
                "(self.factor * torch.log(positions + 1)).clamp(min=self.floor)",
                "(self.factor * torch.log(positions.clamp(min=1))).clamp(min=self.floor)",
            ),
            (
                "steps of log n begin with the position after",
                "torch.floor((positions + self.first) / self.every)",
                "torch.floor(positions / self.every)",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/attention.py",
        CPU,
        (
            (
                "dK of a band is not rotated back",
                "        band_k = rotate(grad_rotated_k, k_rotation, rotary, inverse=True)\n",
                "        band_k = grad_rotated_k\n",
            ),
            (
                "dV of the second piece is lost",
                "            grad_v = _accumulate(grad_v, piece_v[..., :head_dim_v], v.shape, *keys, piece)\n",
                "            grad_v = _accumulate(None, piece_v[..., :head_dim_v], v.shape, *keys, piece)\n",
            ),
            (
                "the gradient of lse is ignored",
                "        grad_out = _add_channel(grad_out, grad_lse.transpose(1, 2))\n",
                "        grad_out = _add_channel(grad_out, 0 * grad_lse.transpose(1, 2))\n",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/cached.py",
        CPU_DECODE,
        (
            (
                "a page too few is gathered",
                "low, high = slot // page_size, -(-stop // page_size)",
                "low, high = slot // page_size, stop // page_size",
            ),
            (
                "keys of the second block count from 0",
                "k_rotation = rotation_for(band_k, call, keys, position + first, False)",
                "k_rotation = rotation_for(band_k, call, keys, first, False)",
            ),
            (
                "page numbers are not clamped",
                ".to(torch.int64).clamp_(0, k_cache.shape[0] - 1)",
                ".to(torch.int64)",
            ),
            (
                "the first slot of a page is skipped",
                "skip, count = slot - low * page_size, stop - slot",
                "skip, count = slot - low * page_size + (low > 0), stop - slot",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/csrc/forward.cpp",
        CPU_COMPILED,
        (
            (
                "the accumulator is not rescaled",
                "store(acc + r * padded_dim + c, load(acc + r * padded_dim + c) * decay);",
                "store(acc + r * padded_dim + c, load(acc + r * padded_dim + c));",
            ),
            (
                "an edge block is not masked",
                "const bool masked = key < full_from || key + BLOCK_N > full_until;",
                "const bool masked = key < full_from || key + BLOCK_N > full_until + 1;",
            ),
            (
                "a query group reads the wrong key head",
                "head_kv(b * call.heads_kv + head_q / (call.heads_q / call.heads_kv)) {}",
                "head_kv(b * call.heads_kv + head_q % call.heads_kv) {}",
            ),
            (
                "keys lie one position early",
                "rotate_row(x, row, call.k_copies[copy], b, first + t, call);",
                "rotate_row(x, row, call.k_copies[copy], b, first + (t ? t - 1 : 0), call);",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/csrc/backward.cpp",
        ("tests/kernels/test_cpu_compiled.py::test_tiles",),
        (
            (
                "gradients of compiled kernels ignore that of lse",
                "delta[row] = product - (backward.grad_lse ? backward.grad_lse[lse_row] : 0);",
                "delta[row] = product;",
            ),
            (
                "dQ of compiled kernels lacks the scale",
                "grad_q.get() + row * width, head_dim, float(call.scale));",
                "grad_q.get() + row * width, head_dim, 1);",
            ),
            (
                "only one query head of a group counts in compiled kernels",
                "head < (head_kv + 1) * group; ++head) {",
                "head < head_kv * group + 1; ++head) {",
            ),
            (
                "a tile of queries is dropped",
                "const int64_t end_row = std::min<int64_t>(last_key + band.band.stop - shift, call.seqlen_q);",
                "const int64_t end_row = std::min<int64_t>(key + band.band.stop - shift, call.seqlen_q);",
            ),
            (
                "a row sees the key before the band's first",
                "const int end = int(std::clamp<int64_t>(nearest + band.stop, first, BLOCK_M));",
                "const int end = int(std::clamp<int64_t>(nearest + band.stop + 1, first, BLOCK_M));",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/csrc/decode.cpp",
        ("tests/kernels/test_cpu_compiled.py", "-k", "chunks_of_keys or layouts or neighbors"),
        (
            (
                "a block of cached keys is rotated one block off",
                "        cos[r][m] = c * block_cos[m] + s * block_sin[m];",
                "        cos[r][m] = c;",
            ),
            (
                "a query head reads another's rows",
                "call.q.row<const T>(sequence, row, head_kv * group + r / call.seqlen_q);",
                "call.q.row<const T>(sequence, row, head_kv * group + r % group);",
            ),
            (
                "pages begin one slot early",
                "call.block_table[sequence * call.max_pages + slot / call.page_size];",
                "call.block_table[sequence * call.max_pages + (slot + 1) / call.page_size];",
            ),
            (
                "left padding is read",
                "int64_t page = sequence, slot = first_slot + key + t;",
                "int64_t page = sequence, slot = key + t;",
            ),
            (
                "chunks are combined without their weights",
                "const float weight = exp(partial[head_dim] - row_max);",
                "const float weight = 1;",
            ),
            (
                "the last key of a sequence is left out",
                "key + CHUNK < seqlen ? key + CHUNK : seqlen);",
                "key + CHUNK < seqlen ? key + CHUNK : seqlen - 1);",
            ),
            (
                "log n of compiled decoding counts from the chunk",
                "const int64_t row = r % call.seqlen_q, position = first_position + row;",
                "const int64_t row = r % call.seqlen_q, position = first_position - first_key + row;",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/csrc/common.h",
        ("tests/kernels/test_cpu_compiled.py", "-k", "tiles or chunks_of_keys or rounded"),
        (
            (
                "bfloat16 is cut, not rounded",
                "uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)",
                "uint16_t(bits >> 16)",
            ),
            (
                "the window of compiled kernels is one key too wide",
                "return position - stop + 1 > 0 ? position - stop + 1 : 0;",
                "return position - stop > 0 ? position - stop : 0;",
            ),
            (
                "interleaved pairs rotate backwards",
                "      y[2 * m] = a * cos[m] - b * sin[m];",
                "      y[2 * m] = a * cos[m] + b * sin[m];",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/cpu/tiles.py",
        ("tests/kernels/test_cpu_compiled.py", "tests/operators/test_accuracy.py", "-k", "compiled"),
        (
            (
                "queries are aligned with the first key",
                "band.queries, seqlen_k - seqlen_q, True)",
                "band.queries, 0, True)",
            ),
            (
                "all bands read the first copy of the keys",
                "_table(tables[-1]), copies.index(band.keys))",
                "_table(tables[-1]), 0)",
            ),
            ("a batch reads the first one's table", "x.stride(0) if x.ndim == 4 and x.shape[0] > 1 else 0)", "0)"),
            (
                "the gradient of lse is left out",
                "    c.grad_lse = None if grad_lse is None else grad_lse.data_ptr()\n",
                "",
            ),
        ),
    ),
)
