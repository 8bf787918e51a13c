"""The scheme of every layer of a served model, what the plugin refuses, and the plans of this process.

It also reads ``dual_chunk_attention_config`` (Qwen2.5-1M) as the option dual_chunk of the field, and vLLM's pages as
the cache calls take them. Importing this file does not import vLLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import partial
from typing import NamedTuple

import torch

from ...backends.quantized import PER_BYTE
from ...configs.dual_chunk import CHUNKS, read_chunks
from ...configs.families import FAMILIES
from ...operators.checks import MAX_NARROW_HEAD_DIM
from ...rotary.bands import shared_map
from ...rotary.rotary import Rotary
from ..options import FIELD, keeps_raw_keys, read_field, training_length
from ..transformers.schemes import LayerScheme, layer_type_of, sliding_window_of

ARCHITECTURES = tuple(sorted(each.vllm for each in FAMILIES.values() if each.vllm))
BACKEND = "CUSTOM"  # vLLM's name for a backend from outside
BACKEND_PATH = "flashrope.integrations.vllm.backend.FlashropeBackend"
CODES = {"int8_per_token_head": torch.int8, "int4_per_token_head": torch.uint8}  # by vLLM's name of a cache dtype
MODEL_DTYPES = {"float16", "bfloat16", "float32"}
SPECULATION = ("ngram", "suffix")  # drafts from the text; others have a draft model, with attention of its own


class Layer(NamedTuple):
    """One layer's attention."""

    rotary: Rotary
    window: int | None  # the model's own sliding window, in keys
    rotated_keys: bool = False  # in the cache


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a served model computes.

    Attributes:
        layers: by layer index.
        stock: the model's own schemes, whose rotary embeddings are turned off.
    """

    layers: tuple[Layer, ...]
    stock: frozenset[Rotary]

    @property
    def digest(self) -> str:
        """Returns 32 hexadecimal digits. If two plans differ in them, their caches are not interchangeable."""
        layers = [[layer.rotary.text, layer.window, layer.rotated_keys] for layer in self.layers]
        return hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        """Returns every scheme with its layers."""
        layers_of: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.layers):
            layers_of.setdefault(layer, []).append(index)
        if len(layers_of) == 1:
            return f"all {len(self.layers)} layers {_describe(self.layers[0])}"
        return "; ".join(f"layers {', '.join(map(str, n))} {_describe(layer)}" for layer, n in layers_of.items())


def _describe(layer: Layer) -> str:
    return f"{layer.rotary!r}, {'rotated' if layer.rotated_keys else 'raw'} keys in the cache"


def asked(config) -> bool:
    """Whether the model of a VllmConfig asks for a scheme."""
    return _asking(config) is not None


def make_plan(config) -> Plan:
    """Returns the plan of a VllmConfig whose model asks for one.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came.
    """
    model = config.model_config
    hf_config = model.hf_text_config
    field = _asking(config)
    options, raw_keys = read_field(field, partial(_training_length, model)), keeps_raw_keys(field)
    _check_model(model, hf_config)
    _check_engine(config)
    _check_windows(model.max_model_len, options)
    plan = Plan(*_layers(hf_config, options, model.max_model_len, raw_keys))
    head_dim = plan.layers[0].rotary.head_dim
    if head_dim % 8 or head_dim > MAX_NARROW_HEAD_DIM:
        raise ValueError(f"head_dim: expected a multiple of 8 up to {MAX_NARROW_HEAD_DIM}, got {head_dim}")
    return plan


def _asking(config):
    """Returns the configuration with the field, of the text model or of the whole; None if neither has it."""
    model = config.model_config
    configs = getattr(model, "hf_text_config", None), getattr(model, "hf_config", None)
    return next((each for each in configs if getattr(each, FIELD, None) is not None), None)


def _training_length(model, config, name: str) -> int:
    overrides = getattr(model, "hf_overrides", None)
    if isinstance(overrides, dict) and "max_position_embeddings" in overrides:
        raise ValueError(
            f"{name}: expected the training length in tokens where hf_overrides replaces max_position_embeddings, got "
            "true, which would read the replaced one"
        )
    return training_length(config, name)


# ---- layers


def _layers(hf_config, options: dict, max_model_len: int, raw_keys: bool):
    layers: list[Layer] = []
    schemes: dict[tuple, Layer] = {}
    stock = set()
    for index in range(hf_config.num_hidden_layers):
        key = layer_type_of(hf_config, index), sliding_window_of(hf_config, index)
        if key not in schemes:
            schemes[key] = _layer(hf_config, key, options, max_model_len, raw_keys)
            stock.add(Rotary.from_hf_config(hf_config, key[0]))
        layers.append(schemes[key])
    if "log_n" in options and all(layer.window for layer in layers):
        raise ValueError("log_n: expected a layer that sees all keys, got a sliding window in every layer")
    return tuple(layers), frozenset(stock)


def _layer(hf_config, key: tuple, options: dict, max_model_len: int, raw_keys: bool) -> Layer:
    layer_type, window = key
    scheme = LayerScheme(hf_config, layer_type, window, True, options)
    if scheme.grows_from < max_model_len:
        raise ValueError(
            f"max_model_len: expected at most {scheme.grows_from}, beyond which the frequencies of this model's rope "
            f"type depend on the length of each sequence, got {max_model_len}"
        )
    rotary = scheme.rotary
    head_dim = Rotary.from_hf_config(hf_config, layer_type).head_dim
    if rotary.head_dim != head_dim:
        raise ValueError(f"rotary: expected head_dim {head_dim} as in the model, got {rotary.head_dim}")
    if rotary.axis:
        raise ValueError("rotary: expected a scheme of one-dimensional positions, got an axial one")
    return Layer(rotary, scheme.window, not raw_keys and shared_map(rotary.bands) is not None)


# ---- refusals


def _check_model(model, hf_config) -> None:
    if model.architecture not in ARCHITECTURES:
        raise ValueError(
            "architecture: expected one of the tested ones, which rotate only through vLLM's get_rope: "
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


def _check_engine(config) -> None:
    cache = config.cache_config
    check_cache_dtype(cache.cache_dtype, config.model_config.dtype)
    size = cache.block_size
    if size is not None and (size < 16 or size & (size - 1)):
        raise ValueError(f"block_size: expected 16, 32, 64, 128, ..., got {size}")
    attention = config.attention_config
    chosen = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    for backend in chosen:
        if backend is not None and getattr(backend, "name", backend) != BACKEND:
            name = getattr(backend, "name", backend)
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
    """Refuses a cache type that the kernels cannot read. cache_dtype: vLLM's name. dtype: the model's."""
    name = str(dtype).removeprefix("torch.")
    if cache_dtype in ("auto", name, *CODES):
        return
    why = ""
    if cache_dtype.startswith("fp8"):
        why = ", whose numbers GPUs below sm_89 convert in software"
    raise ValueError(
        f"kv_cache_dtype: expected auto or {name}, the model's dtype, {' or '.join(CODES)}, got {cache_dtype}{why}"
    )


def _check_windows(max_model_len: int, options: dict) -> None:
    windows = {"window": options.get("window")}
    windows |= {name: options.get(name, (None,))[0] for name in ("string", "self_extend")}
    for name, window in windows.items():
        if isinstance(window, int) and window >= max_model_len:
            raise ValueError(
                f"{name}: expected a window of less than max_model_len = {max_model_len}, since no distance lies "
                f"beyond it, got {window}"
            )


# ---- dual_chunk_attention_config


def adopt_chunks(model) -> bool:
    """Moves dual_chunk_attention_config of a ModelConfig into the field "flashrope", where its workers find it too.

    vLLM's layers must not see it: they would ask for an attention that vLLM has no backend for. A field that has
    dual_chunk, false included, or rotary keeps it.

    Returns:
        Whether the configuration asks for sparse attention too. The attention here is dense.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    configs = _configs(model)
    chunks = read_chunks(*configs)
    for config in configs:
        if hasattr(config, CHUNKS):
            delattr(config, CHUNKS)
    if chunks is None:
        return False
    holder = next((config for config in configs if getattr(config, FIELD, None) is not None), configs[0])
    field = getattr(holder, FIELD, None)
    if field is None:
        field = {}
    # make_plan refuses a field that is not a dict
    if isinstance(field, dict) and field.get("dual_chunk") is None and field.get("rotary") is None:
        setattr(holder, FIELD, {**field, "dual_chunk": chunks.arguments})
    return chunks.sparse


def _configs(model) -> list:
    """Returns the text model's configuration, and that of the whole, which may be the same."""
    configs = (getattr(model, name, None) for name in ("hf_text_config", "hf_config"))
    return [config for config in configs if config is not None]


# ---- pages


SCALE_BYTES = 4  # behind the codes of a row, float32


class Pages(NamedTuple):
    """The cache of one layer: vLLM's tensor and views of it, as ``attention_varlen_with_cache`` takes them."""

    kv_cache: torch.Tensor
    k: torch.Tensor  # (blocks, block_size, heads_kv, head_dim), or codes
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # (blocks, block_size, heads_kv), of codes
    v_scale: torch.Tensor | None = None


def row_bytes(head_size: int, cache_dtype: torch.dtype) -> int:
    """Returns the bytes of one quantized key or value of this type, its scale included."""
    return head_size // PER_BYTE[cache_dtype] + SCALE_BYTES


def split_pages(kv_cache: torch.Tensor, head_size: int) -> Pages:
    """Returns the keys, values and scales in vLLM's cache, as views.

    kv_cache: (blocks, heads_kv, block_size, columns), any strides of the first three dimensions.

    A head of a slot is K | V, 2 * head_size columns; in int8 and uint8 K | scale of K | V | scale of V.
    """
    rows = kv_cache.transpose(1, 2)
    if kv_cache.dtype not in PER_BYTE:
        return Pages(kv_cache, *rows.split(head_size, dim=-1))
    half = row_bytes(head_size, kv_cache.dtype)
    codes = half - SCALE_BYTES
    floats = rows.view(torch.float32)
    k, v = rows[..., :codes], rows[..., half : half + codes]
    return Pages(kv_cache, k, v, floats[..., codes // 4], floats[..., (half + codes) // 4])


# ---- the plans of this process


_plans: dict[str, Plan] = {}  # by digest


def remember(plan: Plan) -> None:
    _plans[plan.digest] = plan


def active_plan(config) -> Plan | None:
    """Returns the plan of a VllmConfig that was checked, in this process or in the one that sent it; None: stock
    vLLM."""
    if config is None or config.model_config is None or not asked(config):
        return None
    digest = digest_of(config)
    if digest is None:
        raise RuntimeError(
            "flashrope: expected a configuration that was checked when it was made, got one that was not"
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
        RuntimeError: another plugin has taken vLLM's CUSTOM, so keys that are not rotated would go to its attention.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum[BACKEND].get_path()
    if path != BACKEND_PATH:
        raise RuntimeError(f"attention_backend: expected {BACKEND} to be {BACKEND_PATH}, got {path} of another plugin")


def digest_of(config) -> str | None:
    additional = getattr(config, "additional_config", None)
    return additional.get(FIELD) if isinstance(additional, dict) else None
