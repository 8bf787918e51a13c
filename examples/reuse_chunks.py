"""A small server that answers questions over documents. It reads each document once, with nothing before it. Cached
keys have no positions, so every prompt can use the keys of a document by reference, at any place. This file is
self-contained: copy it and change it.

    pip install -e '.[demo]'
    python -m experiments copying --preset copying --schemes rope --seeds 1 --threads 1
    python examples/reuse_chunks.py runs/experiments-copying/models/rope-L128-s0.safetensors

The second command trains a model on a CPU in a minute and a half. The third command takes a quarter of a minute. A
document is random letters. A question is eight letters of one document, and its answer is the four letters that follow
them in the document. The model was trained to copy in this way, on 128 letters.

A document that was read alone has not seen the documents that a prompt puts before it, so its keys and values differ
from those of one prefill of the whole prompt. The table shows the effect: how much the loss of the answers differs
from their loss after a full prefill of the same prompt. Recomputing the first letters of every document after
everything that precedes it in the prompt can reduce this effect (EPIC, arXiv 2410.15332).
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from flashrope import PagedKVCache, Rotary
from flashrope.lab.evaluation.losses import half_interval  # half width of Student's 95% interval of a mean
from flashrope.lab.small_models.model import LanguageModel, load_checkpoint, read_in_step, trained_length

QUESTION, ANSWER = 8, 4  # letters
PAGE_SIZE = 16
SHOWN = 3  # questions and answers that are printed
LETTERS = string.ascii_letters + string.digits + "+-"  # one letter for each of the 64 tokens


class Document(NamedTuple):
    tokens: torch.Tensor  # (length,)
    sequence: int  # the sequence of the cache that holds the document's keys and values


class Request(NamedTuple):
    documents: list[str]  # in the order of the prompt
    question: torch.Tensor  # (QUESTION,)
    answer: torch.Tensor  # (ANSWER,), the right answer


class Reply(NamedTuple):
    answer: list[int]
    computed: int  # tokens of the prompt that went through the model
    seconds: float  # time to the first token of the answer
    loss: float  # loss of the right answer, in nats per letter
    right: float  # share of the right answer's letters that are predicted, given the right letters before them


class Server:
    """One model, one cache, and the documents in it."""

    def __init__(self, model: LanguageModel, rotary: Rotary, pages: int):
        config, weights = model.config, model.embedding.weight
        sizes = pages, PAGE_SIZE, config.heads, config.head_dim
        self.model, self.rotary, self.device = model, rotary, weights.device
        self.cache = PagedKVCache(*sizes, weights.dtype, weights.device, layers=config.layers)
        self.documents: dict[str, Document] = {}

    def read(self, sequence: int, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens (n,) to a sequence of the cache. Returns logits (n, vocab_size)."""
        with self.cache.step(
            [sequence], len(tokens)
        ) as step:  # every layer calls step.attend(q, rotary, k, v, layer=n)
            return read_in_step(self.model, self.rotary, step, tokens[None].to(self.device))[0]

    @torch.inference_mode()
    def prefetch(self, name: str, tokens: torch.Tensor) -> None:
        """Appends a document to a new sequence of the cache, with no other document before it."""
        sequence = self.cache.allocate()
        self.read(sequence, tokens)
        self.documents[name] = Document(tokens, sequence)

    def place(self, prompt: int, name: str, again: int) -> int:
        """Appends a document to a prompt by reference. Returns how many of its tokens were computed.

        The first `again` tokens are computed again, after the tokens of the prompt. All later tokens follow by
        reference. If the prompt is empty, nothing comes before the document, and all of it is exact.
        """
        tokens, sequence = self.documents[name]
        again = min(again, len(tokens)) if self.cache.lengths[prompt] else 0
        if not again:
            self.cache.extend(prompt, sequence)
            return 0
        self.read(prompt, tokens[:again])
        rest = self.cache.fork(sequence)  # shares the pages
        self.cache.remove(rest, 0, again)
        self.cache.extend(prompt, rest)
        self.cache.free(rest)
        return again

    @torch.inference_mode()
    def reply(self, request: Request, again: int | None) -> Reply:
        """Returns the model's answer. again: how many of the first tokens of each document are computed again. None:
        all documents are read again, in one prefill."""
        start = time.perf_counter()
        prompt, computed, asked = self.cache.allocate(), 0, request.question
        if again is None:
            asked = torch.cat([*(self.documents[name].tokens for name in request.documents), asked])
        else:
            computed = sum(self.place(prompt, name, again) for name in request.documents)
        logits = self.read(prompt, asked)[-1]
        answer = [int(logits.argmax())]
        seconds = time.perf_counter() - start

        scored = self.cache.fork(prompt)  # the right answer, on the same keys
        expected = request.answer.to(self.device)
        predicted = torch.cat([logits[None], self.read(scored, request.answer[:-1])])
        loss = F.cross_entropy(predicted.double(), expected).item()
        right = (predicted.argmax(-1) == expected).double().mean().item()
        while len(answer) < ANSWER:
            answer.append(int(self.read(prompt, torch.tensor(answer[-1:]))[-1].argmax()))
        for sequence in (prompt, scored):
            self.cache.free(sequence)
        return Reply(answer, computed + len(asked), seconds, loss, right)


def requests(documents: dict[str, Document], retrieved: int, count: int, draw: random.Random) -> Iterator[Request]:
    """Yields ``count`` requests. Each has several documents in random order and a question about one of them."""
    for _ in range(count):
        names = draw.sample(sorted(documents), retrieved)
        tokens = documents[draw.choice(names)].tokens
        start = draw.randrange(len(tokens) - QUESTION - ANSWER + 1)
        _, question, answer, _ = tokens.split([start, QUESTION, ANSWER, len(tokens) - start - QUESTION - ANSWER])
        yield Request(names, question, answer)


def serve(server: Server, asked: Sequence[Request], ways: Sequence[int | None]) -> dict[int | None, list[Reply]]:
    """Returns {way: the replies to all requests}, for every way to make the prompt."""
    replies: dict[int | None, list[Reply]] = {way: [] for way in ways}
    for way in ways:
        server.reply(asked[0], way)  # the first call of a kind takes longer
    for request in asked:
        for way in ways:
            replies[way].append(server.reply(request, way))
    return replies


def name_of(way: int | None) -> str:
    return "full prefill" if way is None else f"reuse, the first {way} computed again" if way else "reuse"


def letters(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def show(asked: Sequence[Request], replies: Sequence[Reply]) -> None:
    for request, reply in list(zip(asked, replies, strict=True))[:SHOWN]:
        mark = "right" if reply.answer == request.answer.tolist() else f"expected {letters(request.answer)}"
        answered = f"{letters(request.question)} -> {letters(reply.answer)} ({mark})"
        print(f"{', '.join(request.documents)}: {answered}")


def report(of_models: Sequence[dict[int | None, list[Reply]]]) -> None:
    """Prints means over models and questions, and the median of the time to the first token."""
    print(f"\n{'':<34}{'prefill':>8}{'saved':>8}{'first token':>13}{'right':>8}{'loss':>8}  against full prefill")
    for way in of_models[0]:
        found = [reply for replies in of_models for reply in replies[way]]
        full = [reply for replies in of_models for reply in replies[None]]
        computed, seconds = fmean(reply.computed for reply in found), median(reply.seconds for reply in found)
        saved, right = 1 - computed / fmean(reply.computed for reply in full), fmean(reply.right for reply in found)
        line = f"{name_of(way):<34}{computed:>8.1f}{100 * saved:>7.1f}%{1000 * seconds:>10.2f} ms{100 * right:>7.1f}%"
        line += f"{fmean(reply.loss for reply in found):>8.3f}"
        if way is not None:
            changes = [reply.loss - other.loss for reply, other in zip(found, full, strict=True)]
            if len(of_models) > 1:
                changes = [
                    fmean(each) for each in zip(*[iter(changes)] * (len(changes) // len(of_models)), strict=True)
                ]
            line += f"  {fmean(changes):+.4f} ± {half_interval(changes):.4f}"
        print(line)


def read(path: Path, device: torch.device) -> tuple[LanguageModel, Rotary, int]:
    """Returns the model, its scheme and its training length. Raises OSError or ValueError for a file that holds no such
    model."""
    model, rotary = load_checkpoint(path, device)
    trained = trained_length(path)
    if model.config.vocab_size != len(LETTERS) or trained is None:
        raise ValueError(
            f"{path}: a model of {model.config.vocab_size} tokens, not {len(LETTERS)}, with training length {trained}"
        )
    return model, rotary, trained


def main(arguments: list[str] | None = None) -> list[dict[int | None, list[Reply]]]:
    parser = argparse.ArgumentParser(description="Answers questions over documents that were read once.")
    parser.add_argument(
        "models", type=Path, nargs="+", help="RoPE models of the experiment copying, models/NAME.safetensors"
    )
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--length", type=int, default=32, help="letters of a document")
    parser.add_argument("--retrieved", type=int, default=4, help="documents of a prompt")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--again", type=int, nargs="*", default=[1, 2, 4, 8], help="first letters to compute again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args(arguments)
    if args.length < QUESTION + ANSWER or not 2 <= args.retrieved <= args.documents or args.questions < 2:
        parser.error(
            f"expected documents of at least {QUESTION + ANSWER} letters, 2 or more retrieved, 2 or more questions"
        )
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    texts = torch.randint(len(LETTERS), (args.documents, args.length), generator=generator)
    prompt_pages = args.retrieved * (-(-args.length // PAGE_SIZE) + 1) + 2
    pages = args.documents * -(-args.length // PAGE_SIZE) + 3 * prompt_pages

    of_models = []
    for path in args.models:
        try:
            model, rotary, trained = read(path, args.device)
        except (OSError, ValueError) as error:
            parser.error(f"models: expected models of the experiment copying (see the top of this file), got {error}")
        rotary = rotary.rectify(trained // 2).log_n(trained)  # ReRoPE: prompts may be longer than in training
        server = Server(model.eval(), rotary, pages)
        start = time.perf_counter()
        for n, tokens in enumerate(texts):
            server.prefetch(f"document {n}", tokens)
        seconds = time.perf_counter() - start
        print(f"{path.name}: {len(texts)} documents of {args.length} letters, read once in {1000 * seconds:.0f} ms")
        asked = list(requests(server.documents, args.retrieved, args.questions, random.Random(args.seed)))
        of_models.append(serve(server, asked, [None, 0, *args.again]))
    show(asked, of_models[-1][0])
    report(of_models)
    return of_models


if __name__ == "__main__":
    main()
