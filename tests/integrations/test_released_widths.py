"""Converts every tested family at the head widths of its released models, and compares logits with the stock model.

The other tests run small heads. They would not notice a width that a kernel, a check or a rope type does not support.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
import vision_models
from families import BOUND, HERE, difference_at, released_width, tokens, wide
from test_transformers import documented

pytestmark = pytest.mark.skipif(
    families.VERSION < (5, 0), reason="the defaults of older configurations are not those of released models"
)


@pytest.mark.parametrize("name", HERE)
def test_a_family(name):
    """At the head widths of released models, converted and stock logits are equal. docs/families.md states the
    widths."""
    model = wide(name)
    assert difference_at(model) <= BOUND and families.widths(model) == released_width(name)
    assert documented()[name][1] == released_width(name)


@pytest.mark.parametrize("name", vision_models.HERE)
def test_the_text_decoder_of_a_vision_language_model(name):
    """The text decoder gives the stock model's tokens. Over a cache the test compares the results of generate, because
    the thinkers of stock Omni models fail if a later call has several tokens."""
    model, ids = vision_models.wide_vision(name), tokens(1).clamp(max=50)

    def generated() -> torch.Tensor:
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)

    stock = generated()
    assert difference_at(model, calls=None) <= BOUND and torch.equal(generated(), stock)
    assert families.widths(model) == str(vision_models.released_width(name))


def test_widths_that_are_known():
    """The widths of five families equal those on their model cards. This checks the defaults of the configurations
    independently."""
    known = {"gemma3_text": "256", "gemma4_text": "256, 512", "llama": "128", "deepseek_v3": "192", "gpt_oss": "64"}
    assert {name: released_width(name) for name in known if name in HERE} == {
        n: w for n, w in known.items() if n in HERE
    }
