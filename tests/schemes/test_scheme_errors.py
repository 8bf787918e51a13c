"""Tests wrong arguments of the builders of schemes.

test_bands.py tests bands that the user gives.
"""

import dataclasses
import math

import pytest
import torch
from flashrope import Band, Rotary
from small_calls import ROPE as SMALL
from small_calls import check_refused

INF = math.inf
ROPE = Rotary.rope(64)
FIELDS = '{"head_dim": 16, "frequencies": [1.0], '
T, V = TypeError, ValueError


def banded(*bands):
    return dataclasses.replace(SMALL, bands=tuple(Band(*band) for band in bands))


# {case: (call, type of the error, argument that it names, what it says was expected, what it says was given)}
REFUSED = {
    "an odd head_dim": (lambda: Rotary.rope(15), V, "head_dim", "an even integer of at least 2", "got 15"),
    "a factor as rotary_dim": (lambda: Rotary.rope(64, rotary_dim=0.5), V, "rotary_dim", "an even integer", "0.5"),
    "freqs_cis": (lambda: Rotary.from_inv_freq(torch.ones(8, dtype=torch.complex64), 16), T, "inv_freq",
                  "of real numbers", "torch.complex64"),
    "a parameter": (lambda: Rotary.from_inv_freq(torch.nn.Parameter(torch.ones(8)), 16), V, "inv_freq",
                    "a table without gradients", "docs/extending.md, 'A scheme outside the formula', trains a table"),
    "the letter of a formula": (lambda: ROPE.rectify(64, k=4), T, "k", "expected factor,", "k=4, an unexpected"),
    "Self-Extend's group": (lambda: ROPE.rectify(64, group=4), T, "group", "self_extend(window, group)", "group=4"),
    "a parameter per axis": (lambda: Rotary.axial(16, [torch.nn.Parameter(torch.ones(4)), 4]), V, "axes[0]",
                             "a table without gradients", "one that requires them"),
    "a name as table": (lambda: Rotary.from_inv_freq("llama", 16), T, "inv_freq", "a tensor, array", "'llama'"),
    "a model's name": (lambda: Rotary.from_hf_config("llama"), T, "config", "a model configuration", "str"),
    "its repr": (lambda: Rotary.from_text(repr(SMALL)), V, "text", "JSON, the text of a", "'Rotary(head_dim=16"),
    "JSON, read": (lambda: Rotary.from_text({"head_dim": 16}), T, "text", "a string", "dict"),
    "other JSON": (lambda: Rotary.from_text('{"rope_theta": 1e4}'), V, "text", "with head_dim, freq", "rope_theta"),
    "a field too much": (lambda: Rotary.from_text(FIELDS + '"theta": 1}'), V, "text", "the fields head_dim,", "theta"),
    "bands of two": (lambda: Rotary.from_text(FIELDS + '"bands": [[0, 1]]}'), T, "bands[0]", "a Band (", "[0, 1]"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "name", "expected", "given"), REFUSED.values(), ids=REFUSED.keys())
def test_the_message_names_the_argument_what_was_expected_and_what_came(call, error, name, expected, given):
    check_refused(call, error, name, expected, given)


# (call, the beginning of the message of its ValueError)
REASONS = [
    # tables
    (lambda: Rotary.none(64).interpolate(2.0), "interpolate: no pair of this scheme rotates"),
    (lambda: Rotary.from_inv_freq([0.0], 64).yarn(2.0, 512), "yarn: no pair of this scheme rotates"),
    (lambda: ROPE.interpolate(2.0).interpolate(2.0), "interpolate: the table was changed by interpolate already"),
    (lambda: ROPE.yarn(2.0, 512).ntk(2.0), "ntk: the table was changed by yarn already"),
    (lambda: ROPE.ntk(2.0).yarn(2.0, 512), "yarn: the table was changed by ntk already"),
    (lambda: Rotary.axial(64).interpolate(2.0), "interpolate: expected a one-dimensional table"),
    (lambda: Rotary.axial(16, [4, 4]).ntk(2.0), "ntk: expected a one-dimensional table"),
    (lambda: Rotary.from_inv_freq([1.0], 64).yarn(2.0, 512), "yarn: needs the base of the table for its ramp"),
    (lambda: ROPE.yarn(2.0, 512, beta_fast=1.0, beta_slow=32.0), "beta_fast: expected at least beta_slow = 32.0, got"),
    (lambda: ROPE.yarn(2.0, 6), "train_length: no pair turns beta_slow = 1.0 times over 6.0 positions"),
    (lambda: ROPE.ntk(2.0, "Aware"), 'variant: expected "old", "aware", "fixed" or "mixed", got \'Aware\''),
    (lambda: Rotary.rope(2).ntk(2.0), 'variant: "aware" needs more than one pair, this table has 1'),
    (lambda: ROPE.ntk(8.0, "mixed", 0), "exponent: expected a positive finite number, got 0"),
    (lambda: ROPE.cope(0), "train_length: expected a positive finite number, got 0"),
    (lambda: ROPE.cope(512, 33), "pairs: expected None or an integer from 0 to 32, the pairs that rotate, got 33"),
    (lambda: ROPE.cope(512, -1), "pairs: expected None or an integer from 0 to 32, the pairs that rotate, got -1"),
    (lambda: ROPE.cope(512, 2.0), "pairs: expected None or an integer from 0 to 32, the pairs that rotate, got 2.0"),
    (lambda: Rotary.hope(64, 512, interleaved=True, compact=True), "compact: expected False with interleaved=True"),
    (lambda: Rotary.rope(64, rotary_dim=66), "rotary_dim: expected at most head_dim = 64, got 66"),
    (lambda: Rotary.axial(16, rotary_dim=18), "rotary_dim: expected at most head_dim = 16, got 18"),
    (lambda: Rotary.rope(64, rotary_dim=33), "rotary_dim: expected an even integer of at least 0, got 33"),
    (lambda: Rotary.rope(64, rotary_dim=True), "rotary_dim: expected an even integer of at least 0, got True"),
    (lambda: Rotary.rope(64, rotary_dim=-2), "rotary_dim: expected an even integer of at least 0, got -2"),
    (lambda: Rotary.rope(64, first_channel=3), "first_channel: expected an even integer of at least 0, got 3"),
    (lambda: Rotary.rope(64, first_channel=-2), "first_channel: expected an even integer of at least 0, got -2"),
    (
        lambda: Rotary.rope(64, rotary_dim=32, first_channel=48),
        "first_channel: expected at most 32, so that 32 rotary channels end within head_dim = 64, got 48",
    ),
    (
        lambda: Rotary.from_inv_freq([1.0, 0.5], 8, first_channel=6),
        "first_channel: expected at most 4, so that 4 rotary channels end within head_dim = 8, got 6",
    ),
    (lambda: Rotary.from_inv_freq([[1.0]], 64), r"inv_freq: expected one dimension, got shape \(1, 1\)"),
    (lambda: Rotary.from_inv_freq([1.0] * 33, 64), "inv_freq: 33 pairs need 66 channels, got head_dim 64"),
    (lambda: Rotary.from_inv_freq([1.0, math.nan], 64), r"inv_freq\[1\]: expected a finite number, got nan"),
    (lambda: Rotary.rope(64, 1.0), "base: expected more than 1, got 1.0"),
    # scales
    (lambda: Rotary.axial(64).log_n(512), "log_n: needs one-dimensional positions"),
    (lambda: ROPE.log_n(512).log_n(512), "log_n: this scheme is scaled by log n already"),
    (lambda: ROPE.log_n(1), "train_length: expected more than 1, got 1.0"),
    (lambda: ROPE.log_steps(0), "floor_scale: expected a positive finite number, got 0"),
    (lambda: ROPE.log_steps(8, -0.1), "attn_scale: expected a positive finite number, got -0.1"),
    (lambda: ROPE.log_steps(8, 0.1, 2), "first: expected 0 or 1, the number of the first position, got 2"),
    (lambda: ROPE.log_n(8).log_steps(8), "log_steps: this scheme is scaled by log n already"),
    (lambda: ROPE.log_steps(8).log_n(8), "log_n: this scheme is scaled by log_steps already"),
    (lambda: ROPE.scale_rotated(0.0), "factor: expected a positive finite number, got 0.0"),
    (lambda: Rotary.none(16).scale_rotated(2.0), "scale_rotated: this scheme has no channels that rotate"),
    (lambda: Rotary.axial(16).log_steps(8), "log_steps: needs one-dimensional positions"),
    (lambda: Rotary(16, (1.0,), log_n_scale=(8, True), log_steps_scale=(8, 0.1, 1)),
     "log_steps_scale: not supported together with log_n"),
    (lambda: ROPE.dual_chunk(160, 32, 0), "length_scale: expected a positive finite number, got 0"),
    (lambda: ROPE.dual_chunk(160, 32, INF), "length_scale: expected a positive finite number, got inf"),
    # bands
    (lambda: ROPE.rectify(8).rectify(8), "rectify: this scheme is rectified already"),
    (lambda: ROPE.rectify(0, 4.0).rectify(8), "rectify: this scheme is rectified already"),
    (lambda: Rotary.axial(64).rectify(8), "rectify: bands over the distance need one-dimensional positions"),
    (lambda: Rotary.axial(64).local(8), "local: a window over the distance needs one-dimensional positions"),
    (lambda: ROPE.rectify(8, 1e-320), "factor: too small to divide by"),
    # position maps
    (lambda: ROPE.self_extend(20, 8), "group: expected a divisor of window = 20, got 8; .* try window 16"),
    (lambda: ROPE.self_extend(20, 0), "group: expected a positive integer, got 0"),
    (lambda: ROPE.self_extend(-4, 2), "window: expected a non-negative integer, got -4"),
    (lambda: ROPE.dual_chunk(300, 100), "chunk_size: .* multiple of 128, .* got 300 - 100 = 200; try local_size 172"),
    (lambda: ROPE.dual_chunk(100, 50), "chunk_size: .* multiple of 128, .* got 100 - 50 = 50$"),
    (lambda: ROPE.dual_chunk(128, 128), "local_size: expected less than chunk_size = 128, got 128; chunks would"),
    (lambda: ROPE.dual_chunk(128, -128), "local_size: expected a non-negative integer, got -128"),
    (lambda: ROPE.self_extend(20, 4).self_extend(20, 4), "self_extend: this scheme has self_extend or dual_chunk al"),
    (lambda: ROPE.rectify(20).self_extend(20, 4), "self_extend: this scheme is rectified already"),
    (lambda: ROPE.dual_chunk(160, 32).rectify(9), "rectify: this scheme has self_extend or dual_chunk already"),
    (lambda: ROPE.dual_chunk(160, 32).local(9), "local: not supported after dual_chunk"),
    (lambda: ROPE.local(9).dual_chunk(160, 32), "dual_chunk: expected a scheme whose queries see all keys"),
    (lambda: Rotary.axial(16).self_extend(20, 4), "self_extend: .* this table is axial"),
    (lambda: ROPE.self_extend(0, 4).mrope([2, 3, 3]), "mrope: expected a scheme without rectify, self_extend"),
    (lambda: ROPE.self_extend(20, 4).bands_for(False), "causal: expected True for a scheme that maps pos"),
    (lambda: banded((0, 9, 1, -3, 2)), r"bands\[0\].offset: expected at least 0 in a band that maps .*, got -3"),
    (lambda: banded((0, 1, 1, 0), (1, 9, 1, 0, 1, 128)), r"bands\[1\].chunk: expected 0, the chunk of bands\[0\], got"),
    (lambda: banded((0, 9, 1, 0, 1, 100)), r"bands\[0\].chunk: expected 0 or a multiple of 128, .* got 100"),
    # every field that replace can set
    (lambda: dataclasses.replace(ROPE, bands=()), r"bands: expected at least one band, got \(\)"),
    (lambda: ROPE.local(0), r"bands: expected at least one band, got \(\); queries would see no keys"),
    (lambda: banded((5, 9, 1, 0)).local(3), "bands: expected at least one band"),
    (lambda: dataclasses.replace(ROPE, head_dim=0), "head_dim: expected a positive integer, got 0"),
    (lambda: dataclasses.replace(ROPE, head_dim=32), "inv_freq: 32 pairs need 64 channels, got head_dim 32"),
    (lambda: dataclasses.replace(ROPE, frequencies=(1e300,)), r"inv_freq\[0\]: expected a magnitude of at most 2\^30"),
    (lambda: dataclasses.replace(ROPE, axis=(10**9,) * 32), r"axis\[0\]: expected less than 32, got 1000000000"),
    (lambda: dataclasses.replace(ROPE, base=1.0), "base: expected more than 1, got 1.0"),
    (lambda: dataclasses.replace(ROPE, base=math.nan), "base: expected a positive finite number, got nan"),
    (lambda: dataclasses.replace(ROPE, exponent_dim=-64), "exponent_dim: expected a non-negative integer, got -64"),
    *(
        (lambda name=name, x=x: dataclasses.replace(ROPE, **{name: x}), f"{name}: expected a number from 2\\^-30 to 2")
        for name in ("temperature", "rotated_scale", "length_scale")
        for x in (1e300, 1e-300)
    ),
    (lambda: ROPE.dual_chunk(2**47 + 128, 128), r"bands\[0\].chunk: expected a magnitude of at most 2\^30, got 140737"),
    (lambda: ROPE.rectify(2**40), r"bands\[0\].stop: expected a magnitude of at most 2\^30, got 1099511627776"),
    (lambda: ROPE.rectify(8, 1e-300), r"bands\[1\].slope: expected a magnitude of at most 2\^30, got "),
    *(
        (lambda band=band: banded(band), rf"bands\[0\].{field}: expected a magnitude of at most 2\^30, got")
        for field, band in {
            "start": (1e300, math.inf, 1, 0), "stop": (0, 1e300, 1, 0), "slope": (0, 9, -1e300, 0),
            "offset": (0, 9, 1, 1e300), "group": (0, 9, 1, 0, 1e300), "last": (0, 9, 1, 0, 1, 0, 1e300),
        }.items()
    ),
    # axes
    (lambda: dataclasses.replace(Rotary.axial(64), frequencies=(1.0,)), "axis: expected one integer for each of"),
    (lambda: Rotary.axial(60, axes=4), "axes: expected a divisor of the 30 pairs, got 4; or give a list"),
    (lambda: Rotary.axial(16, 3, rotary_dim=14), "axes: expected a divisor of the 7 pairs, got 3"),
    (lambda: Rotary.axial(64, axes=0), "axes: expected a positive integer, got 0"),
    (lambda: Rotary.axial(16, True), "axes: expected a positive integer, got True"),
    (lambda: Rotary.axial(128, [16, 56, 56]), r"axes: .* got \[16, 56, 56\], which add up to 128; these are channels"),
    (lambda: Rotary.axial(128, [22, 21, 20]), r"axes: .* add up to 64, .* got \[22, 21, 20\], .* 63$"),
    (lambda: Rotary.axial(16, [4, [1.0] * 5]), r"axes: .* add up to 8, .* got \[4, 5\], .* up to 9$"),
    (lambda: Rotary.axial(16, [8, 0]), r"axes\[1\]: expected the axis's number of pairs, .*, got 0"),
    (lambda: Rotary.axial(16, [4, 4.0]), r"axes\[1\]: expected the axis's number of pairs, .* got 4.0"),
    (lambda: Rotary.axial(16, [8, []]), r"axes\[1\]: expected a table of at least one pair"),
    (lambda: Rotary.axial(16, [4, [[1.0] * 4]]), r"axes\[1\]: expected one dimension, got shape"),
    (lambda: Rotary.axial(16, []), "axes: expected the pairs or the table of at least one axis"),
    (lambda: Rotary.axial(16, axis=[0, 1]), "axis: expected one integer for each of the 8 pairs, got 2"),
    (lambda: Rotary.axial(16, axis=[0] * 7 + [-1]), r"axis\[7\]: expected a non-negative integer"),
    (lambda: Rotary.axial(16, axis=[0, 2] * 4), "axis: .* every axis up to 2, got none of axis 1"),
    (lambda: Rotary.axial(16, 3, axis=[0, 1] * 4), "axes: expected 2, the number of axes in axis, got 3"),
    (lambda: Rotary.axial(16, [5, 3], axis=[0, 1] * 4), r"axis: expected \[5, 3\] pairs .* got \[4, 4\]"),
    (lambda: ROPE.mrope([16, 24]), "sections: expected numbers that add up to the 32 pairs"),
    (lambda: ROPE.mrope([32]), "sections: expected the numbers of pairs of two or more axes"),
    (lambda: ROPE.mrope([32, 0]), "sections: expected the numbers of pairs of two or more axes"),
    (lambda: ROPE.mrope([8, 12, 12], interleaved=True), r"sections: .* first to be .* gives \[11, 11, 10\]"),
    (lambda: Rotary.axial(64).mrope([16, 16]), "mrope: this table is axial already"),
    (lambda: ROPE.rectify(8).mrope([16, 16]), "mrope: expected a scheme without rectify"),
    (lambda: ROPE.log_n(8).mrope([16, 16]), "mrope: expected a scheme without rectify"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "reason"), REASONS, ids=[reason[:60] for _, reason in REASONS])
def test_errors_name_their_reason(build, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        build()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: ROPE.mrope(32), "sections: expected a list of integers, got 32"),
        (lambda: ROPE.mrope("163"), "sections: expected a list of integers, got '163'"),
        (lambda: ROPE.mrope([12, 10, 10], 1), "interleaved: expected True or False, got 1"),
        (lambda: Rotary.axial(16, [4, ["a"]]), r"axes\[1\]: expected a tensor, array or list of real"),
        (lambda: Rotary.axial(16, "44"), "axes: expected a number of axes, or a list with .*, got '44'"),
        (lambda: Rotary.axial(16, axis="01010101"), "axis: expected a list of integers, one per pair"),
        (lambda: ROPE.dual_chunk(160, 32, "long"), "length_scale: expected a number, got 'long'"),
        (lambda: ROPE.rectify(windw=8), ".*unexpected keyword argument"),
    ],
)
def test_errors_of_type_name_their_reason(build, reason):
    with pytest.raises(TypeError, match=f"^{reason}"):
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
