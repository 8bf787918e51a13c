"""Tests that the two scripts of examples/migration give the same results. One calls flash-attn, the other flashrope.
docs/migration.md shows the difference between them."""

import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS, TOKENS = 50, 24


def script(name):
    return runpy.run_path(str(ROOT / "examples" / "migration" / f"{name}.py"))


@pytest.fixture(scope="module")
def results():
    """Returns {name: (losses, tokens)} of both scripts, run as commands. The text is the same under every Python."""
    options = [str(ROOT / "LICENSE"), "--steps", str(STEPS), "--tokens", str(TOKENS)]
    return {name: script(name)["main"](options) for name in ("before", "after")}


def test_both_train_to_the_same_losses(results):
    before, after = (results[name][0] for name in ("before", "after"))
    assert len(before) == STEPS and before[-1] < before[0] - 2  # it learns
    assert after == pytest.approx(before, rel=1e-4)


def test_both_write_the_same_text(results):
    assert len(results["before"][1]) == TOKENS and len(set(results["before"][1])) > 5
    assert results["after"][1] == results["before"][1]


def test_weights_move_and_the_cache_is_right():
    """With the same weights, the decoding loop of each script gives the tokens that full passes of the other script
    give."""
    before, after = script("before"), script("after")
    torch.manual_seed(2)
    models = before["LanguageModel"](), after["LanguageModel"]()
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter *= 3  # so that attention is sharp
    models[1].load_state_dict(models[0].state_dict())
    prompt = torch.randint(256, (1, 30))
    with torch.no_grad():
        logits = [model(prompt) for model in models]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        for namespace, model, other in zip((before, after), models, reversed(models), strict=True):
            found = namespace["generate"](model, prompt, 20)
            read = torch.cat([prompt, torch.tensor([found])], 1)
            best = other(read)[0, 29:-1].topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 1e-3  # no tie that rounding could decide
            assert other(read)[0, 29:-1].argmax(-1).tolist() == found


def test_the_page_shows_the_difference():
    tool = runpy.run_path(str(ROOT / "tools" / "migration_diff.py"))
    page = (ROOT / "docs" / "migration.md").read_text()
    assert page == tool["render"](), "run python tools/migration_diff.py"
    assert "-from flash_attn" not in page and "+from flashrope import KVCache, Rotary, attention" in page
