"""Makes and measures few-shot following (HoPE, section 4.2.2). A prompt has examples "text:label", filler, and then a
text without its label. An answer counts if it is one of the two labels of the examples, whether right or wrong.

There are three kinds of examples, like the paper's three tasks: a sentence, a question with an answer, and a pair of
sentences. Texts are lines of the corpus, cut to 8 to 10 bytes. The two labels are capital letters, which occur in the
texts too. They change from prompt to prompt, so that a model can know them only from the examples. Filler before and
after the examples varies their position and distance. The control scores answers against the labels of another prompt.

No text and no pair of labels of the evaluation occurs in training. The code asserts both.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from flashrope.lab.small_models.data import SEPARATOR, Corpus, TextError, as_tokens

from .tasks import Result, Subject, growing_batches, lengths_of, need_disjoint, percentage

SEPARATORS = {"sentence": b"", "question": b"?", "pair": b"|"}  # between the two texts of an example, if it has two
SHOTS = 5
NARROWEST, WIDEST = 8, 10  # a text has at least and at most this many bytes
MARK = b":"  # occurs only before a label
FILLER = b"Nothing is said here, these words only take up room.\n"
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MULTIPLES = (0.5, 1, 1.5, 2, 2.5)  # lengths / training length: for the paper's 512 these are 256 to 1280
SHORTEST_PRACTICE = 72

LABELS = [bytes(pair) for pair in itertools.combinations(LETTERS, 2)]
ASKED_LABELS = LABELS[::4]  # the labels used in the evaluation only
PRACTICE_LABELS = sorted(set(LABELS) - set(ASKED_LABELS))
need_disjoint(PRACTICE_LABELS, ASKED_LABELS, "labels")


# ---- texts


def texts_of(pieces: Sequence[bytes]) -> list[bytes]:
    """Returns distinct lines of printable ASCII without marks and separators. The lines are stripped, cut to WIDEST
    bytes and sorted."""
    found, forbidden = set(), MARK + b"".join(SEPARATORS.values())
    for piece in pieces:
        for line in piece.splitlines():
            text = line.strip()[:WIDEST]
            if (
                len(text) == WIDEST
                and text.isascii()
                and text.decode().isprintable()
                and not set(text) & set(forbidden)
            ):
                found.add(text)
    return sorted(found)


def beginnings(texts: Sequence[bytes]) -> set[bytes]:
    """Returns the first NARROWEST bytes of every text. Prompts may cut texts, but never shorter than this."""
    return {text[:NARROWEST] for text in texts}


@functools.lru_cache(2)
def practice_texts(train: bytes) -> list[bytes]:
    return _enough(texts_of(train.split(SEPARATOR)))


@functools.lru_cache(2)
def asked_texts(train: bytes, unseen: tuple[bytes, ...]) -> list[bytes]:
    """Returns the texts of the unseen files that begin differently from all texts in training. Raises TextError and
    AssertionError."""
    practised = beginnings(practice_texts(train))
    texts = [text for text in texts_of(unseen) if text[:NARROWEST] not in practised]
    need_disjoint(practised, beginnings(texts), "texts")
    return _enough(texts)


def _enough(texts: list[bytes]) -> list[bytes]:
    if len(texts) < 2 * (SHOTS + 1):
        raise TextError(
            f"few-shot: expected at least {2 * (SHOTS + 1)} different lines of {WIDEST} bytes or more, got {len(texts)}"
        )
    return texts


# ---- prompts


def width(kind: str, shots: int) -> int:
    """Returns the largest number of bytes that the examples and the query can have."""
    query = (2 * WIDEST + 1 if SEPARATORS[kind] else WIDEST) + len(MARK)
    return shots * (query + 2) + query


def filler(size: int) -> bytes:
    return (FILLER * (size // len(FILLER) + 1))[: size - 1] + b"\n" if size else b""


def prompt(
    kind: str, texts: Sequence[bytes], labels: bytes, length: int, shots: int, most_before: int, rng: random.Random
) -> bytes:
    """Returns a prompt of exactly ``length`` bytes: filler of at most ``most_before`` bytes, examples, filler, and a
    query up to its mark.

    Both labels occur in the examples. Raises TextError if the examples might not fit.
    """
    if length < width(kind, shots):
        raise TextError(
            f"few-shot: expected a prompt of at least {width(kind, shots)} bytes for {shots} examples and a query of "
            f"the kind {kind}, got {length}"
        )
    drawn = iter(rng.sample(texts, 2 * (shots + 1)))

    def text() -> bytes:
        return next(drawn)[: rng.randint(NARROWEST, WIDEST)]

    def asked() -> bytes:
        return (text() + SEPARATORS[kind] + text() if SEPARATORS[kind] else text()) + MARK

    answers = [labels[shot % 2] for shot in range(shots)]
    rng.shuffle(answers)
    examples = b"".join(asked() + bytes([answer]) + b"\n" for answer in answers)
    query = asked()
    room = length - len(examples) - len(query)
    before = rng.randint(0, min(room, most_before))
    return filler(before) + examples + filler(room - before) + query


# ---- practice


def practice(texts: Sequence[bytes], length: int, rng: random.Random) -> tuple[bytes, list[int]]:
    """Returns a sample of ``length`` + 1 bytes that ends with a label, and the indices of the labels to predict. A
    label is to be predicted if both labels occur before it. The sample has at least SHOTS examples, if they fit."""
    kind, labels = rng.choice(list(SEPARATORS)), rng.choice(PRACTICE_LABELS)
    fitting = min((length - width(kind, 0)) // (width(kind, 1) - width(kind, 0)), len(texts) // 2 - 1)
    shots = rng.randint(min(SHOTS, fitting), fitting)
    sample = prompt(kind, texts, labels, length, shots, length, rng) + bytes([rng.choice(labels)])
    places = [at + 1 for at, byte in enumerate(sample) if byte == MARK[0]]
    return sample, [at for n, at in enumerate(places) if len({sample[place] for place in places[:n]}) == 2]


def batches(
    corpus: Corpus, tokens: int, length: int, seed: int, steps: int, device: torch.device | str = "cpu", start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields ``growing_batches`` from SHORTEST_PRACTICE bytes on, with labels as targets. Raises TextError."""
    if length * MULTIPLES[0] < (needed := max(width(kind, SHOTS) for kind in SEPARATORS)):
        raise TextError(
            f"few-shot: expected a training length of at least {round(needed / MULTIPLES[0])} bytes, because prompts "
            f"of {MULTIPLES[0]:g} times this length must hold {SHOTS} examples, got {length}"
        )
    sample = functools.partial(practice, practice_texts(corpus.train))
    yield from growing_batches("few-shot", sample, tokens, SHORTEST_PRACTICE, length, seed, steps, device, start)


# ---- evaluation


def prompts(texts: Sequence[bytes], kind: str, length: int, samples: int, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Returns prompts, and for each prompt its two labels. Neighbouring prompts have no label in common."""
    found: list[bytes] = []
    chosen: list[bytes] = []
    for sample in range(samples):
        rng = random.Random(f"few-shot {seed} {kind} {length} {sample}")
        others = set(b"".join(chosen[-1:] + (chosen[:1] if sample == samples - 1 else [])))
        chosen.append(rng.choice([labels for labels in ASKED_LABELS if not others & set(labels)]))
        found.append(prompt(kind, texts, chosen[-1], length, SHOTS, len(FILLER), rng))
    return found, chosen


def measure(subject: Subject, multiples: Sequence[float] = MULTIPLES) -> list[Result]:
    """Returns percentages of answers by length. "few-shot" counts answers that are a label of the prompt, and
    "few-shot-sentence" etc. count them for one kind of examples. "few-shot-control" counts answers that are a label of
    another prompt of the same kind."""
    texts, results = asked_texts(subject.train, tuple(subject.unseen)), []
    for length in lengths_of(subject, multiples):
        follows, control = [], []
        for kind in SEPARATORS:
            asked, labels = prompts(texts, kind, length, subject.samples, subject.seed)
            answers = subject.last_logits(as_tokens(asked, subject.device), 1).argmax(-1)
            right = as_tokens(labels, subject.device)
            follows.append((answers == right).any(1))
            control.append((answers == right.roll(1, 0)).any(1))
            results.append(percentage(f"few-shot-{kind}", length, follows[-1]))
        results += [
            percentage("few-shot", length, torch.cat(follows)),
            percentage("few-shot-control", length, torch.cat(control)),
        ]
    return results
