"""Tests the copying task letter by letter: targets in training, contents of the prompts, and what the measure
counts."""

import torch
from subjects import by_place, subject

from experiments import copying


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def measured(rule, multiples, samples=40):
    return by_place(copying.measure(subject(rule, 128, samples, ()), multiples))


def copier(text):
    """Copies: predicts the letter that followed an earlier occurrence of the last four letters. If they did not occur
    before, it predicts a letter that is never right."""
    at = text[:-1].rfind(text[-4:])
    return text[at + 4] if at >= 0 and at + 4 < len(text) else 99


def grid(text):
    """Looks back by multiples of 12 letters, which is not copying. It takes the multiple at which the letters agree
    best with the last letters, and predicts the letter that followed there."""
    steps = range(12, len(text) - 8, 12)
    best = max(steps, key=lambda d: sum(text[-n] == text[-n - d] for n in range(1, 9)), default=0)
    return text[-best] if best else 99


def test_practice_asks_for_the_letters_that_follow():
    for seed in range(30):
        inputs, targets = copying.practice(3, 128, generator(seed))
        assert inputs.shape == targets.shape == (3, 128)
        assert inputs.min() >= 0 and inputs.max() < copying.LETTERS
        asked = targets[0] != copying.IGNORED
        assert torch.equal(asked, targets[1] != copying.IGNORED)  # all samples of the batch have one layout
        first = asked.nonzero()[0].item()
        assert 128 // 4 - copying.LONGEST <= first <= 128
        for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
            text = bytes(row)
            for at in range(first + 4, 128):
                if wanted[at] != copying.IGNORED and all(wanted[at - n] != copying.IGNORED for n in range(1, 4)):
                    assert text[: at + 1].find(text[at - 3 : at + 1] + bytes([wanted[at]])) < at - 3


def test_practice_covers_what_is_asked_at_its_length():
    """In some practice samples at least as many letters precede the first letter to copy as in any prompt of the
    training length. In others it lies in the first third."""
    practised, asked = set(), set()
    for seed in range(200):
        targets = copying.practice(1, 128, generator(seed))[1][0]
        practised.add((targets != copying.IGNORED).nonzero()[0].item())  # where the first letter to copy is
    for tokens, answer in copying.prompts(200, 0, length=128):
        assert tokens.shape[1] + answer.shape[1] <= 128
        asked.add(tokens.shape[1] - copying.LONGEST + copying.SUFFIX)
    assert max(practised) >= max(asked) and min(practised) < 128 // 3


def test_prompts_letter_by_letter():
    lengths = [9, 15, 12, 10]
    for between in (0, 5):
        tokens, answer = copying.prompt(lengths, 6, generator(), between)
        assert tokens.shape == (6, sum(lengths) + between + 12 - 4) and answer.shape == (6, 4)
        for row, wanted in zip(tokens.tolist(), answer.tolist(), strict=True):
            middle = row[9 + 15 : 9 + 15 + 12]
            assert row[-8:] == middle[:8] and wanted == middle[8:]
    for control in (False, True):
        found = list(copying.prompts(50, 3, length=256, control=control))
        assert sum(len(tokens) for tokens, _ in found) == 50 and len(found) == copying.LAYOUTS
        sizes = {tokens.shape[1] + 4 for tokens, _ in found}
        assert max(sizes) <= 256 and min(sizes) > 256 - 4 * copying.LONGEST and len(sizes) > 5
    again = list(copying.prompts(50, 3, length=256, control=True))
    assert all(
        torch.equal(a, b) for one, other in zip(found, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    ways_back = {t.shape[1] - a.shape[1] for t, a in copying.prompts(40, 0, count=8)}
    assert len(ways_back) > 5  # the answers are at different distances


def test_a_model_that_copies_is_right_and_one_that_looks_back_a_fixed_distance_is_not():
    found = measured(copier, (1, 2), 20)
    tasks = ("copying", "copying-letters", "copying-by-length", "copying-control")
    assert {task for task, _ in found} == set(tasks) and all(value > 95 for value in found.values())
    assert [at for task, at in found if task == "copying"] == list(copying.PAPER_COUNTS)
    assert max(measured(grid, (1,)).values()) < 40
