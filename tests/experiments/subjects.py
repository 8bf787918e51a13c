"""Has what the tests of the tasks share: texts, and models that predict by a rule instead of by weights."""

from __future__ import annotations

import torch
from flashrope.lab.small_models import data
from flashrope.lab.small_models.model import ModelConfig

from experiments.tasks import Subject
from experiments.zoo import scheme

TEXT = b"".join(
    b"line %d of the text, which says nothing: at all\n%d is another one here\n" % (n, n * n) for n in range(400)
)
PIECES = (TEXT[:9000], TEXT[9000:9500], TEXT[9500:])
CORPUS = data.Corpus("text", b"\0".join(PIECES[:2]), PIECES[2:], ("a", "b"), ("c",))


class Oracle(torch.nn.Module):
    """Replaces a model. At every position it predicts the byte ``rule(bytes so far)``."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, tokens, rotary, attend=None):
        logits = torch.zeros(*tokens.shape, 256)
        for row, text in enumerate(tokens.tolist()):
            for at in range(len(text)):
                logits[row, at, self.rule(bytes(text[: at + 1]))] = 20.0
        return logits


def subject(rule, unit=64, samples=10, unseen=PIECES[2:], **options) -> Subject:
    """Returns the Subject that a measure takes, with a rule instead of a model."""
    return Subject(Oracle(rule), scheme("rope", ModelConfig(64, 2, 2), unit), unseen, unit, samples, 0, **options)


def by_place(results):
    return {(result.task, result.at): result.value for result in results}


def sharpen(module):
    """Makes weights ten times larger, because attention hardly matters with initial weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter *= 10


def check_growth(batches, length, shortest):
    """Checks that samples of a task grow, and that a batch depends only on the seed and the step. Samples of the first
    batch are shorter than ``shortest``. Samples of the second half of the 20 batches have ``length`` tokens.
    batches(seed, start) yields the batches from step `start` on."""

    def first(count, seed=0, start=0):
        stream = batches(seed, start)
        return [next(stream) for _ in range(count)]

    found = first(20)
    sizes = [inputs.shape[1] for inputs, _ in found]
    assert sizes == sorted(sizes) and sizes[0] < shortest and set(sizes[10:]) == {length}
    for one, other in zip(found[5:7], first(2, start=5), strict=True):
        assert all(map(torch.equal, one, other))
    ((other, _),) = first(1, seed=1)
    assert not torch.equal(found[0][0], other)
    return found
