"""Builds prompts that hide numbers in a text and end with a question about one of the numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ...console.options import BadInput
from .checkpoint import Tokens

INSTRUCTION = (
    "Somewhere in this text a number is hidden. Find it and keep it in mind; you will be asked for it at the end.\n"
)
FILLER = (
    "The river runs past the mill. A cat sleeps on the wall. Two carts stand in the yard. Rain falls on the roof, and "
    "then it stops. Someone sweeps the stairs.\n"
)
NEEDLE = "The hidden number is{answer}. Keep it in mind:{answer} is the hidden number.\n"
QUESTION = "What is the hidden number?"
ANSWER = " The hidden number is"

INSTRUCTION_OF_KEYS = (
    "Somewhere in this text the numbers of some cities are hidden. Find them and keep them in mind; you will be asked "
    "for one of them at the end.\n"
)
NEEDLE_OF_KEYS = "\nThe number of {name} is{answer}. Keep it in mind:{answer} is the number of {name}.\n"
QUESTION_OF_KEYS = "\nWhat is the number of {name}?"
ANSWER_OF_KEYS = " The number of {name} is"
NAMES = ("Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Rome", "Quito", "Perth", "Dakar")
CANDIDATES = 10


class Prompt(NamedTuple):
    """A prompt and its possible answers. ids: the tokens that the model reads. candidates: the tokens of ten answers,
    of which the first is right."""

    ids: list[int]
    candidates: list[list[int]]


class Haystack(NamedTuple):
    """Builds prompts of an exact number of tokens.

    The parts of a prompt are tokenized separately, so a different depth only moves the numbers and changes
    no other token.

    tokens: the model's Tokens.
    texts: the tokens of the texts in which numbers are hidden. Empty: a block of filler text is repeated.
    keys: how many numbers are hidden, at most 10. If there are several, the question names one of them.
    chat: the texts that the model's chat template puts before and after a message, or None for plain text.
    """

    tokens: Tokens
    texts: tuple[list[int], ...] = ()
    keys: int = 1
    chat: tuple[str, str] | None = None

    def prompt(self, length: int, depth: float, draw: random.Random) -> Prompt:
        """Returns a prompt whose ids and right answer have exactly ``length`` tokens.

        depth: where to hide the number that the question asks for. 0: right after the instruction. 1: right before the
        question. All other numbers are hidden at random places.

        Raises:
            ValueError: ``length`` is too short for the numbers and the question.
        """
        head, tail, needles, candidates = parts = self._parts(draw)
        room = length - _size(*parts)
        if room < 0:
            raise ValueError(
                f"expected at least {length - room} tokens, the length of a prompt without text, got {length}"
            )
        places = [round(depth * room), *(draw.randint(0, room) for _ in needles[1:])]
        hay, at, body = self._hay(room, draw), 0, []
        for place, _, needle in sorted(zip(places, range(len(needles)), needles, strict=True)):
            body += [*hay[at:place], *needle]
            at = place
        return Prompt([*head, *body, *hay[at:], *tail], candidates)

    def shortest(self) -> int:
        """Returns the number of tokens of a prompt without text, including the answer."""
        return _size(*self._parts(random.Random(0)))

    def check_texts(self, longest: int) -> None:
        """Raises BadInput if no text is long enough for a prompt of this length."""
        have = max(map(len, self.texts), default=longest)
        if have < longest:
            raise BadInput(
                f"--text: expected a file of at least {longest:,} {self.tokens.unit}s for the longest prompt, the "
                f"longest file has {have:,}; give other files or shorter --lengths"
            )

    def _parts(self, draw: random.Random) -> tuple[list[int], list[int], list[list[int]], list[list[int]]]:
        """Returns the tokens before the text, the tokens after it, and the tokens of every hidden number and of every
        answer."""
        numbers = [f" {n}" for n in draw.sample(range(10_000, 100_000), CANDIDATES)]
        names = draw.sample(NAMES, self.keys)
        needles = [self._needle(name, number) for name, number in zip(names, numbers, strict=False)]
        return *self._frame(names[0]), needles, [self.tokens.encode(number) for number in numbers]

    def _frame(self, name: str) -> tuple[list[int], list[int]]:
        """Returns the tokens before the text, and the tokens after it up to the answer."""
        several, encode = self.keys > 1, self.tokens.encode
        instruction = INSTRUCTION_OF_KEYS if several else INSTRUCTION
        question = QUESTION_OF_KEYS.format(name=name) if several else QUESTION
        answer = ANSWER_OF_KEYS.format(name=name) if several else ANSWER
        if self.chat is None:
            return [*self.tokens.start, *encode(instruction)], encode(question + answer)
        before, behind = self.chat
        return encode(before + instruction), encode(question + behind + answer.lstrip())

    def _needle(self, name: str, number: str) -> list[int]:
        if self.keys > 1:
            return self.tokens.encode(NEEDLE_OF_KEYS.format(name=name, answer=number))
        return self.tokens.encode(NEEDLE.format(answer=number))

    def _hay(self, size: int, draw: random.Random) -> list[int]:
        if not self.texts:
            filler = self.tokens.encode(FILLER)
            return (filler * (size // len(filler) + 1))[:size]
        places: Sequence[tuple[list[int], int]] = [(text, len(text) - size) for text in self.texts if len(text) >= size]
        at = draw.randrange(sum(last + 1 for _, last in places))
        for text, last in places:
            if at <= last:
                return text[at : at + size]
            at -= last + 1
        raise AssertionError("a place behind the last text")


def _size(head: list[int], tail: list[int], needles: list[list[int]], candidates: list[list[int]]) -> int:
    """Returns the number of tokens of a prompt without text, with the right answer."""
    return len(head) + len(tail) + sum(map(len, needles)) + len(candidates[0])
