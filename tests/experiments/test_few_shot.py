"""Tests few-shot following byte by byte: targets in training, contents of the prompts, and what the measure counts."""

import random

import pytest
from flashrope.lab.small_models import data
from subjects import by_place, subject

from experiments import few_shot
from experiments.few_shot import MARK, SEPARATORS, SHOTS

LINES = [bytes(random.Random(n).choices(b"abcdefgABCDEFG (.)_=", k=12)) for n in range(300)]
TRAIN, UNSEEN = b"\n".join(LINES[:200]), (b"\n".join(LINES[150:]),)  # 50 lines are in both


def measured(rule, multiples, samples=20):
    asked_of = subject(rule, 288, samples, UNSEEN, batch_tokens=9999, train=TRAIN)
    results = few_shot.measure(asked_of, multiples)
    assert results[-1].samples == 3 * samples
    return by_place(results)


def follower(text):
    """Predicts the last label so far."""
    at = text.rfind(MARK, 0, -1)
    return text[at + 1] if at >= 0 and text.endswith(MARK) else 0


def parts(prompt):
    """Splits a prompt into (filler, examples as (text, label), filler, query). Texts contain no line ends."""
    *lines, query = prompt.split(b"\n")
    filler = [n for n, line in enumerate(lines) if MARK not in line]
    examples = [line for line in lines if MARK in line]
    first = lines.index(examples[0])
    assert lines[first : first + len(examples)] == examples  # the examples are not interrupted by filler
    before, behind = (b"".join(lines[n] + b"\n" for n in filler if (n < first) == part) for part in (True, False))
    return before, [(line[:-2], line[-1:]) for line in examples if line[-2:-1] == MARK], behind, query


def check(prompt, kind, labels, texts):
    before, examples, behind, query = parts(prompt)
    for filler in (before, behind):
        assert filler == few_shot.filler(len(filler))
    assert len(examples) == SHOTS and {label for _, label in examples} == {labels[:1], labels[1:]}
    assert query.endswith(MARK)
    asked = [text for text, _ in examples] + [query[:-1]]
    used = [part for text in asked for part in (text.split(SEPARATORS[kind]) if SEPARATORS[kind] else [text])]
    assert len(used) == len(set(used)) == (SHOTS + 1) * (2 if SEPARATORS[kind] else 1)
    assert all(8 <= len(text) <= 10 and any(t.startswith(text) for t in texts) for text in used)
    return before, examples, behind, query


@pytest.mark.parametrize("kind", SEPARATORS)
@pytest.mark.parametrize("length", [144, 145, 288, 720])
def test_prompts_to_the_byte(kind, length):
    texts = few_shot.asked_texts(TRAIN, UNSEEN)
    prompts, chosen = few_shot.prompts(texts, kind, length, 30, seed=0)
    found = [check(prompt, kind, labels, texts) for prompt, labels in zip(prompts, chosen, strict=True)]
    assert {len(prompt) for prompt in prompts} == {length} and set(chosen) <= set(few_shot.ASKED_LABELS)
    assert max(len(before) for before, *_ in found) <= len(few_shot.FILLER)
    assert not any(set(one) & set(other) for one, other in zip(chosen, chosen[1:] + chosen[:1], strict=True))
    assert (prompts, chosen) == few_shot.prompts(texts, kind, length, 30, seed=0)
    assert prompts != few_shot.prompts(texts, kind, length, 30, seed=1)[0]
    last = {length - (prompt.rfind(MARK, 0, -1) + 1) for prompt in prompts}
    assert len(last) > 8  # labels are not always the same distance back


def test_evaluation_shares_no_text_and_no_labels_with_training(monkeypatch):
    practised, asked = few_shot.practice_texts(TRAIN), few_shot.asked_texts(TRAIN, UNSEEN)
    assert len(practised) == 200 and len(asked) == 100
    assert not {text[:8] for text in practised} & {text[:8] for text in asked}
    assert not set(few_shot.PRACTICE_LABELS) & set(few_shot.ASKED_LABELS)
    for labels in (few_shot.PRACTICE_LABELS, few_shot.ASKED_LABELS):
        assert set(b"".join(labels)) == set(few_shot.LETTERS)  # each of the two sets uses every letter
    with pytest.raises(data.TextError, match="at least 12 different lines of 10 bytes or more, got 1"):
        few_shot.asked_texts(TRAIN, (b"only one line here\n",))
    few_shot.asked_texts.cache_clear()
    beginnings = few_shot.beginnings
    monkeypatch.setattr(few_shot, "beginnings", lambda found: beginnings(found if len(found) == 200 else practised))
    with pytest.raises(AssertionError, match="texts: 200 are in both training and evaluation, such as"):
        few_shot.asked_texts(TRAIN, UNSEEN)
    few_shot.asked_texts.cache_clear()


def test_practice_asks_for_labels_that_can_be_known():
    texts = few_shot.practice_texts(TRAIN)
    shots: dict[int, set[int]] = {72: set(), 288: set()}
    for seed in range(60):
        for length in shots:
            sample, places = few_shot.practice(texts, length, random.Random(seed))
            marks = [at for at, byte in enumerate(sample) if byte == MARK[0]]
            labels = [sample[at + 1 : at + 2] for at in marks]
            assert len(sample) == length + 1 and places[-1] == length
            first = next(n for n in range(len(labels)) if labels[n] != labels[0])
            assert places == [at + 1 for at in marks[first + 1 :]]
            assert b"".join(sorted(set(labels))) in few_shot.PRACTICE_LABELS
            shots[length].add(len(marks) - 1)
    assert shots[72] == {2, 4} and min(shots[288]) == 5 and max(shots[288]) > 15


def test_practice_covers_what_is_asked_at_its_length():
    """In practice samples, labels are as far back as in prompts of the training length."""
    texts, asked = few_shot.practice_texts(TRAIN), few_shot.asked_texts(TRAIN, UNSEEN)
    practised = [few_shot.practice(texts, 288, random.Random(n))[0] for n in range(300)]
    prompts = [prompt for kind in SEPARATORS for prompt in few_shot.prompts(asked, kind, 288, 50, 0)[0]]
    back = [[len(text) - text.index(MARK) for text in found] for found in (practised, prompts)]
    assert max(back[0]) > max(back[1]) - 12 and min(back[0]) < min(back[1])


def test_an_answer_that_is_a_label_counts_correct_or_not():
    found = measured(follower, (0.5, 2.5), 5)
    for at in (144, 720):
        tasks = [f"few-shot-{kind}" for kind in SEPARATORS]
        assert all(found[task, at] == 100 for task in (*tasks, "few-shot")) and found["few-shot-control", at] == 0
    half = measured(lambda text: follower(text) if len(text.split(b"|")) > 3 else 0, (1,))
    assert half["few-shot-pair", 288] == 100 and half["few-shot-sentence", 288] == 0
    assert half["few-shot", 288] == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    "cheat",
    [
        lambda text: ord("E"),  # always predicts the same label
        lambda text: text[-130] if len(text) > 130 else 0,  # copies from a fixed distance
        lambda text: text[30] if len(text) > 30 else 0,  # copies from a fixed position
        lambda text: max(few_shot.LETTERS, key=text.count),  # predicts the most frequent letter
        lambda text: text[-2] if len(text) > 2 else 0,  # repeats a letter nearby
    ],
)
def test_a_model_that_does_not_read_the_examples_does_not_follow(cheat):
    found = measured(cheat, (1,))
    assert max(value for (task, _), value in found.items() if task in ("few-shot", "few-shot-control")) < 25
