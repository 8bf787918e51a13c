"""Writes new keys and values to a cache, and converts a cache to the arguments of kernels."""

from __future__ import annotations

import torch

from ...calls.cache_tables import CacheLayer, CacheTables, Packed
from ...calls.records import RotateCall
from ...schemes.rotary import Rotary
from ...triton_kernels import configs
from ...triton_kernels.arguments import _TAG as TAG
from ...triton_kernels.arguments import CacheLayout, TensorView, Variant, encode_ints
from ...triton_kernels.cached.append import append_rows
from .device import block_d, cached_vector_sizes, current_device
from .launcher import Launch, cdiv
from .rotated import rotate


def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes new keys and values, as ``CacheBackend`` describes. The call takes one launch, or two if k is rotated
    first."""
    if not k.numel() or not layer.k.numel() or not tables.capacity(layer.k):
        return
    if rotary is not None and rotary.changes_channels:
        k = rotate(k, RotateCall(rotary, None, tables, tables.capacity(layer.k)))
    layout = kernel_layout(layer, tables)
    with current_device(k):
        AppendLaunch(layer, k, v, tables, layout, append_key(layer, k, v)).run(layer, k, v)


view = tuple.__new__  # view(TensorView, fields) takes one function call, TensorView(*fields) takes two


class AppendLaunch:
    """The launch of ``append_rows`` for layers and new rows of equal shapes, strides and alignment."""

    def __init__(
        self,
        layer: CacheLayer,
        k: torch.Tensor,
        v: torch.Tensor | None,
        tables: CacheTables,
        layout: CacheLayout,
        key: tuple,
    ):
        """Prepares the launch. v: None if values are channels of the keys. layout: ``kernel_layout`` of the layer and
        the tables. key: the ``append_key``."""
        (seqlen, heads_kv, head_dim), head_dim_v = k.shape[-3:], 0 if v is None else v.shape[-1]
        new, batch, max_seqlen, cu_seqlens = tables.new, k.shape[0], seqlen, None
        if isinstance(new, Packed):
            batch = 1
            if new.slot_mapping is None:
                cu_seqlens = new.cu_seqlens_q
                batch, max_seqlen = cu_seqlens.shape[0] - 1, min(new.max_seqlen_q, seqlen)
        if v is None:
            vec = vector_of(key[2], k.dtype.itemsize, layer.k.stride(), key[0])
        elif layer.k_scale is None:
            vec = vector_of(key[2], k.dtype.itemsize, layer.k.stride(), layer.v.stride(), *key[:2])
        else:
            vec = min(cached_vector_sizes(layer.k, layer.v, k, v))
        page_size = 0 if tables.block_table is None else layer.k.shape[1]
        variant = Variant(
            head_dim,
            block_d(head_dim),
            vec=vec,
            page_size=page_size,
            block_m=configs.APPEND_ROWS,
            head_dim_v=head_dim_v,
            block_dv=block_d(head_dim_v) if head_dim_v else 0,
            padded_d=block_d(head_dim),
        )
        # The kernel addresses rows by slots and ignores leftpad. With leftpad, Triton would compile a second kernel.
        self._layout = layout if tables.leftpad is None else layout._replace(leftpad=None)
        self._strides = [stride_fields(x) for x in (layer.k, k, *(() if v is None else (layer.v, v)))]
        self._sizes = (cu_seqlens, seqlen, max_seqlen, heads_kv)
        grid = (cdiv(max_seqlen * heads_kv, configs.APPEND_ROWS) * batch,)
        self._launch = Launch(append_rows, grid, {"VARIANT": variant, **configs.options(configs.APPEND_WARPS)})

    def run(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        layout = self._layout
        if layer.k_scale is not None and layer.v_scale is not None:
            layout = layout._replace(**scale_fields(layer))
        to_k, of_k, *of_values = self._strides
        k_cache, new_k, v_cache, new_v = view(TensorView, (layer.k, *to_k)), view(TensorView, (k, *of_k)), None, None
        if v is not None:
            v_cache, new_v = view(TensorView, (layer.v, *of_values[0])), view(TensorView, (v, *of_values[1]))
        self._launch(k_cache, v_cache, new_k, new_v, layout, *self._sizes)


def append_key(layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> tuple:
    """Returns a key for launches of equal shapes: the strides of k and v, and ``alignment_key``. Launches with equal
    keys can share an ``AppendLaunch``."""
    if v is None:
        return k.stride(), None, alignment_key(layer.k, k)
    return k.stride(), v.stride(), alignment_key(*layer.rows, k, v)


def alignment_key(*tensors: torch.Tensor | None):
    """Returns 0 if all addresses are multiples of 16, else each address modulo 16. Triton compiles a separate
    kernel for addresses that are multiples of 16."""
    addresses = [x.data_ptr() & 15 for x in tensors if x is not None]
    return addresses if any(addresses) else 0


def vector_of(alignment, itemsize: int, *strides: tuple[int, ...]) -> int:
    """Returns ``device.vector_size`` of tensors from their ``alignment_key`` and strides."""
    if alignment:
        return 1
    merged = 0
    for each in strides:
        for stride in each[:-1]:
            merged |= stride
    return 1 if merged * itemsize % 16 else 16 // itemsize


def stride_fields(x: torch.Tensor) -> tuple[int, int, int]:
    """Returns the fields of ``TensorView`` after ptr, for x (batch, seqlen, heads, head_dim) or packed (total, heads,
    head_dim)."""
    stride = x.stride()
    batch = stride[0] if x.ndim == 4 else 0
    return (batch << 4) + TAG, (stride[-3] << 4) + TAG, (stride[-2] << 4) + TAG  # encode_int, inlined


def kernel_layout(layer: CacheLayer, tables: CacheTables, decode_seqlen: int = 0) -> CacheLayout:
    """Returns the tables and the layer's scales as the CacheLayout argument of kernels."""
    seqlens, block_table, leftpad, new, _ = tables
    slots, seqlen_new = (new.slot_mapping, tables.seqlen_new) if isinstance(new, Packed) else (None, new)
    numbers = encode_ints(seqlen_new, tables.capacity(layer.k), layer.k.shape[0], decode_seqlen)
    tensors = (seqlens, block_table, leftpad, slots, *(None,) * 6)
    layout = CacheLayout(*tensors, *numbers)
    return layout if layer.k_scale is None else layout._replace(**scale_fields(layer))


def scale_fields(layer: CacheLayer) -> dict[str, object]:
    """Returns the fields of ``CacheLayout`` that differ by layer."""
    k_scale, v_scale = layer.k_scale, layer.v_scale
    assert k_scale is not None and v_scale is not None
    strides = encode_ints(*k_scale.stride(), *v_scale.stride())
    names = ("k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head")
    return {"k_scale": k_scale, "v_scale": v_scale, **dict(zip(names, strides, strict=True))}
