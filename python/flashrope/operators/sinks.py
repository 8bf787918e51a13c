"""Adds attention sinks: a logit per head that joins the softmax of every row and has no value."""

from __future__ import annotations

import torch


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, gradients: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of attention whose softmax also counts the sinks. The results have gradients with respect to
    out, lse and sinks.

    With the sum of a row's exponentials Z = exp(lse) and a sink s, the weights shrink by the factor
    Z / (Z + exp(s)) = sigmoid(lse - s), and the new lse is ln(Z + exp(s)). This is exact for any kernel's out and lse.
    (Agarwal et al., gpt-oss model card, 2025, section 2.2; Miller, 2023, with s = 0.)

    Args:
        out: (..., seqlen_q, heads_q, head_dim).
        lse: (..., heads_q, seqlen_q), float32 or float64, natural log. It is -inf for rows without keys, whose new lse
            is the sink.
        sinks: (heads_q,). -inf: the head has no sink.
        gradients: whether gradients may be needed. If not, the host queues fewer operations.
    """
    logits = sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]  # (heads_q, 1); -inf - -inf is NaN
    above = lse - logits
    share = torch.sigmoid(above)  # the keys' share of the softmax
    if gradients:  # the gradient of sigmoid(x) contains 1 - sigmoid(x), which loses digits where sigmoid(x) is near 1
        share = torch.where(above > 0, 1 - torch.sigmoid(-above), share)
    return (out * share.transpose(-1, -2).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, logits)
