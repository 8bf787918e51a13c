"""Wrong arguments of the builders of schemes.

Of bands: test_bands.py; of position maps: test_maps.py; of axes: test_axial.py.
"""

import dataclasses
import math

import pytest
import torch
from flashrope import Rotary
from small_calls import ROPE as SMALL
from small_calls import check_refused

INF = math.inf
ROPE = Rotary.rope(64)
FIELDS = '{"head_dim": 16, "frequencies": [1.0], '
T, V = TypeError, ValueError

# what happened: (call, error, the argument, what is expected, what came)
REFUSED = {
    "an odd head_dim": (lambda: Rotary.rope(15), V, "head_dim", "an even integer of at least 2", "got 15"),
    "a factor as rotary_dim": (lambda: Rotary.rope(64, rotary_dim=0.5), V, "rotary_dim", "an even integer", "0.5"),
    "flash-attn's window": (lambda: ROPE.local((128, 0)), V, "window", "a non-negative integer", "(128, 0)"),
    "freqs_cis": (lambda: Rotary.from_inv_freq(torch.ones(8, dtype=torch.complex64), 16), T, "inv_freq",
                  "of real numbers", "torch.complex64"),
    "a parameter": (lambda: Rotary.from_inv_freq(torch.nn.Parameter(torch.ones(8)), 16), V, "inv_freq",
                    "a table without gradients", "docs/extending.md, 'A scheme outside the formula', trains a table"),
    "the letter of a formula": (lambda: ROPE.rectify(64, k=4), T, "k", "expected factor,", "k=4, an unexpected"),
    "Self-Extend's group": (lambda: ROPE.rectify(64, group=4), T, "group", "self_extend(window, group)", "group=4"),
    "a parameter per axis": (lambda: Rotary.axial(16, [torch.nn.Parameter(torch.ones(4)), 4]), V, "axes[0]",
                             "a table without gradients", "one that requires them"),
    "a name as table": (lambda: Rotary.from_inv_freq("llama", 16), T, "inv_freq", "a tensor, array", "'llama'"),
    "no table": (lambda: Rotary.from_inv_freq(None, 16), T, "inv_freq", "a tensor, array", "None"),
    "a model's name": (lambda: Rotary.from_hf_config("llama"), T, "config", "a model configuration", "str"),
    "no configuration": (lambda: Rotary.from_hf_config(None), T, "config", "AutoConfig", "NoneType"),
    "nothing": (lambda: Rotary.from_text(""), V, "text", "JSON, the text of a Rotary", "''"),
    "its repr": (lambda: Rotary.from_text(repr(SMALL)), V, "text", "JSON, the text of a", "'Rotary(head_dim=16"),
    "a scheme's name": (lambda: Rotary.from_text("rope"), V, "text", "JSON, the text of a Rotary", "'rope'"),
    "JSON, read": (lambda: Rotary.from_text({"head_dim": 16}), T, "text", "a string", "dict"),
    "other JSON": (lambda: Rotary.from_text('{"rope_theta": 1e4}'), V, "text", "with head_dim, freq", "rope_theta"),
    "a field too much": (lambda: Rotary.from_text(FIELDS + '"theta": 1}'), V, "text", "the fields head_dim,", "theta"),
    "bands of two": (lambda: Rotary.from_text(FIELDS + '"bands": [[0, 1]]}'), T, "bands[0]", "a Band (", "[0, 1]"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "name", "expected", "given"), REFUSED.values(), ids=REFUSED.keys())
def test_the_message_names_the_argument_what_was_expected_and_what_came(call, error, name, expected, given):
    check_refused(call, error, name, expected, given)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Rotary.none(64).interpolate(2.0), "interpolate: no pair of this scheme rotates"),
        (lambda: Rotary.from_inv_freq([0.0], 64).yarn(2.0, 512), "yarn: no pair of this scheme rotates"),
        (lambda: ROPE.interpolate(2.0).interpolate(2.0), "interpolate: the table was changed by interpolate already"),
        (lambda: ROPE.yarn(2.0, 512).ntk(2.0), "ntk: the table was changed by yarn already"),
        (lambda: ROPE.ntk(2.0).yarn(2.0, 512), "yarn: the table was changed by ntk already"),
        (lambda: Rotary.axial(64).interpolate(2.0), "interpolate: expected a one-dimensional table"),
        (lambda: Rotary.from_inv_freq([1.0], 64).yarn(2.0, 512), "yarn: needs the base of the table for its ramp"),
        (lambda: ROPE.rectify(8).rectify(8), "rectify: this scheme is rectified already"),
        (lambda: ROPE.rectify(0, 4.0).rectify(8), "rectify: this scheme is rectified already"),
        (lambda: Rotary.axial(64).rectify(8), "rectify: bands over the distance need one-dimensional positions"),
        (lambda: Rotary.axial(64).local(8), "local: a window over the distance needs one-dimensional positions"),
        (lambda: Rotary.axial(64).log_n(512), "log_n: needs one-dimensional positions"),
        (lambda: ROPE.log_n(512).log_n(512), "log_n: this scheme is scaled by log n already"),
        (lambda: ROPE.ntk(2.0, "Aware"), 'variant: expected "old", "aware", "fixed" or "mixed", got \'Aware\''),
        (lambda: Rotary.rope(2).ntk(2.0), 'variant: "aware" needs more than one pair, this table has 1'),
        (
            lambda: Rotary.hope(64, 512, interleaved=True, compact=True),
            "compact: pairs m with m [+] a, interleaved=True pairs",
        ),
        (lambda: Rotary.rope(64, rotary_dim=66), "rotary_dim: expected at most head_dim = 64, got 66"),
        (lambda: Rotary.rope(64, rotary_dim=33), "rotary_dim: expected an even integer of at least 0, got 33"),
        (lambda: Rotary.rope(64, rotary_dim=True), "rotary_dim: expected an even integer of at least 0, got True"),
        (lambda: Rotary.rope(64, rotary_dim=False), "rotary_dim: expected an even integer of at least 0, got False"),
        (lambda: Rotary.rope(64, rotary_dim=-2), "rotary_dim: expected an even integer of at least 0, got -2"),
        (
            lambda: Rotary.axial(60, axes=4),
            "axes: expected a divisor of the 30 pairs, got 4; or give the pairs of each",
        ),
        (lambda: Rotary.axial(64, axes=0), "axes: expected a positive integer, got 0"),
        (lambda: Rotary.axial(64.0), "head_dim: expected an even integer of at least 2, got 64.0"),
        (lambda: Rotary.from_inv_freq([[1.0]], 64), r"inv_freq: expected one dimension, got shape \(1, 1\)"),
        (lambda: Rotary.from_inv_freq([1.0] * 33, 64), "inv_freq: 33 pairs need 66 channels, head_dim has 64"),
        (lambda: Rotary.from_inv_freq([1.0, math.nan], 64), r"inv_freq\[1\]: expected a finite number, got nan"),
        (
            lambda: dataclasses.replace(Rotary.axial(64), frequencies=(1.0,)),
            "axis: expected one for each of the 1 pairs, got 32",
        ),
        (
            lambda: ROPE.yarn(2.0, 512, beta_fast=1.0, beta_slow=32.0),
            "beta_fast: expected at least beta_slow = 32.0, got 1.0",
        ),
        (lambda: ROPE.yarn(2.0, 6), "train_length: no pair turns beta_slow = 1.0 times over 6.0 positions"),
        (lambda: ROPE.rectify(8, 1e-320), "factor: too small to divide by"),
        (lambda: ROPE.log_n(1), "train_length: expected more than 1, got 1.0"),
        (lambda: Rotary.rope(64, 1.0), "base: expected more than 1, got 1.0"),
    ],
)
def test_errors_name_their_reason(build, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        build()


NUMBERS = {
    "base": lambda x: Rotary.rope(64, x),
    "base of axial": lambda x: Rotary.axial(64, base=x),
    "train_length": lambda x: Rotary.hope(64, x),
    "factor": lambda x: ROPE.interpolate(x),
    "factor of ntk": lambda x: ROPE.ntk(x),
    "factor of yarn": lambda x: ROPE.yarn(x, 512),
    "train_length of yarn": lambda x: ROPE.yarn(2.0, x),
    "beta_fast": lambda x: ROPE.yarn(2.0, 512, beta_fast=x),
    "beta_slow": lambda x: ROPE.yarn(2.0, 512, beta_slow=x),
    "temperature": lambda x: ROPE.yarn(2.0, 512, temperature=x),
    "train_length of log_n": lambda x: ROPE.log_n(x),
    "factor of rectify": lambda x: ROPE.rectify(8, x),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_checked(name):
    argument = name.split()[0]
    for bad in (0, -1.0, math.nan, INF):
        if (name, bad) != ("factor of rectify", INF):
            with pytest.raises(ValueError, match=f"^{argument}: expected a positive"):
                NUMBERS[name](bad)
    for bad in ("2", True, 2j, [2.0], torch.tensor([2.0])):
        with pytest.raises(TypeError, match=f"^{argument}: expected a number, got "):
            NUMBERS[name](bad)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: Rotary.rope(x),
        lambda x: Rotary.hope(x, 512),
        lambda x: Rotary.none(x),
        lambda x: Rotary.axial(x),
        lambda x: Rotary.from_inv_freq([], x),
    ],
)
@pytest.mark.parametrize("bad", [0, -64, 64.0, "64", True, None])
def test_head_dim_is_checked(build, bad):
    with pytest.raises(ValueError, match="^head_dim: expected an? .*integer.*, got "):
        build(bad)


@pytest.mark.parametrize("build", [lambda x: ROPE.rectify(x), lambda x: ROPE.local(x)])
@pytest.mark.parametrize("bad", [-1, 2.0, "8", True, None])
def test_window_is_checked(build, bad):
    with pytest.raises(ValueError, match="^window: expected a non-negative integer, got "):
        build(bad)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("interleaved", lambda x: Rotary.rope(64, interleaved=x)),
        ("interleaved", lambda x: Rotary.from_inv_freq([1.0], 64, x)),
        ("interleaved", lambda x: Rotary.axial(64, interleaved=x)),
        ("interleaved", lambda x: Rotary.hope(64, 512, interleaved=x)),
        ("compact", lambda x: Rotary.hope(64, 512, compact=x)),
        ("clip", lambda x: ROPE.log_n(512, x)),
        ("truncate", lambda x: ROPE.yarn(2.0, 512, truncate=x)),
    ],
)
@pytest.mark.parametrize("bad", [1, "False", None])
def test_flags_are_checked(name, build, bad):
    with pytest.raises(TypeError, match=f"^{name}: expected True or False, got "):
        build(bad)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rotary.rope(64, bas=1e4),
        lambda: ROPE.rectify(windw=8),
        lambda: ROPE.yarn(2.0, 512, betafast=32),
    ],
)
def test_misspelt_names_are_refused(call):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call()
