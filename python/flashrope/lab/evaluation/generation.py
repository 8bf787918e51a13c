"""Runs ``flashrope generate`` for a Hugging Face model: continues a text under its own scheme or another scheme.

The model is converted, so its cache holds raw keys, and any scheme can be chosen when the model is loaded. If
``convert`` does not support the model's family, the library's own attention is used, and no other scheme is possible.
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...console import options, report
from ...console.hardware import hardware
from ...console.options import BadInput, cores, need, torch_threads
from ...integrations.scheme_options import read_field
from ...schemes.catalogue import describe_options, name_options
from ..small_models.continuation import (
    CHUNK,
    cache_facts,
    check_sampling,
    context,
    given_prompt,
    guarded,
    named_options,
    outcome,
    pick,
    rectifying,
    sampling_words,
    stream,
    window_of,
)
from .checkpoint import Tokens, check_positions, describe, keep_logits, load, new_cache, text_config, training_length

LOOK_BACK = 5  # number of earlier tokens on which the text of a new token may depend


def run(args: argparse.Namespace) -> int:
    def command() -> int:
        need("transformers", extra="transformers")
        with torch_threads(args.threads or cores()), torch.inference_mode():
            return _generate(args)

    return guarded(command)


def _generate(args: argparse.Namespace) -> int:
    for option, given in {"--impl": args.impl, "--keep": args.keep}.items():
        if given:
            raise BadInput(f"{option}: supported only for a checkpoint of flashrope demo, got {args.model}")
    prompt = given_prompt(args)
    if prompt is None:
        raise BadInput("--prompt: expected a text to continue, here or in --prompt-file, for a transformers model")
    device = options.device(args.device)
    model, tokens = load(args.model, device, args.dtype)
    check_sampling(args, text_config(model).vocab_size, f"{tokens.unit}s")
    train_length = training_length(model, args.model, args.train_length)
    text = prompt.decode("utf-8", "replace")
    ids = [*tokens.start, *(list(prompt) if tokens.decode is None else tokens.encode(text))]
    longest = len(ids) + args.tokens
    check_positions(model, longest, "--tokens")
    new_cache(model, args.cache_dtype)
    scheme = _choose_scheme(model, args, train_length, longest, f"{tokens.unit}s")
    facts = {
        "model": describe(model, args.model, train_length),
        "scheme": scheme,
        "context": context(len(ids), args.tokens, train_length, tokens.unit),
        **cache_facts(args.cache_dtype),
        "sampling": sampling_words(args, tokens.unit),
        "machine": f"{hardware(device)}, CPU threads: {torch.get_num_threads()}, torch {torch.__version__}",
    }
    print(report.lines(facts) + "\n", file=sys.stderr, flush=True)

    ends = {*tokens.ends, *_ends(model)}
    last: list[int] = []

    def generated(read: Callable[[int], None]) -> Iterator[int]:
        for token in continued(model, ids, args, read):
            last[:] = [token]
            yield token
            if token in ends:
                return

    decode, rest = _decoder(tokens, ids)
    start = time.perf_counter()
    times, code = stream(text, generated, decode, rest, (len(ids), args.tokens))
    ended = bool(last) and last[0] in ends
    facts = outcome(len(ids), args.tokens, train_length, str(device), start, times, tokens.unit, ended)
    print(f"\n\n{report.lines(facts)}", file=sys.stderr)
    return code


def continued(model, ids: list[int], args: argparse.Namespace, read: Callable[[int], None]) -> Iterator[int]:
    """Yields the tokens that follow ids. read: called with the number of tokens of every piece of the prompt."""
    from ...integrations.transformers.versions import CACHE, cache_of

    generator = torch.Generator().manual_seed(args.seed)
    cache, prompt = new_cache(model, args.cache_dtype), torch.tensor([ids], device=model.device)
    for part in prompt.split(CHUNK, dim=1):
        out = model(part, use_cache=True, **{CACHE: cache}, **keep_logits(model, 1))
        cache = cache_of(out)
        read(part.shape[1])
    for n in range(1, args.tokens + 1):
        token = pick(out.logits[0, -1].double().cpu(), args.temperature, args.top_k, generator)
        yield token
        if n < args.tokens:
            out = model(torch.tensor([[token]], device=model.device), use_cache=True, **{CACHE: cache})
            cache = cache_of(out)


def _choose_scheme(model, args: argparse.Namespace, train_length: int, longest: int, unit: str) -> str:
    """Converts the model to the scheme that the options name. Returns a description of the scheme. Raises BadInput."""
    from ...integrations.transformers import convert

    own = read_field(text_config(model))
    option = f"--scheme {args.scheme}" if args.scheme else rectifying(args) or ("--log-n" if args.log_n else None)
    asked: dict[str, Any] = {}
    if args.scheme:
        asked = named_options(args, train_length, longest)
    elif rectifying(args):
        window = window_of(args, train_length, unit)
        asked = {"rerope": window} if args.factor is None else {"leaky_rerope": (window, args.factor)}
    if args.log_n:
        asked["log_n"] = train_length
    try:
        convert(model, **(own | asked))
    except (TypeError, ValueError) as error:
        if option is None and args.cache_dtype is None:
            return f"the library's own attention; convert does not support the model: {error}"
        raise BadInput(f"{option or '--cache-dtype'}: {error}") from None
    used = own | asked
    numbers = describe_options({name: value for name, value in used.items() if name != "rotary"})
    return f"{name_options(used)}: {numbers}" if numbers else name_options(used) or "the model's own"


def _ends(model) -> list[int]:
    """Returns the tokens that end a text, from the model's generation settings."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if found is None else found if isinstance(found, list) else [found]


def _decoder(tokens: Tokens, prompt: list[int]) -> tuple[Callable[[int], str], Callable[[], str]]:
    """Returns two functions: one returns the text that a token completes, the other the text that is left at the
    end."""
    if tokens.decode is None:
        text = codecs.getincrementaldecoder("utf-8")("replace")
        text.decode(bytes(prompt[len(tokens.start) :]))
        return lambda token: text.decode(bytes([token])) if token < 256 else "", lambda: text.decode(b"", final=True)
    seen, ids = prompt[-LOOK_BACK:], list[int]()
    shown = len(tokens.decode(seen))

    def add(token: int, final: bool = False) -> str:
        nonlocal seen, ids, shown
        assert tokens.decode is not None
        ids += [] if final else [token]
        whole = tokens.decode(seen + ids)
        new = whole[shown:]
        if not final and (not new or new.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""  # more bytes of a character may follow
        seen, ids = (seen + ids)[-LOOK_BACK:], []
        shown = len(tokens.decode(seen))
        return new

    return add, lambda: add(0, final=True)
