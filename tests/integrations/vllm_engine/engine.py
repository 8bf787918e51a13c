"""Engines over the models of models.py, and the comparison with convert()."""

import gc
from contextlib import contextmanager

import torch
from models import VOCABULARY, reference
from vllm import LLM, SamplingParams

BOUND = 1e-4  # of a log probability, float32


@contextmanager
def engine(folder: str, options: dict | None, **settings):
    """vLLM's LLM in this process; options: of the field "flashrope", None: without the field."""
    defaults = dict(
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        max_logprobs=VOCABULARY,
        hf_overrides={} if options is None else {"flashrope": options},
    )
    llm = LLM(folder, **{**defaults, **settings})
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def generate(llm, prompts: list[list[int]], tokens: int = 4, all_prompt: bool = True, **sampling) -> list:
    """The engine's outputs with log probabilities of the whole vocabulary at every new token."""
    options = dict(
        max_tokens=tokens,
        temperature=0.0,
        logprobs=VOCABULARY,
        prompt_logprobs=0 if all_prompt else None,
        detokenize=False,
        ignore_eos=True,
    )
    params = SamplingParams(**{**options, **sampling})
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def differences(folder: str, options: dict | None, outputs) -> list[float]:
    """Per completion, the largest difference of any log probability from that of convert()."""
    found = []
    for output in outputs:
        ids = output.prompt_token_ids
        for completion in output.outputs:
            whole = [*ids, *completion.token_ids]
            expected = reference(folder, options, whole)
            worst = 0.0
            for row, entry in enumerate((output.prompt_logprobs or [None])[1:]):
                worst = max(worst, abs(entry[whole[row + 1]].logprob - float(expected[row, whole[row + 1]])))
            for step, entry in enumerate(completion.logprobs):
                assert len(entry) >= VOCABULARY
                row = torch.tensor([entry[token].logprob for token in range(VOCABULARY)])
                worst = max(worst, float((row - expected[len(ids) - 1 + step]).abs().max()))
            found.append(worst)
    return found
