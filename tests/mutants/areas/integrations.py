"""Mutants: Hugging Face, vLLM."""

from ..breaks import Group

CONVERTED = tuple(f"tests/integrations/test_{name}.py" for name in ("transformers", "refusals", "untested"))

GROUPS = (
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
            (
                "another window is accepted",
                "    if sliding_window != scheme.window:\n",
                "    if False:\n",
            ),
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
            (
                "a sliding window is left out",
                "    return rotary.local(window)\n",
                "    return rotary\n",
            ),
            (
                "the table of the first length serves all",
                "        if length != seqlen:\n",
                "        if not length:\n",
            ),
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
    Group(
        "integrations",
        "python/flashrope/integrations/vllm/backend.py",
        (
            *(f"tests/integrations/vllm_engine/test_{name}.py" for name in ("start", "families")),
            *("-k", "Gemma3 or builds_differently"),
        ),
        (
            ("vLLM's scale is ignored", "            softmax_scale=self.scale,\n", ""),
            ("another window is accepted", "        if self.sliding_window != window:\n", "        if False:\n"),
            (
                "new keys go where the lengths say",
                "            slot_mapping=attn_metadata.slot_mapping,\n",
                "",
            ),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/transformers/continuous_batching.py",
        ("tests/integrations/test_continuous_batching.py",),
        (
            ("the new token counts as cached", "contiguous(), lengths - new, None)", "contiguous(), lengths, None)"),
            ("a page begins one slot late", "// size).to(torch.int32)", "// size + 1).to(torch.int32)"),
            ("the length of another request", "    lengths = starts.diff()\n", "    lengths = starts.diff().roll(1)\n"),
            (
                "pages of another scheme are read",
                "        if conversion is not self.rotary_bands:\n",
                "        if False:\n",
            ),
            ("a table that grows is accepted", 'if getattr(scheme, "grows_from", math.inf) < math.inf:', "if False:"),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/transformers/caches.py",
        ("tests/integrations/test_stale_caches.py",),
        (
            ("a filled cache is taken for empty", "    elif int(length):\n", "    elif int(length) > 1000:\n"),
            (
                "an accepted cache keeps no mark",
                "    else:\n        setattr(cache, MARK, mark)\n    return cache\n",
                "    return cache\n",
            ),
            ("a returned cache keeps no mark", "        setattr(cache, MARK, _mark_of(decoder))\n", "        pass\n"),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/hf_config.py",
        ("tests/integrations/test_hf_config.py", "tests/integrations/test_position_maps.py"),
        (
            ("llama3 blends the other way", "(1 - kept) * f / factor + kept * f", "kept * f / factor + (1 - kept) * f"),
            ("longrope's long table begins one token late", "seqlen > length else", "seqlen > length + 1 else"),
            ("dynamic grows from the start", "/ length - (factor - 1)", "/ length"),
            ("the attention factor is not squared", "float(attention_factor) ** 2", "float(attention_factor)"),
            (
                "YaRN's mscale_all_dim is left out",
                "_mscale(factor, mscale) / _mscale(factor, mscale_all_dim)",
                "_mscale(factor, mscale)",
            ),
            ("pairs of the wrong channels", "interleaved=of_family.interleaved)", "interleaved=False)"),
            (
                "angles of the wrong sign",
                "frequencies=tuple(-f for f in rotary.frequencies)",
                "frequencies=rotary.frequencies",
            ),
            ("chunks are ignored", "        rotary = _dual_chunk(rotary, chunks)\n", "        pass\n"),
            ("layers that do not rotate do", 'slides and layer_type == "full_attention"', "False"),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/distributed.py",
        ("tests/distributed/test_context_parallel.py",),
        (
            (
                "chunks in the order of the ranks",
                "return torch.cat((*first, *second[::-1]), dim)",
                "return torch.cat((*first, *second), dim)",
            ),
            (
                "the last key of a chunk is left out",
                "end = (chunk + 1) * rows.shape[1]",
                "end = (chunk + 1) * rows.shape[1] - 1",
            ),
            (
                "each rank has two neighbouring chunks",
                "return rank, 2 * ranks - 1 - rank\n",
                "return 2 * rank, 2 * rank + 1\n",
            ),
            ("the sinks of another rank", ".chunk(group.size())[group.rank()]", ".chunk(group.size())[0]"),
            ("key heads are repeated in turn", "x.repeat_interleave(repeats, 2) if", "x.repeat(1, 1, repeats, 1) if"),
            (
                "the padded heads are returned",
                "return _sequence_for_heads(out, group)[:, :, :heads_q]",
                "return _sequence_for_heads(out, group)",
            ),
        ),
    ),
    Group(
        "integrations",
        "python/flashrope/integrations/distributed.py",
        ("tests/distributed/test_dtensor.py",),
        (
            (
                "heads are separated from their key heads",
                "    if heads_kv % _shards((spec, dim) for spec, _, dim in specs) == 0:\n",
                "    if True:\n",
            ),
        ),
    ),
)
