"""Keeps memory free for the workspaces of attention, which vLLM's profiling run does not see.

vLLM measures a run without a cache, in which no attention is computed, and gives the rest of the memory to its cache.
Before a step with long prompts attends, it writes rotated copies of keys, one layer after the other. On the CPU, it
also gathers the pages of one sequence. Importing this file does not import vLLM.
"""

from __future__ import annotations

from collections import Counter

from ...schemes.lowered import lower
from .engine_plan import INT8, EnginePlan, active_plan, row_bytes

FLOAT32 = 4  # bytes


def kept_free(
    plan: EnginePlan,
    available: int,
    *,
    heads_kv: int,
    itemsize: int,
    quantized: bool,
    max_model_len: int,
    on_cpu: bool,
    ranks: int = 1,
) -> int:
    """Returns an upper bound of the bytes that the workspaces of a step need beside a cache that fills the rest of the
    memory.

    On a GPU, a rotated copy of keys never has more rows than the cache of one layer, and nothing is copied if the cache
    holds rotated keys. On the CPU, the workspace holds the keys and values of one sequence: as gathered, as float32,
    and packed once per band.

    Args:
        available: bytes for the cache and the workspaces together.
        heads_kv: key heads of this rank.
        itemsize: bytes of a number of the model's dtype.
        quantized: whether the cache holds int8.
        ranks: ranks among which the layers are divided (pipeline parallelism).
    """
    kinds = Counter(layer.window for _, layer in plan.attending)
    together = max(min(kinds.values()) // ranks, 1)  # layers whose keys of a token are stored together, at least
    needed = 0
    for layer in set(layer for _, layer in plan.attending):
        head_dim, bands = layer.rotary.head_dim, len(layer.rotary.bands)
        stored = 2 * heads_kv * (row_bytes(head_dim) if quantized else itemsize * head_dim)  # per token and layer
        if on_cpu:
            numbers = heads_kv * head_dim
            per_token = stored + FLOAT32 * numbers * (3 + bands) + 2 * FLOAT32 * (bands + 1) * head_dim
        else:
            copies = 0 if layer.rotated_keys else len(lower(layer.rotary, True).k_copies)
            per_token = copies * heads_kv * itemsize * head_dim
        tokens = available // (together * stored + per_token)
        needed = max(needed, per_token * (min(tokens, max_model_len) if on_cpu else tokens))
    return needed


def hook_worker(is_cpu: bool) -> None:
    """Makes vLLM's workers keep this memory free, unless the user gives the size of the cache. A second call does
    nothing."""
    if is_cpu:
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker

    stock = Worker.determine_available_memory
    if hasattr(stock, "_flashrope"):
        return

    def determine_available_memory(self) -> int:
        available, config = stock(self), self.vllm_config
        plan = active_plan(config)
        if plan is None or config.cache_config.kv_cache_memory_bytes is not None:
            return available
        model, parallel = config.model_config, config.parallel_config
        return available - kept_free(
            plan,
            available,
            heads_kv=model.get_num_kv_heads(parallel),
            itemsize=model.dtype.itemsize,
            quantized=config.cache_config.cache_dtype == INT8,
            max_model_len=model.max_model_len,
            on_cpu=is_cpu,
            ranks=parallel.pipeline_parallel_size,
        )

    determine_available_memory._flashrope = stock  # type: ignore[attr-defined]
    Worker.determine_available_memory = determine_available_memory
