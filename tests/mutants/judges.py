"""Lists which tests judge the mutants of a file: arguments of pytest, one line per run, the likeliest to fail first.

The first file or pattern that matches is used. A run ends at its first failure. A later run starts only if no earlier
run has failed. A surviving mutant costs all runs, so together they take at most a minute or two.
"""

from __future__ import annotations

import shlex
from fnmatch import fnmatch
from pathlib import Path

from .native_build import target_of

EXECUTED = "-p executor.plugin --executor 80"  # tests that run compiled kernels on the CPU
FORWARD = [
    "tests/operators/test_accuracy.py::test_grouped_heads tests/backends/test_tiles.py tests/operators/test_needles.py"
    ' -k "triton or test_tiles"',
    'tests/operators/test_accuracy.py tests/schemes/test_bands.py tests/operators/test_varlen.py -k "triton"',
    'tests/schemes/test_maps.py tests/operators/test_sinks.py tests/schemes/test_query_scales.py -k "triton"',
]
BACKWARD = [
    'tests/operators/test_accuracy.py tests/operators/test_backward.py -k "triton or test_backward"',
    'tests/operators/test_varlen.py tests/schemes/test_maps.py tests/operators/test_value_width.py -k "triton"',
]
DECODE = [
    "tests/cache/test_decode.py::test_rows_before_the_first_key_that_see_keys_ahead"
    " tests/cache/test_key_groups.py tests/backends/test_decode_triton.py tests/cache/test_decode.py -k triton",
    "tests/cache/test_decode.py tests/cache/test_quantized.py -k triton",
    "tests/cache/test_cached_positions.py tests/cache/test_rotated_keys.py -k triton",
]
SHARES = ["tests/backends/test_shares.py"]
PLACED = [
    "tests/cache/test_cached_positions.py -k triton",
    "tests/cache/test_stored_positions.py tests/backends/test_tiles_cos_sin.py -k 'triton or stored'",
]
QUANTIZED = ["tests/cache/test_quantized.py -k triton"]
ROTATED = ["tests/cache/test_rotated_keys.py tests/operators/test_rotate.py -k triton"]
TABLES = [
    "tests/schemes/test_lowering.py tests/schemes/test_cos_sin.py tests/schemes/test_bands.py"
    " tests/schemes/test_query_scales.py",
    "tests/cache/test_stored_positions.py -k 'cpu or stored'",
]
COMPILED = [
    'tests/backends/test_cpu_compiled.py tests/schemes/test_maps.py -k "tiles or rounded or cpu-float32 or layouts"',
    'tests/cache/test_decode.py tests/operators/test_accuracy.py -k "cpu"',
    'tests/cache/test_cached_positions.py tests/cache/test_quantized.py tests/cache/test_rotated_keys.py -k "cpu"',
]
COMPILED_DECODE = [
    "tests/cache/test_values_in_keys.py -k cpu",
    'tests/backends/test_cpu_compiled.py -k "chunks_of_keys or layouts or neighbors or more_keys or unseen"',
    "tests/backends/test_cpu_positions.py tests/cache/test_decode.py tests/cache/test_cached_positions.py -k cpu",
    'tests/cache/test_quantized.py tests/operators/test_length_scale.py tests/operators/test_sinks.py -k "cpu"',
]
SDPA = [
    "tests/backends/test_cpu.py tests/schemes/test_bands.py tests/operators/test_accuracy.py -k sdpa",
    "tests/operators/test_varlen.py tests/schemes/test_maps.py tests/operators/test_length_scale.py"
    " tests/schemes/test_query_scales.py tests/operators/test_sinks.py"
    ' tests/operators/test_value_width.py -k "sdpa"',
]
SDPA_DECODE = [
    "tests/backends/test_cpu.py tests/cache/test_decode.py -k sdpa",
    "tests/backends/test_cpu_positions.py tests/cache/test_cached_positions.py tests/cache/test_decode.py -k cpu",
    "tests/cache/test_cached_positions.py tests/cache/test_quantized.py -k sdpa",
]
CACHES = [
    "tests/cache/test_moved_tokens.py::test_random_walk tests/cache/test_cache.py tests/cache/test_cache_layers.py"
    " tests/cache/test_cache_errors.py -k 'not triton'",
    "tests/cache/test_moved_tokens.py tests/cache/test_cached_positions.py"
    " tests/cache/test_rotated_keys.py -k 'not triton'",
    "tests/cache/test_stored_positions.py tests/cache/test_quantized.py -k 'not triton'",
]
SCHEMES = [
    "tests/schemes -k 'not triton'",
    "tests/operators/test_identities.py tests/operators/test_length_scale.py -k 'not triton'",
]
CALLS = [
    "tests/operators/test_errors.py tests/cache/test_cache_errors.py tests/operators/test_backends.py"
    " tests/operators/test_value_width.py tests/cache/test_cached_calls.py -k 'not triton'",
    "tests/operators/test_torch.py tests/operators/test_transforms.py tests/operators/test_backward.py"
    " tests/operators/test_rotate.py -k 'not triton'",
    "tests/cache/test_decode.py tests/cache/test_rotated_keys.py tests/cache/test_stored_positions.py"
    " tests/cache/test_cached_positions.py tests/cache/test_quantized.py -k 'cpu or not triton and not reference'",
]
LAUNCHES = " ".join(
    f"tests/backends/test_{name}.py" for name in ("launches", "captured_grids", "specialisation", "splits")
)
CONVERTED = "tests/integrations/test_transformers.py tests/integrations/test_refusals.py"
JUDGES = {
    "triton_kernels/attention/backward.py": BACKWARD,
    "triton_kernels/attention/grad_q.py": BACKWARD,
    "triton_kernels/attention/score_grads.py": ["tests/operators/test_score_grads.py", *BACKWARD],
    "python/flashrope/backends/triton/deterministic.py": ["tests/operators/test_score_grads.py", *BACKWARD],
    "triton_kernels/attention/forward.py": [*FORWARD, *QUANTIZED],
    "triton_kernels/attention/copies.py": [
        "tests/schemes/test_first_channel.py -k triton",
        f"{EXECUTED} tests/executor/test_partial_copies.py",
    ],
    "triton_kernels/attention/keys.py": [*FORWARD, *DECODE[:2]],
    "triton_kernels/cached/chunks.py": DECODE[:2],
    "triton_kernels/softmax.py": ["tests/cache/test_key_groups.py -k triton", *FORWARD],
    "triton_kernels/tiles.py": [
        "tests/backends/test_tiles.py tests/operators/test_varlen.py tests/operators/test_needles.py"
        ' -k "triton or test_tiles"',
        "tests/schemes/test_maps.py -k triton",
        "tests/cache/test_decode.py tests/backends/test_decode_triton.py -k triton",
        *FORWARD[1:2],
        *BACKWARD,
        *DECODE[:2],
    ],
    "triton_kernels/rows.py": [
        "tests/backends/test_tiles.py tests/operators/test_varlen.py tests/operators/test_needles.py"
        ' -k "triton or test_tiles"',
        "tests/schemes/test_maps.py -k triton",
        "tests/cache/test_decode.py tests/backends/test_decode_triton.py -k triton",
        *FORWARD[1:2],
        *BACKWARD,
        *DECODE[:2],
    ],
    "triton_kernels/rotating/rotation.py": [
        *FORWARD[:1],
        "tests/schemes/test_maps.py tests/schemes/test_first_channel.py -k triton",
        *ROTATED,
        *BACKWARD[:1],
        *QUANTIZED,
        *DECODE[:2],
    ],
    "triton_kernels/rotating/pairs.py": [
        *FORWARD[:1],
        "tests/schemes/test_maps.py tests/schemes/test_first_channel.py -k triton",
        *ROTATED,
        *BACKWARD[:1],
        *QUANTIZED,
        *DECODE[:2],
    ],
    "triton_kernels/arguments.py": [*FORWARD[:1], *DECODE[:2]],
    "triton_kernels/cached/append.py": DECODE,
    "triton_kernels/attention/merge.py": ["tests/operators/test_whole_sequences.py -k triton"],
    "triton_kernels/cached/decode*.py": [*DECODE[:1], *SHARES, *DECODE[1:]],
    "triton_kernels/cached/combine.py": [*SHARES, *DECODE],
    "triton_kernels/cached/shares.py": [*SHARES, *DECODE],
    "triton_kernels/kv_cache.py": DECODE,
    "triton_kernels/rotating/rotate.py": [*ROTATED, *DECODE[:1], *FORWARD[:1]],
    "triton_kernels/cached/explicit_positions.py": PLACED,
    "triton_kernels/cached/placing.py": PLACED,
    "triton_kernels/cached/stored_positions.py": PLACED[::-1],
    "triton_kernels/quantized.py": QUANTIZED,
    "triton_kernels/rotating/channels.py": [
        "tests/schemes/test_first_channel.py tests/cache/test_values_in_keys.py -k triton",
        *DECODE,
    ],
    "python/flashrope/schemes/head_parts.py": ["tests/schemes/test_first_channel.py"],
    "python/flashrope/schemes/resident.py": ["tests/schemes/test_resident.py", *TABLES[:1]],
    "python/flashrope/schemes/cos_sin.py": [
        *TABLES,
        "tests/schemes/test_first_channel.py tests/cache/test_cached_positions.py -k triton",
    ],
    "python/flashrope/schemes/lowered.py": [
        *TABLES,
        *FORWARD[:1],
        "tests/schemes/test_maps.py tests/schemes/test_resident.py",
    ],
    "python/flashrope/backends/chosen.py": ["tests/operators/test_chosen.py tests/backends/test_cpu_compiled.py"],
    "python/flashrope/backends/others.py": ["tests/operators/test_chosen.py"],
    "python/flashrope/backends/shared/blocks.py": [*SDPA_DECODE, *COMPILED_DECODE[2:]],
    "python/flashrope/backends/shared/merging.py": SDPA_DECODE[1:],
    "python/flashrope/backends/sdpa/whole.py": ["tests/operators/test_whole_sequences.py"],
    "python/flashrope/backends/sdpa/operators.py": ["tests/operators/test_whole_sequences.py"],
    "python/flashrope/backends/sdpa/rotated.py": [
        "tests/operators/test_rotate.py tests/cache/test_rotated_keys.py -k sdpa"
    ],
    "python/flashrope/backends/sdpa/pieces.py": SDPA,
    "python/flashrope/backends/sdpa/attention.py": SDPA,
    "python/flashrope/backends/shared/host_rotation.py": [*SDPA, *SDPA_DECODE],
    "python/flashrope/backends/sdpa/cached.py": [
        *SDPA_DECODE,
        "tests/operators/test_length_scale.py -k sdpa",
    ],
    "python/flashrope/backends/sdpa/masked.py": SDPA_DECODE[1:],
    "python/flashrope/backends/sdpa/*": [*SDPA, *SDPA_DECODE],
    "python/flashrope/backends/shared/runs.py": [
        "tests/backends/test_cpu_positions.py tests/cache/test_cached_positions.py tests/cache/test_decode.py -k cpu",
        "tests/cache/test_stored_positions.py tests/cache/test_moved_tokens.py -k 'not triton'",
    ],
    "python/flashrope/backends/cpu/plan.py": ["tests/cache/test_plan.py -k cpu", *COMPILED_DECODE[1:2]],
    "python/flashrope/backends/shared/step_part.py": ["tests/cache/test_plan.py -k cpu", *COMPILED_DECODE[1:2]],
    "python/flashrope/backends/cpu/rotated.py": [
        "tests/cache/test_rotated_keys.py tests/operators/test_rotate.py -k cpu"
    ],
    "python/flashrope/backends/cpu/sequences.py": COMPILED,
    "python/flashrope/backends/cpu/served.py": [
        "tests/backends/test_cpu_compiled.py -k 'chosen or bands or positions'"
    ],
    "python/flashrope/backends/cpu/cached.py": COMPILED_DECODE,
    "python/flashrope/backends/cpu/attention.py": COMPILED,
    "python/flashrope/backends/cpu/decode.py": [*COMPILED_DECODE, "tests/cache/test_plan.py -k cpu"],
    "python/flashrope/backends/cpu/*": ["tests/backends/test_cpu_loader.py tests/backends/test_cpu.py", *COMPILED],
    "python/flashrope/backends/triton/device.py": ["tests/schemes/test_first_channel.py -k triton", LAUNCHES, *FORWARD],
    "python/flashrope/backends/triton/attention.py": [*FORWARD[:1], *BACKWARD[:1], LAUNCHES],
    "python/flashrope/backends/triton/cached.py": [
        *SHARES,
        LAUNCHES,
        "tests/cache/test_plan.py -k triton",
        "tests/backends/test_tuning.py",
        *DECODE[:2],
        *ROTATED,
    ],
    "python/flashrope/backends/triton/rotated.py": ROTATED,
    "python/flashrope/backends/triton/*": [LAUNCHES, *FORWARD[:2], *DECODE[:1], "tests/backends/test_tuning.py"],
    "python/flashrope/backends/shared/splits.py": ["tests/backends/test_splits.py", LAUNCHES],
    "python/flashrope/backends/tuned_tiles.py": ["tests/backends/test_tuning.py"],
    "python/flashrope/backends/cuda.py": ["tests/backends/test_cuda_extension.py tests/backends/test_splits.py"],
    "python/flashrope/backends/reference.py": [
        "tests/operators/test_accuracy.py tests/schemes/test_bands.py tests/cache/test_decode.py"
        " tests/cache/test_rotated_keys.py tests/operators/test_value_width.py -k reference",
        "tests/schemes/test_query_scales.py tests/operators/test_sinks.py"
        " tests/operators/test_length_scale.py tests/operators/test_torch.py -k reference",
    ],
    "python/flashrope/calls/visible.py": [
        "tests/cache/test_cached_positions.py tests/cache/test_stored_positions.py -k 'not triton'",
    ],
    "python/flashrope/calls/int8.py": ["tests/cache/test_quantized.py -k 'cpu or reference or sdpa'"],
    "python/flashrope/backends/shared/packed.py": [
        "tests/cache/test_decode.py tests/cache/test_cached_calls.py"
        " -k 'not triton and (packed or mixed or cached_calls or given_splits or rows or run)'"
    ],
    "python/flashrope/calls/addresses.py": [
        "tests/cache/test_decode.py tests/cache/test_cached_calls.py tests/cache/test_cached_positions.py -k reference",
        "tests/cache/test_rotated_keys.py tests/operators/test_errors.py -k 'not triton'",
    ],
    "python/flashrope/backends/shared/precision.py": ["tests/operators/test_torch.py -k autocast"],
    "python/flashrope/backends/*": CALLS,
    "csrc/cpu/bf16/decode*": ["tests/backends/test_cpu_bfloat16_decode.py"],
    "csrc/cpu/bf16/*": [
        "tests/backends/test_cpu_bfloat16.py",
        "tests/operators/test_accuracy.py tests/cache/test_quantized.py -k 'cpu and bfloat16'",
    ],
    "csrc/cpu/decode*": COMPILED_DECODE,
    "csrc/cpu/rotate.cpp": ["tests/cache/test_rotated_keys.py tests/operators/test_rotate.py -k cpu", *COMPILED[1:]],
    "csrc/cpu/forward.cpp": [*COMPILED[:1], "tests/operators/test_accuracy.py tests/cache/test_quantized.py -k cpu"],
    "csrc/cpu/backward.cpp": [
        "tests/operators/test_nan_rows.py -k 'cpu or does_not_see'",
        *COMPILED[:1],
        "tests/operators/test_accuracy.py tests/operators/test_backward.py -k cpu",
    ],
    "csrc/cpu/*": [COMPILED[0], COMPILED_DECODE[0], *COMPILED[1:]],
    "csrc/*": [f"{EXECUTED} tests/executor/test_cuda_kernels.py"],
    "python/flashrope/cache/*": [
        "tests/cache/test_outliving.py tests/cache/test_capture.py -k 'not triton'",
        "tests/cache/test_plan.py tests/cache/test_cache_layers.py -k 'not triton'",
        *CACHES,
    ],
    "python/flashrope/operators/cache_plan.py": [
        "tests/cache/test_plan.py tests/cache/test_outliving.py -k 'not triton'",
        *CALLS,
    ],
    "python/flashrope/calls/memory.py": [
        "tests/cache/test_overlapping_memory.py tests/cache/test_outliving.py -k 'not triton'",
        *CALLS,
    ],
    "python/flashrope/operators/documents.py": ["tests/operators/test_varlen.py -k cu_seqlens_of"],
    "python/flashrope/calls/position_checks.py": [
        "tests/cache/test_cached_positions.py tests/cache/test_stored_positions.py -k 'not triton'",
        *CALLS,
    ],
    "python/flashrope/operators/sinks.py": ["tests/operators/test_sinks.py -k 'not triton'"],
    "python/flashrope/operators/autograd.py": [
        "tests/operators/test_transforms.py tests/operators/test_rotate.py",
        "tests/operators/test_backward.py tests/operators/test_accuracy.py -k 'not triton'",
        *CALLS,
    ],
    "python/flashrope/calls/foreign_keywords.py": ["tests/operators/test_errors.py"],
    "python/flashrope/calls/*": CALLS,
    "python/flashrope/operators/*": CALLS,
    "python/flashrope/integrations/distributed.py": [
        "tests/distributed/test_context_parallel.py tests/distributed/test_context_parallel_packed.py",
        "tests/distributed/test_dtensor.py",
    ],
    "python/flashrope/integrations/vllm/*": [
        "tests/integrations/test_vllm_plan.py",
        "tests/integrations/test_vllm_configured.py",
        "tests/integrations/test_vllm_memory.py",
    ],
    "python/flashrope/schemes/hugging_face.py": [
        "tests/integrations/test_hf_config.py tests/integrations/test_qwen_1m.py"
    ],
    "python/flashrope/schemes/dual_chunk.py": [
        "tests/integrations/test_qwen_1m.py tests/integrations/test_vllm_configured.py"
    ],
    "python/flashrope/schemes/families.py": [
        "tests/integrations/test_hf_config.py tests/integrations/test_mrope_models.py"
    ],
    "python/flashrope/schemes/*": SCHEMES,
    "python/flashrope/integrations/transformers/adapters.py": ["tests/integrations/test_adapters.py"],
    "python/flashrope/integrations/transformers/checkpointing.py": ["tests/integrations/test_checkpointing.py"],
    "python/flashrope/integrations/transformers/configurations.py": [
        "tests/integrations/test_shared_parts.py tests/integrations/test_saving.py"
    ],
    "python/flashrope/integrations/transformers/embeddings.py": [
        "tests/integrations/test_model_tables.py tests/integrations/test_shared_parts.py",
        CONVERTED,
    ],
    "python/flashrope/integrations/transformers/c*": [
        "tests/integrations/test_continuous_batching.py tests/integrations/test_vision_models.py",
        CONVERTED,
    ],
    "python/flashrope/integrations/transformers/one_tensor.py": [
        "tests/integrations/test_one_tensor.py tests/integrations/test_module_calls.py"
    ],
    "python/flashrope/integrations/transformers/positions.py": [
        "tests/integrations/test_positions.py tests/integrations/test_rows_of_padding.py",
        CONVERTED,
    ],
    "python/flashrope/integrations/transformers/reuse.py": ["tests/integrations/test_join_passages.py"],
    "python/flashrope/integrations/*": [
        f"{CONVERTED} tests/integrations/test_untested.py tests/integrations/test_options.py",
        "tests/integrations/test_stale_caches.py tests/integrations/test_codes_cache.py"
        " tests/integrations/test_saving.py",
        "tests/integrations/test_qwen_1m.py tests/integrations/test_models.py tests/integrations/test_vision_models.py",
    ],
}


def judges(file: str) -> list[tuple[str, ...]]:
    lines = next(lines for pattern, lines in JUDGES.items() if fnmatch(file, pattern))
    return [(*target_options(file), *shlex.split(line)) for line in dict.fromkeys(lines)]


def target_options(file: str) -> tuple[str, ...]:
    """Returns pytest's arguments for the target that the file is compiled for. Without them, the tests would compile
    the CPU kernels again, with optimisation, for the best target of this processor."""
    return ("--cpu-target", target_of(Path(file))) if file.startswith("csrc/cpu/") else ()
