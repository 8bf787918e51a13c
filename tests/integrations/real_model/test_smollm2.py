"""Tests that a converted pretrained model gives the stock model's results under its own scheme, and the recorded losses
under other schemes."""

import json

import pytest
import recorded
import torch
from flashrope.integrations.transformers import convert, revert
from flashrope.lab.evaluation.by_position import position_losses

QUESTIONS = ("The capital of France is", "Water boils at", "A Debian package is installed with the command")
NEW = 40


@pytest.fixture(scope="module")
def padded(tokens):
    """Returns (ids, mask) of a batch of prompts with three lengths, padded on the left."""
    prompts = [tokens.encode(text) for text in QUESTIONS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model, prompt) -> torch.Tensor:
    return model.generate(**prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)


@torch.no_grad()
def test_logits_are_the_stock_models(model, tokens):
    ids = recorded.row(tokens)[None, :512]
    stock = model(ids).logits
    found = convert(model)(ids).logits
    assert float((found - stock).abs().max()) <= 1e-3 < float(stock.abs().max()) / 1e4  # float32, 30 layers


def test_greedy_tokens_are_the_stock_models(model, tokens, padded):
    """The greedy tokens are the same for a single prompt and for a padded batch."""
    prompt = tokens.encode(QUESTIONS[0])
    one = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    stock = [greedy(model, some) for some in (one, padded)]
    assert tokens.decode(stock[0][0, len(prompt) :].tolist()).startswith(" Paris")
    convert(model)
    for some, expected in zip((one, padded), stock, strict=True):
        assert greedy(model, some).tolist() == expected.tolist()


def test_every_scheme_of_the_catalogue_has_the_recorded_loss(model, tokens):
    expected = json.loads(recorded.FILE.read_text())
    found = recorded.losses(model, tokens)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=0.05, nan_ok=True)
    assert len({round(loss, 3) for loss in found.values()}) > len(found) / 2  # they differ


@pytest.mark.slow
def test_rerope_reads_a_novel_beyond_the_training_length(model, tokens, tmp_path):
    """Under ReRoPE the loss does not rise beyond the training length. The text is 12,288 tokens of the novel Emma."""
    from experiments.fetch import fetch_novel

    fetch_novel(tmp_path / "emma.txt", tmp_path)
    if not (tmp_path / "emma.txt").exists():
        pytest.skip("Rscript is not installed, which reads the novel's package")
    ids = [*tokens.start, *tokens.encode((tmp_path / "emma.txt").read_text(encoding="utf-8"))]
    row = torch.tensor(ids[: 12 * 1024 + 1])
    stock = position_losses(model, row)
    rerope = position_losses(convert(model, rerope=2048, log_n=True), row)
    revert(model)
    below, beyond = slice(0, 8192), slice(11 * 1024, None)
    assert float((rerope[below].mean() - stock[below].mean()).abs()) < 0.02
    assert float(stock[beyond].mean() - rerope[beyond].mean()) > 0.5
