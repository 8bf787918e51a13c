"""Loads a Hugging Face causal language model with its tokenizer, and computes the logits of the last tokens."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from ...console.options import BadInput, cores, need, torch_threads
from ...integrations.scheme_options import FIELD
from ..small_models.model import check_checkpoint
from . import gguf_file
from .streaming import PIECE, KeptTokens

MESSAGE = "MESSAGE"  # stands for the user's message when a chat template is applied
MAX_BYTE_VOCABULARY = 512  # bytes and special tokens; with a larger vocabulary, the tokenizer's files are missing


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Converts text to tokens.

    start: the tokens that the tokenizer puts before every text.
    decode: a function that returns the text of tokens, or of one token: transformers' TextStreamer passes both.
    ends: the tokens that end a text.
    chat: the texts that the chat template puts before and after a user's message. None if there is no template.
    """

    encode: Callable[[str], list[int]]
    start: tuple[int, ...] = ()
    unit: str = "token"
    decode: Callable[[int | list[int]], str] | None = None
    ends: tuple[int, ...] = ()
    chat: tuple[str, str] | None = None


def load(name: str, device: torch.device, dtype: str | None = None):
    """Returns a causal language model and its Tokens. A model without a tokenizer reads bytes if its vocabulary has 256
    to 512 entries.

    Args:
        name: one of three: a name or folder for transformers, where the folder may hold a model that was saved after
            ``convert``; a .gguf file; a .safetensors file of ``flashrope demo`` or the experiments.
        dtype: the dtype of the weights, such as "float16". Default: bfloat16 on a GPU, float32 elsewhere.

    Raises:
        BadInput: the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    from ...integrations.transformers import convert

    # With this import, transformers loads models that were saved with options.
    from ...integrations.transformers.applying import choose_stock_attention
    from . import llama

    weights = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    try:
        if gguf_file.is_gguf(name):
            model = gguf_file.read(Path(name), weights)
        elif Path(name).is_file():
            model = llama.read(Path(name)).to(weights)
        elif Path(name).suffix == ".safetensors":
            raise BadInput(f"--model: no file {name}; run 'flashrope demo' first, or give another checkpoint")
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=weights)
            if getattr(text_config(model), FIELD, None):
                choose_stock_attention(model)
                convert(model)
    except BadInput:  # the message already names its option
        raise
    except (OSError, TypeError, ValueError) as error:
        raise BadInput(f"--model: {str(error).splitlines()[0]}") from None
    model = model.to(device).eval()
    check_causal(model, name)
    return model, _tokens(name, text_config(model))


def run_command(
    name: str, measure: Callable[[argparse.Namespace], int], args: argparse.Namespace, draws: bool = True
) -> int:
    """Runs a command on a model and returns its exit code. BadInput is printed as one line on stderr, and the exit code
    is 2. draws: whether the command needs matplotlib."""
    try:
        _check_file(args.model)
        need("transformers", extra="transformers")
        need(*["matplotlib"] * draws)
        with torch_threads(args.threads or cores()):
            return measure(args)
    except BadInput as error:
        print(f"flashrope {name}: error: {error}", file=sys.stderr)
        return 2


def _check_file(name: str) -> None:
    """Raises BadInput for a file that is not a readable checkpoint, whatever packages are installed."""
    if Path(name).suffix == ".safetensors" and Path(name).is_file() and find_spec("safetensors"):
        try:
            check_checkpoint(name)
        except ValueError as error:
            raise BadInput(f"--model: {error}") from None


def text_config(model):
    return model.config.get_text_config()


def training_length(model, name: str, given: int | None) -> int:
    """Returns the training length in tokens: ``given``, or else max_position_embeddings. Raises BadInput if both are
    missing."""
    length = given or getattr(text_config(model), "max_position_embeddings", None)
    if not length:
        raise BadInput(f"--train-length: {name} does not define max_position_embeddings")
    return length


def measured_lengths(asked: list[int] | None, train_length: int) -> list[int]:
    """Returns the lengths of --lengths, sorted. By default: a half, one, two and four times the training length."""
    return sorted(set(asked or [train_length // 2, train_length, 2 * train_length, 4 * train_length]))


def check_positions(model, longest: int, option: str) -> None:
    """Raises BadInput if a length is beyond a learned table of positions. option: the option that the error names."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if not limit or longest <= limit:
        return
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module is not words and 0 <= module.num_embeddings - limit <= 2:
            raise BadInput(
                f"{option}: expected at most {limit:,}, because this model has a learned embedding for each position "
                f"({name}), got {longest:,}"
            )


def rope_type_by_length(model) -> str | None:
    """Returns the rope type of the model's configuration if its table depends on the length of the text, else None."""
    config = text_config(model)
    for field in ("rope_scaling", "rope_parameters"):
        found = getattr(config, field, None) or {}
        for each in (found, *(value for value in found.values() if isinstance(value, dict))):
            if (kind := each.get("rope_type", each.get("type"))) in ("dynamic", "longrope"):
                return kind
    return None


def describe(model, name: str, train_length: int) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    weights = f", dequantized from {gguf_file.weights(Path(name))}" if gguf_file.is_gguf(name) else ""
    dtype = "" if model.dtype == torch.float32 else f", {str(model.dtype).removeprefix('torch.')}"
    return f"{name}, {parameters:,} parameters{weights}{dtype}, training length {train_length:,} tokens"


def cache_facts(cache_dtype: str | None) -> dict[str, str]:
    """Returns the line about the cache in a list of settings, if it is quantized."""
    return {"cache": f"{cache_dtype}, a scale for each token and key head"} if cache_dtype else {}


@torch.no_grad()
def check_causal(model, name: str) -> None:
    """Raises BadInput if a token changes the logits of earlier tokens, as in BERT. Such a model sees the tokens that it
    has to predict."""
    size, half = text_config(model).vocab_size, 16
    ids = (17 * torch.arange(2 * half, device=model.device)[None] + 5) % size
    changed = ids.clone()
    changed[:, half:] = (changed[:, half:] + size // 2) % size
    first, second = (model(x, use_cache=False).logits[:, :half] for x in (ids, changed))
    # Experts round differently if they get other tokens, so logits may differ by rounding.
    bound = (1e-4 if first.dtype == torch.float32 else 1e-2) * (highest := float(first.abs().max()))
    if not math.isfinite(highest):
        raise BadInput(f"--model: the largest logit is {highest}: the model's weights are not finite")
    if not torch.allclose(first, second, rtol=0, atol=bound, equal_nan=True):
        raise BadInput(f"--model: expected a causal language model; {name} sees the tokens that it is asked to predict")


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Hides transformers' warnings. Version 4.57 warns about a setting of Llama's tokenizer even if the model has no
    tokenizer."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _tokens(name: str, config) -> Tokens:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    beside = Path(name).with_name("tokenizer.json")  # models of the experiments have a tokenizer beside them
    try:
        with _errors_alone():
            if gguf_file.is_gguf(name):
                tokenizer = gguf_file.tokenizer(Path(name))
            elif Path(name).suffix == ".safetensors" and beside.exists():
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(beside))
            else:
                tokenizer = AutoTokenizer.from_pretrained(name)
        first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (" 12345", " 67890"))
        # If a tokenizer's files are missing, transformers 5.0 returns a tokenizer without a vocabulary.
        reason = "it encodes different texts alike" if first == second else ""
    except Exception as error:  # if there is no tokenizer, transformers raises one of half a dozen exceptions
        lines = [line for line in str(error).splitlines() if line.strip()]  # some messages begin with an empty line
        reason = lines[0] if lines else type(error).__name__
    if not reason:
        start = _start(tokenizer)
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

        def decode(ids: int | list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return Tokens(encode, start, decode=decode, ends=ends, chat=_chat(tokenizer))
    if not 256 <= config.vocab_size <= MAX_BYTE_VOCABULARY:
        size = "small" if config.vocab_size < 256 else "large"
        raise BadInput(f"--model: {name} has no tokenizer, and its vocabulary is too {size} for bytes ({reason})")
    return Tokens(lambda text: list(text.encode()), unit="byte", decode=_text_of_bytes)


def _text_of_bytes(ids: int | list[int]) -> str:
    return bytes(n for n in (ids if isinstance(ids, list) else [ids]) if n < 256).decode(errors="replace")


def _start(tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer puts before every text. Many tokenizers have a start token but do not add
    it."""
    text, whole = (tokenizer.encode("12345", add_special_tokens=special) for special in (False, True))
    for at in range(len(whole) - len(text) + 1):
        if whole[at : at + len(text)] == text:
            return tuple(whole[:at])
    return ()


def _chat(tokenizer) -> tuple[str, str] | None:
    """Returns the texts that the chat template puts before and after a message, up to the beginning of the answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    message = [{"role": "user", "content": MESSAGE}]
    try:
        text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    except Exception:  # a template may reject the message with any error
        return None
    before, found, behind = text.partition(MESSAGE)
    return (before, behind) if found else None


def new_cache(model, cache_dtype: str | None):
    """Returns an empty cache of this type, or None for transformers' own cache. Raises BadInput."""
    if cache_dtype is None:
        return None
    from ...integrations.transformers import CodesCache

    try:
        return CodesCache(model.config, cache_dtype)
    except ValueError as error:
        raise BadInput(f"--cache-dtype: {str(error).removeprefix('cache_dtype: ')}") from None


def keep_logits(model, count: int) -> dict[str, int]:
    """Returns the argument that limits a forward pass to the last ``count`` logits, for models that support it."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


@torch.no_grad()
def last_logits(
    model,
    ids: torch.Tensor,
    count: int,
    chunk: int | None = None,
    cache_dtype: str | None = None,
    kept: KeptTokens | None = None,
) -> torch.Tensor:
    """Returns the logits at the last ``count`` of the tokens ids, (batch, count, vocab_size) in float32.

    A model that supports ``logits_to_keep`` computes no other logits.

    chunk: read this many tokens per forward pass, with a KV cache, to save memory for activations.
    cache_dtype: all keys and values go through a cache of this type. The model must be converted.
    kept: the tokens that stay in the cache between two pieces.
    """
    from ...integrations.transformers.versions import CACHE, cache_of

    def read(piece: torch.Tensor, keep: int, **cache):
        out = model(piece, **cache, **keep_logits(model, keep))
        return out.logits[:, -keep:].float(), cache_of(out)

    length = ids.shape[1]
    if (not chunk or chunk >= length) and cache_dtype is None:
        return read(ids, count, use_cache=False)[0]
    found, cache, chunk = [], new_cache(model, cache_dtype), chunk or length
    for begin in range(0, length, chunk):
        piece = ids[:, begin : begin + chunk]
        wanted = begin + piece.shape[1] - max(begin, length - count)
        logits, cache = read(piece, max(wanted, 1), use_cache=True, **{CACHE: cache})
        if wanted > 0:
            found.append(logits)
        if kept:
            kept.cut(cache)
    return torch.cat(found, 1)


@torch.no_grad()
def read_prompt(model, ids: torch.Tensor, cache, kept: KeptTokens | None = None):
    """Returns the model's output for the last piece of ids, int64 (batch, seqlen), with one row of logits.

    cache: an empty cache to fill. None: transformers' own cache.
    kept: the tokens that stay in the cache between two pieces. None: everything is read at once.
    """
    from ...integrations.transformers.versions import CACHE, cache_of

    out = None
    for piece in ids.split(PIECE if kept else max(ids.shape[1], 1), dim=1):
        if out is not None and kept:
            kept.cut(cache := cache_of(out))
        given = {} if cache is None else {CACHE: cache}
        out = model(piece, use_cache=True, **given, **keep_logits(model, 1))
    return out
