"""Runs ``flashrope generate``: continues a text with a Hugging Face model or a model of ``flashrope demo``, under its
own scheme or another scheme.

The model is converted, so its cache holds raw keys, and any scheme can be chosen when the model is loaded. If
``convert`` does not support the model's family, the library's own attention is used, and no other scheme is possible.
The text is streamed to stdout. Everything else is printed on stderr.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...console import options, report
from ...console.hardware import hardware
from ...console.options import BadInput
from ...console.program import INTERRUPTED
from ...integrations.scheme_options import read_field
from ...schemes.catalogue import SCHEMES, Lengths, add_options, describe_options, name_options
from .checkpoint import (
    cache_facts,
    check_positions,
    describe,
    keep_logits,
    load,
    new_cache,
    run_command,
    text_config,
    training_length,
)
from .readings import check_streams
from .streaming import KeptTokens

CHUNK = 1024  # tokens of the prompt in a forward pass
# Tokens of the prompt in a forward pass with --keep. They attend to one another and to the kept tokens.
KEPT_CHUNK = 64


def run(args: argparse.Namespace) -> int:
    return run_command("generate", _generate, args, draws=False)


@torch.inference_mode()
def _generate(args: argparse.Namespace) -> int:
    from transformers import TextStreamer

    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise BadInput(f"--temperature: expected a number of at least 0, got {args.temperature}")
    prompt, device = _prompt(args), options.device(args.device)
    kept = KeptTokens(*args.keep) if args.keep else None
    model, tokens = load(args.model, device, args.dtype)
    train_length = training_length(model, args.model, args.train_length)
    ids = [*tokens.start, *tokens.encode(prompt)]
    longest = len(ids) + args.tokens
    if not args.keep:
        check_positions(model, longest, "--tokens")
    new_cache(model, args.cache_dtype)
    top_k = f", from the {args.top_k} most likely {tokens.unit}s" if args.top_k else ""
    facts = {
        "model": describe(model, args.model, train_length),
        "scheme": _choose_scheme(model, args, train_length, longest),
        "context": f"prompt of {len(ids):,} {tokens.unit}s, up to {args.tokens:,} {tokens.unit}s generated",
        **cache_facts(args.cache_dtype),
        **({"kept": f"the first {kept.first:,} and the last {kept.last:,} {tokens.unit}s"} if kept else {}),
        "sampling": f"temperature {args.temperature:g}{top_k}, seed {args.seed}"
        if args.temperature
        else f"always the most likely {tokens.unit} (greedy)",
        "machine": f"{hardware(device)}, CPU threads: {torch.get_num_threads()}, torch {torch.__version__}",
    }
    print(report.lines(facts) + "\n", file=sys.stderr, flush=True)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    ends, streamer, times, stopped = {*tokens.ends, *_ends(model)}, TextStreamer(tokens), [time.perf_counter()], ""
    try:
        streamer.put(torch.tensor(ids))
        for token in continued(model, ids, args, kept):
            times.append(time.perf_counter())
            if token in ends:
                stopped = ", the end of the text"
                break
            streamer.put(torch.tensor([token]))
    except KeyboardInterrupt:
        stopped = ", interrupted"
    streamer.end()
    made, reached = len(times) - 1, len(ids) + len(times) - 1
    speed = f", {(made - 1) / (times[-1] - times[1]):,.0f} tokens/s" if made > 1 else ""
    facts = {
        "generated": f"{made:,} tokens of {args.tokens:,}{stopped}{speed}",
        "context": f"reached {reached:,} {tokens.unit}s, {reached / train_length:.1f} times the training length",
    }
    print(f"\n{report.lines(facts)}", file=sys.stderr)
    return INTERRUPTED if stopped == ", interrupted" else 0


def continued(model, ids: list[int], args: argparse.Namespace, kept: KeptTokens | None) -> Iterator[int]:
    """Yields the tokens that follow ids. Sampling is done on the CPU, so a seed gives the same random numbers on every
    device."""
    from ...integrations.transformers.versions import CACHE, cache_of

    generator, cache = torch.Generator().manual_seed(args.seed), new_cache(model, args.cache_dtype)
    pieces = torch.tensor([ids], device=model.device).split(KEPT_CHUNK if kept else CHUNK, dim=1)
    for _ in range(args.tokens):
        for piece in pieces:
            out = model(piece, use_cache=True, **{CACHE: cache}, **keep_logits(model, 1))
            cache = cache_of(out)
            if kept:
                kept.cut(cache)
        token = _pick(out.logits[0, -1].double().cpu(), args.temperature, args.top_k, generator)
        yield token
        pieces = (torch.tensor([[token]], device=model.device),)


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Returns a token sampled from logits, float64 (vocab_size,) on the CPU. At temperature 0 it is the most likely
    token."""
    highest, likeliest = logits.max(dim=0)
    if not math.isfinite(highest):
        raise BadInput(f"--model: the largest logit is {highest.item()}: the model's weights are not finite")
    if temperature == 0:
        return int(likeliest)
    found, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial(((found - highest) / temperature).softmax(dim=0), 1, generator=generator)])


def _prompt(args: argparse.Namespace) -> str:
    text, option = args.prompt, "--prompt"
    if text is None:
        option = "--prompt-file"
        try:
            text = Path(args.prompt_file).read_text("utf-8", "replace")
        except OSError as error:
            raise BadInput(f"--prompt-file: cannot read {args.prompt_file} ({error.strerror})") from None
    if not text:
        raise BadInput(f"{option}: expected at least one byte, got none")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # as Python decoded argv


def _choose_scheme(model, args: argparse.Namespace, train_length: int, longest: int) -> str:
    """Converts the model to the scheme that the options name. Returns a description of the scheme. Raises BadInput."""
    from ...integrations.transformers import convert

    used = read_field(text_config(model))
    try:
        option = f"--scheme {args.scheme}"
        if args.scheme:
            used = add_options(used, _named_options(args, train_length, longest))
        else:
            option = "--keep" if args.keep else "--cache-dtype"
            if args.window or args.factor is not None:
                raise BadInput("--window, --factor: expected --scheme with them, such as --scheme rerope")
        convert(model, **used)
        if args.keep:
            option = "--keep"
            check_streams(model)
    except (TypeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        if not (args.scheme or args.keep or args.cache_dtype):
            return f"the library's own attention; convert does not support the model: {error}"
        raise BadInput(f"{option}: {error}") from None
    numbers = describe_options({name: value for name, value in used.items() if name != "rotary"})
    return f"{name_options(used)}: {numbers}" if numbers else name_options(used) or "the model's own"


def _named_options(args: argparse.Namespace, train_length: int, longest: int) -> dict[str, Any]:
    """Returns the options of ``convert`` for the scheme that --scheme names. Raises BadInput or ValueError."""
    scheme = SCHEMES[args.scheme]
    if args.window and not scheme.reads_window:
        raise BadInput(f"--window: expected a scheme with a window, got {scheme.name}")
    found = scheme.options(Lengths(train_length, longest, args.window, args.factor))
    if args.factor is not None and "leaky_rerope" not in found:
        raise BadInput(f"--factor: expected a scheme with a factor, got {scheme.name}")
    return found


def _ends(model) -> list[int]:
    """Returns the tokens that end a text, from the model's generation settings."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if found is None else found if isinstance(found, list) else [found]
