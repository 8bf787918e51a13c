"""Hooks this package into vLLM, once per process.

The hook in the platform's ``check_and_update_config`` gets every VllmConfig before anything is built from it. If the
model has a field "flashrope" or dual chunk attention, the hook makes the plan, or raises an error, and selects this
package's attention backend. Three more hooks read the configuration in use. They replace the registry of ``get_rope``,
the CPU platform's choice of a backend, and the seed of the prefix cache's block hashes. For other models all hooks do
what vLLM does without them.

The registry compares the cos/sin table of every rotary embedding that vLLM makes with the plan's frequencies, and then
turns the embedding off. Importing this file does not import vLLM.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ...schemes.rotary import Rotary
from ..scheme_options import FIELD
from .configured import SAVED, adopt_chunks, asked, dropped, misspelt, origin_of
from .engine_plan import (
    BACKEND,
    BACKEND_PATH,
    EnginePlan,
    active_plan,
    check_backend,
    digest_of,
    make_plan,
    remember,
)

TESTED = "0.32.0"  # version of vLLM
_problem: Exception | None = None  # set if this vLLM lacks a function to hook; raised only for models with the field


def register() -> None:
    from vllm.platforms import current_platform

    global _problem
    platform = type(current_platform)
    if getattr(platform, "_flashrope", False):
        return
    _hook_configuration(platform)
    platform._flashrope = True
    try:
        _hook_backend(platform, current_platform.is_cpu())
        _hook_rope()
        _hook_block_hashes()
    except (AttributeError, ImportError) as error:
        _problem = error


# ---- hooks


def _hook_configuration(platform) -> None:
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config) -> None:
        stock(cls, vllm_config)
        if vllm_config.model_config is None:
            return
        for message in misspelt(vllm_config.model_config):
            _logger().warning("flashrope: %s", message)
        sparse = _problem is None and adopt_chunks(vllm_config.model_config)
        if asked(vllm_config):
            _configure(cls, vllm_config)
        if sparse:
            _logger().warning(
                "flashrope: dual_chunk_attention_config asks for sparse attention (sparse_attention_config), which is "
                "not supported: every query sees all keys before it, which the sparse attention approximates for speed"
            )

    platform.check_and_update_config = classmethod(check_and_update_config)


def _configure(platform, vllm_config) -> None:
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if _problem is not None:
        raise RuntimeError(f"vllm: expected {TESTED}, got {vllm.__version__} ({_problem})") from _problem
    if platform.device_type not in ("cpu", "cuda") or platform._enum.name == "ROCM":
        raise ValueError(f"device: expected a CPU or an NVIDIA GPU, got {platform._enum.name}")
    if not isinstance(vllm_config.additional_config, dict):
        given = type(vllm_config.additional_config).__name__
        raise TypeError(f"additional_config: expected a dict, to hold the scheme's digest, got {given}")
    check_backend()
    plan = make_plan(vllm_config)
    if digest_of(vllm_config) != plan.digest:  # otherwise the process that sent the configuration has logged it
        _log(vllm_config.model_config, plan)
    # compute_hash includes the digest, so schemes do not share compiled graphs. Workers compare it with the digest of
    # their own plan.
    vllm_config.additional_config = {**vllm_config.additional_config, FIELD: plan.digest}
    vllm_config.attention_config.backend = AttentionBackendEnum[BACKEND]
    remember(plan)


def _log(model, plan: EnginePlan) -> None:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    _logger().info(
        "flashrope: %s, configured by %s, context %d, separate block hashes (%s): %s",
        model.architecture,
        origin_of(model),
        model.max_model_len,
        plan.digest[:8],
        plan,
    )
    if model.hf_overrides:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        saved = get_hf_file_to_dict(SAVED, model.hf_config_path or model.model, revision)
        if message := dropped(model, saved):
            _logger().warning(message)


def _logger():
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.flashrope")  # vLLM prints the records of loggers below its own


def _hook_backend(platform, is_cpu: bool) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[BACKEND], BACKEND_PATH)
    if not is_cpu:
        return  # CudaPlatform accepts CUSTOM, but CpuPlatform only considers its own backends
    stock = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        custom = AttentionBackendEnum[BACKEND]
        if selected_backend is not custom or custom.get_path() != BACKEND_PATH:
            return stock(cls, selected_backend, attn_selector_config, num_heads)
        reasons = custom.get_class().validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(
                f"flashrope: expected an attention layer that flashrope supports, got {', '.join(reasons)}"
            )
        return BACKEND_PATH

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _hook_rope() -> None:
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT = RopeRegistry(rotary_embedding._ROPE_DICT)


def _hook_block_hashes() -> None:
    """Makes the scheme part of the block hashes.

    A block's hash covers its tokens and the blocks before it. After the first layer, keys also depend on the scheme, so
    the scheme is made part of the seed of the first block's hash.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler

    digest = None
    init, resolve_seed = Scheduler.__init__, kv_cache_utils.resolve_none_hash_seed

    def init_and_note(self, vllm_config, *args, **kwargs):
        nonlocal digest
        digest = digest_of(vllm_config) if vllm_config.model_config is not None and asked(vllm_config) else None
        init(self, vllm_config, *args, **kwargs)

    def resolve_none_hash_seed(hash_fn) -> str:  # EngineCore calls this after making its scheduler
        seed = resolve_seed(hash_fn)
        return seed if digest is None else f"{seed}:{FIELD}:{digest}"

    Scheduler.__init__ = init_and_note
    kv_cache_utils.resolve_none_hash_seed = resolve_none_hash_seed


# ---- the model's own rotary embedding


RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of frequencies in a table


class RopeRegistry(dict):
    """The embeddings that vLLM's ``get_rope`` has made in this process, with separate entries for each plan.

    vLLM stores an embedding here when it is made. If the configuration in use has a scheme, the embedding's rotation is
    then turned off.

    Attributes:
        raw: digests of the plans for which an embedding was turned off. They are not stored in the dict, because vLLM
            clears the dict when an engine ends, possibly while another engine starts.
    """

    def __init__(self, embeddings=()) -> None:
        super().__init__(embeddings)
        self.raw: set[str] = set()

    def __contains__(self, key) -> bool:
        return super().__contains__(_by_plan(key))

    def __getitem__(self, key):
        return super().__getitem__(_by_plan(key))

    def __setitem__(self, key, embedding) -> None:
        plan = _plan_in_use()
        if plan is not None:
            check_backend()
            _turn_off(embedding, plan)
            self.raw.add(plan.digest)
        super().__setitem__(_by_plan(key), embedding)


class RawRotaryEmbedding(nn.Module):
    """Returns q and k unchanged."""

    def forward(self, positions, query, key=None, *args, **kwargs):
        return query, key


def _plan_in_use() -> EnginePlan | None:
    from vllm.config import get_current_vllm_config_or_none

    return active_plan(get_current_vllm_config_or_none())


def _by_plan(key):
    plan = _plan_in_use()
    return key if plan is None else (plan.digest, key)


def _turn_off(embedding, plan: EnginePlan) -> None:
    """Compares a rotary embedding's table with the plan's schemes. Then makes the embedding return q and k unchanged.

    Raises:
        ValueError: the embedding has no table of cos and sin, or its table differs from the model's configuration.
    """
    name = type(embedding).__name__
    table = getattr(embedding, "cos_sin_cache", None)
    if table is None or table.ndim != 2:
        raise ValueError(f"rope: expected a rotary embedding with one table of cos and sin, got {name}")
    if not any(_same(embedding, table, rotary) for rotary in plan.stock):
        schemes = " or ".join(map(repr, plan.stock))
        raise ValueError(
            f"rope: expected the cos and sin of the model's configuration, {schemes}, got a different table from "
            f"vLLM's {name}, which reads the rope parameters differently"
        )
    embedding.__class__ = RawRotaryEmbedding
    embedding.is_neox_style = False  # otherwise Qwen3-Next rotates in a fused kernel on CUDA, without the embedding
    del embedding.cos_sin_cache


def _same(embedding, table: torch.Tensor, rotary: Rotary) -> bool:
    """Whether the table's row of position 1 holds cos(inv_freq) and then sin(inv_freq), times attention_factor."""
    cos, sin = table[1].detach().double().cpu().chunk(2)
    rounding = RELATIVE_ERROR[table.dtype]
    return (
        embedding.rotary_dim == rotary.rotary_dim
        and embedding.is_neox_style is not rotary.interleaved
        and torch.allclose(torch.atan2(sin, cos), rotary.inv_freq, rtol=rounding, atol=0)
        and math.isclose(float(cos[-1] ** 2 + sin[-1] ** 2), rotary.temperature, rel_tol=2 * rounding)
    )
