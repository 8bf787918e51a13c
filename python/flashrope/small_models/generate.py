"""``flashrope generate``: continue a text with a model trained by ``flashrope demo``, past its training length.

One cache holds the raw keys of all blocks, so any scheme can be chosen when the model is loaded; it only changes the
attention call. The text is streamed to stdout; everything else goes to stderr.
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

import torch

from .. import Rotary
from ..backends.cache_tables import CachePositions
from ..backends.registry import resolve_impl, unsupported_positions
from ..cli import options, report
from ..cli.hardware import hardware
from ..cli.options import MAX_THREADS, BadInput, cores, need, torch_threads
from ..cli.program import INTERRUPTED
from ..cli.progress import Bar
from ..rotary.catalogue import SCHEMES, Lengths, apply_options, describe_options
from . import data
from .model import Decoder, LanguageModel, RollingDecoder, load_checkpoint, trained_length
from .train import autocast

CHUNK = 1024  # bytes of the prompt per call
KEPT_CHUNK = 64  # of those that --keep lets in at a time; they see one another and the kept ones
DEFAULT_PROMPT = 128  # bytes, if the training length is unknown
VOCABULARY = 256
SMALL_MODEL = 4_000_000  # parameters; a decoding step of a smaller model takes less time than starting threads


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the options ask for: what to run, on which prompt, and where."""

    model: LanguageModel
    rotary: Rotary
    scheme: str  # description
    train_length: int | None
    prompt: bytes
    device: torch.device
    impl: str


def run(args: argparse.Namespace) -> int:
    try:
        settings = resolve(args)
        with torch.inference_mode(), autocast(settings.device), torch_threads(_threads(settings, args)):
            return _generate(settings, args)
    except BadInput as error:
        print(f"flashrope generate: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"\nflashrope generate: error: {error}", file=sys.stderr)
        return 1


def _generate(settings: Settings, args: argparse.Namespace) -> int:
    capacity = _longest(args, settings.prompt)
    dtype = torch.bfloat16 if settings.device.type == "cuda" else torch.float32  # what autocast passes to attention
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

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    text = codecs.getincrementaldecoder("utf-8")("replace")
    _show(text.decode(settings.prompt))
    start, times, code = time.perf_counter(), [], 0
    sampling = args.temperature, args.top_k, args.seed
    with _bars(len(settings.prompt), args.tokens) as (read, wrote):
        try:
            for byte in generate(decoder, settings.prompt, args.tokens, *sampling, read):
                times.append(time.perf_counter())
                _show(text.decode(bytes([byte])))
                wrote()
        except KeyboardInterrupt:
            code = INTERRUPTED
    _show(text.decode(b"", final=True))
    print(f"\n\n{report.lines(_outcome(settings, args, start, times))}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _bars(prompt: int, tokens: int) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
    """Two callbacks: one takes the number of tokens read, the other is called after every generated token. They draw
    bars with the time left if the text goes to a file or a pipe. On a terminal the text itself shows the progress."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        yield lambda count: None, lambda: None
        return
    reading, writing = Bar(prompt), Bar(tokens)
    reading.start("reading the prompt")

    def wrote():
        if not writing.done:
            writing.start("generating")  # its time starts with the first token, after the prompt
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

    ``read`` is called with the number of tokens of every piece of the prompt.

    Sampling is done on the CPU, so a seed gives the same draws on every device. Raises FloatingPointError if the logits
    are not finite.
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
    """One token sampled from logits, float64 (vocab_size,) on the CPU; the most likely one at temperature 0."""
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
    """The most bytes that a query sees."""
    return sum(args.keep) + KEPT_CHUNK if args.keep else len(prompt) + args.tokens


def _threads(settings: Settings, args: argparse.Namespace) -> int:
    small = sum(p.numel() for p in settings.model.parameters()) < SMALL_MODEL
    return args.threads or (1 if small else min(cores(), MAX_THREADS))


# ---- options
def resolve(args: argparse.Namespace) -> Settings:
    """The settings for these options. Raises BadInput."""
    need("safetensors")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise BadInput(f"--temperature: expected a number of at least 0, got {args.temperature}")
    if args.top_k is not None and args.top_k > VOCABULARY:
        raise BadInput(f"--top-k: expected at most {VOCABULARY}, the number of different bytes, got {args.top_k}")
    if args.top_k is not None and args.temperature == 0:
        raise BadInput(
            "--top-k: has no effect at --temperature 0, which always takes the most likely byte; give only one of them"
        )
    if not 0 <= args.seed < 1 << 63:
        raise BadInput(f"--seed: expected 0 to 2**63 - 1, got {args.seed}")
    device = options.device(args.device)
    model, trained, train_length = _load(args, device)
    prompt = _prompt(args, train_length)
    if args.scheme:
        rotary, scheme = _named_scheme(args, trained, train_length, _longest(args, prompt))
    else:
        rotary, scheme = _scheme(args, trained, train_length)
    if args.cache_dtype and args.impl == "cuda":
        raise BadInput(f"--cache-dtype: expected a backend that reads {args.cache_dtype}, got --impl cuda; give triton")
    try:
        impl = resolve_impl(args.impl, torch.empty(1, 1, 1, model.config.head_dim, device=device), cached=True)
    except ValueError as error:
        raise BadInput(f"--impl: {error}") from None
    tables = CachePositions(
        *(torch.zeros(1, 1, dtype=torch.int32) for _ in range(3))
    )  # as the cache of --keep gives them
    if args.keep and (reason := unsupported_positions(impl, tables)):
        raise BadInput(f"--keep: {impl} cannot serve it: {reason}")
    return Settings(model, rotary, scheme, train_length, prompt, device, impl)


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
    """The scheme of --scheme, and its description."""
    scheme = SCHEMES[args.scheme]
    if args.rectify or args.log_n:
        raise BadInput(f"--scheme: expected no {'--rectify' if args.rectify else '--log-n'} beside it, got both")
    if args.window and not scheme.reads_window:
        raise BadInput(f"--window: expected a scheme with a window, got {scheme.name}")
    if train_length is None:
        raise BadInput(f"--scheme: {args.model} does not record its training length; give --train-length")
    try:
        options = scheme.options(Lengths(train_length, longest, args.window, args.factor))
        rotary = apply_options(trained, options)
    except ValueError as error:
        raise BadInput(f"--scheme: {error}") from None
    if args.factor is not None and "factor" not in options:
        raise BadInput(f"--factor: expected a scheme with a factor, got {scheme.name}")
    return rotary, f"{scheme.label}: {describe_options(options) or 'as it was trained'}"


def _scheme(args: argparse.Namespace, trained: Rotary, train_length: int | None) -> tuple[Rotary, str]:
    """The scheme to run under, and its description."""
    rotated = sum(f != 0 for f in trained.frequencies)
    rotary, words = trained, [f"trained with {rotated} of {trained.head_dim // 2} channel pairs rotated"]
    unknown = f"{args.model} does not record its training length; give --train-length"
    if args.rectify or args.window or args.factor is not None:
        option = "--rectify" if args.rectify else "--window" if args.window else "--factor"
        if not rotated:
            raise BadInput(f"{option}: no channel pair of this model is rotated, so it has no distances to rectify")
        if train_length is None:
            raise BadInput(f"{option}: {unknown}")
        window = args.window or max(train_length // 2, 1)
        if window > train_length:
            raise BadInput(
                f"--window: expected at most the training length of {train_length:,} bytes, beyond which distances are "
                f"not trained, got {window:,}"
            )
        try:
            rotary = rotary.rectify(window, args.factor)
        except ValueError as error:
            raise BadInput(f"--{error}" if str(error).startswith("factor: ") else f"{option}: {error}") from None
        leaky = args.factor is not None and math.isfinite(args.factor)
        far = f"beyond it grow by 1/{args.factor:g}" if leaky else f"beyond it are treated as {window:,}"
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


def _prompt(args: argparse.Namespace, train_length: int | None) -> bytes:
    if args.prompt is not None:
        option, prompt = "--prompt", args.prompt.encode("utf-8", "surrogateescape")  # as Python decoded argv
    elif args.prompt_file is not None:
        option = "--prompt-file"
        try:
            prompt = Path(args.prompt_file).read_bytes()
        except OSError as error:
            raise BadInput(f"--prompt-file: cannot read {args.prompt_file} ({error.strerror})") from None
    else:
        return _unseen_piece(Path(args.model).with_name("split.json"), train_length or DEFAULT_PROMPT, args.seed)
    if not prompt:
        raise BadInput(f"{option}: expected at least one byte, got none")
    return prompt


def _unseen_piece(split: Path, length: int, seed: int) -> bytes:
    """``length`` bytes of a file that is unseen according to the split next to the checkpoint, from the start of a line
    if possible. Works for the standard library only: for other texts the split records the names, not where they
    are."""
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
    prompt, end = len(settings.prompt), len(settings.prompt) + args.tokens
    passed = ""
    if trained_at and args.keep:
        passed = f"; a byte sees {_longest(args, settings.prompt):,} at most"
    elif trained_at:
        place = "within the prompt" if prompt > trained_at else f"at generated byte {trained_at - prompt + 1:,}"
        passed = f"; past the training length {place}" if end > trained_at else "; within the training length"
    top_k = f", from the {args.top_k} most likely bytes" if args.top_k else ""
    length = f"{trained_at:,} bytes" if trained_at else "unknown"
    return {
        "model": f"{args.model}, {parameters:,} parameters, layers {config.layers}, "
        f"heads {config.heads} of {config.head_dim} channels, training length {length}",
        "scheme": settings.scheme,
        "context": f"prompt of {prompt:,} bytes, up to {args.tokens:,} bytes generated{passed}",
        **({"cache": f"{args.cache_dtype}, a scale for each token and key head"} if args.cache_dtype else {}),
        **({"kept": f"the first {args.keep[0]:,} and the last {args.keep[1]:,} bytes"} if args.keep else {}),
        "sampling": f"temperature {args.temperature:g}{top_k}, seed {args.seed}"
        if args.temperature
        else "always the most likely byte (greedy)",
        "machine": f"{hardware(settings.device)}, CPU threads: {torch.get_num_threads()}, backend {settings.impl}, "
        f"torch {torch.__version__}",
    }


def _outcome(settings: Settings, args: argparse.Namespace, start: float, times: list[float]) -> dict[str, str]:
    """What was generated, and how fast. ``times`` has one entry per generated byte. The first ends the prefill; the
    second includes compiling kernels and building tables."""
    device = f"{settings.device}, backend {settings.impl}"
    if not times:
        return {"prompt": "interrupted during the prefill", "device": device}
    prompt, generated = len(settings.prompt), len(times)
    reached = prompt + generated
    speed = f", {(generated - 2) / (times[-1] - times[1]):,.0f} tokens/s from the third on" if generated > 2 else ""
    stopped = "" if generated == args.tokens else f" of {args.tokens:,}, interrupted"
    multiple = f", {reached / settings.train_length:.1f} times the training length" if settings.train_length else ""
    return {
        "prompt": f"{prompt:,} tokens, {prompt / (times[0] - start):,.0f} tokens/s",
        "generated": f"{generated:,} tokens{stopped}{speed} (1 token = 1 byte)",
        "context": f"reached {reached:,} bytes{multiple}",
        "device": device,
    }


def _show(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
