"""The loss by position, against the losses of every position."""

import math

import pytest
import torch

from experiments import by_position
from experiments.tasks import Subject, windows_of
from experiments.zoo import ZooModel, scheme
from flashrope import attention
from flashrope.demo.model import ModelConfig

CONFIG = ModelConfig(width=32, layers=1, heads=2)


def test_loss_by_position_is_the_mean_of_its_positions():
    torch.manual_seed(0)
    model, used = ZooModel(CONFIG, "rope", 16).eval(), scheme("rope", CONFIG, 16)
    text = bytes(torch.randint(97, 110, (4000,), generator=torch.Generator().manual_seed(0)).tolist())
    subject = Subject(model, used, [text], 16, 6, 3, batch_tokens=300)
    windows = windows_of(subject, 128)
    expected = torch.zeros(128)
    for window in windows:
        tokens = torch.tensor(list(window))[None]
        with torch.no_grad():
            log_p = model(tokens[:, :-1], used.rotary, attention)[0].log_softmax(-1)
        expected += torch.tensor([-log_p[at, tokens[0, at + 1]].item() for at in range(128)]) / len(windows)
    found = by_position.measure(subject)
    places, (before,) = found[:-1], found[-1:]
    assert [each.at for each in places] == [8 * n for n in range(1, 17)] and {each.samples for each in found} == {6}
    for n, each in enumerate(places):
        assert each.value == pytest.approx(expected[8 * n : 8 * n + 8].mean().item(), rel=1e-4)
    assert before == by_position.Result(by_position.BEFORE, 128, places[1].value, 6)
    assert abs(places[0].value - math.log(256)) < 0.5
