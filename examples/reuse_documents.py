"""A small server over a Hugging Face model that answers questions over documents. Each document is read once, after the
head that all prompts share, and joined into any prompt. This file is self-contained: copy it and change it.

    pip install -e '.[transformers,gguf]'
    python -m experiments fetch runs/smollm2
    python examples/reuse_documents.py runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text runs/smollm2/handbook.txt

The second command fetches a small model and texts. A model may also be a checkpoint folder. A document is a passage of
the text with the number of a city hidden in it, and a question asks for one of the numbers.

A document does not see the documents that a prompt puts before it, so its keys and values differ from those of one
prefill of the prompt. The table shows the effect: how much the log probability of the right answer differs from its
log probability after a full prefill of the same prompt. Recomputing the first tokens of every document after everything
that precedes it in the prompt reduces this effect (EPIC, arXiv 2410.15332).
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from flashrope.console.options import BadInput
from flashrope.integrations.transformers import Passage, convert, join_passages, prefill_passage
from flashrope.integrations.transformers.versions import CACHE  # the name of a cache in this version of transformers
from flashrope.lab.evaluation.checkpoint import Tokens, load
from flashrope.lab.evaluation.statistics import half_interval  # half width of Student's 95% interval of a mean

HEAD = "Read these documents. You will be asked a question about one of them at the end.\n"
DOCUMENT = "\nDocument:\n{before}\nThe number of {name} is {number}.\n{after}"
QUESTION, ANSWER = "\nWhat is the number of {name}?", "The number of {name} is"
NAMES = "Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Rome", "Quito", "Perth", "Dakar"


class Request(NamedTuple):
    documents: list[str]  # names, in the order of the prompt
    asked: str  # name of the document that the question is about
    answer: str  # the right answer


class Reply(NamedTuple):
    answer: str
    computed: int  # tokens of the prompt that went through the model
    seconds: float  # time to the first token of the answer
    log_probability: float  # log probability of the right answer, in nats


class Server:
    """One model, and the documents that it has read."""

    def __init__(self, model, tokens: Tokens):
        self.model, self.tokens = convert(model), tokens
        before, self.behind = tokens.chat or ("", "\n")
        start = () if tokens.chat else tokens.start  # a chat template adds its own start token
        self.head = prefill_passage(model, self.ids(before + HEAD, start))
        self.documents: dict[str, Passage] = {}

    def ids(self, text: str, start: Sequence[int] = ()) -> torch.Tensor:
        return torch.tensor([[*start, *self.tokens.encode(text)]], device=self.model.device)

    def prefetch(self, name: str, text: str) -> None:
        """Reads a document once. The document sees the head before it."""
        self.documents[name] = prefill_passage(self.model, self.ids(text), behind=self.head)

    def prompt(self, names: Sequence[str], recompute: int | None) -> tuple[Passage, int]:
        """Returns the prompt of these documents, and how many of its tokens were computed for it.

        recompute: how many of the first tokens of each document are computed again. None: the whole prompt is computed
            in one prefill.
        """
        documents = [self.documents[name] for name in names]
        if recompute is None:
            ids = torch.cat([passage.input_ids for passage in (self.head, *documents)], 1)
            return prefill_passage(self.model, ids), ids.shape[1]
        joined = join_passages(self.model, [self.head, *documents], recompute=recompute)
        return joined, sum(min(recompute, passage.input_ids.shape[1]) for passage in documents)

    @torch.inference_mode()
    def reply(self, request: Request, recompute: int | None) -> Reply:
        begin = time.perf_counter()
        prompt, computed = self.prompt(request.documents, recompute)
        question = self.ids(QUESTION.format(name=request.asked) + self.behind + ANSWER.format(name=request.asked))
        cache = copy.deepcopy(prompt.cache)  # every call appends to the cache that it gets
        self.model(question, **{CACHE: cache}).logits[0, -1].argmax().item()
        seconds = time.perf_counter() - begin
        right = self.ids(f" {request.answer}")
        behind = torch.cat([question, right], 1)
        predicted = self.model(behind[:, :-1], **{CACHE: copy.deepcopy(prompt.cache)}).logits[0, -right.shape[1] :]
        chosen = predicted.float().log_softmax(-1).gather(1, right[0][:, None])
        ids = torch.cat([prompt.input_ids, question], 1)
        options = {"max_new_tokens": right.shape[1], "do_sample": False, "pad_token_id": 0}
        written = self.model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=prompt.cache, **options)
        written = written[0, ids.shape[1] :]
        answer = self.tokens.decode(written.tolist())
        return Reply(answer.strip(), computed + question.shape[1], seconds, float(chosen.double().sum()))


def write_documents(text: str, size: int, draw: random.Random) -> dict[str, tuple[str, str]]:
    """Returns {name: (document, number)}. A document is a passage of ``size`` characters with the number in it."""
    found = {}
    for name in NAMES:
        at, number = draw.randrange(len(text) - size), str(draw.randrange(10_000, 100_000))
        passage, place = text[at : at + size], draw.randrange(size // 4, 3 * size // 4)
        before, after = passage[:place], passage[place:]
        found[name] = DOCUMENT.format(before=before, name=name, number=number, after=after), number
    return found


def draw_requests(answers: dict[str, str], retrieved: int, count: int, draw: random.Random) -> list[Request]:
    """Returns ``count`` requests. Each has several documents in random order and a question about one of them."""
    requests = []
    for _ in range(count):
        names = draw.sample(sorted(answers), retrieved)
        asked = draw.choice(names)
        requests.append(Request(names, asked, answers[asked]))
    return requests


def name_of(way: int | None) -> str:
    return "full prefill" if way is None else f"reuse, the first {way} computed again" if way else "reuse"


def report(requests: Sequence[Request], replies: dict[int | None, list[Reply]]) -> None:
    """Prints means over the questions, and the median of the time to the first token."""
    print(f"\n{'':<34}{'computed':>9}{'first token':>13}{'right':>7}{'log p':>9}  against full prefill")
    full = replies[None]
    for way, found in replies.items():
        computed, seconds = fmean(reply.computed for reply in found), median(reply.seconds for reply in found)
        right = sum(reply.answer == request.answer for reply, request in zip(found, requests, strict=True))
        line = f"{name_of(way):<34}{computed:>9.0f}{1000 * seconds:>10.0f} ms{right:>4} of {len(found)}"
        line += f"{fmean(reply.log_probability for reply in found):>7.2f}"
        if way is not None:
            pairs = zip(found, full, strict=True)
            changes = [reply.log_probability - other.log_probability for reply, other in pairs]
            line += f"  {fmean(changes):+.2f} ± {half_interval(changes):.2f}"
        print(line)


def main(arguments: list[str] | None = None) -> dict[int | None, list[Reply]]:
    parser = argparse.ArgumentParser(
        description="Answers questions over documents that a Hugging Face model read once."
    )
    parser.add_argument("model", help="a checkpoint folder or a .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="a text file that documents are cut from")
    parser.add_argument("--size", type=int, default=1500, help="characters of a document")
    parser.add_argument("--retrieved", type=int, default=3, help="documents of a prompt")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--again", type=int, nargs="*", default=[0, 16], help="first tokens to compute again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args(arguments)
    draw = random.Random(args.seed)
    try:
        text = args.text.read_text(encoding="utf-8")
        if not 1 <= args.retrieved <= len(NAMES) or args.questions < 2 or not 4 <= args.size < len(text):
            raise ValueError(
                f"expected 1 to {len(NAMES)} documents retrieved, 2 or more questions, and documents of 4 to "
                f"{len(text) - 1} characters"
            )
        server = Server(*load(args.model, args.device))
    except (BadInput, OSError, ValueError) as error:
        parser.error(str(error))
    documents = write_documents(text, args.size, draw)
    begin = time.perf_counter()
    for name, (words, _) in documents.items():
        server.prefetch(name, words)
    tokens = sum(passage.input_ids.shape[1] for passage in server.documents.values())
    print(f"{len(documents)} documents, {tokens} tokens, read once in {time.perf_counter() - begin:.1f} s")
    answers = {name: number for name, (_, number) in documents.items()}
    requests = draw_requests(answers, args.retrieved, args.questions, draw)
    ways = [None, *args.again]
    server.reply(requests[0], None)  # the first call takes longer
    replies: dict[int | None, list[Reply]] = {way: [server.reply(request, way) for request in requests] for way in ways}
    for request, reply in zip(requests[:3], replies[ways[-1]], strict=False):
        print(f"{', '.join(request.documents)}: {request.asked} -> {reply.answer} (expected {request.answer})")
    report(requests, replies)
    return replies


if __name__ == "__main__":
    main()
