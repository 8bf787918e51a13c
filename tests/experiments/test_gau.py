"""Compares gated attention units with a plain float64 formula."""

import math

import pytest
import torch
from flashrope import Rotary
from flashrope.lab.small_models.model import ModelConfig
from flashrope.lab.small_models.train import TrainConfig, train

from experiments.gau import GauModel
from experiments.zoo import ZooModel, scheme

CONFIG = ModelConfig(width=32, layers=3, heads=2)


def model_of(config=CONFIG):
    torch.manual_seed(0)
    model = GauModel(config)
    with torch.no_grad():
        for block in model.blocks:
            block.uvz.weight *= 2  # attention far from uniform
            block.offset += torch.randn_like(block.offset)
    return model.double()


def rotated(x, base=10_000.0):
    """Returns x (seqlen, head_dim) after RoPE: channels m and m + head_dim / 2 of row p rotate by the angle
    p * base ** (-2 m / head_dim)."""
    seqlen, size = x.shape
    half = size // 2
    out = torch.empty_like(x)
    for p in range(seqlen):
        for m in range(half):
            c, s = math.cos(p * base ** (-m / half)), math.sin(p * base ** (-m / half))
            out[p, m] = c * x[p, m] - s * x[p, m + half]
            out[p, m + half] = s * x[p, m] + c * x[p, m + half]
    return out


def formula(model, tokens, log_n=None):
    """Returns the logits of one sequence, computed unit by unit with the paper's formula."""

    def silu(x):
        return x / (1 + (-x).exp())

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    x = norm(model.embedding.weight[tokens])
    seqlen = len(tokens)
    for block in model.blocks:
        wide, _, s = block.sizes
        w_u, w_v, w_z = block.uvz.weight.split(block.sizes)
        u, v, z = (silu(x @ w.T) for w in (w_u, w_v, w_z))
        q, k = (z * block.scale[at] + block.offset[at] for at in (0, 1))
        scores = rotated(q) @ rotated(k).T / s**0.5
        if log_n:
            scores = scores * (torch.arange(1, seqlen + 1, dtype=x.dtype).log() / math.log(log_n))[:, None]
        scores = scores.masked_fill(torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1), -torch.inf)
        x = norm(x + (u * (scores.softmax(-1) @ v)) @ block.out.weight.T)
    return x @ model.embedding.weight.T


@pytest.mark.parametrize(
    "config, parts", [(CONFIG, 1), (ModelConfig(width=192, layers=1, heads=12), 2)], ids=["one call", "v in parts"]
)
def test_units_are_the_formula(config, parts):
    model = model_of(config)
    assert model.blocks[0].parts == parts
    tokens = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))
    rope = Rotary.rope(config.head_dim)
    logits = model(tokens, rope)
    expected = torch.stack([formula(model, each) for each in tokens])
    assert logits.shape == (2, 13, 256) and expected.std() > 0.05
    assert (logits - expected).abs().max() < 1e-6
    scaled = torch.stack([formula(model, each, log_n=8) for each in tokens])
    assert (model(tokens, rope.log_n(8, clip=False)) - scaled).abs().max() < 1e-6 < (scaled - expected).abs().max()


@pytest.mark.parametrize("name", ["rope", "rope+logn", "kerple", "learned", "randomized"])
def test_units_learn_and_are_causal(name):
    torch.manual_seed(0)
    model, used = ZooModel(CONFIG, name, 32, "gau"), scheme(name, CONFIG, 32)
    text = torch.tensor(list(b"a line of text that is learned by heart; " * 4))
    generator = torch.Generator().manual_seed(0)
    batches = (text[torch.randint(41, (8, 1), generator=generator) + torch.arange(33)] for _ in range(80))
    found = train(model, used.training, batches, TrainConfig(80, 8, 32, 1e-2))
    assert found.losses[0] > 5 and found.loss < 1.0, found.losses[-5:]
    model.eval()
    tokens = torch.randint(97, 101, (1, 30))
    changed = tokens.clone()
    changed[0, 20] = 97 if tokens[0, 20] != 97 else 98
    with torch.no_grad():
        difference = (model(tokens, used.rotary) - model(changed, used.rotary)).abs().amax(-1)[0]
    assert difference[:20].max() < 1e-4 < difference[20]
