"""Mutants: attention sinks, and the factor by the length of a sequence."""

from ..breaks import Group

GROUPS = (
    Group(
        "scales",
        "python/flashrope/operators/sinks.py",
        ("tests/operators/test_sinks.py", "-k", "not triton"),
        (
            ("a sink in the wrong head", "logits = sinks.to(lse.dtype)", "logits = sinks.roll(1).to(lse.dtype)"),
            ("lse leaves the sink out", "torch.logaddexp(lse, logits)", "lse"),
            ("all sinks are 0", "above = lse - logits", "above = lse"),
            (
                "a small sink's gradient loses digits",
                "    if gradients:",
                "    if False:",
            ),
            ("-inf minus -inf", ".clamp(min=torch.finfo(lse.dtype).min)", ""),
        ),
    ),
    Group(
        "scales",
        "python/flashrope/operators/length_scale.py",
        ("tests/rotary/test_length_scale.py", "-k", "not triton"),
        (
            (
                "short sequences are scaled down",
                "return max(1.0, 0.1 * math.log(",
                "return max(0.0, 0.1 * math.log(",
            ),
            (
                "a packed row has the factor of its neighbour",
                "row, right=True)",
                "row, right=False)",
            ),
            ("padding counts as keys", "        keys = keys - layout.leftpad.clamp(min=0)\n", "        pass\n"),
            ("new tokens do not count", "        keys = keys + layout.seqlen_new\n", "        pass\n"),
            (
                "new packed tokens do not count",
                "        keys = keys + layout.cu_seqlens_q.diff()\n",
                "        pass\n",
            ),
            (
                "rows are scaled down",
                "/ rotary.length_scale).log() + 1).clamp(min=1)",
                "/ rotary.length_scale).log() + 1)",
            ),
        ),
    ),
    Group(
        "scales",
        "triton_kernels/rotation.py",
        ("tests/operators/test_length_scale.py", "-k", "triton"),
        (
            (
                "the factor by length counts one key too many",
                "growth = tl.log(tl.maximum(length, 1).to(tl.float32) / scheme.length_scale)",
                "growth = tl.log(tl.maximum(length + 1, 1).to(tl.float32) / scheme.length_scale)",
            ),
        ),
    ),
)
