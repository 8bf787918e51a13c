"""Compares every encoding that is not rotary, element by element, with a plain formula."""

import math

import pytest
import torch

from experiments import encodings
from experiments.encodings import ABSOLUTE, BIASES, attend_with_bias, distances


def bias_of(name, heads=4, seqlen=24, train_length=16, seed=0):
    torch.manual_seed(seed)
    module = BIASES[name](heads, train_length)
    return module, module(distances(seqlen)).detach()


def assert_everywhere(bias, formula):
    heads, seqlen, _ = bias.shape
    for h in range(heads):
        for i in range(seqlen):
            for j in range(i + 1):
                assert bias[h, i, j].item() == pytest.approx(formula(h, i, j), rel=2e-4, abs=1e-5), (h, i, j)


def test_alibi():
    _, bias = bias_of("alibi", heads=8)
    assert_everywhere(bias, lambda h, i, j: -(2 ** -(h + 1)) * (i - j))
    # ALiBi's slopes for 12 heads are the slopes for 8 heads, then every other slope for 16 heads.
    expected = [2**-n for n in (1, 2, 3, 4, 5, 6, 7, 8)] + [2**-n for n in (0.5, 1.5, 2.5, 3.5)]
    assert encodings.alibi_slopes(12) == pytest.approx(expected)


def test_kerple():
    module, bias = bias_of("kerple")
    r1, r2 = module.log_r1.exp().tolist(), module.log_r2.exp().tolist()
    assert min(r1 + r2) > 0 and len(set(r1)) == 4
    assert_everywhere(bias, lambda h, i, j: -r1[h] * math.log(1 + r2[h] * (i - j)))
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_fire():
    module, bias = bias_of("fire", seqlen=24, train_length=16)
    c = module.log_c.exp().item()
    first, _, second = module.mlp

    def formula(h, i, j):
        x = math.log(c * (i - j) + 1) / math.log(c * max(i, 16) + 1)
        hidden = [max(w * x + b, 0) for w, b in zip(first.weight[:, 0].tolist(), first.bias.tolist(), strict=True)]
        return sum(w * x for w, x in zip(second.weight[h].tolist(), hidden, strict=True)) + second.bias[h].item()

    assert_everywhere(bias, formula)
    beyond = [(bias[0, i, i - 3] - bias[0, 16, 13]).abs().item() for i in (17, 23)]
    assert min(beyond) > 1e-6  # beyond the threshold the weight of a distance depends on the position
    assert bias[0, 3, 1] == bias[0, 15, 13]


def test_t5():
    module, bias = bias_of("t5", heads=1, seqlen=140, train_length=512)
    assert module.farthest == 128 and module.table.shape == (32, 1)  # as in the paper
    table = module.table.tolist()

    def bucket(d):
        """Returns the bucket of a distance. Every distance below 16 has its own bucket. From there to 128, 16 buckets
        are spaced evenly in the logarithm."""
        if d < 16:
            return d
        edges = [16 * 8 ** (step / 16) for step in range(17)]
        return 16 + max(step for step in range(16) if d >= edges[step] - 1e-9)

    assert [bucket(d) for d in (15, 16, 17, 18, 19, 20, 127, 128, 199)] == [15, 16, 16, 16, 17, 17, 31, 31, 31]
    assert_everywhere(bias, lambda h, i, j: table[bucket(i - j)][h])
    short, _ = bias_of("t5", train_length=64)
    reached = encodings.t5_buckets(torch.arange(64), short.buckets, short.farthest)
    assert set(reached.tolist()) == set(range(32)) - {20}  # training reaches the last bucket


def test_sandwich():
    _, bias = bias_of("sandwich", heads=4, seqlen=40)
    sinusoidal = encodings.sinusoidal(40, 128).double()
    assert_everywhere(bias, lambda h, i, j: (sinusoidal[i] @ sinusoidal[j]).item() / (2 * (h + 1)))
    assert not list(BIASES["sandwich"](4, 16).parameters())


def test_random_positions():
    torch.manual_seed(0)
    module = encodings.RandomPositions(50)
    trained = [module(3, 20) for _ in range(3)]
    for positions in trained:
        assert positions.shape == (3, 20) and torch.equal(positions[0], positions[2])
        row = positions[0].tolist()
        assert row == sorted(set(row)) and row[0] >= 0 and row[-1] < 50
    assert not torch.equal(trained[0], trained[1]) and not torch.equal(trained[1], trained[2])
    resumed = encodings.RandomPositions(50)
    resumed.load_state_dict(module.state_dict())
    assert torch.equal(module(3, 20), resumed(3, 20))  # a resumed run continues with the same draws
    module.eval()
    assert torch.equal(module(1, 20), module(5, 20)[:1]) and not torch.equal(module(1, 20)[:, :10], module(1, 10))
    assert module(1, 50).tolist() == [list(range(50))]
    with pytest.raises(ValueError, match="at most 50, the size of the range of random positions, got 51"):
        module(1, 51)
    every = torch.stack([module.train()(1, 20)[0] for _ in range(200)])
    assert 24 < every.double().mean() < 25  # uniform over 0 .. 49


def test_sinusoidal():
    table = encodings.sinusoidal(300, 10)
    for p in (0, 1, 7, 299):
        for m in range(5):
            angle = p / 10_000 ** (2 * m / 10)
            assert table[p, 2 * m].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * m + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_integer_and_binary():
    assert encodings.integer(5, 3).tolist() == [[p] * 3 for p in range(5)]
    table = encodings.binary(300, 32)
    for p in (0, 1, 5, 252, 299):
        bits = [int(bit) for bit in reversed(f"{p:016b}")]
        assert table[p].tolist() == [bit for bit in bits for _ in range(2)]


def test_learned_ends_at_the_training_length():
    module = encodings.Learned(8, 16)
    assert torch.equal(module(5), module.table[:5]) and module.table.requires_grad
    assert len(module(16)) == 16
    with pytest.raises(ValueError, match="expected at most 16 learned positions, got 17"):
        module(17)


@pytest.mark.parametrize("name", BIASES)
def test_attention_with_a_bias_is_the_formula(name):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 12, 3, 8, requires_grad=True) for _ in range(3))
    module, bias = bias_of(name, heads=3, seqlen=12)
    out = attend_with_bias(module, q, k, v, None)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 + bias
    scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.allclose(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), atol=1e-6)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_absolute_encodings_have_the_shape_of_the_embedding():
    for name, function in ABSOLUTE.items():
        assert function(7, 12).shape == (7, 12) and function(7, 12).dtype == torch.float32, name
