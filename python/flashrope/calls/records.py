"""Describes the calls that a backend receives, apart from q, k and v: attention, attention with a cache, and rotate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from ..schemes.bands import Band, PositionMap
from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import over_rotated_keys
from .cache_tables import CacheTables

MAX_SPLITS = 256  # csrc/decode.h defines the same number


class Kept(NamedTuple):
    """Tensors that the forward saves for the backward. A tensor that is not saved has the shape (0,).

    rotated_k: rotated keys (copies, rows, heads_kv, channels), with k's dtype. If ``head_parts.copied_parts``
        returns a part, only this part's channels are saved, unless the call has whole_keys.
    table: cos and sin of explicit positions, float32 (rotations, batch, seqlen, 2, pairs).
    """

    rotated_k: torch.Tensor
    table: torch.Tensor


class KeptShapes(NamedTuple):
    """The shapes of the tensors in ``Kept``."""

    rotated_k: tuple[int, ...] = (0,)
    table: tuple[int, ...] = (0,)


class AttentionCall(NamedTuple):
    """One call of attention or attention_varlen, without q, k and v. The operators' schemas follow from its fields.

    Packed sequences (cu_seqlens_q is given): q (total_q, heads_q, head_dim), lse (heads_q, total_q).
    Otherwise: q (batch, seqlen_q, heads_q, head_dim), lse (batch, heads_q, seqlen_q).
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    positions: torch.Tensor | None = None  # (batch, seqlen) or (batch, seqlen, axes); batch is 1 if packed
    cu_seqlens_q: torch.Tensor | None = None  # (sequences + 1,) int32
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    # True: gradients are bitwise reproducible. False: a backend that has a faster nondeterministic backward uses it,
    # and gradients may differ from run to run by rounding. None: like False if the nondeterministic backward is
    # predicted to be faster and torch does not request deterministic algorithms, else like True.
    deterministic: bool | None = None
    # Whether rotated keys are kept with all channels, so that the backward of another backend can read them.
    whole_keys: bool = False

    @property
    def bands(self) -> tuple[Band, ...]:
        return self.rotary.bands_for(self.causal)

    @property
    def score_scale(self) -> float:
        """Returns softmax_scale times the scheme's temperature, applied to the float32 scores."""
        return self.softmax_scale * self.rotary.temperature

    def packed_sequences(self) -> Iterator[tuple[slice, slice, AttentionCall]]:
        """Yields (query rows, key rows, call) of every packed sequence. The call contains the positions of that
        sequence. The host reads cu_seqlens."""
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            rows, given = slice(q0, q1), self.positions
            sequence = self if given is None else self._replace(positions=given[:, rows])
            yield rows, slice(k0, k1), sequence


class CacheCall(NamedTuple):
    """One call of attention_with_cache, without q (batch, seqlen_q, heads_q, head_dim) and the caches. The operator's
    schema follows from its fields.

    If queries are packed, it is a call of attention_varlen_with_cache. Then q is (total_q, heads_q, head_dim), and lse
    is (heads_q, total_q).
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    tables: CacheTables
    num_splits: int = 0  # 0: the backend chooses it from the shapes
    rotated_keys: bool = False  # the cache holds keys that ``rotate`` has rotated

    @property
    def bands(self) -> tuple[Band, ...]:
        return self.rotary.bands_for(self.causal)

    @property
    def score_scale(self) -> float:
        return self.softmax_scale * self.rotary.temperature

    @property
    def positions(self) -> None:
        return None  # positions count from tables.leftpad

    def for_backend(self) -> CacheCall:
        """Returns the call that backends expect if the cache holds rotated keys. The bands of this call rotate only the
        queries."""
        return self._replace(rotary=over_rotated_keys(self.rotary))


class RotateCall(NamedTuple):
    """One call of rotate, without x (batch, seqlen, heads, head_dim).

    Row r is at position r, or at positions[..., r]. If tables are given, x holds new keys for a cache, which are the
    last keys of every sequence. x may then be packed, (total, heads, head_dim).
    """

    rotary: Rotary  # from over_rotated_keys: all its bands rotate queries in the same way
    positions: torch.Tensor | None = None  # (batch, seqlen) or (batch, seqlen, axes)
    tables: CacheTables | None = None
    capacity: int = 0  # largest number of slots of a sequence in that cache

    @property
    def position_map(self) -> PositionMap:
        return self.rotary.bands[0].queries


def refuse(impl: str | None, reason: str) -> None:
    """Raises ValueError if there is a reason why a backend cannot serve a call."""
    if reason:
        raise ValueError(f"impl={impl!r} cannot serve this call: {reason}")


def out_shape(q, v: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of out: q's shape, with v's head_dim. q: a tensor, or ``plans.Queries``."""
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q) -> tuple[int, ...]:
    """Returns the shape of lse: (batch, heads_q, seqlen_q), or packed (heads_q, total_q). q: a tensor, or
    ``plans.Queries``."""
    shape = q.shape
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])


def accumulation_type(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of lse and of the scores."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def unseen(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of queries that see no key: 0 and -inf."""
    return q.new_zeros(out_shape(q, v)), q.new_full(lse_shape(q), float("-inf"), dtype=accumulation_type(q))


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row (head_dim elements) of these tensors starts at a multiple of 16 bytes. All tensors must have
    the same dtype."""
    # The strides of dimensions of size 1 are checked, too, because kernels also compute addresses of rows that do not
    # exist.
    addresses, strides = 0, 0
    for x in tensors:
        addresses |= x.data_ptr()
        for stride in x.stride()[:-1]:
            strides |= stride
    return (strides * tensors[0].element_size() | addresses) % 16 == 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU. Without a GPU, when kernels are interpreted or compiled offline,
    returns 108, the number of an A100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 108
