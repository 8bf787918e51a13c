"""Makes and measures passkey retrieval: a prompt is text with a key somewhere in it, and then the question for the key.

The text comes from the corpus and may contain digits. The mark that precedes a key is replaced by a space wherever the
corpus has it. No digit occurs twice in a key. In training the key is at a random place, so that no distance and no
position leads to it. The control asks the same questions after text without a key.

No key of the evaluation occurs in training, and the code asserts this. Training and evaluation take their texts from
different files.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from flashrope.lab.small_models.data import Corpus, TextError, as_tokens

from .tasks import MULTIPLES, Result, Subject, growing_batches, lengths_of, need_disjoint, percentage

MARK = b"#"  # occurs only before a key
NEEDLE, QUESTION, DIGITS = b"\nkey #%s.\n", b"\nkey #", 5
NEEDLE_SIZE = len(NEEDLE) - len(b"%s") + DIGITS
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST_PRACTICE = 32

KEYS = [bytes(key) for key in itertools.permutations(b"0123456789", DIGITS)]  # no key has a digit twice
random.Random("keys").shuffle(KEYS)
ASKED_KEYS, PRACTICE_KEYS = KEYS[: len(KEYS) // 4], KEYS[len(KEYS) // 4 :]
need_disjoint(PRACTICE_KEYS, ASKED_KEYS, "keys")


def room(length: int) -> int:
    """Returns how many bytes of text a prompt of ``length`` bytes has beside key and question. Raises TextError if the
    prompt is too short for them."""
    if length < NEEDLE_SIZE + len(QUESTION):
        raise TextError(f"passkey: expected a prompt of at least {NEEDLE_SIZE + len(QUESTION)} bytes, got {length}")
    return length - NEEDLE_SIZE - len(QUESTION)


def prompt(text: bytes, at: int, key: bytes) -> bytes:
    """Returns the text with the key inserted after ``at`` bytes, followed by the question."""
    return text[:at] + NEEDLE % key + text[at:] + QUESTION


@functools.lru_cache(2)
def without_marks(pieces: tuple[bytes, ...]) -> list[bytes]:
    """Returns the pieces after replacing marks by spaces."""
    return [piece.replace(MARK, b" ") for piece in pieces]


# ---- practice


def practice(train: bytes, length: int, rng: random.Random) -> tuple[bytes, list[int]]:
    """Returns a sample of ``length`` + 1 bytes that ends with a key, and the indices of the digits to predict.

    In half of the samples the key occurs twice. In the others it occurs a random number of times, at least twice. The
    last occurrence is at the end of the sample, and the others are at random places in the text. The targets are the
    digits of every occurrence but the first.
    """
    most = (length + 1 + NEEDLE_SIZE - len(QUESTION) - DIGITS) // NEEDLE_SIZE
    needles, key = rng.choice((2, rng.randint(2, most))), rng.choice(PRACTICE_KEYS)
    size = length + 1 - (needles - 1) * NEEDLE_SIZE - len(QUESTION) - DIGITS
    begin = rng.randrange(len(train) - size)
    text, cuts = train[begin : begin + size], sorted(rng.randint(0, size) for _ in range(needles - 1))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, size], strict=True)]
    ends = [sum(map(len, parts[: n + 1])) + n * NEEDLE_SIZE + len(QUESTION) for n in range(needles)]
    places = [end + digit for end in ends[1:] for digit in range(DIGITS)]
    return (NEEDLE % key).join(parts) + QUESTION + key, places


def batches(
    corpus: Corpus, tokens: int, length: int, seed: int, steps: int, device: torch.device | str = "cpu", start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields ``growing_batches`` from SHORTEST_PRACTICE bytes on, with digits as targets."""
    sample = functools.partial(practice, *without_marks((corpus.train,)))
    yield from growing_batches("passkey", sample, tokens, SHORTEST_PRACTICE, length, seed, steps, device, start)


# ---- evaluation


def prompts(
    pieces: Sequence[bytes], length: int, depth: float, samples: int, seed: int, control: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """Returns prompts of exactly ``length`` bytes, and their keys. depth: where in the text the key is, from 0 (start)
    to 1 (end). control: whether the text has no key. Raises TextError if no file is long enough."""
    size = room(length)
    whole = size + NEEDLE_SIZE * control
    fitting = [piece for piece in pieces if len(piece) >= whole]
    if not fitting:
        raise TextError(f"passkey: expected a file of at least {whole} bytes for a prompt of {length} bytes, got none")
    found, keys = [], []
    for sample in range(samples):
        rng = random.Random(f"passkey {seed} {length} {depth} {sample}")
        piece, key = rng.choice(fitting), rng.choice(ASKED_KEYS)
        begin = rng.randrange(len(piece) - whole + 1)
        text = piece[begin : begin + whole]
        found.append(text + QUESTION if control else prompt(text, round(depth * size), key))
        keys.append(key)
    return found, keys


def right(subject: Subject, asked: Sequence[bytes], keys: Sequence[bytes]) -> torch.Tensor:
    """Returns bool (samples, DIGITS): whether the model rates each digit of the key as the most likely byte after the
    correct digits before it. If a whole row is true, greedy decoding would have written the key."""
    tokens = as_tokens([prompt_ + key for prompt_, key in zip(asked, keys, strict=True)], subject.device)
    return subject.last_logits(tokens[:, :-1], DIGITS).argmax(-1) == tokens[:, -DIGITS:]


def measure(subject: Subject, multiples: Sequence[float] = MULTIPLES) -> list[Result]:
    """Returns percentages of right answers by length, over five depths. "passkey" counts whole keys, "passkey-digits"
    counts their digits, and "passkey-control" counts digits when the text has no key."""
    results, pieces, samples = [], without_marks(tuple(subject.unseen)), max(subject.samples // len(DEPTHS), 1)

    def found(length: int, control: bool) -> torch.Tensor:
        size = length + 1 - DIGITS
        asked = [prompts(pieces, size, depth, samples, subject.seed, control) for depth in DEPTHS]
        return torch.cat([right(subject, *each) for each in asked])

    for length in lengths_of(subject, multiples):
        keys, control = found(length, False), found(length, True)
        for task, values in (("passkey", keys.all(1)), ("passkey-digits", keys), ("passkey-control", control)):
            results.append(percentage(task, length, values))
    return results
