"""Tests training on text only, and what the measures of text models count."""

import dataclasses
import math

import pytest
import torch
from flashrope import attention
from flashrope.lab.small_models import data
from flashrope.lab.small_models.model import ModelConfig
from subjects import CORPUS, PIECES, by_place, sharpen, subject

from experiments import tasks
from experiments.tasks import Subject, windows_of
from experiments.zoo import ZooModel, scheme


def test_repeated():
    assert tasks.repeated([b"abcdef"], 3, 9) == [b"abcabcabca"]
    assert tasks.repeated([b"abcdef"], 4, 6) == [b"abcdabc"]


def test_batches_are_text_and_depend_only_on_seed_and_step():
    def first(count, seed=0, start=0):
        stream = tasks.batches(CORPUS, 8, 64, seed, start=start)
        return [next(stream) for _ in range(count)]

    batches = first(5)
    assert all(batch.shape == (8, 65) and batch.dtype == torch.int64 for batch in batches)
    assert all(torch.equal(one, other) for one, other in zip(batches[3:], first(2, start=3), strict=True))
    assert not torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], first(1, seed=1)[0])
    assert all(bytes(row) in CORPUS.train for batch in batches for row in batch.tolist())


# ---- measures
def copier(text):
    """Predicts the byte that followed an earlier occurrence of the last seven bytes. If they did not occur before, it
    predicts "z"."""
    at = text[:-1].rfind(text[-7:])
    return text[at + 7] if at >= 0 and at + 7 < len(text) else ord("z")


def test_accuracy_over_all_tokens():
    """The accuracy of always predicting one byte is the share of that byte."""
    it = subject(lambda text: ord("e"), samples=4, batch_tokens=200)
    windows = data.unseen_windows(it.unseen, 8 * 64 + 1, 4, 0)
    found = by_place(tasks.measure_accuracy(it))

    def share(texts):
        return 100 * sum(text[1:].count(b"e") for text in texts) / sum(len(text) - 1 for text in texts)

    assert found["accuracy", 64] == pytest.approx(share([w[:65] for w in windows]))
    assert found["accuracy-non-repeat", 512] == pytest.approx(share(windows))
    assert found["accuracy-repeat", 512] == pytest.approx(share([(w[:64] * 9)[:513] for w in windows]))
    periodic = subject(lambda text: text[-64] if len(text) >= 64 else 0, samples=4, batch_tokens=200)
    assert by_place(tasks.measure_accuracy(periodic))["accuracy-repeat", 512] == pytest.approx(100 * (512 - 63) / 512)


def test_perplexity_is_over_the_last_half_training_length():
    it = subject(lambda text: ord("e"), samples=3, batch_tokens=200)
    found = by_place(tasks.measure_perplexity(it))
    assert set(found) == {("perplexity", 64 * m) for m in (1, 2, 4, 8)}
    windows = data.unseen_windows(it.unseen, 8 * 64 + 1, 3, 0)
    hits = sum(window[-32:].count(b"e") for window in windows) / (3 * 32)
    expected = math.exp(math.log(math.exp(20) + 255) - 20 * hits)
    assert all(value == pytest.approx(expected, rel=1e-4) for value in found.values())


def test_accuracy_at_the_training_length_is_as_trained():
    torch.manual_seed(0)
    config = ModelConfig(64, 2, 2)
    model = ZooModel(config, "rope", 64)
    sharpen(model.language.blocks)

    def found(name):
        used = scheme(name, config, 64)
        return by_place(tasks.measure_accuracy(Subject(model, used, PIECES[2:], 64, 4, 0)))

    rope, pi = found("rope"), found("pi-s8")
    assert (
        rope["accuracy", 64] == pi["accuracy", 64]
        and rope["accuracy-non-repeat", 512] != pi["accuracy-non-repeat", 512]
    )


def test_loss_by_position_is_the_mean_of_its_positions():
    torch.manual_seed(0)
    config = ModelConfig(width=32, layers=1, heads=2)
    model, used = ZooModel(config, "rope", 16).eval(), scheme("rope", config, 16)
    text = bytes(torch.randint(97, 110, (4000,), generator=torch.Generator().manual_seed(0)).tolist())
    it = Subject(model, used, [text], 16, 6, 3, batch_tokens=300)
    windows = windows_of(dataclasses.replace(it, samples=30), 128)
    expected = torch.zeros(128)
    for window in windows:
        tokens = torch.tensor(list(window))[None]
        with torch.no_grad():
            log_p = model(tokens[:, :-1], used.rotary, attention)[0].log_softmax(-1)
        expected += torch.tensor([-log_p[at, tokens[0, at + 1]].item() for at in range(128)]) / len(windows)
    found = tasks.measure_by_position(it)
    assert [each.at for each in found] == [8, 16, 24, 32, 48, 64, 96, 128]
    assert {each.samples for each in found} == {30} and len(windows) == 30
    for start, each in zip((0, 8, 16, 24, 32, 48, 64, 96), found, strict=True):
        assert each.value == pytest.approx(expected[start : each.at].mean().item(), rel=1e-4)
    assert len({round(each.value, 4) for each in found}) == 8 and abs(found[0].value - math.log(256)) < 0.5
