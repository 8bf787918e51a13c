"""Computes the schemes' formula with loops over scalars, for one batch and one head."""

from __future__ import annotations

import cmath
import math

import torch


def by_hand(p, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of a problem.

    positions(i, j): the two positions by which query i and key j are rotated, or None if i does not see j.
    """
    rotary, rows = p.rotary, []
    q, k, v = (x[0, :, 0].tolist() for x in (p.q, p.k, p.v))
    pairs = len(rotary.frequencies)
    channels = [(2 * m, 2 * m + 1) if rotary.interleaved else (m, m + pairs) for m in range(pairs)]
    for r, query in enumerate(q):
        i = r + len(k) - len(q)
        scale, scores = rotary.head_dim**-0.5 * rotary.temperature, {}
        if rotary.log_n_scale:
            train_length, clip = rotary.log_n_scale
            log_n = math.log(max(i, 0) + 1) / math.log(train_length)
            scale *= max(log_n, 1.0) if clip else log_n
        for j, key in enumerate(k):
            if (found := positions(i, j)) is None:
                continue
            of_q, of_k = found
            score = sum(x * y for x, y in zip(query[2 * pairs :], key[2 * pairs :], strict=True))
            for (a, b), theta in zip(channels, rotary.frequencies, strict=True):
                turned = complex(query[a], query[b]) * cmath.exp(1j * theta * of_q)
                score += (turned * (complex(key[a], key[b]) * cmath.exp(1j * theta * of_k)).conjugate()).real
            scores[j] = score * scale
        lse = math.log(sum(map(math.exp, scores.values()))) if scores else -math.inf
        rows.append(([sum(math.exp(s - lse) * v[j][c] for j, s in scores.items()) for c in range(len(v[0]))], lse))
    out, lse = zip(*rows, strict=True)
    return torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)
