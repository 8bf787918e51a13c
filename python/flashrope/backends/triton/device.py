"""Helpers for all launches: the device, strides and alignment, and a scheme's tables on the device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton

from ...calls.records import aligned
from ...schemes.cos_sin import padded_pairs
from ...schemes.head_parts import Part
from ...schemes.lowered import Lowered, lower
from ...schemes.resident import kept_on_device
from ...schemes.rotary import Rotary
from ...triton_kernels.arguments import Variant
from .launcher import interpreted


class DeviceScheme(NamedTuple):
    """The result of ``lower(rotary, causal)``, and parts of it as int32 tensors on the device.

    bands: rows of LoweredBand. q_rotations: the rotation of each band's queries. k_copies: the rotation of each rotated
    copy of k. key_ranges: (copies, 2), ``Lowered.rotated_key_ranges``. maps: rows of RowMap, or None.
    """

    lowered: Lowered
    bands: torch.Tensor
    q_rotations: torch.Tensor
    k_copies: torch.Tensor
    key_ranges: torch.Tensor
    maps: torch.Tensor | None


@kept_on_device("band tables")
def scheme_on(rotary: Rotary, causal: bool, device: torch.device) -> DeviceScheme:
    lowered = lower(rotary, causal)
    values = (lowered.bands, lowered.q_rotations, lowered.k_copies, lowered.rotated_key_ranges, lowered.maps or None)
    tensors = (x if x is None else torch.tensor(x, dtype=torch.int32, device="cpu").to(device) for x in values)
    return DeviceScheme._make((lowered, *tensors))


@lru_cache(maxsize=1024)
def variant_of(
    rotary: Rotary,
    vec: int,
    *fields: int,
    head_dim_v: int = 0,
    aligned_maps: bool = False,
    code_vec: int = 0,
    one_run: bool = False,
    stored: bool = False,
    axes: int = 0,
    parts: int = 1,
    channels: tuple[Part, ...] = (),
    first_value: int = -1,
    shares: bool = False,
    key_groups: int = 1,
) -> Variant:
    """Returns the VARIANT of a kernel. fields: the fields of Variant from num_bands to block_n. head_dim_v: 0 means
    that v has the head_dim of q."""
    rotary_dim, head_dim_v = rotary.rotary_dim if rotary.changes_channels else 0, head_dim_v or rotary.head_dim
    variant = Variant(rotary.head_dim, block_d(rotary.head_dim), rotary_dim, rotary.interleaved, vec, *fields)
    rotated_keys = any(band.keys_rotated for band in rotary.bands)
    return variant._replace(
        head_dim_v=head_dim_v,
        block_dv=block_d(head_dim_v),
        padded_d=variant.block_d,
        aligned_maps=aligned_maps,
        rotated_keys=rotated_keys,
        code_vec=code_vec,
        one_run=one_run,
        stored=stored,
        axes=axes,
        parts=parts,
        first_channel=0 if rotary.interleaved or not rotary.changes_channels else rotary.first_channel,
        channels=channels,
        first_value=first_value,
        shares=shares,
        key_groups=key_groups,
    )


@cache
def block_d(head_dim: int) -> int:
    """Returns the number of channels of a tile that holds head_dim channels."""
    return 2 * padded_pairs(head_dim)


def vector_size(*tensors: torch.Tensor) -> int:
    """Returns the alignment of all addresses and strides, in elements: 16 // itemsize if every address and stride is a
    multiple of 16 bytes, else 1."""
    return 16 // tensors[0].element_size() if aligned(*tensors) else 1


def cached_vector_sizes(k_cache: torch.Tensor, v_cache: torch.Tensor, *others: torch.Tensor) -> tuple[int, int]:
    """Returns (vec, code_vec) of Variant, for a cache and other tensors of q's dtype."""
    if k_cache.dtype == others[0].dtype:
        return vector_size(*others, k_cache, v_cache), 0
    steps = 16
    for x in (k_cache, v_cache):
        for number in (x.data_ptr(), *x.stride()[:-1]):
            steps |= number
    return vector_size(*others), steps & -steps


def fits_int32_offsets(x: torch.Tensor) -> bool:
    """Whether offsets within a tile of up to 128 rows fit in 32 bits."""
    return x.stride(-3) < 2**24 or x.shape[-3] == 1


def with_int32_offsets(x: torch.Tensor) -> torch.Tensor:
    return x if fits_int32_offsets(x) else x.contiguous()


_HERE = nullcontext()


def current_device(x: torch.Tensor):
    """Returns a context in which x's device is the current device."""
    here = not x.is_cuda or torch.cuda.current_device() == x.get_device()
    return _HERE if here else torch.cuda.device(x.device)


def compute_capability(device: torch.device) -> int | str:
    """Returns the compute capability, such as 80 or 90, or under ROCm the architecture, such as "gfx942".

    Without a GPU, returns the compute capability of the compilation target, or 80 in the interpreter.
    """
    if device.type == "cuda":
        return _compute_capability(device)
    return 80 if interpreted() else triton.runtime.driver.active.get_current_target().arch


@cache
def _compute_capability(device: torch.device) -> int | str:
    if torch.version.hip and not interpreted():
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]  # gfx942:sramecc+:xnack-
    major, minor = (8, 0) if interpreted() else torch.cuda.get_device_capability(device)
    return 10 * major + minor
