"""Compares attention patterns, their components, and the picture task with plain formulas."""

import math

import pytest
import torch
from flashrope import Rotary, attention
from flashrope.lab.small_models.model import ModelConfig
from subjects import sharpen

from experiments import picture
from experiments.encodings import distances
from experiments.patterns import components, pattern, repeated
from experiments.zoo import ZooModel, scheme

CONFIG = ModelConfig(width=64, layers=2, heads=2)


def model_of(name, length=64):
    torch.manual_seed(0)
    model = ZooModel(CONFIG, name, length)
    sharpen(model.language.blocks)
    return model


def scores_of_last(q, k, rotary):
    """Computes scores by a plain formula: it rotates q and k by their positions and then multiplies them."""

    def rotate(x, position):
        half = rotary.rotary_dim // 2
        out = x.clone().double()
        for m, f in enumerate(rotary.frequencies):
            one, two = (2 * m, 2 * m + 1) if rotary.interleaved else (m, m + half)
            c, s = math.cos(position * f), math.sin(position * f)
            out[..., one], out[..., two] = c * x[..., one] - s * x[..., two], s * x[..., one] + c * x[..., two]
        return out

    last = rotate(q[:, -1], k.shape[1] - 1)
    return torch.stack([(last * rotate(k[:, j], j)).sum((-1, -2)) for j in range(k.shape[1])], 1) * q.shape[-1] ** -0.5


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary.rope(16),
        Rotary.hope(16, 64),
        Rotary.hope(16, 64, interleaved=True),
        Rotary.hope(16, 64, compact=True),
        Rotary.none(16),
        Rotary.rope(16, rotary_dim=8),
    ],
    ids=repr,
)
def test_components_add_up_to_the_scores(rotary):
    q, k = (torch.randn(3, 20, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    found = components(q, k, rotary)
    assert torch.allclose(found.sum(1), scores_of_last(q, k, rotary), atol=1e-12)
    assert found.shape[1] == len(rotary.frequencies) + (rotary.rotary_dim < 16)
    # All pairs except the first are zero.
    only = torch.zeros_like(q)
    channels = (0, 1) if rotary.interleaved else (0, rotary.rotary_dim // 2)
    only[..., channels] = q[..., channels]
    if rotary.frequencies:
        assert torch.allclose(components(only, k, rotary)[:, 0], found[:, 0]) and not torch.allclose(
            found[:, 0], found[:, 1]
        )
    with pytest.raises(ValueError, match="expected one band of slope 1"):
        components(q, k, Rotary.rope(16).rectify(8))


def test_pattern_of_the_first_layer_by_hand():
    """The pattern of the first layer equals a computation by hand. On these inputs all queries and keys except the
    first are equal before their rotation."""
    model, rotary = model_of("rope"), Rotary.rope(32)
    bytes_ = torch.tensor([10, 32, 97, 101, 116, 255])
    found = pattern(model, rotary, repeated(bytes_, 40))
    block = model.language.blocks[0]
    q, k, _ = block.qkv(block.attention_norm(model.language.embedding(bytes_))).unflatten(-1, (3, 2, 32)).unbind(1)

    def score(distance):
        return (
            scores_of_last(*(x[:, None].expand(-1, distance + 1, -1, -1) for x in (q, k)), rotary)[:, 0].mean() / 2
        )  # heads

    by_distance = [score(d) for d in range(39)]
    assert found.overall.shape == (2, 39) and found.components.shape == (2, 16, 39)
    assert torch.allclose(found.overall[0], torch.stack(by_distance).detach(), atol=1e-5)
    assert torch.allclose(found.components.sum(1), found.overall, atol=1e-9)
    assert torch.equal(found.mean_overall, found.overall.mean(0))


def test_pattern_of_a_bias_contains_the_bias():
    model = model_of("kerple")
    found = pattern(model, scheme("kerple", CONFIG, 64).rotary, repeated([1, 2, 3, 4], 30))
    bias = torch.stack([bias(distances(30))[:, -1].mean(0) for bias in model.biases]).detach().flip(-1)[:, :29]
    content = found.components.sum(1)
    assert torch.allclose(found.overall, content + bias, atol=1e-6)
    assert content[0].std() < 1e-6 < found.overall[0].std()  # without positions all keys of the first layer are equal


def test_pattern_is_of_what_the_model_computes():
    """Recording a pattern does not change the results of the attention calls."""
    model = model_of("hope")
    rotary = scheme("hope", CONFIG, 64).rotary
    calls = []

    def attend(*qkv):
        calls.append(qkv[0].shape)
        return attention(*qkv)

    one = pattern(model, rotary, repeated(range(5, 10), 30), attend=attend)
    in_parts = pattern(model, rotary, repeated(range(5, 10), 30), batch_tokens=30)
    assert calls == [(5, 30, 2, 32)] * 2
    assert torch.allclose(one.overall, in_parts.overall, atol=1e-9)
    learned = model_of("learned")
    positions_in_embedding = pattern(learned, Rotary.none(32), repeated([5, 6], 30))
    assert positions_in_embedding.overall[0].std() > 1e-5


def test_pattern_of_text_is_the_score_between_independent_windows():
    """If q and k are averaged before they are multiplied, the score is the mean over all pairs of windows, where the
    query comes from one window and the key from the other."""
    model, rotary = model_of("rope"), Rotary.rope(32)
    tokens = torch.randint(256, (4, 20), generator=torch.Generator().manual_seed(5))
    block = model.language.blocks[0]
    q, k, _ = block.qkv(block.attention_norm(model.language.embedding(tokens))).unflatten(-1, (3, 2, 32)).unbind(2)
    scores = [scores_of_last(q[i : i + 1], k[j : j + 1], rotary)[0] / 2 for i in range(4) for j in range(4)]
    found = pattern(model, rotary, tokens, average_first=True)
    assert torch.allclose(found.overall[0], torch.stack(scores).mean(0)[1:].flip(0).detach(), atol=1e-5)
    in_parts = pattern(model, rotary, tokens, average_first=True, batch_tokens=20)
    assert torch.allclose(found.components, in_parts.components, atol=1e-9)
    kept = pattern(model, rotary, tokens)
    assert not torch.allclose(kept.overall[0], found.overall[0], atol=1e-3)


# ---- the picture task


def test_axial_attention_knows_rows_from_columns():
    """With two-dimensional positions, the relative weight of the pixel below is the same at every width of the picture.
    With positions in row order it is not."""
    torch.manual_seed(0)
    q, k = (3 * torch.randn(1, 1, 2, 16).expand(1, 24, 2, 16) for _ in range(2))

    def weight(rotary, rows, columns, key):
        marked = torch.zeros(1, 24, 2, 16)
        marked[0, key] = 1
        return picture.attend_on(rows, columns)(q, k, marked, rotary)[0, 0, 0, 0].item()

    def below_to_itself(rotary, rows, columns):
        return weight(rotary, rows, columns, columns) / weight(rotary, rows, columns, 0)

    axial, raster = (picture.encoding(name, 16) for name in ("axial", "raster"))
    assert below_to_itself(axial, 4, 6) == pytest.approx(below_to_itself(axial, 6, 4), rel=1e-4)
    assert below_to_itself(raster, 4, 6) != pytest.approx(below_to_itself(raster, 6, 4), rel=1e-2)
    assert weight(axial, 4, 6, 1) != pytest.approx(weight(axial, 4, 6, 6), rel=1e-2)
    assert weight(axial, 4, 6, 23) > 0  # attention is not causal
