"""The tasks that the experiments measure, and the practice batches that small models are trained on. A token is a byte.

Evaluation and practice never share a sample: their texts come from different files, and random sequences and keys are
even in evaluation and odd in practice.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from flashrope import attention
from flashrope.demo.data import Corpus, TextError, as_tokens, unseen_windows
from flashrope.demo.evaluate import loss_by_context
from flashrope.demo.model import Attend
from flashrope.demo.train import autocast

from .zoo import Scheme, ZooModel

LETTERS = b"abcdefghijklmnopqrstuvwxyz"
PREFIX, SUFFIX = 8, 4  # tokens of a sequence in practice for copying; the task itself is in copying.py
PAPER_LENGTH = 512  # tokens; the training length in both papers
SHOTS = 5
LABELS = {"digits": b"01", "letters": b"AB", "answers": b"yn"}  # one label set per task, like SST-2, QNLI and RTE
FILLER = b"Nothing is said here, these words only take up room.\n"
NEEDLE, ASKED, DIGITS = b"\nThe key is %s.\n", b"\nThe key is ", 5
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MULTIPLES = (1, 2, 4, 8)  # of the training length
FEW_SHOT_MULTIPLES = (0.5, 1, 1.5, 2, 2.5)  # 256 to 1280 at 512
EVALUATION, PRACTICE = 0, 1  # parities


@dataclasses.dataclass(frozen=True)
class Result:
    """One measurement. ``at`` is a length, or a number of sequences."""

    task: str
    at: float
    value: float
    samples: int


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model under one scheme, and the data to measure it on."""

    model: ZooModel
    scheme: Scheme
    unseen: Sequence[bytes]
    # the preset's training length, to which task sizes are relative; the model may be trained at a multiple of it
    unit: int
    samples: int
    seed: int
    device: torch.device | str = "cpu"
    attend: Attend = attention
    batch_tokens: int = 16384

    def can_read(self, length: int) -> bool:
        return self.scheme.longest is None or length <= self.scheme.longest

    @torch.no_grad()
    def last_logits(self, tokens: torch.Tensor, count: int, as_trained: bool = False) -> torch.Tensor:
        """tokens int64 (samples, seqlen) to the last ``count`` logits, float32 (samples, count, vocab_size)."""
        rotary = self.scheme.training if as_trained else self.scheme.rotary
        found = []
        for part in tokens.split(max(self.batch_tokens // tokens.shape[1], 1)):
            with autocast(part.device):
                found.append(self.model(part, rotary, self.attend)[:, -count:].float())
        return torch.cat(found)


# ---- samples
def sequences(count: int, rng: random.Random, parity: int) -> list[bytes]:
    """``count`` sequences of PREFIX + SUFFIX letters with different prefixes."""
    drawn: dict[bytes, bytes] = {}
    while len(drawn) < count:
        sequence = bytearray(rng.choices(LETTERS, k=PREFIX + SUFFIX))
        if sum(sequence) % 2 != parity:
            sequence[0] += 1 if sequence[0] < LETTERS[-1] else -1
        drawn.setdefault(bytes(sequence[:PREFIX]), bytes(sequence))
    return list(drawn.values())


def text_width(shortest: int) -> int:
    """Size of an example's text in bytes: at most 60, and SHOTS + 1 examples fill about two thirds of the shortest
    prompt."""
    return max(min(2 * shortest // (3 * (SHOTS + 1)) - 3, 60), 1)


def few_shot(texts: Sequence[bytes], labels: bytes, length: int, samples: int, seed: int, width: int) -> list[bytes]:
    """Prompts of exactly ``length`` bytes: SHOTS lines "text:label", filler lines, then a text and a colon.

    Each text has ``width`` bytes. Labels are random, and both occur. Raises TextError if the examples do not fit or
    there are too few texts.
    """
    room = length - SHOTS * (width + 3) - (width + 1)
    if room < 0:
        raise TextError(
            f"few-shot: {SHOTS} examples of {width} bytes and a query need {length - room} bytes, the prompt has "
            f"{length}"
        )
    if len(texts) <= SHOTS:
        raise TextError(
            f"few-shot: more than {SHOTS} different lines of at least {width} bytes are needed, the text has "
            f"{len(texts)}"
        )
    padding = b"" if not room else (FILLER * (room // len(FILLER) + 1))[: room - 1] + b"\n"
    prompts = []
    for sample in range(samples):
        rng = random.Random(f"few-shot {seed} {labels!r} {length} {sample}")
        chosen = rng.sample(texts, SHOTS + 1)
        answers = [labels[shot % 2] for shot in range(SHOTS)]
        rng.shuffle(answers)
        shots = [text + b":" + bytes([label]) + b"\n" for text, label in zip(chosen, answers, strict=False)]
        prompts.append(b"".join(shots) + padding + chosen[-1] + b":")
    return prompts


def lines_of(pieces: Sequence[bytes], width: int) -> list[bytes]:
    """The distinct lines of printable ASCII without colons, stripped and cut to ``width`` bytes, sorted. Shorter lines
    are dropped."""
    found = set()
    for piece in pieces:
        for line in piece.splitlines():
            cut = line.strip()[:width]
            if len(cut) == width and cut.isascii() and b":" not in cut and cut.decode().isprintable():
                found.add(cut)
    return sorted(found)


def passkey(
    pieces: Sequence[bytes], length: int, depth: float, samples: int, seed: int, parity: int = EVALUATION
) -> tuple[list[bytes], list[bytes]]:
    """Prompts of exactly ``length`` bytes (text with a key at ``depth`` of it, then the question), and answers of
    DIGITS digits. Raises TextError."""
    room = length - len(NEEDLE) + len(b"%s") - DIGITS - len(ASKED)
    pieces = [piece for piece in pieces if len(piece) >= room]
    if room < 0 or not pieces:
        raise TextError(
            f"passkey: a prompt of {length} bytes needs a file of at least {room} bytes"
            if room >= 0
            else f"passkey: expected a prompt of at least {length - room} bytes, got {length}"
        )
    prompts, answers = [], []
    for sample in range(samples):
        rng = random.Random(f"passkey {seed} {length} {depth} {sample}")
        piece = rng.choice(pieces)
        start = rng.randrange(len(piece) - room + 1)
        text, cut = piece[start : start + room], round(depth * room)
        key = b"%0*d" % (DIGITS, 2 * rng.randrange(10**DIGITS // 2) + parity)
        prompts.append(text[:cut] + NEEDLE % key + text[cut:] + ASKED)
        answers.append(key)
    return prompts, answers


def repeated(windows: Sequence[bytes], unit: int, length: int) -> list[bytes]:
    """The first ``unit`` bytes of every window, repeated up to length + 1 bytes."""
    return [(window[:unit] * (length // unit + 2))[: length + 1] for window in windows]


# ---- measures
def correct(subject: Subject, prompts: list[bytes], answers: list[bytes]) -> torch.Tensor:
    """bool (samples, answer length): whether each byte of the answer is the most likely one after the bytes before it.
    If a whole row is true, greedy decoding would have written the answer."""
    tokens = as_tokens([p + a for p, a in zip(prompts, answers, strict=True)], subject.device)
    count = len(answers[0])
    return subject.last_logits(tokens[:, :-1], count).argmax(-1) == tokens[:, -count:]


def measure_perplexity(subject: Subject, multiples: Sequence[float] = MULTIPLES) -> list[Result]:
    """Perplexity of the last unit / 2 bytes of unseen windows, by context length."""
    lengths = _lengths(subject, multiples)
    windows = _windows(subject, round(max(multiples) * subject.unit))
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


def measure_few_shot(subject: Subject, multiples: Sequence[float] = FEW_SHOT_MULTIPLES) -> list[Result]:
    """Share of prompts whose most likely next byte is one of the labels, correct or not, by input length."""
    results, width = [], text_width(subject.unit // 2)
    texts = lines_of(subject.unseen, width)
    for length in _lengths(subject, multiples):
        for name, labels in LABELS.items():
            prompts = few_shot(texts, labels, length, subject.samples, subject.seed, width)
            predicted = subject.last_logits(as_tokens(prompts, subject.device), 1).argmax(-1)[:, 0]
            follows = torch.isin(predicted, torch.tensor(list(labels), device=predicted.device))
            results.append(Result(f"few-shot-{name}", length, 100 * follows.float().mean().item(), len(prompts)))
    return results


def measure_accuracy(subject: Subject) -> list[Result]:
    """Next-token accuracy over all tokens of a window: as trained at the training length ("accuracy"), and under the
    scheme at MULTIPLES[-1] times that length, with repeating and with other text."""
    short, long = subject.unit, MULTIPLES[-1] * subject.unit
    windows = _windows(subject, long)
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


def measure_passkey(subject: Subject, multiples: Sequence[float] = MULTIPLES) -> list[Result]:
    """Share of correct keys ("passkey") and of their correct digits ("passkey-digits") by length, over five depths."""
    results = []
    for length in _lengths(subject, multiples):
        right = torch.cat([correct(subject, *_passkeys(subject, length, depth)) for depth in DEPTHS])
        results += [
            Result("passkey", length, 100 * right.all(1).float().mean().item(), len(right)),
            Result("passkey-digits", length, 100 * right.float().mean().item(), len(right)),
        ]
    return results


MEASURES: dict[str, Callable[..., list[Result]]] = {
    "perplexity": measure_perplexity,
    "few-shot": measure_few_shot,
    "accuracy": measure_accuracy,
    "passkey": measure_passkey,
}


def _lengths(subject: Subject, multiples: Sequence[float]) -> list[int]:
    lengths = [round(multiple * subject.unit) for multiple in multiples]
    return [length for length in lengths if subject.can_read(length)]


def _passkeys(subject: Subject, length: int, depth: float) -> tuple[list[bytes], list[bytes]]:
    return passkey(subject.unseen, length - DIGITS + 1, depth, max(subject.samples // len(DEPTHS), 1), subject.seed)


def _windows(subject: Subject, length: int) -> list[bytes]:
    windows = unseen_windows(subject.unseen, length + 1, subject.samples, subject.seed)
    if not windows:
        raise TextError(
            f"no unseen file has {length + 1:,} bytes, as a context of {length:,} needs; give a longer text"
        )
    return windows


# ---- practice
def batches(
    corpus: Corpus,
    batch_size: int,
    length: int,
    seed: int,
    practice: float,
    device: torch.device | str = "cpu",
    start: int = 0,
) -> Iterator[torch.Tensor]:
    """Endless batches int64 (batch_size, length + 1), starting with step ``start``.

    Rows are windows of the training text; the share ``practice`` of the rows are task samples instead, copying twice as
    often as the others. The batch of step n depends only on the seed and n.
    """
    text = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
    rows, offsets = round(practice * batch_size), torch.arange(length + 1)
    pieces = corpus.train.split(b"\0")
    width = text_width(length // 2)
    texts = lines_of(pieces, width) if rows else []
    step = start
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - length, (batch_size - rows, 1), generator=generator)
        drawn = text[starts + offsets]
        if rows:
            samples = [
                practice_sample(pieces, texts, width, length + 1, f"{seed} {step} {row}", row % 4 % 3)
                for row in range(rows)
            ]
            drawn = torch.cat((drawn, as_tokens(samples).to(torch.uint8)))
        yield drawn.to(device).long()
        step += 1


def practice_sample(
    pieces: Sequence[bytes], texts: Sequence[bytes], width: int, size: int, seed: str, kind: int
) -> bytes:
    """A practice sample of ``size`` bytes. Kind 0: sequences, then the same ones repeated in random order. Kind 1: a
    few-shot prompt of random length with its label. Kind 2: a key at a random depth, and its question. Text fills the
    space in front of the prompt."""
    rng = random.Random(f"practice {seed} {kind}")
    if kind == 0:
        drawn = sequences(rng.randint(1, max(size // (2 * (PREFIX + SUFFIX)), 1)), rng, PRACTICE)
        again = rng.choices(drawn, k=size // (PREFIX + SUFFIX) + 1)
        return b"".join(drawn + again)[:size]
    if kind == 1:
        labels = rng.choice(list(LABELS.values()))
        length = rng.randrange((size - 1) // 2, size - 1)
        prompt = few_shot(texts, labels, length, 1, seed, width)[0] + bytes([rng.choice(labels)])
    else:
        length = rng.randrange(size // 2 + 1, size - DIGITS + 1)
        prompts, answers = passkey(pieces, length, rng.random(), 1, seed, PRACTICE)
        prompt = prompts[0] + answers[0]
    room = size - len(prompt)
    piece = rng.choice([piece for piece in pieces if len(piece) >= room])
    start = rng.randrange(len(piece) - room + 1)
    return piece[start : start + room] + prompt
