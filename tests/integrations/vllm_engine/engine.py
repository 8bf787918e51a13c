"""Makes engines over the models of models.py, and compares them with convert()."""

import gc
from contextlib import contextmanager

import torch
from models import VOCABULARY, Rounded, reference
from vllm import LLM, SamplingParams

BOUND = 1e-4  # the largest allowed difference of a log probability in float32


@contextmanager
def engine(folder: str, options: dict | None, **settings):
    """Starts vLLM's LLM in this process and returns it. options: the value of the field "flashrope". None: the field is
    absent."""
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
    """Returns the engine's outputs with log probabilities of the whole vocabulary at every new token."""
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


def differences(folder: str, options: dict | None, outputs, rounded: Rounded | None = None) -> list[float]:
    """Returns, for each completion, the largest difference of any log probability from that of the model converted by
    convert()."""
    return [float(x.abs().max()) for x in compared(folder, options, outputs, rounded)]


def compared(folder: str, options: dict | None, outputs, rounded: Rounded | None = None) -> list[torch.Tensor]:
    """Returns, for each completion, the differences of all log probabilities from those of the model converted by
    convert()."""
    found = []
    for output in outputs:
        ids = output.prompt_token_ids
        for completion in output.outputs:
            whole = [*ids, *completion.token_ids]
            expected = reference(folder, options, whole, rounded=rounded)
            prompt = (output.prompt_logprobs or [None])[1:]
            rows = [torch.tensor([entry[whole[n + 1]].logprob for n, entry in enumerate(prompt)])]
            rows[0] -= expected[torch.arange(len(prompt)), whole[1 : len(prompt) + 1]]
            for step, entry in enumerate(completion.logprobs):
                assert len(entry) >= VOCABULARY
                row = torch.tensor([entry[token].logprob for token in range(VOCABULARY)])
                rows.append(row - expected[len(ids) - 1 + step])
            found.append(torch.cat(rows))
    return found


def check_rounded(folder: str, options: dict | None, outputs, rounded: Rounded) -> None:
    """Checks the outputs over a quantized cache. In root mean square, every output must be at least ten times closer to
    convert() over rounded keys and values than to convert() over exact keys and values. The outputs need not be equal,
    because a number halfway between two quantized values may be rounded either way. At least one output must agree
    within BOUND."""
    from_rounded = compared(folder, options, outputs, rounded)
    costs = compared(folder, options, outputs)
    ratios = [
        float(x.square().mean() / cost.square().mean()) ** 0.5 for x, cost in zip(from_rounded, costs, strict=True)
    ]
    assert max(ratios) < 1 / 10 and min(float(cost.square().mean()) for cost in costs) > 1e-5, ratios
    assert min(float(x.abs().max()) for x in from_rounded) <= BOUND
