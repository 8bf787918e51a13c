"""Makes and measures in-context copying (HoPE, section 4.2.1). A prompt has several sequences of random letters and
then the start of one of them. The model predicts the last letters of this sequence.

The paper's sequences have 12 letters. Here each sequence has 9 to 15, so that no fixed distance leads from the query to
the answer. If all sequences had one length, a model could answer by looking back a multiple of that length. The control
puts 2 to 10 random letters between the sequences and the query. They make no difference to a model that copies.

Samples are drawn from a seed. With 64 letters and at least 9 per sequence, two samples practically never share a
sequence.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch

from .tasks import IGNORED, MULTIPLES, PAPER_LENGTH, Result, Subject, percentage

LETTERS = 64  # tokens 0 to 63
SHORTEST, LONGEST = 9, 15  # letters of a sequence; the mean is 12, as in the paper
SUFFIX = 4  # how many letters the model must predict
BETWEEN = (2, 10)  # how many random letters the control puts before the query: at least, at most
LAYOUTS = 20  # different layouts in one measurement; samples with the same layout differ in their letters
PAPER_COUNTS = (30, 40, 50, 60, 70, 80)  # the paper's numbers of sequences, for its training length
SHORTEST_PRACTICE = 3 * LONGEST


def paper_count(count: int, train_length: int) -> int:
    """Returns the paper's number of sequences, scaled to another training length."""
    return max(round(count * train_length / PAPER_LENGTH), 1)


def integer(low: int, high: int, generator: torch.Generator) -> int:
    """Returns a random integer from low to high."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def letters(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(LETTERS, tuple(shape), generator=generator)


def layout(room: int, generator: torch.Generator) -> list[int]:
    """Returns the lengths of sequences that together fill at most ``room`` letters. There is at least one sequence."""
    lengths: list[int] = []
    while not lengths or sum(lengths) <= room:
        lengths.append(integer(SHORTEST, LONGEST, generator))
    return lengths if len(lengths) == 1 else lengths[:-1]


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths))]


# ---- practice


def practice(count: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (inputs, targets), int64 (count, length). A sample is a list of sequences, followed by repetitions of
    whole sequences in random order.

    The targets are the letters that the preceding text determines: in a repeated sequence, all letters after the first.
    The list fills at least about a quarter of the sample, and leaves room for at least one repetition.
    """
    size = length + 1
    lengths = layout(integer(size // 4, size - LONGEST, generator), generator)
    starts, source = starts_of(lengths), list(range(sum(lengths)))
    follows = [False] * len(source)
    while len(source) < size:
        n = integer(0, len(lengths) - 1, generator)
        source += range(starts[n], starts[n] + lengths[n])
        follows += [False] + [True] * (lengths[n] - 1)
    tokens = letters((count, sum(lengths)), generator)[:, source[:size]]
    targets = tokens[:, 1:].clone()
    targets[:, ~torch.tensor(follows[1:size])] = IGNORED
    return tokens[:, :-1], targets


def batches(
    tokens: int, length: int, seed: int, steps: int, device: torch.device | str = "cpu", start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches without end, starting with step ``start``. A batch has about ``tokens`` letters and four layouts.

    Samples grow from SHORTEST_PRACTICE to ``length`` letters in the first half of the steps. The batch of step n
    depends only on the seed and n.
    """
    for step in itertools.count(start):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        grown = min(2 * (step + 1) / steps, 1.0)
        now = (
            min(SHORTEST_PRACTICE + int(grown * (length - SHORTEST_PRACTICE)) // 4 * 4, length) if grown < 1 else length
        )
        parts = [practice(max(tokens // now // 4, 1), now, generator) for _ in range(4)]
        inputs, targets = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
        yield inputs, targets


# ---- evaluation


def prompt(
    lengths: Sequence[int], samples: int, generator: torch.Generator, between: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (prompts, answers), int64 (samples, seqlen) and (samples, SUFFIX).

    A prompt consists of sequences of the given lengths, ``between`` random letters, and the middle sequence again
    without its last SUFFIX letters. The removed letters are the answer.
    """
    middle = len(lengths) // 2
    start = starts_of(lengths)[middle]
    context = letters((samples, sum(lengths)), generator)
    asked = context[:, start : start + lengths[middle]]
    whole = torch.cat((context, letters((samples, between), generator), asked), 1)
    return whole[:, :-SUFFIX], whole[:, -SUFFIX:]


def prompts(
    samples: int, seed: int, count: int | None = None, length: int | None = None, control: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (prompts, answers) for each of LAYOUTS layouts, with several samples per layout. A prompt has ``count``
    sequences. Without ``count``, it has the number of sequences that fit into ``length`` letters together with the
    query and the whole answer."""
    for n in range(LAYOUTS):
        if not (some := (samples + LAYOUTS - 1 - n) // LAYOUTS):
            continue
        digest = hashlib.sha256(f"copying {seed} {count} {length} {control} {n}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        between = integer(*BETWEEN, generator) if control else 0
        if count is not None:
            lengths = [integer(SHORTEST, LONGEST, generator) for _ in range(count)]
        else:
            lengths = layout(length - LONGEST - between, generator)
        yield prompt(lengths, some, generator, between)


def right(subject: Subject, samples: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Returns bool (samples, SUFFIX): whether the model rates each letter of the answer as the most likely one after
    the correct letters before it. Returns None if the model cannot read prompts of this length."""
    found = []
    for asked, answer in samples:
        tokens = torch.cat((asked, answer), 1).to(subject.device)
        if not subject.can_read(tokens.shape[1] - 1):
            return None
        found.append(subject.last_logits(tokens[:, :-1], SUFFIX).argmax(-1) == tokens[:, -SUFFIX:])
    return torch.cat(found)


def measure(subject: Subject, multiples: Sequence[float] = (0.5, *MULTIPLES)) -> list[Result]:
    """Returns percentages of right answers for four tasks.

    At the paper's numbers of sequences, "copying" counts whole suffixes and "copying-letters" counts their letters. At
    multiples of the training length, "copying-by-length" counts letters, and "copying-control" counts letters in
    prompts with random letters before the query.
    """
    results = []

    for count in PAPER_COUNTS:
        found = right(subject, prompts(subject.samples, subject.seed, count=paper_count(count, subject.unit)))
        if found is not None:
            results.append(percentage("copying", count, found.all(1)))
            results.append(percentage("copying-letters", count, found))
    for length in (round(multiple * subject.unit) for multiple in multiples):
        for task, control in (("copying-by-length", False), ("copying-control", True)):
            found = right(subject, prompts(subject.samples, subject.seed, length=length, control=control))
            if found is not None:
                results.append(percentage(task, length, found))
    return results
