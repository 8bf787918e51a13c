"""An attention backend for vLLM: computes ragged batches over vLLM's pages with ``plan_cache``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from ...calls.cache_tables import CacheLayer, CacheTables, Packed
from ...calls.checks import MAX_HEAD_DIM
from ...operators.cache_plan import CachePlan, plan_cache
from ...schemes.rotary import Rotary
from .engine_memory import hook_worker
from .engine_plan import BACKEND, INT8, EnginePages, active_plan, check_cache_dtype, row_bytes, split_pages


class FlashropeBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32", INT8]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[FlashropeImpl]:
        return FlashropeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashropeMetadataBuilder]:
        return FlashropeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [16, 32, 64, 128, 256, 512, 1024]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Adds room for the scales of a quantized cache, in the layout that vLLM's own kernels use."""
        if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=2 * row_bytes(spec.head_size))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Returns the layouts in order of preference, or None if all are equally good. On the CPU the first is the
        layout in which the rows of one head in a page are contiguous, because the CPU kernels read this layout
        faster."""
        if not current_platform.is_cpu():
            return None
        return (KVCacheLayout.LBHNC, *(each for each in KVCacheLayout if each is not KVCacheLayout.LBHNC))

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or capability.major >= 8


@dataclass
class FlashropeMetadata(AttentionMetadata):
    """The batch of one step. All tensors are on the device."""

    tokens: int  # number of tokens of q, without padding
    tables: CacheTables  # the tables of the requests and their new tokens
    plans: dict[tuple, CachePlan] = field(default_factory=dict)  # by the properties in which layers may differ


class FlashropeMetadataBuilder(AttentionMetadataBuilder[FlashropeMetadata]):
    """Builds the metadata of a step. Kernel grids follow from the shapes of the tables, not from lengths. So a CUDA
    graph can hold the attention of batches whose requests have the same number of new tokens."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FlashropeMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("causal: expected causal attention for every request, got a request that sees later keys")
        requests, tokens = common.num_reqs, common.num_actual_tokens
        packed = Packed(
            common.query_start_loc[: requests + 1], common.max_query_len, slot_mapping=common.slot_mapping[:tokens]
        )
        # seq_lens already includes the new tokens.
        tables = CacheTables(common.seq_lens[:requests], common.block_table_tensor[:requests].contiguous(), new=packed)
        return FlashropeMetadata(tokens, tables)


class FlashropeImpl(AttentionImpl):
    """The attention of one layer. At its first run, while the engine starts, it looks up the scheme by the layer's
    index.

    A layer that shares the keys and values of an earlier layer gets that layer's pages and no new keys, because the
    earlier layer has written the new tokens.
    """

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        **others,
    ) -> None:
        config = get_current_vllm_config()
        plan = active_plan(config)
        if plan is None:
            raise ValueError('attention_backend: expected a model with a field "flashrope" for CUSTOM, got none')
        self.plan = plan
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, sliding_window
        self.sinks = sinks  # (num_heads,), a parameter of the model: a logit per head that joins every softmax
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name  # an attribute that vLLM reads
        self.scheme: tuple[Rotary, bool] | None = None  # the scheme, and whether the cache holds rotated keys
        self.pages: EnginePages | None = None
        self.layer: CacheLayer | None = None
        check_cache_dtype(kv_cache_dtype, config.model_config.dtype)
        given = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap or None,  # some models pass 0
            **others,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: not supported by flashrope, got {value!r}")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type: expected decoder self-attention, got {attn_type}")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.plan.digest not in rotary_embedding._ROPE_DICT.raw:
            raise RuntimeError(
                "flashrope: expected a model that gets its rotation from vLLM's get_rope, got one without"
            )
        hook_worker(current_platform.is_cpu())  # the worker's module is imported by now; it measures memory later

    def forward(
        self,
        layer,
        query: torch.Tensor,  # (tokens, heads_q, head_dim), raw; there may be rows of padding
        key: torch.Tensor | None,  # None: the layer reads the keys of another layer
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,  # as in split_pages
        attn_metadata: FlashropeMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.scheme is None:
            self.scheme = self._find_scheme(layer.layer_name)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: a quantized output is not supported by flashrope, got a scale")
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        n, padded = attn_metadata.tokens, output
        if n < query.shape[0]:
            query, output = query[:n], output[:n]
            key, value = (None if x is None else x[:n] for x in (key, value))
        if self.pages is None or self.pages.kv_cache is not kv_cache:
            self.pages = split_pages(kv_cache, self.head_size)
            self.layer = CacheLayer(*self.pages[1:])
            self.strides = tuple(x.stride() for x in self.pages[1:] if x is not None)
        own = self.layer
        assert own is not None
        k_pages = own.k
        alike = self.scheme, self.scale, query.shape, k_pages.shape, k_pages.dtype, self.strides
        if (plan := attn_metadata.plans.get(alike)) is None:
            rotary, rotated_keys = self.scheme
            plan = attn_metadata.plans[alike] = plan_cache(
                attn_metadata.tables,
                like=own,
                rotary=rotary,
                seqlen_q=n,
                heads_q=self.num_heads,
                dtype=query.dtype,
                softmax_scale=self.scale,
                rotated_keys=rotated_keys,
            )
        if output.is_contiguous():
            plan.attend(query, own, key, value, sinks=self.sinks, out=output.view(query.shape))
        else:
            output.copy_(plan.attend(query, own, key, value, sinks=self.sinks).view(output.shape))
        return padded

    def _find_scheme(self, layer_name: str) -> tuple[Rotary, bool]:
        index = extract_layer_index(layer_name)
        planned = self.plan.layers[index]
        if planned is None:
            raise ValueError(
                f"layer_types: the configuration has no attention in layer {index}, but vLLM runs attention there"
            )
        rotary, window, rotated_keys = planned
        if self.sliding_window != window:
            raise ValueError(
                f"sliding_window: expected {window} in layer {index}, as the model's configuration says, got "
                f"{self.sliding_window} from vLLM"
            )
        if rotary.head_dim != self.head_size:
            raise ValueError(f"head_size: expected {rotary.head_dim} in layer {index}, got {self.head_size} from vLLM")
        return rotary, rotated_keys
