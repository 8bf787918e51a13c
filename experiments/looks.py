"""Defines the names, colours and markers of the schemes. They are the same in all figures and tables."""

from __future__ import annotations

import re

from flashrope.console.figure import COLOURS

ORANGE, BLUE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS
GREY, DARK = "0.55", "0.35"
NAMES = {
    "rope": "RoPE",
    "hope": "HoPE",
    "rerope": "ReRoPE",
    "leaky-rerope": "Leaky ReRoPE",
    "inv-leaky": "InvLeaky",
    "hfwa": "HFWA",
    "p-rope": "p-RoPE",
    "cope": "CoPE",
    "self-extend": "Self-Extend",
    "dual-chunk": "DCA",
    "nope": "no positions",
    "pi": "PI",
    "yarn": "YaRN",
    "ntk-old": "NTK, old",
    "ntk-aware": "NTK",
    "ntk-fixed": "NTK, fixed",
    "ntk-mixed": "NTK, mixed",
    "hope-ab1": "HoPE AB1",
    "hope-ab2": "HoPE AB2",
    "hope-ab3": "HoPE AB3",
    "alibi": "ALiBi",
    "kerple": "KERPLE",
    "fire": "FIRE",
    "t5": "T5",
    "sandwich": "Sandwich",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "integer": "integer",
    "binary": "binary",
    "randomized": "Randomized",
    "gau": "GAU",
    "axial": "two-dimensional RoPE",
    "raster": "RoPE in row order",
    "logn": "log n",
    "dagger": "log n†",
}
# {family: (colour, marker)}. Windows and factors do not change the look. A scheme with log n that is not listed looks
# like the same scheme without log n.
LOOKS = {
    "rope": (BLACK, "o"),
    "rope+dagger": (GREY, "o"),
    "hope": (ORANGE, "s"),
    "hope-ab1": (SKY, "s"),
    "hope-ab2": (GREEN, "s"),
    "hope-ab3": (PINK, "s"),
    "hope+pi": (PINK, "*"),
    "hope+yarn": (YELLOW, "P"),
    "rerope": (BLUE, "^"),
    "rerope+dagger": (SKY, "v"),
    "rerope+logn": (DARK, "v"),
    "leaky-rerope": (PINK, "<"),
    "leaky-rerope+dagger": (PINK, ">"),
    "inv-leaky": (GREEN, "<"),
    "hfwa": (GREY, "h"),
    "p-rope": (YELLOW, "d"),
    "cope": (ORANGE, "d"),
    "self-extend": (PINK, "h"),
    "self-extend+dagger": (ORANGE, "h"),
    "dual-chunk": (GREEN, "h"),
    "dual-chunk+dagger": (SKY, "h"),
    "nope": (GREY, "x"),
    "pi": (PINK, "X"),
    "yarn": (GREEN, "D"),
    "ntk-old": (PINK, "D"),
    "ntk-aware": (YELLOW, "D"),
    "ntk-fixed": (ORANGE, "D"),
    "ntk-mixed": (SKY, "D"),
    "alibi": (SKY, "p"),
    "kerple": (GREEN, "p"),
    "fire": (DARK, "p"),
    "t5": (BLUE, "p"),
    "sandwich": (PINK, "p"),
    "learned": (PINK, "P"),
    "sinusoidal": (BLUE, "P"),
    "integer": (ORANGE, "P"),
    "binary": (GREEN, "P"),
    "randomized": (SKY, "P"),
    "gau": (BLUE, "h"),
    "axial": (BLUE, "8"),
    "raster": (BLACK, "8"),
}


def family(scheme: str) -> str:
    """Returns the scheme's name without windows and factors, for example rerope+dagger for rerope-w64+dagger."""
    return "+".join(re.sub(r"(-[wkspg]\d+(\.\d+)?)+$", "", part) for part in scheme.split("+"))


def label(scheme: str, numbers: bool = False) -> str:
    """Returns the scheme's name for readers. numbers: whether to include windows and factors."""
    parts = []
    for part in scheme.split("+"):
        name, found = family(part), re.findall(r"-([wkspg])(\d+(?:\.\d+)?)", part)
        text = NAMES.get(name, name)
        parts.append(" ".join([text, *(letter + value for letter, value in found)]) if numbers else text)
    changes = "".join(", " + part if part.startswith("log n") else " + " + part for part in parts[1:])
    return parts[0] + changes


def scheme_of(name: str) -> str | None:
    """Returns the scheme that has this name or label, or None if no scheme has it."""
    if family(name) in LOOKS:
        return name
    return next((scheme for scheme in LOOKS if label(scheme) == name), None)


def look(scheme: str) -> tuple[str, str]:
    """Returns (colour, marker)."""
    name = family(scheme)
    return LOOKS.get(name) or LOOKS.get(name.partition("+logn")[0].partition("+dagger")[0]) or (DARK, ".")
