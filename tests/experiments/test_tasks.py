"""The samples of the tasks byte by byte, that evaluation and practice share none, and what the measures count."""

import math

import pytest
import torch

from experiments import tasks
from experiments.tasks import EVALUATION, PRACTICE, Subject
from experiments.zoo import ZooModel, scheme
from flashrope.demo import data
from flashrope.demo.model import ModelConfig

TEXT = b"".join(
    b"line %d of the text, which says nothing: at all\n%d is another one here\n" % (n, n * n) for n in range(400)
)
PIECES = (TEXT[:9000], TEXT[9000:9500], TEXT[9500:])
CORPUS = data.Corpus("text", b"\0".join(PIECES[:2]), PIECES[2:], ("a", "b"), ("c",))


class Oracle(torch.nn.Module):
    """A stand-in for a model: predicts the byte ``rule(bytes so far)`` at every position."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, tokens, rotary, attend=None):
        logits = torch.zeros(*tokens.shape, 256)
        for row, text in enumerate(tokens.tolist()):
            for at in range(len(text)):
                logits[row, at, self.rule(bytes(text[: at + 1]))] = 20.0
        return logits


def subject(rule, unit=64, samples=4, unseen=PIECES[2:], name="rope", batch_tokens=200):
    return Subject(
        Oracle(rule), scheme(name, ModelConfig(64, 2, 2), unit), unseen, unit, samples, 0, batch_tokens=batch_tokens
    )


# ---- samples
@pytest.mark.parametrize("length", [40, 41, 64, 200])
def test_few_shot_to_the_byte(length):
    width = 4
    texts = tasks.lines_of(PIECES, width)
    for prompt in tasks.few_shot(texts, b"AB", length, 10, seed=0, width=width):
        assert len(prompt) == length
        lines = [prompt[at : at + 7] for at in range(0, 35, 7)]
        assert all(
            line[:4] in texts and line[4:5] == b":" and line[5:6] in b"AB" and line[6:] == b"\n" for line in lines
        )
        assert {line[5:6] for line in lines} == {b"A", b"B"}
        assert prompt[-5:-1] in texts and prompt[-1:] == b":"
        assert len({prompt[-5:-1], *(line[:4] for line in lines)}) == 6
        padding = prompt[35:-5]
        assert padding == b"" or padding.endswith(b"\n") and (tasks.FILLER * 9).startswith(padding[:-1])
    once, again = (tasks.few_shot(texts, b"AB", length, 3, seed, width) for seed in (0, 1))
    assert once == tasks.few_shot(texts, b"AB", length, 3, 0, width) != again


def test_few_shot_says_what_it_needs():
    texts = tasks.lines_of(PIECES, 4)
    with pytest.raises(data.TextError, match="5 examples of 4 bytes and a query need 40 bytes, the prompt has 39"):
        tasks.few_shot(texts, b"AB", 39, 1, 0, 4)
    with pytest.raises(
        data.TextError, match="more than 5 different lines of at least 4 bytes are needed, the text has 3"
    ):
        tasks.few_shot(texts[:3], b"AB", 99, 1, 0, 4)
    for shortest in (32, 64, 256, 1024):  # the sizes that the measure uses always fit
        width = tasks.text_width(shortest)
        texts = tasks.lines_of([bytes([letter]) * 99 for letter in range(65, 91)], width)
        tasks.few_shot(texts, b"01", shortest, 1, 0, width)


def test_lines_are_cut_and_plain():
    piece = "  first line\nab\nwith: colon here\nümlaut here\ntab\there now\nfirst lines\nzulu now\n".encode()
    assert tasks.lines_of((piece, piece), 5) == [b"first", b"zulu "]
    assert tasks.lines_of((b"abcde:fg\n",), 5) == [b"abcde"]


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_passkey_to_the_byte(depth):
    prompts, answers = tasks.passkey(PIECES[2:], 200, depth, 12, seed=5)
    for prompt, answer in zip(prompts, answers, strict=True):
        needle = b"\nThe key is " + answer + b".\n"
        assert len(prompt) == 200 and prompt.count(needle) == 1 and prompt.endswith(b"\nThe key is ")
        assert len(answer) == 5 and answer.isdigit() and int(answer) % 2 == EVALUATION
        at = prompt.index(needle)
        text = prompt[:at] + prompt[at + len(needle) : -len(b"\nThe key is ")]
        assert text in PIECES[2] and at == round(depth * len(text))
    assert len(set(answers)) > 6
    assert tasks.passkey(PIECES[2:], 200, depth, 12, seed=5) == (prompts, answers)
    with pytest.raises(data.TextError, match="a prompt of 90000 bytes needs a file of at least 89969 bytes"):
        tasks.passkey(PIECES, 90_000, depth, 1, 0)
    with pytest.raises(data.TextError, match="expected a prompt of at least 31 bytes, got 30"):
        tasks.passkey(PIECES, 30, depth, 1, 0)


def test_repeated():
    assert tasks.repeated([b"abcdef"], 3, 9) == [b"abcabcabca"]
    assert tasks.repeated([b"abcdef"], 4, 6) == [b"abcdabc"]


# ---- practice
def test_practice_is_from_the_training_text_and_odd():
    size = 129
    width = tasks.text_width(64)
    texts = tasks.lines_of(PIECES[:2], width)
    for sample in range(12):
        copied, shots, key = (
            tasks.practice_sample(PIECES[:2], texts, width, size, f"0 {sample}", kind) for kind in range(3)
        )
        assert len(copied) == len(shots) == len(key) == size
        sequences = [copied[at : at + 12] for at in range(0, 120, 12)]
        assert all(sum(sequence) % 2 == PRACTICE for sequence in sequences)
        assert len(set(sequences)) <= 5 and copied[120:] in b"".join(s[:9] + b"|" for s in sequences)
        assert shots[-2:-1] == b":" and shots[-1:] in b"01AByn" and shots[-2 - width : -2] in texts
        assert key[-17:-5] == tasks.ASKED and int(key[-5:]) % 2 == PRACTICE
        assert key.count(b"\nThe key is " + key[-5:] + b".\n") == 1


def test_few_shot_practice_and_evaluation_use_other_texts():
    train, unseen = (
        set(tasks.lines_of(pieces, 12)) for pieces in (PIECES[:1], (b"entirely other lines stand in here\n" * 3,))
    )
    assert train and unseen and not train & unseen


def test_batches_depend_only_on_seed_and_step():
    def first(count, seed=0, start=0, practice=0.5):
        stream = tasks.batches(CORPUS, 8, 64, seed, practice, start=start)
        return [next(stream) for _ in range(count)]

    batches = first(5)
    assert all(batch.shape == (8, 65) and batch.dtype == torch.int64 for batch in batches)
    assert all(torch.equal(one, other) for one, other in zip(batches[3:], first(2, start=3), strict=True))
    assert not torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], first(1, seed=1)[0])
    for batch in batches:
        assert all(bytes(row) in CORPUS.train for row in batch[:4].tolist())
        assert not any(bytes(row) in CORPUS.train for row in batch[4:].tolist())
    assert all(bytes(row) in CORPUS.train for row in first(1, practice=0.0)[0].tolist())


# ---- measures
def copier(text):
    """Predicts what followed an earlier occurrence of the last seven bytes; "z" if there is none."""
    at = text[:-1].rfind(text[-7:])
    return text[at + 7] if at >= 0 and at + 7 < len(text) else ord("z")


def by_place(results):
    return {(result.task, result.at): result.value for result in results}


def test_passkey_counts_complete_keys_and_digits():
    def right(text):
        return copier(text) if text[-7:].startswith(b"key is ") or text[-1:].isdigit() else 0

    found = by_place(tasks.measure_passkey(subject(right, samples=10), (2, 4)))
    assert found == {
        ("passkey", 128): 100,
        ("passkey-digits", 128): 100,
        ("passkey", 256): 100,
        ("passkey-digits", 256): 100,
    }
    first_only = subject(lambda text: copier(text) if text.endswith(b"is ") else 0, samples=10)
    assert by_place(tasks.measure_passkey(first_only, (2,))) == {
        ("passkey", 128): 0,
        ("passkey-digits", 128): pytest.approx(20),
    }
    assert tasks.measure_passkey(subject(right, samples=10), (2,))[0].samples == 10  # five depths


def test_few_shot_counts_labels_correct_or_not():
    found = by_place(tasks.measure_few_shot(subject(lambda text: ord("B")), (0.5, 2)))
    assert found == {
        ("few-shot-digits", 32): 0,
        ("few-shot-letters", 32): 100,
        ("few-shot-answers", 32): 0,
        ("few-shot-digits", 128): 0,
        ("few-shot-letters", 128): 100,
        ("few-shot-answers", 128): 0,
    }


def test_accuracy_over_all_tokens():
    """The accuracy of always predicting one byte is the share of that byte."""
    it = subject(lambda text: ord("e"))
    windows = data.unseen_windows(it.unseen, 8 * 64 + 1, 4, 0)
    found = by_place(tasks.measure_accuracy(it))

    def share(texts):
        return 100 * sum(text[1:].count(b"e") for text in texts) / sum(len(text) - 1 for text in texts)

    assert found["accuracy", 64] == pytest.approx(share([w[:65] for w in windows]))
    assert found["accuracy-non-repeat", 512] == pytest.approx(share(windows))
    assert found["accuracy-repeat", 512] == pytest.approx(share([(w[:64] * 9)[:513] for w in windows]))
    periodic = subject(lambda text: text[-64] if len(text) >= 64 else 0)
    assert by_place(tasks.measure_accuracy(periodic))["accuracy-repeat", 512] == pytest.approx(100 * (512 - 63) / 512)


def test_perplexity_is_over_the_last_half_training_length():
    it = subject(lambda text: ord("e"), samples=3)
    found = by_place(tasks.measure_perplexity(it))
    assert set(found) == {("perplexity", 64 * m) for m in (1, 2, 4, 8)}
    windows = data.unseen_windows(it.unseen, 8 * 64 + 1, 3, 0)
    hits = sum(window[-32:].count(b"e") for window in windows) / (3 * 32)
    expected = math.exp(math.log(math.exp(20) + 255) - 20 * hits)
    assert all(value == pytest.approx(expected, rel=1e-4) for value in found.values())


def test_accuracy_at_the_training_length_is_as_trained():
    torch.manual_seed(0)
    config = ModelConfig(64, 2, 2)
    model = ZooModel(config, "rope", 64)
    with torch.no_grad():
        for parameter in model.language.blocks.parameters():
            parameter *= 10 if parameter.ndim == 2 else 1

    def found(name):
        used = scheme(name, config, 64)
        return by_place(tasks.measure_accuracy(Subject(model, used, PIECES[2:], 64, 4, 0)))

    rope, pi = found("rope"), found("pi-s8")
    assert (
        rope["accuracy", 64] == pi["accuracy", 64]
        and rope["accuracy-non-repeat", 512] != pi["accuracy-non-repeat", 512]
    )


def test_learned_positions_are_measured_up_to_the_training_length():
    model = ZooModel(ModelConfig(64, 2, 2), "learned", 64)
    it = Subject(model, scheme("learned", model.config, 64), PIECES[2:], 64, 4, 0)
    assert {place for place in by_place(tasks.measure_perplexity(it))} == {("perplexity", 64)}
    assert {task for task, _ in by_place(tasks.measure_accuracy(it))} == {"accuracy"}


def test_text_too_short_for_the_length():
    with pytest.raises(data.TextError, match="no unseen file has 513 bytes, as a context of 512 needs"):
        tasks.measure_perplexity(subject(copier, unseen=(b"short",)))
