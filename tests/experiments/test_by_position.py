"""The loss by position, against the losses of every position."""

import dataclasses
import math

import pytest
import torch
from flashrope import attention
from flashrope.small_models.model import ModelConfig

from experiments import by_position
from experiments.tasks import Subject, windows_of
from experiments.zoo import ZooModel, scheme

CONFIG = ModelConfig(width=32, layers=1, heads=2)


def test_loss_by_position_is_the_mean_of_its_positions():
    torch.manual_seed(0)
    model, used = ZooModel(CONFIG, "rope", 16).eval(), scheme("rope", CONFIG, 16)
    text = bytes(torch.randint(97, 110, (4000,), generator=torch.Generator().manual_seed(0)).tolist())
    subject = Subject(model, used, [text], 16, 6, 3, batch_tokens=300)
    windows = windows_of(dataclasses.replace(subject, samples=30), 128)
    expected = torch.zeros(128)
    for window in windows:
        tokens = torch.tensor(list(window))[None]
        with torch.no_grad():
            log_p = model(tokens[:, :-1], used.rotary, attention)[0].log_softmax(-1)
        expected += torch.tensor([-log_p[at, tokens[0, at + 1]].item() for at in range(128)]) / len(windows)
    found = by_position.measure(subject)
    assert [each.at for each in found] == [8, 16, 24, 32, 48, 64, 96, 128]
    assert {each.samples for each in found} == {30} and len(windows) == 30
    for start, each in zip((0, 8, 16, 24, 32, 48, 64, 96), found, strict=True):
        assert each.value == pytest.approx(expected[start : each.at].mean().item(), rel=1e-4)
    assert len({round(each.value, 4) for each in found}) == 8 and abs(found[0].value - math.log(256)) < 0.5
