"""``python -m experiments reuse``: measures how well a pretrained model answers from reused passages.

A prompt is a head, two documents and a question. Half of the questions ask for the number of a city. The number is
hidden in a document. In the other half, the prompt ends with the beginning of a quote from a document, and the answer
is the continuation of the quote. Each prompt is prefilled in several ways, with its documents in both orders. One way
is a single prefill. In the other ways the passages were prefilled alone or after ("behind") the head, and some of the
first tokens of each passage are computed again.

For every way, the log probability of the whole right answer is compared with its log probability after a full prefill
of the same prompt. An answer counts as found if greedy decoding would write it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from flashrope.console import files
from flashrope.console.hardware import hardware
from flashrope.console.options import positive
from flashrope.console.progress import Bar
from flashrope.lab.evaluation import prompts
from flashrope.lab.evaluation.checkpoint import Tokens, describe, load, training_length
from flashrope.lab.evaluation.journal import Journal
from flashrope.lab.evaluation.statistics import half_interval, wilson

from .real_speed import command_line, parse

SUMMARY = "answers over passages that a pretrained model read before: reuse --model FILE --text PATH --out DIR"
RESULT, JOURNAL = "reuse.json", "reuse.jsonl"
INSTRUCTION = "Read these documents. You will be asked a question about one of them at the end.\n"
DOCUMENT = "\nDocument:\n"
KINDS = ("number", "quote")
QUOTE_QUESTION = "\nQuote a sentence from one of the documents."
QUOTE_ANSWER = 'One of the documents says: "'
QUOTED, CONTINUED = 16, 5  # tokens of a quote, tokens of its continuation that are judged
DOCUMENTS, SIZE = 2, 352  # number of documents, tokens of each; both documents are rows of one batch
FULL = "full prefill"
RECOMPUTED = (0, 4, 16, 64)
ALONE, BEHIND = "alone", "behind the head"
ORDERS = ("the document asked for first", "the document asked for last")


class Question(NamedTuple):
    """Holds the token lists of a question. The question is about the first document."""

    kind: str
    head: list[int]
    documents: list[list[int]]
    question: list[int]
    answer: list[int]


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a checkpoint folder or a .gguf file")
    parser.add_argument("--text", metavar="PATH", nargs="+", required=True, help="text files")
    parser.add_argument("--questions", type=positive, default=48)
    args = parse(parser, argv)
    measure(args, command_line(program, argv))


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures all questions. Writes reuse.json after every question."""
    from flashrope.integrations.transformers import convert

    model, tokens = load(args.model, torch.device("cpu"))
    model = convert(model)
    texts = [tokens.encode(Path(path).read_text(encoding="utf-8")) for path in args.text]
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": describe(model, args.model, training_length(model, args.model, None)),
        "text": [Path(path).name for path in args.text],
        "documents": DOCUMENTS,
        "tokens of a document": SIZE,
        "seed": args.seed,
    }
    journal = Journal(args.out / JOURNAL, settings)
    done = {row["question"] for row in journal.rows}
    facts = settings | {"machine": f"{hardware('cpu')}, torch {torch.__version__}", "command": command}
    with Bar(args.questions) as bar:
        bar.start("questions")
        for number in range(args.questions):
            if number not in done:
                draw = random.Random(f"{args.seed} {number}")
                question = ask(KINDS[number % len(KINDS)], tokens, texts, draw)
                journal.add({"question": number, "kind": question.kind, "ways": answers(model, question)})
                write(args.out / RESULT, facts, journal.rows)
            bar.step(1)
    write(args.out / RESULT, facts, journal.rows)
    print(table(summary(journal.rows)))


# ---- questions


def ask(kind: str, tokens: Tokens, texts: Sequence[list[int]], draw: random.Random) -> Question:
    """Returns a random question about passages of the texts. kind: what it asks for."""
    names = draw.sample(prompts.NAMES, DOCUMENTS)
    numbers = [f" {n}" for n in draw.sample(range(10_000, 100_000), DOCUMENTS)]
    before, behind = tokens.chat or ("", "\n")
    head = [*(() if tokens.chat else tokens.start), *tokens.encode(before + INSTRUCTION)]
    start, documents = tokens.encode(DOCUMENT), []
    for name, number in zip(names, numbers, strict=True):
        hidden = tokens.encode(prompts.NEEDLE_OF_KEYS.format(name=name, answer=number)) if kind == "number" else []
        text = passage(texts, SIZE - len(start) - len(hidden), draw)
        place = draw.randrange(len(text) // 4, 3 * len(text) // 4)
        documents.append([*start, *text[:place], *hidden, *text[place:]])
    if kind == "number":
        asked, answer = prompts.QUESTION_OF_KEYS.format(name=names[0]), tokens.encode(numbers[0])
        question = tokens.encode(asked + behind + prompts.ANSWER_OF_KEYS.format(name=names[0]).lstrip())
    else:
        at = draw.randrange(SIZE // 4, SIZE - QUOTED - CONTINUED)
        quote, answer = documents[0][at : at + QUOTED], documents[0][at + QUOTED : at + QUOTED + CONTINUED]
        question = [*tokens.encode(QUOTE_QUESTION + behind + QUOTE_ANSWER), *quote]
    return Question(kind, head, documents, question, answer)


def passage(texts: Sequence[list[int]], size: int, draw: random.Random) -> list[int]:
    """Returns ``size`` consecutive tokens from a random place of one of the texts."""
    text = draw.choice(texts)
    at = draw.randrange(len(text) - size)
    return text[at : at + size]


# ---- answers


def answers(model, question: Question) -> list[dict[str, Any]]:
    """Returns, for every way and order, the log probability of the right answer and whether the model finds it.

    Prompts of equal length are rows of one batch: both orders of the documents, made from both kinds of passages.
    """
    from flashrope.integrations.transformers import join_passages, prefill_passage

    texts = torch.tensor(question.documents)
    orders = (0, 1), (1, 0)  # both orders of the documents
    head = prefill_passage(model, torch.tensor([question.head]))
    heads = select_rows(model, [(head, 0)] * 2)
    whole = prefill_passage(model, torch.stack([texts[list(order)].flatten() for order in orders]), heads)
    # Full prefill: the scores are exact, because only one passage follows the head and was prefilled behind the head.
    scores = score(model, join_passages(model, [heads, whole]), question)
    found = [{"way": FULL, "order": order} | each for order, each in zip(ORDERS, scores, strict=True)]
    read = {ALONE: prefill_passage(model, texts), BEHIND: prefill_passage(model, texts, heads)}
    rows = [(way, order) for way in read for order in range(len(orders))]
    places = [select_rows(model, [(read[way], orders[order][at]) for way, order in rows]) for at in range(DOCUMENTS)]
    heads = select_rows(model, [(head, 0)] * len(rows))
    for recompute in RECOMPUTED:
        scores = score(model, join_passages(model, [heads, *places], recompute), question)
        for (way, order), each in zip(rows, scores, strict=True):
            found.append({"way": way, "recomputed": recompute, "order": ORDERS[order]} | each)
    return found


def select_rows(model, rows: Sequence[tuple[Any, int]]):
    """Returns a batch made of rows of passages. rows: a (passage, index of its row) for each row of the batch."""
    from flashrope.integrations.transformers import Passage, accept_cache
    from transformers import DynamicCache

    cache = accept_cache(model, DynamicCache(config=model.config))
    for index in range(len(rows[0][0].cache.layers)):
        layers = [(passage.cache.layers[index], row) for passage, row in rows]
        keys, values = ([getattr(x, name)[row : row + 1] for x, row in layers] for name in ("keys", "values"))
        cache.update(torch.cat(keys), torch.cat(values), index)
    return Passage(torch.cat([passage.input_ids[row : row + 1] for passage, row in rows]), cache)


@torch.no_grad()
def score(model, prompt, question: Question) -> list[dict[str, Any]]:
    """Returns, for every prompt of a batch, the log probability of the answer in nats, and whether greedy decoding
    writes the answer."""
    from flashrope.integrations.transformers.versions import CACHE

    answer, batch = torch.tensor(question.answer), prompt.input_ids.shape[0]
    asked = torch.tensor([[*question.question, *question.answer[:-1]]]).expand(batch, -1)
    logits = model(asked, logits_to_keep=len(answer), **{CACHE: prompt.cache}).logits.float()
    chosen = logits.log_softmax(-1).gather(2, answer[None, :, None].expand(batch, -1, -1)).double().sum((1, 2))
    found = (logits.argmax(-1) == answer).all(1)
    return [{"log_probability": p, "found": ok} for p, ok in zip(chosen.tolist(), found.tolist(), strict=True)]


# ---- results


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the mean results of every way to prefill: for all questions and for each kind of question, over both
    orders and in each order."""
    rows, found = list(rows), []
    for kind in ("all", *KINDS):
        for order in ("both", *ORDERS):
            found += [
                {"kind": kind, "order": order, **each}
                for each in _of_ways([row for row in rows if kind in ("all", row["kind"])], order)
            ]
    return found


def _of_ways(rows: Sequence[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    """Returns the mean results of every way to prefill. A question counts once: its two orders are averaged first."""
    of: dict[tuple, list[list[dict]]] = {}
    for row in rows:
        mine: dict[tuple, list[dict]] = {}
        for each in row["ways"]:
            if order in ("both", each["order"]):
                mine.setdefault((each["way"], each.get("recomputed")), []).append(each)
        for way, values in mine.items():
            of.setdefault(way, []).append(values)
    found = []
    for (way, recomputed), questions in of.items():
        means = [fmean(each["log_probability"] for each in values) for values in questions]
        base = [fmean(each["log_probability"] for each in values) for values in of[FULL, None]]
        changes = [mean - other for mean, other in zip(means, base, strict=True)]
        right = [each["found"] for values in questions for each in values]
        row = {"way": way} | ({} if recomputed is None else {"recomputed": recomputed})
        row |= {"questions": len(means), "log_probability": fmean(means), "change": fmean(changes)}
        row |= {"interval_95": half_interval(changes)} if len(changes) > 1 else {}
        found.append(row | {"found": sum(right), "asked": len(right), "found_95": wilson(sum(right), len(right))})
    return found


def write(path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    files.write(path, json.dumps({**facts, "results": summary(rows), "rows": rows}, indent=1) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in results:
        name = row["way"] + (f", {row['recomputed']} recomputed" if "recomputed" in row else "")
        lines.append(
            f"{row['kind']:<7} {row['order']:<30} {name:<32} {row['log_probability']:>8.3f} "
            f"{row['change']:+.3f} ± {row.get('interval_95', float('nan')):.3f}   {row['found']} of {row['asked']}"
        )
    return "\n".join(lines)
