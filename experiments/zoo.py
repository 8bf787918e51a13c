"""Implements a byte-level language model whose position encoding is chosen by name.

A name starts with the encoding that the model is trained with. After plus signs it has the changes that are made when
the model is used:

    rope   hope+yarn   rerope-w256   leaky-rerope-w128-k16+logn   ntk-mixed-s8+dagger

-w is a window, -k is the factor of Leaky ReRoPE, -s is the factor by which the context grows, and -p is the share of
pairs that p-RoPE rotates. ``randomized-s16`` draws positions from 16 times the training length. ``pi``, ``yarn``,
``rerope`` etc. are short for ``rope+pi`` and so on. Models with ``+logn`` are trained with log n. ``+dagger`` adds log
n, clipped to at least 1, to a model that was trained without it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import torch
from flashrope import Rotary, attention
from flashrope.console.options import BadInput
from flashrope.lab.small_models.model import Attend, LanguageModel, ModelConfig
from torch import nn

from .encodings import ABSOLUTE, BIASES, Formula, Learned, RandomPositions, attend_with_bias
from .gau import GAU, GauModel

LLAMA = "llama"
ARCHITECTURES = {LLAMA: LanguageModel, GAU: GauModel}
ROTARY = ("rope", "hope", "hope-ab1", "hope-ab2", "hope-ab3", "p-rope", "inv-leaky", "hfwa", "randomized", "nope")
UNCHANGED = ("hfwa", "randomized")  # rotary encodings that cannot be changed
LOG_N = ("logn", "dagger")
CHANGES = ("pi", "ntk-old", "ntk-aware", "ntk-fixed", "ntk-mixed", "yarn", "rerope", "leaky-rerope", *LOG_N)
ENCODINGS = (*ROTARY, *BIASES, *ABSOLUTE, "learned")
KNOWN = (*ENCODINGS, *CHANGES[: -len(LOG_N)])  # the words that a name may start with
FIELDS = {"window": "w", "leak": "k", "growth": "s", "share": "p"}
TAKES = {
    "pi": "s",
    "ntk-old": "s",
    "ntk-aware": "s",
    "ntk-fixed": "s",
    "ntk-mixed": "s",
    "yarn": "s",
    "rerope": "w",
    "leaky-rerope": "wk",
    "inv-leaky": "wk",
    "hfwa": "w",
    "p-rope": "p",
    "randomized": "s",
}
SHARE = 0.75  # default share of pairs that p-RoPE rotates; its paper trains models with 0.25 and with 0.75
RANDOM_RANGE = 16.0  # default range of random positions, in training lengths; the longest measured context has 8

Rotaries = Rotary | tuple[Rotary, ...]


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Holds values that are used where a name specifies none. A window of None means half the training length."""

    window: int | None = None
    leak: float = 16.0
    growth: float = 8.0
    base: float = 10_000.0


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Describes an encoding in use.

    Attributes:
        name: the full name.
        trained: name of the encoding that the model is trained with. Schemes that are trained with the same encoding
            share the model.
        rotary: the scheme of the attention calls, or one scheme per layer.
        training: the scheme or schemes of the attention calls during training.
        longest: the longest context that the encoding supports. None: any.
    """

    name: str
    trained: str
    rotary: Rotaries
    training: Rotaries
    longest: int | None = None


def scheme(name: str, config: ModelConfig, train_length: int, defaults: Defaults = Defaults()) -> Scheme:
    """Returns the scheme for a name. Raises BadInput for names that are unknown or invalid."""
    first, *changes = name.split("+")
    encoding, numbers = _numbers(first, name)
    if encoding in KNOWN and encoding not in ENCODINGS:
        changes, encoding, numbers, first = [first, *changes], "rope", {}, "rope"
    if encoding not in ENCODINGS:
        raise BadInput(
            f"unknown encoding {name!r}; known are {', '.join(KNOWN)}, and after a plus sign {', '.join(CHANGES)}"
        )
    parsed = [_numbers(change, name) for change in changes]
    for change, _ in parsed:
        if change not in CHANGES:
            raise BadInput(f"unknown change {change!r} in {name!r}; known are {', '.join(CHANGES)}")
    if parsed and (encoding not in ROTARY or encoding in UNCHANGED):
        raise BadInput(f"{name!r}: {encoding} cannot be changed")
    if encoding == "inv-leaky" and (other := [change for change, _ in parsed if change not in LOG_N]):
        raise BadInput(
            f"{name!r}: inv-leaky is used with plain RoPE and can only be combined with {' or '.join(LOG_N)}, "
            f"not {other[0]}"
        )
    trained = first + ("+logn" if "logn" in changes else "")
    try:
        rotary = training = _rotary(encoding, numbers, config, train_length, defaults)
        for change, its_numbers in parsed:
            rotary = _changed(rotary, change, its_numbers, train_length, defaults)
        if "logn" in changes:
            training = training.log_n(train_length, clip=False)
        if encoding == "inv-leaky":  # only training enlarges the distances beyond the window
            leak = numbers.get("leak", defaults.leak)
            training = training.rectify(_window(numbers, train_length, defaults), 1 / leak)
    except ValueError as error:
        raise BadInput(f"{name!r}: {error}") from None
    longest = train_length if encoding == "learned" else None
    if encoding == "randomized":
        longest = random_range(first, train_length)
    return Scheme(name, trained, rotary, training, longest)


def random_range(trained: str, train_length: int) -> int:
    """Returns the number of positions that ``randomized`` draws from."""
    return round(_numbers(trained, trained)[1].get("growth", RANDOM_RANGE) * train_length)


def hfwa_window(train_length: int, layers: int) -> int:
    """Returns the window w of all layers except the last. It is the largest w with (w - 1)(layers - 1) + 1 <= 3/4 of
    the training length. The left side is how far these layers reach together."""
    return max((3 * train_length // 4 - 1) // max(layers - 1, 1) + 1, 1)


def p_rope(head_dim: int, share: float, base: float = 10_000.0) -> Rotary:
    """Returns p-RoPE (Barbero et al. 2025) for a share p. Only the floor(p * head_dim / 2) pairs of RoPE with the
    highest frequencies rotate. p = 0 is NoPE, and p = 1 is RoPE. Raises ValueError if p is not from 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"p: expected a share from 0 to 1, got {share:g}")
    rope = Rotary.rope(head_dim, base)
    kept = int(share * head_dim / 2)
    return Rotary.from_inv_freq([f if m < kept else 0.0 for m, f in enumerate(rope.frequencies)], head_dim)


def hope_ablation(head_dim: int, train_length: int, which: str, base: float = 10_000.0) -> Rotary:
    """Returns one of the ablations of the HoPE paper (section 5), with L = train_length.

    "ab1": pairs with pi / L < inv_freq < 2 pi / L do not rotate. "ab2": pairs with inv_freq <= pi / L do not rotate.
    "ab3": all pairs rotate, with frequencies in geometric steps from 1 to 2 pi / L.
    """
    rope, edge = Rotary.rope(head_dim, base), math.pi / train_length
    last = max(head_dim // 2 - 1, 1)
    frequencies = {
        "ab1": [0.0 if edge < f < 2 * edge else f for f in rope.frequencies],
        "ab2": [0.0 if f <= edge else f for f in rope.frequencies],
        "ab3": [(2 * edge) ** (m / last) for m in range(head_dim // 2)],
    }
    return dataclasses.replace(rope, frequencies=tuple(frequencies[which]), base=None if which == "ab3" else rope.base)


class ZooModel(nn.Module):
    """Implements a language model of one of ``ARCHITECTURES``, together with the parameters of its encoding.

    A rotary encoding has no parameters. Other encodings have a bias per layer or one bias for all layers, vectors per
    position, or the state of random positions.
    """

    def __init__(self, config: ModelConfig, trained: str, train_length: int, architecture: str = LLAMA):
        super().__init__()
        self.config, self.architecture = config, architecture
        self.language = ARCHITECTURES[architecture](config)
        first = trained.split("+")[0]
        name, _ = _numbers(first, trained)
        self.absolute = self.biases = self.positions = None
        if name == "learned":
            self.absolute = Learned(config.width, train_length)
        elif name in ABSOLUTE:
            self.absolute = Formula(ABSOLUTE[name], config.width)
        elif name in BIASES:
            heads = config.heads if architecture == LLAMA else 1
            count = 1 if getattr(BIASES[name], "shared", False) else config.layers
            self.biases = nn.ModuleList(BIASES[name](heads, train_length) for _ in range(count))
        elif name == "randomized":
            self.positions = RandomPositions(random_range(first, train_length))

    def forward(self, tokens: torch.Tensor, rotary: Rotaries, attend: Attend = attention) -> torch.Tensor:
        """Returns the logits (batch, seqlen, vocab_size) of tokens, int64 (batch, seqlen)."""
        x = self.language.embedding(tokens)
        if self.absolute is not None:
            x = x + self.absolute(tokens.shape[1])
        if self.positions is not None:
            attend = functools.partial(_attend_at, attend, self.positions(*tokens.shape))
        return self.language.decode(x, rotary, self.attends(rotary, attend))

    def attends(self, rotary: Rotaries, attend: Attend = attention) -> list[Attend]:
        """Returns the attention of each layer."""
        if self.biases is not None:
            return [functools.partial(attend_with_bias, bias) for bias in self.layer_biases]
        layers = rotary if isinstance(rotary, tuple) else (rotary,) * self.config.layers
        return [functools.partial(_attend_under, attend, rotary) for rotary in layers]

    @property
    def layer_biases(self) -> list[nn.Module]:
        """Returns the bias of each layer."""
        return [self.biases[layer % len(self.biases)] for layer in range(self.config.layers)]


def _attend_at(attend: Attend, positions: torch.Tensor, q, k, v, rotary) -> torch.Tensor:
    return attend(q, k, v, rotary, positions=positions)


def _attend_under(attend: Attend, own: Rotary, q, k, v, rotary) -> torch.Tensor:
    return attend(q, k, v, own)


def _numbers(part: str, name: str) -> tuple[str, dict[str, float]]:
    """Splits a part of a name: "leaky-rerope-w32-k16" becomes ("leaky-rerope", {"window": 32, "leak": 16.0})."""
    text, numbers = part, {}
    while match := re.fullmatch(r"(.+)-([wksp])(\d+(?:\.\d+)?)", text):
        field = next(field for field, letter in FIELDS.items() if letter == match[2])
        text, numbers[field] = match[1], int(float(match[3])) if field == "window" else float(match[3])
    for field in numbers:
        if text in (*ENCODINGS, *CHANGES) and FIELDS[field] not in TAKES.get(text, ""):
            raise BadInput(f"{name!r}: {text} takes no -{FIELDS[field]}")
    return text, numbers


def _window(numbers: dict[str, float], train_length: int, defaults: Defaults) -> int:
    return numbers.get("window", defaults.window or train_length // 2)


def _rotary(encoding: str, numbers: dict, config: ModelConfig, train_length: int, defaults: Defaults) -> Rotaries:
    head_dim, base = config.head_dim, defaults.base
    if encoding == "hope":
        return Rotary.hope(head_dim, train_length, base)
    if encoding.startswith("hope-"):
        return hope_ablation(head_dim, train_length, encoding.removeprefix("hope-"), base)
    if encoding == "p-rope":
        return p_rope(head_dim, numbers.get("share", SHARE), base)
    if encoding == "hfwa":
        local = Rotary.rope(head_dim, base).local(numbers.get("window", hfwa_window(train_length, config.layers)))
        return (local,) * (config.layers - 1) + (Rotary.none(head_dim).log_n(train_length, clip=False),)
    return Rotary.rope(head_dim, base) if encoding in ("rope", "inv-leaky", "randomized") else Rotary.none(head_dim)


def _changed(rotary: Rotary, change: str, numbers: dict, train_length: int, defaults: Defaults) -> Rotary:
    growth = numbers.get("growth", defaults.growth)
    if change == "pi":
        return rotary.interpolate(growth)
    if change.startswith("ntk-"):
        return rotary.ntk(growth, change.removeprefix("ntk-"))
    if change == "yarn":
        return rotary.yarn(growth, train_length)
    if change == "rerope":
        return rotary.rectify(_window(numbers, train_length, defaults))
    if change == "leaky-rerope":
        return rotary.rectify(_window(numbers, train_length, defaults), numbers.get("leak", defaults.leak))
    return rotary.log_n(train_length, clip=change == "dagger")
