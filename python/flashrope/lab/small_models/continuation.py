"""``flashrope generate``: continues a text with a model trained by ``flashrope demo``, past its training length.

One cache holds the raw keys of all blocks, so any scheme can be chosen when the model is loaded. Only the attention
call depends on the scheme. The text is streamed to stdout. Everything else is printed on stderr.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ... import Rotary
from ...backends.registry import resolve_impl, unsupported_positions
from ...calls.cache_tables import CachePositions
from ...console import options, report
from ...console.hardware import hardware
from ...console.options import MAX_THREADS, BadInput, cores, need, torch_threads
from ...console.program import INTERRUPTED
from ...console.progress import Bar
from ...schemes.catalogue import SCHEMES, Lengths, apply_options, describe_options
from . import data
from .model import Decoder, LanguageModel, RollingDecoder, load_checkpoint, trained_length
from .train import autocast

CHUNK = 1024  # bytes of the prompt per call
# Bytes of the prompt per call with --keep. The bytes of one call attend to one another and to the kept bytes.
KEPT_CHUNK = 64
DEFAULT_PROMPT = 128  # bytes of the default prompt if the training length is unknown
VOCABULARY = 256
SMALL_MODEL = 4_000_000  # parameters; for smaller models, starting threads takes longer than a decoding step


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that follow from the options: what to run, on which prompt, and where."""

    model: LanguageModel
    rotary: Rotary
    scheme: str  # description of the scheme
    train_length: int | None
    prompt: bytes
    device: torch.device
    impl: str | None  # the value of --impl


def run(args: argparse.Namespace) -> int:
    def command() -> int:
        settings = resolve(args)
        with torch.inference_mode(), autocast(settings.device), torch_threads(_threads(settings, args)):
            return _generate(settings, args)

    return guarded(command)


def guarded(command: Callable[[], int]) -> int:
    """Runs the command and returns its exit code: 2 for BadInput, and 1 for weights that are not finite. Each of these
    errors is printed as one line on stderr."""
    try:
        return command()
    except BadInput as error:
        print(f"flashrope generate: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"\nflashrope generate: error: {error}", file=sys.stderr)
        return 1


def _generate(settings: Settings, args: argparse.Namespace) -> int:
    capacity = _longest(args, settings.prompt)
    dtype = torch.bfloat16 if settings.device.type == "cuda" else torch.float32  # autocast casts q, k and v to it
    try:
        options = dtype, settings.impl, args.cache_dtype
        decoder: Decoder | RollingDecoder
        if args.keep:
            decoder = RollingDecoder(settings.model, settings.rotary, args.keep, KEPT_CHUNK, *options)
        else:
            decoder = Decoder(settings.model, settings.rotary, capacity, *options)
    except ValueError as error:
        raise BadInput(f"--model: {error}") from None
    except (RuntimeError, MemoryError):
        raise BadInput(
            f"--tokens: {settings.device} has not enough memory for a cache of {capacity:,} tokens"
        ) from None
    print(report.lines(_facts(settings, args)) + "\n", file=sys.stderr, flush=True)

    text = codecs.getincrementaldecoder("utf-8")("replace")
    sampling = args.temperature, args.top_k, args.seed
    start = time.perf_counter()
    times, code = stream(
        text.decode(settings.prompt),
        lambda read: generate(decoder, settings.prompt, args.tokens, *sampling, read),
        lambda byte: text.decode(bytes([byte])),
        lambda: text.decode(b"", final=True),
        (len(settings.prompt), args.tokens),
    )
    device = f"{settings.device}, backend {settings.impl or 'default'}"
    facts = outcome(len(settings.prompt), args.tokens, settings.train_length, device, start, times)
    print(f"\n\n{report.lines(facts)}", file=sys.stderr)
    return code


def stream(
    prompt: str,
    tokens: Callable[[Callable[[int], None]], Iterator[int]],
    decode: Callable[[int], str],
    rest: Callable[[], str],
    counts: tuple[int, int],
) -> tuple[list[float], int]:
    """Writes the prompt and the text of the tokens to stdout as they come.

    tokens: a function that yields the tokens. The function calls its argument with the number of tokens of each piece
        of the prompt after reading the piece.
    decode: a function that returns the text that a token completes.
    rest: a function that returns the text after the last token.
    counts: the number of tokens of the prompt, and the number to generate.

    Returns:
        (times at which the tokens were yielded, exit code).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    _show(prompt)
    times: list[float] = []
    code = 0
    with _bars(*counts) as (read, wrote):
        try:
            for token in tokens(read):
                times.append(time.perf_counter())
                _show(decode(token))
                wrote()
        except KeyboardInterrupt:
            code = INTERRUPTED
    _show(rest())
    return times, code


@contextlib.contextmanager
def _bars(prompt: int, tokens: int) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
    """Yields two callbacks: one takes the number of tokens read, the other is called after every new token. If the text
    is written to a file or a pipe, they draw bars with the time left. On a terminal the text itself shows the
    progress."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        yield lambda count: None, lambda: None
        return
    reading, writing = Bar(prompt), Bar(tokens)
    reading.start("reading the prompt")

    def wrote():
        if not writing.done:
            writing.start("generating")  # the bar's time starts with the first token, after the prompt
        writing.step()

    try:
        yield reading.step, wrote
    finally:
        writing.clear()


def generate(
    decoder: Decoder | RollingDecoder,
    prompt: bytes,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[int]:
    """Yields the bytes that follow ``prompt``, one at a time. Call it under torch.inference_mode.

    ``read`` is called with the number of tokens of every piece of the prompt. Sampling is done on the CPU, so a seed
    gives the same random numbers on every device. Raises FloatingPointError if the logits are not finite.
    """
    device = decoder.model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    for piece in data.as_tokens([prompt], device).split(
        KEPT_CHUNK if isinstance(decoder, RollingDecoder) else CHUNK, dim=1
    ):
        logits = decoder.read(piece)
        read(piece.shape[1])
    for n in range(1, tokens + 1):
        byte = pick(logits[0, -1].double().cpu(), temperature, top_k, generator)
        yield byte
        if n < tokens:
            logits = decoder.read(torch.full((1, 1), byte, device=device))


def pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Returns a token sampled from logits, float64 (vocab_size,) on the CPU. At temperature 0 it is the most likely
    token."""
    highest, token = logits.max(dim=0)
    if not math.isfinite(highest):
        raise FloatingPointError(f"the model's largest logit is {highest.item()}: its weights are not finite")
    if temperature == 0:
        return int(token)
    if top_k is not None:
        logits, tokens = logits.topk(top_k)
    drawn = int(torch.multinomial(((logits - highest) / temperature).softmax(dim=0), 1, generator=generator))
    return drawn if top_k is None else int(tokens[drawn])


def _longest(args: argparse.Namespace, prompt: bytes) -> int:
    """Returns the largest number of bytes that a query attends to."""
    return sum(args.keep) + KEPT_CHUNK if args.keep else len(prompt) + args.tokens


def _threads(settings: Settings, args: argparse.Namespace) -> int:
    small = sum(p.numel() for p in settings.model.parameters()) < SMALL_MODEL
    return args.threads or (1 if small else min(cores(), MAX_THREADS))


# ---- options
def resolve(args: argparse.Namespace) -> Settings:
    """Returns the settings for these options. Raises BadInput."""
    need("safetensors")
    check_sampling(args, VOCABULARY, "bytes")
    if args.dtype:
        raise BadInput(f"--dtype: supported only for a transformers model or a .gguf file, got {args.model}")
    device = options.device(args.device)
    model, trained, train_length = _load(args, device)
    prompt = _prompt(args, train_length)
    if args.scheme:
        rotary, scheme = _named_scheme(args, trained, train_length, _longest(args, prompt))
    else:
        rotary, scheme = _scheme(args, trained, train_length)
    if args.cache_dtype and args.impl == "cuda":
        raise BadInput(f"--cache-dtype: expected a backend that reads {args.cache_dtype}, got --impl cuda; use triton")
    try:
        impl = resolve_impl(args.impl, torch.empty(1, 1, 1, model.config.head_dim, device=device), cached=True)
    except ValueError as error:
        raise BadInput(f"--impl: {error}") from None
    tables = CachePositions(
        *(torch.zeros(1, 1, dtype=torch.int32) for _ in range(3))
    )  # with --keep, calls over the cache have these three tables of positions
    if args.keep and (reason := unsupported_positions(impl, tables)):
        raise BadInput(f"--keep: not supported by the backend {args.impl} ({reason})")
    return Settings(model, rotary, scheme, train_length, prompt, device, args.impl)


def check_sampling(args: argparse.Namespace, vocabulary: int, unit: str) -> None:
    """Raises BadInput for an invalid --temperature, --top-k or --seed. unit: the name of tokens, in the plural."""
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise BadInput(f"--temperature: expected a number of at least 0, got {args.temperature}")
    if args.top_k is not None and args.top_k > vocabulary:
        raise BadInput(f"--top-k: expected at most {vocabulary}, the number of different {unit}, got {args.top_k}")
    if args.top_k is not None and args.temperature == 0:
        raise BadInput(
            "--top-k: has no effect at --temperature 0, which always takes the most likely byte; give only one of them"
        )
    if not 0 <= args.seed < 1 << 63:
        raise BadInput(f"--seed: expected 0 to 2**63 - 1, got {args.seed}")


def _load(args: argparse.Namespace, device: torch.device) -> tuple[LanguageModel, Rotary, int | None]:
    if not Path(args.model).is_file():
        raise BadInput(
            f"--model: no file {args.model}; run 'flashrope demo' first to create it, or give another checkpoint"
        )
    try:
        model, trained = load_checkpoint(args.model, device)
        train_length = trained_length(args.model)
    except (ValueError, OSError) as error:
        raise BadInput(f"--model: {error}") from None
    if model.config.vocab_size != VOCABULARY:
        raise BadInput(
            f"--model: expected a model over {VOCABULARY} bytes, {args.model} has {model.config.vocab_size} tokens"
        )
    if train_length and args.train_length and args.train_length != train_length:
        raise BadInput(f"--train-length: expected {train_length}, which {args.model} records, got {args.train_length}")
    return model, trained, train_length or args.train_length


def _named_scheme(
    args: argparse.Namespace, trained: Rotary, train_length: int | None, longest: int
) -> tuple[Rotary, str]:
    """Returns the scheme that --scheme names, and its description."""
    options = named_options(args, train_length, longest)
    try:
        rotary = apply_options(trained, options)
    except ValueError as error:
        raise BadInput(f"--scheme: {error}") from None
    return rotary, f"{SCHEMES[args.scheme].label}: {describe_options(options) or 'as it was trained'}"


def named_options(args: argparse.Namespace, train_length: int | None, longest: int) -> dict[str, Any]:
    """Returns the options of ``convert`` for the scheme that --scheme names. Raises BadInput."""
    scheme = SCHEMES[args.scheme]
    if args.rectify or args.log_n:
        raise BadInput(f"--scheme: cannot be combined with {'--rectify' if args.rectify else '--log-n'}")
    if args.window and not scheme.reads_window:
        raise BadInput(f"--window: expected a scheme with a window, got {scheme.name}")
    if train_length is None:
        raise BadInput(f"--scheme: {args.model} does not record its training length; give --train-length")
    try:
        options = scheme.options(Lengths(train_length, longest, args.window, args.factor))
    except ValueError as error:
        raise BadInput(f"--scheme: {error}") from None
    if args.factor is not None and "leaky_rerope" not in options:
        raise BadInput(f"--factor: expected a scheme with a factor, got {scheme.name}")
    return options


def _scheme(args: argparse.Namespace, trained: Rotary, train_length: int | None) -> tuple[Rotary, str]:
    """Returns the scheme under which the model runs, and its description."""
    rotated = sum(f != 0 for f in trained.frequencies)
    rotary, words = trained, [f"trained with {rotated} of {trained.head_dim // 2} channel pairs rotated"]
    unknown = f"{args.model} does not record its training length; give --train-length"
    if option := rectifying(args):
        if not rotated:
            raise BadInput(f"{option}: no channel pair of this model is rotated, so it has no distances to rectify")
        if train_length is None:
            raise BadInput(f"{option}: {unknown}")
        window = window_of(args, train_length, "bytes")
        try:
            rotary = rotary.rectify(window, args.factor)
        except ValueError as error:
            raise BadInput(f"--{error}" if str(error).startswith("factor: ") else f"{option}: {error}") from None
        leaky = args.factor is not None and math.isfinite(args.factor)
        far = f"beyond it grow by 1/{args.factor:g}" if leaky else f"beyond it count as {window:,}"
        words.append(f"{'Leaky ReRoPE' if leaky else 'ReRoPE'}, window {window:,} bytes: distances {far}")
    else:
        words.append("distances unchanged")
    if args.log_n:
        if train_length is None:
            raise BadInput(f"--log-n: {unknown}")
        try:
            rotary = rotary.log_n(train_length)
        except ValueError as error:
            raise BadInput(f"--log-n: {error}") from None
        words.append(f"log n: the query at position i is scaled by max(1, ln(i + 1) / ln({train_length}))")
    return rotary, "; ".join(words)


def rectifying(args: argparse.Namespace) -> str | None:
    """Returns the first option that selects ReRoPE or Leaky ReRoPE, or None."""
    asked = {"--rectify": args.rectify, "--window": args.window, "--factor": args.factor is not None}
    return next((option for option, given in asked.items() if given), None)


def window_of(args: argparse.Namespace, train_length: int, unit: str) -> int:
    """Returns the value of --window, by default half the training length. Raises BadInput."""
    window = args.window or max(train_length // 2, 1)
    if window > train_length:
        raise BadInput(
            f"--window: expected at most the training length of {train_length:,} {unit}, beyond which distances are "
            f"not trained, got {window:,}"
        )
    return window


def _prompt(args: argparse.Namespace, train_length: int | None) -> bytes:
    prompt = given_prompt(args)
    if prompt is None:
        return _unseen_piece(Path(args.model).with_name("split.json"), train_length or DEFAULT_PROMPT, args.seed)
    return prompt


def given_prompt(args: argparse.Namespace) -> bytes | None:
    """Returns the bytes of --prompt or --prompt-file, or None if neither is given. Raises BadInput."""
    if args.prompt is not None:
        option, prompt = "--prompt", args.prompt.encode("utf-8", "surrogateescape")  # as Python decoded argv
    elif args.prompt_file is not None:
        option = "--prompt-file"
        try:
            prompt = Path(args.prompt_file).read_bytes()
        except OSError as error:
            raise BadInput(f"--prompt-file: cannot read {args.prompt_file} ({error.strerror})") from None
    else:
        return None
    if not prompt:
        raise BadInput(f"{option}: expected at least one byte, got none")
    return prompt


def _unseen_piece(split: Path, length: int, seed: int) -> bytes:
    """Returns ``length`` bytes of an unseen file, if possible from the start of a line. The file split.json next to the
    checkpoint says which files are unseen. The text must be the standard library, because for other texts the split
    records the names of the files but not their folder."""
    try:
        record = json.loads(split.read_text())
        text, files = record["text"], record["unseen"]["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(
            f"--prompt: found no {split}, which says which text is unseen; give --prompt or --prompt-file"
        ) from None
    corpus = data.standard_library(length)
    pieces = [piece for name, piece in zip(corpus.unseen_files, corpus.unseen, strict=True) if name in set(files)]
    windows = data.unseen_windows(pieces, 2 * length, 1, seed) if text == corpus.name else []
    if not windows:
        raise BadInput(f"--prompt: the unseen part of {text} is not available; give --prompt or --prompt-file")
    return windows[0][windows[0][:length].find(b"\n") + 1 :][:length]


# ---- output
def _facts(settings: Settings, args: argparse.Namespace) -> dict[str, str]:
    config, trained_at = settings.model.config, settings.train_length
    parameters = sum(p.numel() for p in settings.model.parameters())
    seen = f"; a byte sees {_longest(args, settings.prompt):,} at most" if trained_at and args.keep else None
    length = f"{trained_at:,} bytes" if trained_at else "unknown"
    return {
        "model": f"{args.model}, {parameters:,} parameters, layers {config.layers}, "
        f"heads {config.heads} of {config.head_dim} channels, training length {length}",
        "scheme": settings.scheme,
        "context": context(len(settings.prompt), args.tokens, trained_at, "byte", seen),
        **cache_facts(args.cache_dtype),
        **({"kept": f"the first {args.keep[0]:,} and the last {args.keep[1]:,} bytes"} if args.keep else {}),
        "sampling": sampling_words(args, "byte"),
        "machine": f"{hardware(settings.device)}, CPU threads: {torch.get_num_threads()}, "
        f"backend {settings.impl or 'default'}, torch {torch.__version__}",
    }


def context(prompt: int, tokens: int, train_length: int | None, unit: str, seen: str | None = None) -> str:
    """Returns the line about the context: how much is read and written, and where the text exceeds the training length.

    seen: a text to print instead of the part about the training length.
    """
    passed = seen or ""
    if train_length and seen is None:
        end = prompt + tokens
        place = "within the prompt" if prompt > train_length else f"at generated {unit} {train_length - prompt + 1:,}"
        passed = f"; past the training length {place}" if end > train_length else "; within the training length"
    return f"prompt of {prompt:,} {unit}s, up to {tokens:,} {unit}s generated{passed}"


def cache_facts(cache_dtype: str | None) -> dict[str, str]:
    """Returns the line about the cache in a list of settings, if it is quantized."""
    return {"cache": f"{cache_dtype}, a scale for each token and key head"} if cache_dtype else {}


def sampling_words(args: argparse.Namespace, unit: str) -> str:
    if not args.temperature:
        return f"always the most likely {unit} (greedy)"
    top_k = f", from the {args.top_k} most likely {unit}s" if args.top_k else ""
    return f"temperature {args.temperature:g}{top_k}, seed {args.seed}"


def outcome(
    prompt: int,
    tokens: int,
    train_length: int | None,
    device: str,
    start: float,
    times: list[float],
    unit: str = "byte",
    ended: bool = False,
) -> dict[str, str]:
    """Returns what was generated, and how fast.

    prompt: the number of tokens of the prompt. tokens: the number of tokens that were asked for. times: when each
    generated token came. The first token ends the prefill. The time of the second token includes compiling kernels and
    building tables. ended: whether the model ended the text.
    """
    if not times:
        return {"prompt": "interrupted during the prefill", "device": device}
    generated = len(times)
    reached = prompt + generated
    speed = f", {(generated - 2) / (times[-1] - times[1]):,.0f} tokens/s from the third on" if generated > 2 else ""
    stopped = "" if generated == tokens else f" of {tokens:,}, {'the end of the text' if ended else 'interrupted'}"
    multiple = f", {reached / train_length:.1f} times the training length" if train_length else ""
    same = " (1 token = 1 byte)" if unit == "byte" else ""
    return {
        "prompt": f"{prompt:,} tokens, {prompt / (times[0] - start):,.0f} tokens/s",
        "generated": f"{generated:,} tokens{stopped}{speed}{same}",
        "context": f"reached {reached:,} {unit}s{multiple}",
        "device": device,
    }


def _show(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
