"""Tests the OpenAI server over HTTP with its engine in separate processes: it serves concurrent clients, and serves
again after a kill and a restart."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

from engine import BOUND
from models import prompt, reference, save_model

REROPE = {"rerope": 64, "log_n": 256}
TOKENS = 6
START_SECONDS = 240


@contextmanager
def server(folder: str, log, *arguments: str):
    """Starts a server and returns (process, URL) when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--hf-overrides", json.dumps({"flashrope": REROPE}), *arguments]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < end, "the server did not start"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complete(url: str, token_ids: list[int], **options) -> dict:
    """Requests a completion and returns its only choice. Prompts are token ids, because the model has no tokenizer."""
    body = dict(prompt=token_ids, max_tokens=TOKENS, temperature=0.0, logprobs=1, ignore_eos=True, **options)
    body |= dict(return_token_ids=True, return_tokens_as_token_ids=True, detokenize=False)
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]


def difference(folder: str, token_ids: list[int], choice: dict) -> float:
    """Returns the largest difference of the chosen tokens' log probabilities from convert()'s."""
    tokens, chosen = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(tokens) == len(chosen) == TOKENS
    expected = reference(folder, REROPE, [*token_ids, *tokens])[len(token_ids) - 1 :]
    return max(abs(chosen[n] - float(expected[n, token])) for n, token in enumerate(tokens))


def test_concurrent_clients_kill_and_restart(tmp_path):
    folder = save_model(tmp_path / "model", "llama")
    prompts = [prompt(n) for n in (5, 17, 64, 65, 200, 300, 500, 700)]
    with open(tmp_path / "log", "w") as log:
        with server(folder, log) as (process, url), ThreadPoolExecutor(len(prompts)) as clients:
            first = list(clients.map(lambda ids: complete(url, ids), prompts))
            with pytest.raises(urllib.error.HTTPError) as refused:
                complete(url, prompt(1100))
            assert refused.value.code == 400 and "1024" in refused.value.read().decode()
            again = complete(url, prompts[-1])
            running = [clients.submit(complete, url, ids, min_tokens=TOKENS) for ids in prompts]
            os.killpg(process.pid, signal.SIGKILL)  # kills the server while it answers requests
            for request in running:
                request.exception(timeout=120)
        with server(folder, log) as (_, url):
            second = [complete(url, ids) for ids in prompts[::3]]
    text = (tmp_path / "log").read_text()
    assert "64 for d >= 64" in text
    assert max(difference(folder, *pair) for pair in zip(prompts, first, strict=True)) <= BOUND
    assert max(difference(folder, *pair) for pair in zip(prompts[::3], second, strict=True)) <= BOUND
    assert again["token_ids"] == first[-1]["token_ids"]
