"""The most instructions per tensor-core instruction that a hot loop may take: what makes one worse fails the gate.

A little above what the compilers give today, so that a release that schedules otherwise passes and a lost vector load,
a mask in the inner loop or a rotation that crept in does not.
"""

from __future__ import annotations

import triton


def _by_size(sm80: tuple[float, float], sm90: tuple[float, float]) -> dict[tuple[int, int], float]:
    """{(architecture, head_dim): instructions}, given for head_dim 64 and 128."""
    return {(80, 64): sm80[0], (80, 128): sm80[1], (90, 64): sm90[0], (90, 128): sm90[1]}


# Instructions per HMMA (sm_80) or HGMMA (sm_90) in bf16, by kernel and the gate's scheme. What is not named is not
# limited.
CEILINGS = {
    ("attention_forward", "rope"): _by_size((5.2, 4.5), (40, 33)),
    ("attention_forward", "rerope"): _by_size((5.2, 4.5), (40, 33)),
    ("attention_grad_kv", "rope"): _by_size((4.6, 4.3), (22.5, 19.3)),
    ("attention_grad_kv", "rerope"): _by_size((4.6, 4.3), (22.5, 12)),
    ("attention_grad_q", "rope"): _by_size((3.8, 3.1), (24.5, 18.2)),
    ("attention_grad_q", "rerope"): _by_size((3.8, 3.1), (24.5, 18.2)),
    ("attention_decode", "rope contiguous"): _by_size((40, 37), (40, 37)),
    ("attention_decode", "rope paged"): _by_size((51, 48), (51, 48)),
    ("attention_decode", "rerope contiguous"): _by_size((21.5, 19), (21.5, 19)),
    ("attention_decode", "rerope paged"): _by_size((32, 30), (32, 30)),
}
# Newer compilers (seen: 3.9) have tiles of their own in configs.py, where those of 3.6 would spill.
NEWER = {
    ("attention_forward", "rope"): {(80, 64): 6.7},
    ("attention_forward", "rerope"): {(80, 64): 6.7, (80, 128): 5.5},
}


def most_instructions(kernel: str, scheme: str, arch: int, head_dim: int) -> float | None:
    """The ceiling of a kernel in bf16 under this Triton, None where it has none."""
    newer = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
    for table in (NEWER, CEILINGS) if newer else (CEILINGS,):
        if (arch, head_dim) in table.get((kernel, scheme), {}):
            return table[kernel, scheme][arch, head_dim]
    return None
