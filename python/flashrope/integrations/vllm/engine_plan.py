"""Plans the scheme of every layer of a served model, checks its configuration, and keeps the plans of this process.

This file also makes views of vLLM's pages for the cache calls. Importing this file does not import vLLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import partial
from typing import NamedTuple

import torch

from ...calls.checks import MAX_HEAD_DIM, MAX_NARROW_HEAD_DIM
from ...schemes.bands import shared_map
from ...schemes.families import FAMILIES
from ...schemes.rotary import Rotary
from ..scheme_options import FIELD, keeps_raw_keys, naming_field, read_field, training_length
from ..transformers.layer_schemes import LayerScheme, attending_layers, check_sees_all, layer_type_of, sliding_window_of
from .configured import asked, holder_of_field, origin_of

ARCHITECTURES = tuple(sorted(each.vllm for each in FAMILIES.values() if each.vllm))
BACKEND = "CUSTOM"  # vLLM's name for a backend of a plugin
BACKEND_PATH = "flashrope.integrations.vllm.backend.FlashropeBackend"
INT8 = "int8_per_token_head"  # vLLM's name for a quantized cache
CHOSEN_FOR_TWO_WIDTHS = ("TRITON_ATTN", "FLASH_ATTN")  # backends that vLLM sets if layers differ in head_dim
MODEL_DTYPES = {"float16", "bfloat16", "float32"}
SPECULATION = ("ngram", "suffix")  # methods that draft from the text, without a draft model that has its own attention


class Layer(NamedTuple):
    """Describes the attention of one layer."""

    rotary: Rotary
    window: int | None  # the model's own sliding window, in keys
    rotated_keys: bool = False  # whether the cache holds rotated keys


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """The schemes under which a model is served.

    Attributes:
        layers: the layers in order. None: a layer without attention, such as a recurrent layer of Qwen3-Next.
        stock: the model's own schemes, whose rotary embeddings are turned off.
    """

    layers: tuple[Layer | None, ...]
    stock: frozenset[Rotary]

    @property
    def attending(self) -> list[tuple[int, Layer]]:
        """Returns the layers that have attention, with their indices."""
        return [(index, layer) for index, layer in enumerate(self.layers) if layer is not None]

    @property
    def digest(self) -> str:
        """Returns 32 hexadecimal digits. Caches are only interchangeable between plans with the same digits."""
        layers = [layer and [layer.rotary.text, layer.window, layer.rotated_keys] for layer in self.layers]
        return hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        """Returns a description of every kind of layer: its layers, its scheme, and the form of its keys."""
        layers_of: dict[Layer, list[int]] = {}
        for index, layer in self.attending:
            layers_of.setdefault(layer, []).append(index)
        return "; ".join(_describe(layer, indices) for layer, indices in layers_of.items())


def _describe(layer: Layer, indices: list[int]) -> str:
    kind = "all keys" if layer.window is None else f"window {layer.window}"
    keys = "rotated" if layer.rotated_keys else "raw"
    return f"layers {_ranges(indices)} ({kind}): {layer.rotary!r}, {keys} keys in the cache"


def _ranges(indices: list[int]) -> str:
    """Returns ascending numbers as text. Numbers that follow one another are a range, as in 0-2, 5."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ", ".join(f"{part[0]}-{part[-1]}" if part[1:] else str(part[0]) for part in parts)


def make_plan(config) -> EnginePlan:
    """Returns the plan of a VllmConfig whose model has a field "flashrope".

    Raises:
        TypeError, ValueError: the configuration is not supported. The message names the argument.
    """
    model = config.model_config
    hf_config = model.hf_text_config
    holder, origin = holder_of_field(model), origin_of(model)
    options = read_field(holder, partial(_training_length, model), origin)
    raw_keys = keeps_raw_keys(holder, origin)
    _check_model(model, hf_config)
    with naming_field(origin):
        _check_windows(model.max_model_len, options)
    plan = EnginePlan(*_layers(hf_config, options, model.max_model_len, raw_keys, origin))
    widths = {layer.rotary.head_dim for _, layer in plan.attending}
    _check_engine(config, CHOSEN_FOR_TWO_WIDTHS if len(widths) > 1 else ())
    for head_dim in widths:
        _check_head_dim(head_dim, config.cache_config.cache_dtype)
    return plan


def _check_head_dim(head_dim: int, cache_dtype: str) -> None:
    largest, cache = (
        (MAX_NARROW_HEAD_DIM, f" in a cache of {cache_dtype}") if cache_dtype == INT8 else (MAX_HEAD_DIM, "")
    )
    if head_dim % 8 or head_dim > largest:
        raise ValueError(f"head_dim: expected a multiple of 8 up to {largest}{cache}, got {head_dim}")


def _training_length(model, config, name: str) -> int:
    overrides = getattr(model, "hf_overrides", None)
    if isinstance(overrides, dict) and "max_position_embeddings" in overrides:
        raise ValueError(
            f"{name}: expected the training length in tokens, because hf_overrides replaces max_position_embeddings, "
            "got true, which stands for the replaced max_position_embeddings"
        )
    return training_length(config, name)


# ---- layers


def _layers(hf_config, options: dict, max_model_len: int, raw_keys: bool, origin: str):
    layers: list[Layer | None] = [None] * hf_config.num_hidden_layers
    schemes: dict[tuple, Layer] = {}
    stock = set()
    for index in attending_layers(hf_config):
        key = layer_type_of(hf_config, index), sliding_window_of(hf_config, index)
        if key not in schemes:
            own = Rotary.from_hf_config(hf_config, key[0])
            with naming_field(origin):
                scheme = _scheme(hf_config, key, options, own.head_dim)
            schemes[key] = _layer(scheme, max_model_len, raw_keys)
            stock.add(own)
        layers[index] = schemes[key]
    with naming_field(origin):
        check_sees_all(options, ((layer.window, any(layer.rotary.frequencies)) for layer in schemes.values()))
    return tuple(layers), frozenset(stock)


def _scheme(hf_config, key: tuple, options: dict, head_dim: int) -> LayerScheme:
    layer_type, window = key
    scheme = LayerScheme(hf_config, layer_type, window, True, options)
    if scheme.rotary.head_dim != head_dim:
        raise ValueError(f"rotary: expected head_dim {head_dim} as in the model, got {scheme.rotary.head_dim}")
    if scheme.rotary.axis:
        raise ValueError("rotary: expected a scheme of one-dimensional positions, got an axial one")
    return scheme


def _layer(scheme: LayerScheme, max_model_len: int, raw_keys: bool) -> Layer:
    if scheme.grows_from < max_model_len:
        raise ValueError(
            f"max_model_len: expected at most {scheme.grows_from}, beyond which the frequencies of this model's rope "
            f"type depend on the length of each sequence, got {max_model_len}"
        )
    rotary = scheme.rotary
    rotates_once = shared_map(rotary.bands) is not None and rotary.head_dim <= MAX_NARROW_HEAD_DIM
    return Layer(rotary, scheme.window, rotates_once and not raw_keys)


# ---- checks


def _check_model(model, hf_config) -> None:
    if model.architecture not in ARCHITECTURES:
        raise ValueError(
            "architecture: expected a tested architecture, which rotates only through vLLM's get_rope: "
            f"{', '.join(ARCHITECTURES)}; got {model.architecture}"
        )
    if model.runner_type != "generate":
        raise ValueError(f"runner: expected 'generate', got {model.runner_type!r}")
    for name in (
        "attn_logit_softcapping",
        "attention_chunk_size",
        "layer_rope_theta",
        "llama_4_scaling",
    ):
        if getattr(hf_config, name, None):
            raise ValueError(f"{name}: not supported by flashrope, got {_get(hf_config, name)}")
    if getattr(hf_config, "alibi", False):
        raise ValueError("alibi: expected a model that rotates, got a bias on its scores")
    for name in ("use_bidirectional_attention", "is_encoder_decoder"):
        if getattr(hf_config, name, False):
            raise ValueError(f"{name}: expected causal self-attention in every layer, got {_get(hf_config, name)}")
    if getattr(hf_config, "is_causal", True) is False:
        raise ValueError("is_causal: expected causal self-attention in every layer, got False")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype: expected {', '.join(sorted(MODEL_DTYPES))}, got {dtype}")


def _get(config, name: str):
    return repr(getattr(config, name))


def _check_engine(config, chosen_by_vllm: tuple[str, ...] = ()) -> None:
    cache = config.cache_config
    check_cache_dtype(cache.cache_dtype, config.model_config.dtype)
    size = cache.block_size
    if size is not None and (size < 16 or size & (size - 1)):
        raise ValueError(f"block_size: expected 16, 32, 64, 128, ..., got {size}")
    attention = config.attention_config
    chosen = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    for backend in chosen:
        name = getattr(backend, "name", backend)
        if name not in (None, BACKEND, *chosen_by_vllm):
            raise ValueError(f"attention_backend: expected None or {BACKEND}, which flashrope registers, got {name}")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(config.parallel_config, name, 1)
        if size > 1:
            raise ValueError(f"{name}: expected 1, got {size}; shards of one sequence's keys are not supported")
    if getattr(config, "kv_transfer_config", None) is not None:
        raise ValueError(
            "kv_transfer_config: connectors are not supported by flashrope (a store may be shared with engines whose "
            "keys are rotated or whose scheme differs), got one"
        )
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and speculative.method not in SPECULATION:
        raise ValueError(
            f"speculative_config: expected a method without a draft model, {', '.join(SPECULATION)}, got "
            f"{speculative.method!r}"
        )


def check_cache_dtype(cache_dtype: str, dtype) -> None:
    """Raises ValueError for a cache type that the kernels cannot read. cache_dtype: vLLM's name. dtype: the model's
    dtype."""
    name = str(dtype).removeprefix("torch.")
    if cache_dtype in ("auto", name, INT8):
        return
    why = ""
    if cache_dtype.startswith("fp8"):
        why = ", whose numbers GPUs below sm_89 convert in software"
    if cache_dtype.startswith("int4"):
        why = ", whose keys of 4 bits cost too much loss"
    raise ValueError(f"kv_cache_dtype: expected auto or {name}, the model's dtype, or {INT8}, got {cache_dtype}{why}")


def _check_windows(max_model_len: int, options: dict) -> None:
    windows = {"rerope": options.get("rerope")}
    windows |= {name: options.get(name, (None,))[0] for name in ("leaky_rerope", "string", "self_extend")}
    for name, window in windows.items():
        if isinstance(window, int) and window >= max_model_len:
            raise ValueError(
                f"{name}: expected a window of less than max_model_len = {max_model_len} (no distance would lie "
                f"beyond it), got {window}"
            )


# ---- pages


SCALE_BYTES = 4  # a float32 scale after the quantized values of a row


class EnginePages(NamedTuple):
    """The cache of one layer: vLLM's tensor and views of it, as ``plan_cache`` expects them."""

    kv_cache: torch.Tensor
    k: torch.Tensor  # (blocks, block_size, heads_kv, head_dim), or quantized values
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # (blocks, block_size, heads_kv), the scales of quantized values
    v_scale: torch.Tensor | None = None


def row_bytes(head_size: int) -> int:
    """Returns the number of bytes of one quantized key or value, including its scale."""
    return head_size + SCALE_BYTES


def split_pages(kv_cache: torch.Tensor, head_size: int) -> EnginePages:
    """Returns the keys, values and scales in vLLM's cache, as views.

    kv_cache: (blocks, heads_kv, block_size, columns), with any strides of the first three dimensions. The columns of
    one slot and head are K | V, 2 * head_size columns. In a quantized cache (int8) they are K | scale of K | V | scale
    of V.
    """
    rows = kv_cache.transpose(1, 2)
    if kv_cache.dtype != torch.int8:
        return EnginePages(kv_cache, *rows.split(head_size, dim=-1))
    half, floats = row_bytes(head_size), rows.view(torch.float32)
    k, v = rows[..., :head_size], rows[..., half : half + head_size]
    return EnginePages(kv_cache, k, v, floats[..., head_size // 4], floats[..., (half + head_size) // 4])


# ---- the plans of this process


_plans: dict[str, EnginePlan] = {}  # {digest: plan}


def remember(plan: EnginePlan) -> None:
    _plans[plan.digest] = plan


def active_plan(config) -> EnginePlan | None:
    """Returns the plan of a VllmConfig that was checked in this process, or in the process that sent it. Returns None
    for a model without the field, which runs on stock vLLM."""
    if config is None or config.model_config is None or not asked(config):
        return None
    digest = digest_of(config)
    if digest is None:
        raise RuntimeError(
            "flashrope: expected a VllmConfig that the flashrope plugin has checked, got one without the plugin's "
            "entry in additional_config"
        )
    if digest not in _plans:
        plan = make_plan(config)
        if plan.digest != digest:
            raise RuntimeError("flashrope: expected the scheme that the configuration was checked for, got another one")
        _plans[digest] = plan
    return _plans[digest]


def check_backend() -> None:
    """Checks that vLLM's CUSTOM backend is this package's.

    Raises:
        RuntimeError: another plugin has registered CUSTOM, so its attention would get keys that are not rotated.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum[BACKEND].get_path()
    if path != BACKEND_PATH:
        raise RuntimeError(f"attention_backend: expected {BACKEND} to be {BACKEND_PATH}, got {path} of another plugin")


def digest_of(config) -> str | None:
    additional = getattr(config, "additional_config", None)
    return additional.get(FIELD) if isinstance(additional, dict) else None
