"""Tests small models in the released shapes of Gemma 4 and of latent attention. After conversion they give the results
of the stock models."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import released
from families import BOUND, RUNS, close, padded, tokens
from flashrope.integrations.transformers import convert
from released import GEMMAS, LATENT
from test_gemma4 import THREE
from test_latent import ONE_OF_EACH
from test_transformers import GENERATE


@pytest.mark.parametrize("name", [*GEMMAS, *LATENT])
def test_logits(name):
    model = released.released(name)
    stock = {run: call(model) for run, call in RUNS.items()}
    convert(model)
    size = max(1.0, float(stock["uncached"].abs().max()) / 3)
    assert all(close(call(model), stock[run], BOUND * size) for run, call in RUNS.items())


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("name", [name for name in (*THREE, *ONE_OF_EACH) if name in (*GEMMAS, *LATENT)])
def test_generate(name, how):
    model, ids = released.released(name), tokens(seqlen=14)

    def run():
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=padded(14), max_new_tokens=6, min_new_tokens=6, **GENERATE[how])

    stock = run()
    assert len(set(stock[:, 14:].flatten().tolist())) > 3
    convert(model)
    assert torch.equal(run(), stock)
