"""Tests that vLLM with the plugin writes the same text as a converted pretrained model. .ci/run vllm passes the model's
file."""

import os

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")
PATH = os.environ.get("FLASHROPE_REAL_MODEL")
pytestmark = pytest.mark.skipif(not PATH, reason="FLASHROPE_REAL_MODEL is not set; .ci/run vllm sets it")

import torch
from engine import engine, generate
from flashrope.integrations.transformers import convert

QUESTIONS = ("The capital of France is", "Water boils at", "A Debian package is installed with the command")
NEW = 24


@pytest.mark.parametrize("options", [{}, {"rerope": 64, "log_n": 256}], ids=["own", "rerope"])
def test_greedy_tokens(options, tmp_path):
    from flashrope.lab.evaluation.checkpoint import load

    model, tokens = load(PATH, torch.device("cpu"))
    model.save_pretrained(tmp_path)
    prompts = [tokens.encode(text) for text in QUESTIONS]
    prompts.append(tokens.encode(" ".join(QUESTIONS) * 12))  # this prompt is longer than the window
    assert len(prompts[-1]) > 128
    convert(model, **options)
    given = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    expected = [model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist() for ids in prompts]
    with engine(str(tmp_path), options, max_model_len=512, max_logprobs=1) as llm:
        outputs = generate(llm, prompts, NEW, all_prompt=False, logprobs=None)
    assert [output.outputs[0].token_ids for output in outputs] == expected
