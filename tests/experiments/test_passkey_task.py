"""Tests passkeys byte by byte: targets in training, contents of the prompts, and what the measure counts."""

import random

import pytest
from flashrope.lab.small_models import data
from subjects import CORPUS, PIECES, by_place, subject

from experiments import passkey

ASKED, PRACTISED = set(passkey.ASKED_KEYS), set(passkey.PRACTICE_KEYS)


def measured(rule, multiples, samples=10):
    return by_place(passkey.measure(asked_of(rule, samples), multiples))


def asked_of(rule, samples=10):
    return subject(rule, 64, samples, batch_tokens=9999, train=CORPUS.train)


def reader(text):
    """Predicts the byte at the same offset from the first occurrence of the question."""
    at = text.rfind(passkey.QUESTION)
    so_far = text[at:]
    earlier = text.find(so_far[: len(passkey.QUESTION)])
    return text[earlier + len(so_far)] if 0 <= earlier < at else 0


def test_keys_are_disjoint_and_all_there():
    assert not ASKED & PRACTISED and len(ASKED | PRACTISED) == 30_240 and len(ASKED) == 7560
    for place in range(5):
        counts = [sum(key[place : place + 1] == b"%d" % digit for key in ASKED) for digit in range(10)]
        assert min(counts) > 650 and max(counts) < 860  # digits are as frequent in evaluation as in practice


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_prompts_to_the_byte(depth):
    prompts, keys = passkey.prompts(PIECES[2:], 200, depth, 12, seed=5)
    for prompt, key in zip(prompts, keys, strict=True):
        needle = b"\nkey #" + key + b".\n"
        assert len(prompt) == 200 and prompt.count(needle) == 1 and prompt.endswith(b"\nkey #") and key in ASKED
        at = prompt.index(needle)
        text = prompt[:at] + prompt[at + len(needle) : -len(b"\nkey #")]
        assert text in PIECES[2] and at == round(depth * len(text))
    assert len(set(keys)) > 6
    assert passkey.prompts(PIECES[2:], 200, depth, 12, seed=5) == (prompts, keys)
    assert passkey.prompts(PIECES[2:], 200, depth, 12, seed=6) != (prompts, keys)
    without, same = passkey.prompts(PIECES[2:], 200, depth, 12, seed=5, control=True)
    assert same == keys and {len(prompt) for prompt in without} == {200}
    assert all(prompt[:-6] in PIECES[2] and prompt.endswith(b"\nkey #") for prompt in without)
    assert not any(key in prompt for key, prompt in zip(same, without, strict=True))
    with pytest.raises(data.TextError, match="a file of at least 89981 bytes for a prompt of 90000 bytes"):
        passkey.prompts(PIECES, 90_000, depth, 1, 0)
    with pytest.raises(data.TextError, match="expected a prompt of at least 19 bytes, got 18"):
        passkey.prompts(PIECES, 18, depth, 1, 0)


def test_practice_asks_for_a_key_that_stands_before():
    distances = set()
    for seed in range(200):
        sample, places = passkey.practice(CORPUS.train, 128, random.Random(seed))
        key = sample[-passkey.DIGITS :]
        needles = sample.count(passkey.NEEDLE % key) + 1
        assert len(sample) == 129 and key in PRACTISED and needles == sample.count(passkey.QUESTION + key) > 1
        assert b"".join(sample[at : at + 1] for at in places) == key * (needles - 1) and places[-1] == 128
        text = sample[: -passkey.DIGITS - len(passkey.QUESTION)].replace(passkey.NEEDLE % key, b"")
        assert text in CORPUS.train
        if needles == 2:
            distances.add(len(sample) - sample.index(passkey.QUESTION))
    assert max(distances) > 120 and min(distances) < 45 and len(distances) > 40


def test_counts_complete_keys_and_digits():
    found = measured(reader, (2, 4))
    for at in (128, 256):
        assert found["passkey", at] == found["passkey-digits", at] == 100 and found["passkey-control", at] == 0
    first_only = measured(lambda text: reader(text) if text.endswith(b"#") else 0, (2,))
    assert first_only["passkey", 128] == 0 and first_only["passkey-digits", 128] == pytest.approx(20)
    assert passkey.measure(asked_of(reader), (2,))[0].samples == 10  # five depths


@pytest.mark.parametrize(
    "cheat",
    [
        lambda text: ord("7"),  # always predicts the same digit
        lambda text: text[-50] if len(text) > 50 else 0,  # copies from a fixed distance
        lambda text: text[40] if len(text) > 40 else 0,  # copies from a fixed position
        lambda text: next((byte for byte in reversed(text[:-6]) if chr(byte).isdigit()), 0),  # repeats the last digit
    ],
)
def test_a_model_that_does_not_read_the_key_does_not_find_it(cheat):
    found = measured(cheat, (2, 4), 50)
    assert all(value < 5 for (task, _), value in found.items() if task == "passkey")
    assert all(value < 35 for value in found.values())
