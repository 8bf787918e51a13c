"""Tests that options are not forgotten: suggest starts from the options that a model has, and convert names the options
that it drops."""

import warnings

import pytest

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import schemes, tiny
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained, revert, suggest
from flashrope.schemes.catalogue import SCHEMES, Lengths, known_options
from transformers import AutoConfig

ROPE = Rotary.rope(16)


@pytest.mark.parametrize(
    "has, scheme, expected",
    [
        ({"hope": 32}, "rerope", {"hope": 32, "rerope": 16, "log_n": 32}),
        ({"cope": 128}, "rerope", {"cope": 128, "rerope": 64, "log_n": 128}),
        (
            {"cope": {"train_length": 32, "pairs": 3}},
            "string",
            {"cope": {"train_length": 32, "pairs": 3}, "string": (10, 2)},
        ),
        ({"yarn": (2.0, 32)}, "self-extend", {"yarn": (2.0, 32), "self_extend": (16, 16)}),
        ({"log_n": 32, "log_n_clip": False}, "rerope", {"log_n": 32, "log_n_clip": False, "rerope": 16}),
        ({"p_rope": 0.5, "leaky_rerope": (6, 4.0)}, "rerope", {"p_rope": 0.5, "rerope": 32, "log_n": 64}),
        ({"leaky_rerope": (6, 4.0), "log_n": 64}, "self-extend", {"log_n": 64, "self_extend": (32, 8)}),
        ({"hope": 32}, "cope", {"cope": 32}),
        ({"hope": 128, "log_n": 32}, "yarn", {"hope": 128, "log_n": 32, "yarn": (2.0, 128)}),
        ({"rotary": ROPE.interpolate(2.0)}, "rerope", {"rotary": ROPE.interpolate(2.0), "rerope": 32, "log_n": 64}),
    ],
    ids=str,
)
def test_suggest_starts_from_the_options_of_the_model(has, scheme, expected, tmp_path):
    """The suggestion has the model's options and its training length, for the converted model, its configuration and
    the saved model. convert drops none of them."""
    model = convert(tiny("llama"), **has)
    found = suggest(model, 256, scheme)
    assert found.changes == expected == suggest(model.config, 256, scheme).changes
    model.save_pretrained(tmp_path)
    assert suggest(AutoConfig.from_pretrained(tmp_path), 256, scheme).changes == expected
    for name in [name for name in has if has[name] == expected.get(name)]:
        assert f"{name}={expected[name]!r}" in found.reason or f"log n by {expected[name]}" in found.reason
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convert:")
        made = schemes(convert(model, **found.changes))
    assert made == schemes(convert(tiny("llama"), **expected))


def test_suggest_within_the_training_length_keeps_the_options():
    model = convert(tiny("llama"), hope=512)
    found = suggest(model, 512)
    assert found == ({"hope": 512}, "512 tokens are within the 512 that the model was trained with")
    assert suggest(revert(model), 64).changes == {}


def test_every_option_of_a_length_says_so():
    """The training length of a model is known from every option that a scheme computes from the training length."""
    for row in SCHEMES.values():
        if row.option and row.name in ("yarn", "log-n", "hope", "cope"):
            assert row.option.train_length(row.options(Lengths(1234, 99_999))[row.option.name]) == 1234
    named = {name for name, option in known_options().items() if option.train_length}
    assert named == {"yarn", "log_n", "hope", "cope"}


@pytest.mark.parametrize(
    "had, given, dropped",
    [
        ({"hope": 48}, {"rerope": 6}, "hope=48"),
        ({"hope": 48, "log_n": 12}, {"rerope": 6}, "hope=48, log_n=12"),
        ({"rotary": ROPE.interpolate(2.0)}, {"rerope": 6}, "rotary="),
        ({"hope": 48}, {"rotary": ROPE}, "hope=48"),
        ({"leaky_rerope": (6, 4.0)}, {"rerope": 7}, None),
        ({"leaky_rerope": (6, 4.0)}, {"self_extend": (8, 4)}, None),  # another option of the same kind
        ({"hope": 48}, {"cope": 48, "rerope": 6}, None),
        ({"rerope": 6}, {}, None),  # keeps them, with a warning that says so
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
def test_convert_names_the_options_that_it_drops(had, given, dropped, saved, tmp_path, recwarn):
    model = convert(tiny("llama"), **had)
    if saved:
        model.save_pretrained(tmp_path)
        model = from_pretrained(tmp_path)
    assert not [each for each in recwarn if "convert" in str(each.message)]
    convert(model, **given)
    found = [str(each.message) for each in recwarn if "drop" in str(each.message)]
    assert len(found) == (dropped is not None)
    if dropped:
        assert found[0].startswith(f"convert: drops {dropped}") and "pass" in found[0]
    recwarn.clear()
    convert(revert(model), **given)
    assert not [each for each in recwarn if "convert" in str(each.message)]


def test_options_of_a_folder_that_are_not_known_do_not_stop_convert():
    model = tiny("llama")
    model.config.flashrope = {"of_a_later_version": 3}
    with pytest.warns(UserWarning, match="convert: drops of_a_later_version=3"):
        convert(model, rerope=6)
