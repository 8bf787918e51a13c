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
                "        return rotary.local(window)\n",
                "        return rotary\n",
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
)
