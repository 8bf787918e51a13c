"""Tests which scheme the name of an encoding stands for, which model it is used with, and that every encoding
trains."""

import itertools
import math

import pytest
import torch
from flashrope import Rotary, attention
from flashrope.console.options import BadInput
from flashrope.lab.small_models.model import ModelConfig
from flashrope.lab.small_models.train import TrainConfig, train
from subjects import sharpen

from experiments.zoo import ENCODINGS, ZooModel, hfwa_window, hope_ablation, p_rope, scheme

CONFIG, LENGTH = ModelConfig(width=32, layers=2, heads=2), 64
ROPE = Rotary.rope(16)


def of(name, **options):
    return scheme(name, CONFIG, LENGTH, **options)


def test_hope_ablations():
    full, edge = Rotary.rope(64).frequencies, math.pi / 512
    ab1, ab2, ab3 = (hope_ablation(64, 512, which).frequencies for which in ("ab1", "ab2", "ab3"))
    assert ab1 == tuple(0 if edge < f < 2 * edge else f for f in full)
    assert ab2 == tuple(0 if f <= edge else f for f in full)
    assert (ab3[0], len(ab3), ab3[-1]) == (1.0, 32, pytest.approx(2 * edge, rel=1e-14))
    assert [b / a for a, b in itertools.pairwise(ab3)] == pytest.approx([(2 * edge) ** (1 / 31)] * 31, rel=1e-13)
    dropped1, dropped2, hope = (
        {m for m, f in enumerate(t) if f == 0} for t in (ab1, ab2, Rotary.hope(64, 512).frequencies)
    )
    assert dropped1 and dropped2 and not dropped1 & dropped2 and dropped1 | dropped2 == hope
    with pytest.raises(BadInput, match="'hope-ab3[+]yarn': yarn: needs the base of the table for its ramp"):
        of("hope-ab3+yarn")


@pytest.mark.parametrize(
    "name, rotary, trained",
    [
        ("rope", ROPE, "rope"),
        ("hope", Rotary.hope(16, 64), "hope"),
        ("hope-ab1", hope_ablation(16, 64, "ab1"), "hope-ab1"),
        ("hope-ab2", hope_ablation(16, 64, "ab2"), "hope-ab2"),
        ("hope-ab3", hope_ablation(16, 64, "ab3"), "hope-ab3"),
        ("nope", Rotary.none(16), "nope"),
        ("pi", ROPE.interpolate(8), "rope"),
        ("rope+pi-s4", ROPE.interpolate(4), "rope"),
        ("ntk-old", ROPE.ntk(8, "old"), "rope"),
        ("ntk-aware-s2", ROPE.ntk(2, "aware"), "rope"),
        ("ntk-fixed", ROPE.ntk(8, "fixed"), "rope"),
        ("ntk-mixed-s4+dagger", ROPE.ntk(4, "mixed").log_n(64), "rope"),
        ("yarn", ROPE.yarn(8, 64), "rope"),
        ("hope+yarn-s4", Rotary.hope(16, 64).yarn(4, 64), "hope"),
        ("hope+pi", Rotary.hope(16, 64).interpolate(8), "hope"),
        ("rerope", ROPE.rectify(32), "rope"),
        ("rerope-w16+logn", ROPE.rectify(16).log_n(64, clip=False), "rope+logn"),
        ("rerope+dagger", ROPE.rectify(32).log_n(64), "rope"),
        ("leaky-rerope", ROPE.rectify(32, 16), "rope"),
        ("leaky-rerope-w24-k8", ROPE.rectify(24, 8), "rope"),
        ("leaky-rerope-k8-w24+logn", ROPE.rectify(24, 8).log_n(64, clip=False), "rope+logn"),
        ("nope+logn", Rotary.none(16).log_n(64, clip=False), "nope+logn"),
        ("hope+rerope-w8", Rotary.hope(16, 64).rectify(8), "hope"),
    ],
)
def test_what_a_name_means(name, rotary, trained):
    found = of(name)
    assert found.rotary == rotary and found.trained == trained and found.longest is None
    assert of(trained).rotary == of(trained).training == found.training  # the model's name is a scheme too


def test_inv_leaky_is_trained_with_longer_distances_and_used_with_rope():
    found = of("inv-leaky")
    assert found.rotary == ROPE and found.training == ROPE.rectify(32, 1 / 16) and found.trained == "inv-leaky"
    assert of("inv-leaky-w16-k4").training == ROPE.rectify(16, 1 / 4)
    assert max(band.slope for band in found.training.bands) == 16
    with_log_n, log_n = of("inv-leaky+logn"), ROPE.log_n(64, clip=False)
    assert with_log_n.rotary == log_n and with_log_n.training == log_n.rectify(32, 1 / 16)
    assert with_log_n.trained == "inv-leaky+logn"
    dagger = of("inv-leaky+dagger")
    assert dagger.rotary == ROPE.log_n(64) and dagger.training == found.training and dagger.trained == "inv-leaky"


def test_hfwa_is_local_except_in_its_last_layer():
    found = scheme("hfwa", ModelConfig(32, 3, 2), LENGTH)
    assert found.rotary == (ROPE.local(24), ROPE.local(24), Rotary.none(16).log_n(64, clip=False))
    for length, layers in ((512, 12), (64, 2), (512, 24)):
        w = hfwa_window(length, layers)
        assert (w - 1) * (layers - 1) + 1 <= 0.75 * length < w * (layers - 1) + 1
    assert scheme("hfwa-w5", CONFIG, LENGTH).rotary[0] == ROPE.local(5)


def test_p_rope_keeps_the_highest_frequencies():
    base = 10_000.0
    for share, kept in ((0.75, 6), (0.25, 2), (0.2, 1), (1.0, 8)):
        expected = [base ** (-2 * m / 16) if m < kept else 0.0 for m in range(8)]
        assert p_rope(16, share).frequencies == pytest.approx(expected)
    assert of("p-rope").rotary == p_rope(16, 0.75) and of("p-rope-p0.25").rotary == p_rope(16, 0.25)
    assert of("p-rope-p0.5").trained == "p-rope-p0.5" and of("p-rope+rerope-w8").rotary == p_rope(16, 0.75).rectify(8)
    assert p_rope(16, 1.0).frequencies == ROPE.frequencies and not any(p_rope(16, 0.0).frequencies)


def test_random_positions_reach_the_attention_calls():
    found = of("randomized-s4")
    assert found.rotary == found.training == ROPE and found.longest == 256 and of("randomized").longest == 16 * 64
    model = ZooModel(CONFIG, "randomized-s4", LENGTH)
    seen = []

    def attend(q, k, v, rotary, positions):
        seen.append(positions)
        return attention(q, k, v, rotary, positions=positions)

    model(torch.randint(256, (3, 40)), ROPE, attend)
    assert len(seen) == CONFIG.layers and torch.equal(seen[0], seen[1]) and seen[0].shape == (3, 40)
    assert seen[0].max() > 64  # positions go beyond the training length
    model.eval()
    tokens = torch.randint(256, (1, 40))
    again = model(tokens, ROPE)
    assert torch.equal(again, model(tokens, ROPE))
    with pytest.raises(ValueError, match="at most 256, the size of the range of random positions"):
        model(torch.randint(256, (1, 257)), ROPE)


def test_t5_shares_its_weights():
    model = ZooModel(CONFIG, "t5", LENGTH)
    assert len(model.biases) == 1 and model.layer_biases == [model.biases[0]] * 2
    assert len(ZooModel(CONFIG, "kerple", LENGTH).biases) == 2


@pytest.mark.parametrize("name", [*ENCODINGS, "rope+logn", "nope+logn", "inv-leaky+logn"])
def test_every_encoding_trains_and_is_causal(name):
    torch.manual_seed(0)
    model, used = ZooModel(CONFIG, name, LENGTH), of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [torch.randint(256, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    train(model, used.training, batches, TrainConfig(2, 2, LENGTH, 1e-2))
    unchanged = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    unchanged = [key for key in unchanged if key != "positions.seed"]
    assert not unchanged, f"not trained: {unchanged}"
    model.eval()
    tokens = torch.randint(256, (1, 40))
    logits = model(tokens, used.rotary)
    assert logits.shape == (1, 40, 256) and logits.isfinite().all()
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    difference = (model(changed, used.rotary) - logits).abs().amax(-1)[0]
    assert difference[:20].max() < 1e-4 < difference[20]  # attention is causal


def test_encodings_differ_from_one_another():
    config = ModelConfig(width=64, layers=2, heads=2)  # one of its 16 pairs is between pi / 64 and 2 pi / 64
    tokens = torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(3))
    seen = []
    for name in ENCODINGS:
        if name == "inv-leaky":  # it is used like rope
            continue
        torch.manual_seed(0)
        model = ZooModel(config, name, LENGTH)
        sharpen(model.language.blocks)
        seen.append((name, model(tokens, scheme(name, config, LENGTH).rotary)[0, -1]))
    for at, (one, logits) in enumerate(seen):
        for other, others in seen[:at]:
            assert (logits - others).abs().max() > 1e-5, (one, other)
