"""Converts the document of every token to the boundaries that ``attention_varlen`` takes."""

from __future__ import annotations

import torch

__all__ = ["cu_seqlens_of"]


def cu_seqlens_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Returns the boundaries of packed documents, for ``attention_varlen``.

    Use it if a data loader or a mask of FlexAttention says which document every token belongs to. Call it once per
    batch, not in every layer: it waits for the device.

    Example:
        document_ids = torch.tensor([[0, 0, 0, 1, 1], [7, 7, 8, 8, 8]])  # two rows with two documents each
        cu_seqlens = cu_seqlens_of(document_ids)  # [0, 3, 5, 7, 10]
        longest = int(cu_seqlens.diff().max())
        q, k, v = (torch.randn(2, 5, heads, 64) for heads in (8, 2, 2))
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out = attention_varlen(*packed, Rotary.rope(64), cu_seqlens, cu_seqlens, longest, longest).view(q.shape)

    Args:
        document_ids: (total,) or (batch, seqlen), integers. The tokens of a document are neighbors in a row. Documents
            do not continue in the next row. Padding is a document of its own.

    Returns:
        (documents + 1,) int32 on the same device, the first token of every document, then the number of all tokens.
        Tokens are counted over all rows.

    Raises:
        TypeError, ValueError: document_ids is not a tensor of integers with one or two dimensions, or a document stands
            at two places in a row. The message says what was expected.
    """
    if not isinstance(document_ids, torch.Tensor) or document_ids.dtype.is_floating_point or document_ids.is_complex():
        got = document_ids.dtype if isinstance(document_ids, torch.Tensor) else type(document_ids).__name__
        raise TypeError(f"document_ids: expected a tensor of integers, got {got}")
    if document_ids.ndim not in (1, 2):
        raise ValueError(f"document_ids: expected shape (total,) or (batch, seqlen), got {tuple(document_ids.shape)}")
    ids = document_ids if document_ids.ndim == 2 else document_ids[None]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, first = begins.nonzero(as_tuple=True)
    documents = torch.stack((row, ids[row, first].to(torch.int64)), 1)
    seen, count = documents.unique(dim=0, return_counts=True)
    if (count > 1).any():
        again = seen[count > 1][0].tolist()
        raise ValueError(
            f"document_ids: expected the tokens of a document side by side, got document {again[1]} at several places "
            f"of row {again[0]}"
        )
    starts = row * ids.shape[1] + first
    return torch.cat((starts, starts.new_tensor([ids.numel()]))).to(torch.int32)
