"""Provides the code that all measures share, and the measures of models that are trained only on text. A token is a
byte."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from flashrope import attention
from flashrope.lab.small_models.data import Corpus, TextError, as_tokens, unseen_windows
from flashrope.lab.small_models.evaluate import loss_by_context
from flashrope.lab.small_models.model import Attend
from flashrope.lab.small_models.train import autocast

from .tokens import TokenCorpus, TokenFile
from .zoo import Scheme, ZooModel

PAPER_LENGTH = 512  # tokens; the training length in both papers
MULTIPLES = (1, 2, 4, 8)  # lengths / training length
IGNORED = -100  # this target does not count in the loss
BY_POSITION = "loss-by-position"
PART_ENDS = (0.5, 1, 1.5, 2, 3, 4, 6, 8)  # in training lengths: measure_by_position divides a window at these positions
WINDOWS_PER_SAMPLE = 5  # more windows, because the loss of a few positions varies more than the loss of a window


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds one measurement. ``at`` is a length, or a number of sequences."""

    task: str
    at: float
    value: float
    samples: int


@dataclasses.dataclass(frozen=True)
class Subject:
    """Holds a trained model, the scheme to use it with, and the data to measure it on."""

    model: ZooModel
    scheme: Scheme
    unseen: Sequence[bytes]
    unit: int  # the preset's training length; the model may be trained at a multiple of it
    samples: int
    seed: int
    device: torch.device | str = "cpu"
    attend: Attend = attention
    batch_tokens: int = 16384
    train: bytes = b""  # the text the model was trained on

    def can_read(self, length: int) -> bool:
        return self.scheme.longest is None or length <= self.scheme.longest

    @torch.no_grad()
    def last_logits(self, tokens: torch.Tensor, count: int, as_trained: bool = False) -> torch.Tensor:
        """Returns the logits of the last ``count`` tokens, float32 (samples, count, vocab_size). tokens: int64
        (samples, seqlen)."""
        rotary = self.scheme.training if as_trained else self.scheme.rotary
        found = []
        for part in tokens.split(max(self.batch_tokens // tokens.shape[1], 1)):
            with autocast(part.device):
                found.append(self.model(part, rotary, self.attend)[:, -count:].float())
        return torch.cat(found)


def need_disjoint(training: Iterable, evaluation: Iterable, what: str) -> None:
    """Raises AssertionError if training and evaluation have an element in common."""
    if shared := set(training) & set(evaluation):
        raise AssertionError(f"{what}: {len(shared)} are in both training and evaluation, such as {min(shared)!r}")


def percentage(task: str, at: float, found: torch.Tensor) -> Result:
    """Returns a `Result` of this task at `at`, whose value is the percentage of true values in `found`, bool
    (samples, ...)."""
    return Result(task, at, 100 * found.float().mean().item(), len(found))


def growing_batches(
    name: str,
    practice: Callable[[int, random.Random], tuple[bytes, Sequence[int]]],
    tokens: int,
    shortest: int,
    length: int,
    seed: int,
    steps: int,
    device: torch.device | str,
    start: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches (inputs, targets) without end, starting with step ``start``. A batch has about ``tokens`` bytes.

    ``practice(length, rng)`` returns one sample in the form that ``asked_for`` takes. Samples grow from ``shortest`` to
    ``length`` bytes in the first half of the steps. The batch of step n depends only on the seed and n.
    """
    for step in itertools.count(start):
        rng = random.Random(f"{name} practice {seed} {step}")
        now = min(shortest + 2 * (step + 1) * (length - shortest) // steps, length)
        inputs, targets = asked_for([practice(now, rng) for _ in range(max(tokens // now, 1))])
        yield inputs.to(device), targets.to(device)


def asked_for(samples: Sequence[tuple[bytes, Sequence[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (inputs, targets), int64 (count, n) each. samples: count pairs of n + 1 bytes and the indices of the
    bytes to predict. All other targets are IGNORED."""
    whole = as_tokens([sample for sample, _ in samples])
    targets = torch.full_like(whole, IGNORED)
    for row, (_, places) in enumerate(samples):
        targets[row, places] = whole[row, places]
    return whole[:, :-1], targets[:, 1:]


def repeated(windows: Sequence[bytes], unit: int, length: int) -> list[bytes]:
    """Returns the first ``unit`` bytes of every window, repeated up to length + 1 bytes."""
    return [(window[:unit] * (length // unit + 2))[: length + 1] for window in windows]


def measure_perplexity(subject: Subject, multiples: Sequence[float] = MULTIPLES) -> list[Result]:
    """Returns the perplexity of the last `subject.unit // 2` bytes of every unseen window, by context length."""
    lengths = lengths_of(subject, multiples)
    windows = windows_of(subject, round(max(multiples) * subject.unit))
    losses = loss_by_context(
        subject.model,
        subject.scheme.rotary,
        as_tokens(windows, subject.device),
        lengths,
        subject.unit // 2,
        subject.batch_tokens,
        subject.attend,
    )
    return [Result("perplexity", loss.context_length, math.exp(min(loss.last, 700)), len(windows)) for loss in losses]


def measure_accuracy(subject: Subject) -> list[Result]:
    """Returns the next-token accuracy over all tokens of a window. The task "accuracy" measures the model as trained at
    the training length. Two more tasks measure it under the scheme at MULTIPLES[-1] times that length, on repeated text
    and on other text."""
    short, long = subject.unit, MULTIPLES[-1] * subject.unit
    windows = windows_of(subject, long)
    cases = [
        ("accuracy", short, [window[: short + 1] for window in windows]),
        ("accuracy-repeat", long, repeated(windows, short, long)),
        ("accuracy-non-repeat", long, windows),
    ]
    results = []
    for task, length, texts in cases:
        if subject.can_read(length):
            tokens = as_tokens(texts, subject.device)
            parts = tokens.split(max(subject.batch_tokens // length, 1))
            predicted = [subject.last_logits(part[:, :-1], length, task == "accuracy").argmax(-1) for part in parts]
            right = torch.cat(predicted) == tokens[:, 1:]
            results.append(Result(task, length, 100 * right.double().mean().item(), len(texts)))
    return results


MEASURES: dict[str, Callable[..., list[Result]]] = {
    "perplexity": measure_perplexity,
    "accuracy": measure_accuracy,
}


def lengths_of(subject: Subject, multiples: Sequence[float]) -> list[int]:
    """Returns the lengths in bytes that the model can read."""
    lengths = [round(multiple * subject.unit) for multiple in multiples]
    return [length for length in lengths if subject.can_read(length)]


def windows_of(subject: Subject, length: int) -> list[bytes]:
    windows = unseen_windows(subject.unseen, length + 1, subject.samples, subject.seed)
    if not windows:
        raise TextError(
            f"text: expected an unseen file of at least {length + 1:,} bytes for a context of {length:,}, got none"
        )
    return windows


def reader(text: bytes | TokenFile) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that takes int64 indices into the text and returns the bytes or tokens there."""
    if isinstance(text, TokenFile):
        return text.at
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).__getitem__


def batches(
    corpus: Corpus | TokenCorpus,
    batch_size: int,
    length: int,
    seed: int,
    device: torch.device | str = "cpu",
    start: int = 0,
) -> Iterator[torch.Tensor]:
    """Yields batches of windows of the training text without end, starting with step ``start``. A batch is int64
    (batch_size, length + 1).

    The batch of step n depends only on the seed and n.
    """
    text, offsets = reader(corpus.train), torch.arange(length + 1)
    for step in itertools.count(start):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(corpus.train) - length, (batch_size, 1), generator=generator)
        yield text(starts + offsets).to(device).long()


@torch.no_grad()
def measure_by_position(subject: Subject) -> list[Result]:
    """Returns the mean loss, in nats per byte, of each part of the windows. ``at`` is the end of the part.

    If a scheme uses a longer context, the loss falls with the position (Su 2023, ReRoPE: "longer context, lower loss").
    If it merely tolerates a longer context, the loss stays level. If it fails, the loss rises.
    """
    ends = [round(end * subject.unit) for end in PART_ENDS]
    windows = windows_of(dataclasses.replace(subject, samples=WINDOWS_PER_SAMPLE * subject.samples), ends[-1])
    total = torch.zeros(ends[-1], dtype=torch.float64)
    for tokens in as_tokens(windows, subject.device).split(max(subject.batch_tokens // ends[-1], 1)):
        with autocast(tokens.device):
            logits = subject.model(tokens[:, :-1], subject.scheme.rotary, subject.attend)
        losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        total += losses.double().sum(0).cpu()
    mean = total / len(windows)
    return [
        Result(BY_POSITION, end, mean[start:end].mean().item(), len(windows))
        for start, end in zip((0, *ends), ends, strict=False)
    ]
