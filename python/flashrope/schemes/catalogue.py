"""Lists the schemes with their names and options, and computes the options' values from a model's lengths.

To add a scheme, write a method of ``Rotary`` and a row of SCHEMES. The commands, ``convert``, ``suggest`` and the vLLM
plugin's ``flashrope`` field take their schemes from these rows. Importing this file does not load torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .fitting import dual_chunk_for, self_extend_for
from .scheme_checks import check_flag, check_fraction, check_window, positive

if TYPE_CHECKING:
    from .rotary import Rotary

# Stages, in the order in which options are applied. A scheme has at most one option of each stage.
TABLE, CUT, BANDS, SCALE = range(4)


class Lengths(NamedTuple):
    """The lengths from which the options of a scheme are computed.

    Attributes:
        train: the training length, in tokens.
        longest: the length of the longest text, in tokens.
        window: the window of the scheme, in positions. None: half the training length.
        factor: the factor of Leaky ReRoPE. None: the factor is chosen so that scores see no distance beyond the middle
            between the window and the training length.
    """

    train: int
    longest: int
    window: int | None = None
    factor: float | None = None

    @property
    def chosen_window(self) -> int:
        return _half(self.train) if self.window is None else self.window

    @property
    def growth(self) -> float:
        """Returns the length of the longest text as a multiple of the training length, at least 1."""
        return max(self.longest / self.train, 1.0)


def _half(train_length: int) -> int:
    return max(train_length // 2, 1)


class Beside(NamedTuple):
    """An option that can only be given together with another option.

    Attributes:
        read: a function (name, value) that checks the value and returns it.
        default: the value if the option is not given.
        words: a format string of the value, for lists of settings.
    """

    name: str
    read: Callable[[str, Any], Any]
    default: Any
    words: str


class Option(NamedTuple):
    """An option of ``convert`` and of the vLLM plugin's ``flashrope`` field.

    Attributes:
        stage: TABLE, CUT, BANDS or SCALE.
        read: a function (name, value, length) that returns the value in the form that ``apply`` and JSON accept, or
            raises TypeError or ValueError. If the user gave True, ``read`` computes the value from the model's training
            length, length(name).
        apply: a function (rotary, value) that returns a Rotary. If the user gives the option ``beside``, its value is
            passed as a keyword argument.
        words: a format string of the value, for lists of settings.
        beside: an option that can only be given together with this one.
        train_length: a function of the value that returns the training length that the value states, in tokens. None:
            the value states none.
    """

    name: str
    stage: int
    read: Callable[[str, Any, Callable[[str], int]], Any]
    apply: Callable[..., Rotary]
    words: str
    beside: Beside | None = None
    train_length: Callable[[Any], float] | None = None


class Scheme(NamedTuple):
    """A scheme that commands accept by its name.

    Attributes:
        name: the name on the command line.
        method: the name in tables and figures, without ``note``.
        fit: a function that computes the options of ``convert`` from ``Lengths``.
        option: the option of ``convert`` that this row defines. ``fit`` of other rows may use the option, too.
        log_n: whether the scheme also scales queries by log n of the training length.
        note: a remark about log n, which is added to ``method`` in tables and figures.
        reads_window: whether ``fit`` depends on the window.
        why: why ``suggest`` suggests this scheme, as a format string of train and longest.
    """

    name: str
    method: str
    fit: Callable[[Lengths], dict[str, Any]]
    option: Option | None = None
    log_n: bool = False
    note: str = ""
    reads_window: bool = False
    why: str = ""

    @property
    def label(self) -> str:
        return self.method + self.note

    def options(self, lengths: Lengths) -> dict[str, Any]:
        """Returns the options of ``convert`` that give this scheme for these lengths.

        Raises:
            ValueError: the scheme cannot be fitted to these lengths.
        """
        return self.fit(lengths) | ({"log_n": lengths.train} if self.log_n else {})


def known_options() -> dict[str, Option]:
    """Returns {name: option} of all options, in the order in which they are applied."""
    found = [scheme.option for scheme in SCHEMES.values() if scheme.option]
    return {option.name: option for option in sorted(found, key=lambda option: option.stage)}


def add_options(own: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a model with other options added. An added option replaces the options of its stage,
    and the options beside them."""
    known = known_options().values()
    stages = {option.name: option.stage for option in known}
    stages |= {option.beside.name: option.stage for option in known if option.beside}
    replaced = {stages.get(name, name) for name in added}
    return {name: value for name, value in own.items() if stages.get(name, name) not in replaced} | dict(added)


def stated_length(options: Mapping[str, Any]) -> int | None:
    """Returns the longest training length that options state, in tokens, or None if they state none."""
    known = known_options()
    lengths = [each(options[name]) for name in known if name in options and (each := known[name].train_length)]
    return int(max(lengths)) if lengths else None


def apply_options(rotary: Rotary, options: Mapping[str, Any], sees_all: bool = True) -> Rotary:
    """Returns the scheme after applying options. If no pair rotates, only options of the stage SCALE are applied.

    Args:
        options: {name of the option: value}, from ``Scheme.options`` or ``Option.read``.
        sees_all: False leaves out options of the stages BANDS and SCALE, for layers with a sliding window.
    """
    for name, option in known_options().items():
        if name not in options or not (sees_all or option.stage < BANDS):
            continue
        if option.stage != SCALE and not any(rotary.frequencies):
            continue
        beside = option.beside.name if option.beside else ""
        rotary = option.apply(rotary, options[name], **({beside: options[beside]} if beside in options else {}))
    return rotary


def describe_options(options: Mapping[str, Any]) -> str:
    """Returns options in words, such as "window 16, log n by 32". options: from ``Scheme.options``."""
    words = {option.name: option.words for option in known_options().values()}
    words |= {option.beside.name: option.beside.words for option in known_options().values() if option.beside}
    return ", ".join(
        words[name].format(*(value if isinstance(value, tuple) else [value])) for name, value in options.items()
    )


def name_options(options: Mapping[str, Any]) -> str:
    """Returns a short name for the scheme that options give, such as "ReRoPE w 16, log n". Unlike ``describe_options``,
    it leaves out lengths and factors."""
    methods = {scheme.option.name: scheme.method for scheme in SCHEMES.values() if scheme.option}
    parts = ["own Rotary"] if "rotary" in options else []
    for name in known_options():
        if options.get(name, False) is not False:
            window = {"rerope": options[name], "leaky_rerope": (options.get("leaky_rerope") or (0,))[0]}.get(name)
            parts.append(methods[name] if window is None else f"{methods[name]} w {window:,}")
    return ", ".join(parts)


# ---- how values are read


def _number(name: str, value, length) -> float:
    positive(name, value)
    return value


def _hope_length(name: str, value, length: Callable[[str], int]) -> float:
    return _number(name, length(name) if value is True else value, length)


def _window(name: str, value, length: Callable[[str], int]) -> int:
    value = _half(length(name)) if value is True else value
    check_window(value, name)
    return value


def _window_and_factor(name: str, value, length) -> tuple[int, float]:
    window, factor = _numbers("window", "factor")(name, value, length)
    check_window(window, f"{name}: window")
    positive(f"{name}: factor", factor)
    return window, factor


def _flag(name: str, value) -> bool:
    check_flag(name, value)
    return value


def _log_n(name: str, value, length: Callable[[str], int]) -> float:
    value = length(name) if value is True else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected True or a length of more than 1, got {value!r}")
    if not 1 < value < math.inf:
        raise ValueError(f"{name}: expected True or a length of more than 1, got {value!r}")
    return value


def _cope_arguments(name: str, value, length: Callable[[str], int]) -> float | dict[str, Any]:
    """Returns the training length, or the arguments of ``Rotary.cope``. Their names are checked here, and their values
    by ``Rotary.cope``."""
    if not isinstance(value, dict):
        return length(name) if value is True else value
    known = ("train_length", "pairs", "taper")
    if unknown := sorted(value.keys() - set(known)):
        raise ValueError(
            f"{name}: expected True, a length or a dict with some of {', '.join(known)}, got {unknown[0]!r}"
        )
    return dict(value) if "train_length" in value else {"train_length": length(name), **value}


def _chunks(name: str, value, length: Callable[[str], int]) -> tuple:
    value = dual_chunk_for(length(name)) if value is True else value
    return _numbers("chunk_size", "local_size", "length_scale")(name, value, length)


def _numbers(first: str, second: str, third: str = ""):
    """Returns an ``Option.read`` for a pair of numbers with these names, or for three numbers if `third` is given."""
    extra = f", or three numbers with {third}" if third else ""

    def read(name: str, value, length) -> tuple:
        if not (isinstance(value, (tuple, list)) and len(value) in ((2, 3) if third else (2,))):
            raise TypeError(f"{name}: expected a pair ({first}, {second}){extra}, got {value!r}")
        return tuple(value)

    return read


def _fraction(name: str, value, length) -> float:
    check_fraction(value)
    return value


# ---- what they do


def _hope(rotary: Rotary, train_length: float) -> Rotary:
    """Applies HoPE to a model's own table. The frequency before any interpolation decides whether a pair rotates."""
    original = rotary.frequencies
    if rotary.base is not None:
        original = tuple(rotary.base ** (-2 * m / rotary.exponent_dim) for m in range(len(rotary.frequencies)))
    frequencies = tuple(
        frequency if abs(before) >= 2 * math.pi / train_length else 0.0
        for frequency, before in zip(rotary.frequencies, original, strict=True)
    )
    return dataclasses.replace(rotary, frequencies=frequencies)


def _p_rope(rotary: Rotary, fraction: float) -> Rotary:
    from .tables import first_pairs  # loads torch, which is loaded already if there is a Rotary

    return dataclasses.replace(rotary, frequencies=first_pairs(rotary.frequencies, fraction))


def _cope(rotary: Rotary, given: float | dict[str, Any]) -> Rotary:
    return rotary.cope(**given) if isinstance(given, dict) else rotary.cope(given)


def _rerope(lengths: Lengths) -> dict[str, Any]:
    return {"rerope": lengths.chosen_window}


def _leaky(lengths: Lengths) -> dict[str, Any]:
    window, factor = lengths.chosen_window, lengths.factor
    if factor is None:
        factor = float(max(2 * math.ceil((lengths.longest - window) / max(lengths.train - window, 1)), 2))
    return {"leaky_rerope": (window, factor)}


def _string(lengths: Lengths) -> dict[str, Any]:
    start = max(lengths.train // 3, 1)
    return {"string": (start, min(128, start // 4))}


def _self_extend(lengths: Lengths) -> dict[str, Any]:
    return {"self_extend": self_extend_for(lengths.train, lengths.longest, lengths.window)}


def _dual_chunk(lengths: Lengths) -> dict[str, Any]:
    return {"dual_chunk": dual_chunk_for(lengths.train)}


# ---- the rows

SLOW_PAIRS = "pairs with less than one turn over {:,} tokens"
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("stock", "stock", lambda lengths: {}),
        Scheme(
            "log-n",
            "log n",
            lambda lengths: {},
            Option(
                "log_n",
                SCALE,
                _log_n,
                lambda rotary, length, log_n_clip=True: rotary.log_n(length, clip=log_n_clip),
                "log n by {:,}",
                Beside("log_n_clip", _flag, True, "also below 1"),
                train_length=lambda length: length,
            ),
            log_n=True,
            why="it keeps attention sharp over many keys",
        ),
        Scheme(
            "ntk",
            "NTK",
            lambda lengths: {"ntk": lengths.growth},
            Option("ntk", TABLE, _number, lambda rotary, factor: rotary.ntk(factor), "factor {:g}"),
        ),
        Scheme(
            "yarn",
            "YaRN",
            lambda lengths: {"yarn": (lengths.growth, lengths.train)},
            Option(
                "yarn",
                TABLE,
                _numbers("factor", "train_length"),
                lambda rotary, given: rotary.yarn(*given),
                "factor {:g}",
                train_length=lambda given: given[1],
            ),
        ),
        Scheme(
            "rerope",
            "ReRoPE",
            _rerope,
            Option(
                "rerope",
                BANDS,
                _window,
                lambda rotary, window: rotary.rectify(window),
                "window {:,}",
            ),
            log_n=True,
            reads_window=True,
            why="the window is half of the training length {train}, and scores see no distance beyond the window; "
            "windows of a quarter to a half of the training length are best in ReRoPE's ablation; log n, at least 1, "
            "keeps attention sharp over {longest} keys and changes nothing within the training length",
        ),
        Scheme("rerope-plain", "ReRoPE", _rerope, note=" without log n", reads_window=True),
        Scheme(
            "leaky",
            "Leaky ReRoPE",
            _leaky,
            Option(
                "leaky_rerope",
                BANDS,
                _window_and_factor,
                lambda rotary, given: rotary.rectify(*given),
                "factor {1:g}, window {0:,}",
            ),
            log_n=True,
            reads_window=True,
        ),
        Scheme(
            "hope",
            "HoPE",
            lambda lengths: {"hope": lengths.train},
            Option(
                "hope",
                CUT,
                _hope_length,
                _hope,
                f"{SLOW_PAIRS} do not rotate",
                train_length=lambda length: length,
            ),
        ),
        Scheme(
            "p-rope",
            "p-RoPE",
            lambda lengths: {"p_rope": 0.75},
            Option("p_rope", CUT, _fraction, _p_rope, "the first {:.0%} of the pairs rotate"),
        ),
        Scheme(
            "cope",
            "CoPE",
            lambda lengths: {"cope": lengths.train},
            Option(
                "cope",
                CUT,
                _cope_arguments,
                _cope,
                f"{SLOW_PAIRS} rotate less",
                train_length=lambda given: given["train_length"] if isinstance(given, dict) else given,
            ),
            why="the angles of these pairs beyond the training length are new to the model; distances do not change",
        ),
        Scheme(
            "string",
            "STRING",
            _string,
            Option(
                "string",
                BANDS,
                _numbers("start", "window"),
                lambda rotary, given: rotary.string(*given),
                "distances from {:,} on begin at {:,}",
            ),
            why="from a third of the training length {train} on, distances seldom occur in training; frequent "
            "distances replace them, but the longest distance still grows with the text",
        ),
        Scheme(
            "self-extend",
            "Self-Extend",
            _self_extend,
            Option(
                "self_extend",
                BANDS,
                _numbers("window", "group"),
                lambda rotary, given: rotary.self_extend(*given),
                "window {:,}, groups of {:,}",
            ),
            reads_window=True,
            why="the window is half of the training length {train}; the group is the smallest that keeps the distances "
            "of {longest} tokens below the training length",
        ),
        Scheme("self-extend-log-n", "Self-Extend", _self_extend, log_n=True, note=" with log n", reads_window=True),
        Scheme(
            "dual-chunk",
            "DCA",
            _dual_chunk,
            Option(
                "dual_chunk",
                BANDS,
                _chunks,
                lambda rotary, given: rotary.dual_chunk(*given),
                "chunk size {:,}, local size {:,}",
            ),
            why="no distance exceeds the training length {train}; within the local size, queries see the true "
            "distances to the chunk before",
        ),
        Scheme("dual-chunk-log-n", "DCA", _dual_chunk, log_n=True, note=" with log n"),
    )
}
