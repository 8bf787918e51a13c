"""Merges attention of the same rows to several sets of keys by the lse of each, as ring attention does."""

from __future__ import annotations

import torch


def add_partial(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merges the result of more keys into out (..., rows, head_dim) and lse (..., rows), in place.

    more, more_lse: the result of attention of the same rows to more keys. A row that has seen no key has lse -inf.
    """
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == -torch.inf, 0)
    out.mul_((lse - base).exp()[..., None]).addcmul_(more, (more_lse - base).exp()[..., None])
    lse.copy_(total)
