"""Mutants of the schemes, the tables, the launches, the CPU backend, the caches and the integrations."""

from .breaks import Group

SCALES = ("tests/test_query_scales.py",)
SCHEMES = ("tests/test_rotary.py", "tests/test_bands.py", "tests/test_cos_sin.py", "tests/test_lowering.py")
CPU = ("tests/test_cpu.py", "tests/test_bands.py", "tests/test_accuracy.py", "tests/test_varlen.py", "-k", "cpu")
CPU_COMPILED = ("tests/test_cpu_compiled.py",)
CPU_DECODE = ("tests/test_cpu.py", "tests/test_decode.py", "tests/test_cache.py", "-k", "cpu")
CACHES = ("tests/test_cache.py", "tests/test_cache_layers.py")
LAUNCHES = ("tests/test_launches.py", "tests/test_decode_triton.py", "tests/test_backward.py", "tests/test_splits.py")
CONVERTED = ("tests/integrations",)

GROUPS = (
    Group(
        "schemes",
        "python/flashrope/rotary.py",
        SCHEMES,
        (
            ("PI multiplies", "[f / factor for f in self.frequencies]", "[f * factor for f in self.frequencies]"),
            (
                "YaRN's temperature is not squared",
                "(0.1 * math.log(factor) + 1) ** 2 if",
                "(0.1 * math.log(factor) + 1) if",
            ),
            (
                "YaRN forgets an earlier temperature",
                "temperature=self.temperature * temperature)",
                "temperature=temperature)",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/tables.py",
        SCHEMES,
        (
            (
                "HoPE keeps one pair too few",
                "kept = sum(f >= 2 * math.pi / train_length for",
                "kept = sum(f > 2.1 * math.pi / train_length for",
            ),
            (
                "HoPE cuts at pi / L",
                "kept = sum(f >= 2 * math.pi / train_length for",
                "kept = sum(f >= math.pi / train_length for",
            ),
            (
                "ablation 1 keeps the pairs it should drop",
                "tuple(0.0 if edge < f < 2 * edge else f",
                "tuple(0.0 if f < 2 * edge else f",
            ),
            ("ablation 3 ends at pi / L", "tuple((2 * edge) ** (m / last)", "tuple(edge ** (m / last)"),
            ("NTK-aware divides by D", "decay = [2 * m / (dim - 2) for m", "decay = [2 * m / dim for m"),
            ("NTK-fixed starts at m = 0", "decay = [2 * (m + 1) / dim for m", "decay = [2 * m / dim for m"),
            (
                "YaRN's ramp runs the other way",
                "changed.append(f / factor * interpolated + f * (1 - interpolated))",
                "changed.append(f * interpolated + f / factor * (1 - interpolated))",
            ),
            ("YaRN's ramp is not rounded", "low, high = math.floor(low), math.ceil(high)", "low, high = low, high"),
            ("CoPE clips one pair too few", "last = r == len(slow) - 1", "last = r == len(slow)"),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/axes.py",
        ("tests/test_axial.py", "tests/test_mrope.py", "-k", "not triton"),
        (
            (
                "axial tables repeat the first axis",
                "tuple(a for a, count in enumerate(counts) for _ in range(count))",
                "tuple(0 * a for a, count in enumerate(counts) for _ in range(count))",
            ),
            (
                "the tables of the axes are in the order of the axes, whatever axis says",
                "return tuple(next(remaining[a]) for a in order), order",
                "return tuple(f for table in tables for f in table), order",
            ),
            (
                "an axis has the table of half as many pairs",
                "geometric_table(base, 2 * entry)",
                "geometric_table(base**2, 2 * entry)",
            ),
            ("axes need not add up", "    if sum(counts) != pairs:\n", "    if sum(counts) > 2 * pairs:\n"),
            (
                "interleaved sections take turns to the end",
                "m % axes if m < axes * sections[m % axes] else 0 for",
                "m % axes for",
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/scheme_bands.py",
        SCHEMES,
        (
            (
                "ReRoPE's constant distance is off by one",
                "return Band(window, math.inf, slope, window - window * slope)",
                "return Band(window, math.inf, slope, window - window * slope + 1)",
            ),
            (
                "Leaky ReRoPE grows by the factor",
                '        slope = 1.0 / positive("factor", factor, finite=False)\n',
                '        slope = 1.0 * positive("factor", factor, finite=False)\n',
            ),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/bands.py",
        SCHEMES,
        (
            (
                "the mirror image of a band is off by one",
                "Band(1 - stop, 1 - start, slope, -offset)",
                "Band(-stop, -start, slope, -offset)",
            ),
            (
                "the mirror image keeps the offset",
                "Band(1 - stop, 1 - start, slope, -offset)",
                "Band(1 - stop, 1 - start, slope, offset)",
            ),
            ("bands may overlap", "        if start < before:\n", "        if start < before - 1:\n"),
            ("a cut band loses its last distance", "stop=min(band.stop, stop))", "stop=min(band.stop, stop - 1))"),
        ),
    ),
    Group(
        "schemes",
        "python/flashrope/backends/base.py",
        ("tests/test_accuracy.py", "tests/test_identities.py", "tests/test_decode.py", "-k", "not triton"),
        (
            (
                "log n lacks its floor",
                "1 / math.log(train_length), 1.0 if clip else 0.0",
                "1 / math.log(train_length), 0.0",
            ),
            (
                "log n counts one token more",
                "1 / math.log(train_length), 1.0 if clip else 0.0",
                "1 / math.log(train_length + 1), 1.0 if clip else 0.0",
            ),
            (
                "the temperature is left out",
                "return self.softmax_scale * self.rotary.temperature",
                "return self.softmax_scale",
            ),
            (
                "packed queries lose their last row",
                "rows = slice(starts[begin], starts[begin] + (end - begin) * length)",
                "rows = slice(starts[begin], starts[begin] + (end - begin) * length - 1)",
            ),
            (
                "left padding beyond the end is believed",
                "[(min(max(pad, 0), end), end) for pad",
                "[(max(pad, 0), end) for pad",
            ),
            (
                "a slot lies in the next page",
                "entry = (slot // page_size).clamp(",
                "entry = ((slot + 1) // page_size).clamp(",
            ),
            (
                "new keys go to a page that does not exist",
                "fits & (page >= 0) & (page < k_cache.shape[0])",
                "fits & (page < k_cache.shape[0])",
            ),
        ),
    ),
    Group(
        "tables",
        "python/flashrope/cos_sin.py",
        (*SCHEMES, *SCALES),
        (
            (
                "tables are built in float32",
                "    positions = positions.to(torch.float64)\n",
                "    positions = positions.to(torch.float32)\n",
            ),
            ("the coarse rows lack the offset", "slope * blocks + offset]", "slope * blocks]"),
            (
                "the coarse table is one row short",
                "return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()",
                "return 1 << max(positions // FINE_ROWS - 1, 0).bit_length()",
            ),
            (
                "coarse rows are a fine row apart",
                "torch.arange(coarse, dtype=torch.float64) * FINE_ROWS",
                "torch.arange(coarse, dtype=torch.float64) * (FINE_ROWS + 1)",
            ),
            ("the table lacks the factor on rotated channels", "each[:, FINE_ROWS:] *= factors", "each *= 1"),
            ("padded pairs rotate", "pad(cos, missing, value=1.0)", "pad(cos, missing)"),
        ),
    ),
    Group(
        "tables",
        "python/flashrope/lowering.py",
        (*SCHEMES, *SCALES),
        (
            (
                "a step between bands has the wrong sign",
                "PositionMap(rotation.slope - before.slope, rotation.offset - before.offset)",
                "PositionMap(before.slope - rotation.slope, before.offset - rotation.offset)",
            ),
            (
                "a copy of keys ends with its first band",
                "            max(stop for (_, stop), row in zip(ranges, rows, strict=True) if row[3] == copy) for copy in k_copies\n",
                "            min(stop for (_, stop), row in zip(ranges, rows, strict=True) if row[3] == copy) for copy in k_copies\n",
            ),
            (
                "keys have the factor on rotated channels",
                "number(of_q, True, rotary.rotated_scale), number(of_k, False)",
                "number(of_q, True, rotary.rotated_scale), number(of_k, False, rotary.rotated_scale)",
            ),
            ("the last rotating pair is left out", "max((m + 1 for m, frequency", "max((m for m, frequency"),
        ),
    ),
    Group(
        "launches",
        "python/flashrope/backends/triton/attention.py",
        LAUNCHES,
        (
            (
                "log n is applied to the keys",
                "scheme = self.scheme._replace(log_n_factor=0.0, log_n_floor=1.0)",
                "scheme = self.scheme",
            ),
            (
                "queries lack a program for the last tile",
                "(cdiv(self.max_seqlen_q, tile.block_m) * self.batch * self.heads_q,),\n            tensor_view(q)",
                "(self.max_seqlen_q // tile.block_m * self.batch * self.heads_q,),\n            tensor_view(q)",
            ),
            (
                "key heads lack their last program",
                "cdiv(heads, configs.ROTATE_HEADS),\n            len(copies),",
                "max(heads // configs.ROTATE_HEADS, 1),\n            len(copies),",
            ),
            (
                "the table is too short for the keys",
                "coarse_rows(max(self.seqlen_q, self.seqlen_k))",
                "coarse_rows(self.seqlen_q)",
            ),
            (
                "statistics are too small for packed sequences",
                "(_rows(out) // configs.STATISTICS_ROWS + self.batch) * configs",
                "(-(-_rows(out) // configs.STATISTICS_ROWS)) * configs",
            ),
            (
                "rotated queries without log n are not made",
                "if not any(self.lowered.q_rotations) and not self.scheme.log_n_factor:",
                "if not any(self.lowered.q_rotations):",
            ),
            (
                "rows outside every sequence are not cleared",
                "        out.zero_()  # rows outside every sequence\n",
                "        pass\n",
            ),
        ),
    ),
    Group(
        "launches",
        "python/flashrope/backends/triton/cached.py",
        LAUNCHES,
        (
            (
                "the workspace of a window is one key short",
                "beyond = max(self.lowered.k_stops) - 1  #",
                "beyond = max(self.lowered.k_stops) - 2  #",
            ),
            (
                "the table ends at the queries",
                "rows = coarse_rows(max(self.max_seqlen_q, self.capacity))",
                "rows = coarse_rows(self.max_seqlen_q)",
            ),
            (
                "partial results of packed queries are too few",
                "min(self.seqlen_q, self.batch * self.decode_seqlen)\n",
                "min(self.seqlen_q, self.decode_seqlen)\n",
            ),
        ),
    ),
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
        (*CPU, *SCALES),
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
                "factors = QueryFactors.of(call) if is_query else OF_KEYS",
                "factors = QueryFactors.of(call)",
            ),
            (
                "queries of the CPU lack the factor on rotated channels",
                "return cls(call.log_n, call.rotary.rotated_scale)",
                "return cls(call.log_n)",
            ),
        ),
    ),
    Group(
        "cpu",
        "python/flashrope/backends/base.py",
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
            ("page numbers are not clamped", ".to(torch.int64).clamp_(0, k_cache.shape[0] - 1)", ".to(torch.int64)"),
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
        "caches",
        "python/flashrope/cache/contiguous.py",
        CACHES,
        (
            (
                "a full cache takes one more token",
                "if longest + seqlen_new > self.capacity:",
                "if longest + seqlen_new > self.capacity + 1:",
            ),
            (
                "tokens are counted twice",
                "            self.seqlens.add_(seqlen_new)\n",
                "            self.seqlens.add_(2 * seqlen_new)\n",
            ),
            (
                "truncating keeps the padding",
                "        self._pad([min(pad, length) for pad, length in zip(self._padding, self._lengths, strict=True)])\n",
                "        self._pad(list(self._padding))\n",
            ),
            (
                "the padding of a step is forgotten",
                "        self._count(step.seqlen_new)\n        self._pad(step.padding)\n",
                "        self._count(step.seqlen_new)\n",
            ),
        ),
    ),
    Group(
        "caches",
        "python/flashrope/cache/paged.py",
        CACHES,
        (
            (
                "a fork shares the reserved pages",
                "shared = parent.pages[: -(-parent.length // self.page_size)]",
                "shared = parent.pages[:]",
            ),
            (
                "a fork does not hold its pages",
                "            self._references[page] += 1\n            self._set(child, n, page)\n",
                "            self._set(child, n, page)\n",
            ),
            (
                "appending writes into a shared page",
                "if shared is not None and references[shared] - copied[shared] > 1:",
                "if shared is not None and references[shared] - copied[shared] > 2:",
            ),
            (
                "a page at the edge is not reserved",
                "end = -(-(sequence.length + seqlen_new) // self.page_size)",
                "end = (sequence.length + seqlen_new) // self.page_size",
            ),
            (
                "truncating keeps a page",
                "self._give_back(shortened, -(-length // self.page_size))",
                "self._give_back(shortened, length // self.page_size + 1)",
            ),
            (
                "a freed page that others share is free",
                "            if not self._references[page]:\n",
                "            if self._references[page] < 2:\n",
            ),
            (
                "an undone step keeps its pages",
                "            self._references[page] = 0\n            self._free.append(page)\n",
                "            self._references[page] = 0\n",
            ),
            (
                "the table keeps a page that was given back",
                "            self._set(sequence, len(sequence.pages), UNUSED)\n",
                "            pass\n",
            ),
            (
                "only the keys of a shared page are copied",
                "            for pool in (self.k, self.v):\n",
                "            for pool in (self.k,):\n",
            ),
            (
                "a fork forgets its padding",
                "child = _Sequence(self._take_row(), shared, parent.length, parent.leftpad)",
                "child = _Sequence(self._take_row(), shared, parent.length)",
            ),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/transformers/attention_function.py",
        CONVERTED,
        (
            (
                "padding on the left is ignored",
                "return attention_with_cache(q, k, v, rotary, end, cache_leftpad=first, **options)",
                "return attention_with_cache(q, k, v, rotary, end, **options)",
            ),
            (
                "a padded width changes the softmax scale",
                'options["softmax_scale"] = head_dim**-0.5 if scaling is None else scaling',
                'options["softmax_scale"] = scaling',
            ),
            (
                "sinks are left out",
                'options = {"softmax_scale": scaling, "sinks": s_aux}',
                'options = {"softmax_scale": scaling, "sinks": None}',
            ),
            (
                "gradients see the padding",
                "torch.stack((rows[:-1], rows[:-1] + first), -1)",
                "torch.stack((rows[:-1], rows[:-1]), -1)",
            ),
            ("another window is accepted", "    if sliding_window != scheme.window:\n", "    if False:\n"),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/transformers/masks.py",
        CONVERTED,
        (
            (
                "the position of the first query counts the padding",
                "    answer[2] = q_offset - first\n",
                "    answer[2] = q_offset\n",
            ),
            (
                "the last key is left out",
                "    answer[1] = q_offset + q_length - kv_offset\n",
                "    answer[1] = q_offset + q_length - kv_offset - 1\n",
            ),
            (
                "packed sequences run into one another",
                "    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]\n",
                "    starts[:, 1:] = False\n",
            ),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/transformers/layer_schemes.py",
        CONVERTED,
        (
            ("a sliding window is left out", "        return rotary.local(window)\n", "        return rotary\n"),
            ("the table of the first length serves all", "        if length != seqlen:\n", "        if not length:\n"),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/vllm/plan.py",
        ("tests/integrations/test_vllm_plan.py", "tests/integrations/vllm_engine"),
        (
            (
                "the prefix hash leaves the scheme out",
                "layers = [[layer.rotary.text, layer.window] for layer in self.layers]",
                'layers = [["", layer.window] for layer in self.layers]',
            ),
        ),
    ),
)
