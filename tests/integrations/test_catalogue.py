"""Tests that every row of schemes/catalogue.py is a choice of every command, and an option of convert, of suggest and
of the field that the vLLM plugin reads."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import schemes, tiny
from flashrope import Rotary
from flashrope.cli import main as commands
from flashrope.integrations.transformers import convert, from_pretrained, suggest
from flashrope.lab.evaluation.readings import applicable
from flashrope.lab.small_models.comparison import compared
from flashrope.schemes import catalogue
from flashrope.schemes.catalogue import SCHEMES, TABLE, Lengths, Option, Scheme, apply_options, describe_options
from test_options import planned

ROPE = Rotary.rope(16)


def halved(rotary: Rotary, pairs: int) -> Rotary:
    frequencies = [f / 2 if m < pairs else f for m, f in enumerate(rotary.frequencies)]
    return dataclasses.replace(rotary, frequencies=tuple(frequencies))


def read(name, value, length) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    return value


ROW = Scheme("half", "Half", lambda lengths: {"half": 3}, Option("half", TABLE, read, halved, "pairs {}"))


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setitem(catalogue.SCHEMES, "half", ROW)


@pytest.mark.parametrize("command", ["loss", "passkey", "generate", "demo"])
def test_the_commands_offer_it(row, command):
    option = "--scheme" if command == "generate" else "--schemes"
    needed = ["--model", "x"] if command in ("loss", "passkey") else []
    needed += {"loss": ["--text", "x"], "generate": ["--prompt", "x"]}.get(command, [])
    arguments = [command, *needed, option, "half"]
    args = commands._parser(arguments).parse_args(arguments)
    assert (args.scheme if command == "generate" else args.schemes) in ("half", ["half"])


def test_the_commands_run_it(row):
    model = tiny("llama")
    (found,), _ = applicable(model, ["half"], 64, 256)
    found.apply()
    assert (found.label, found.words) == ("Half", "pairs 3") and schemes(model) == [halved(ROPE, 3)] * 3
    assert {scheme.name: scheme.rotary for scheme in compared(16, 64, 8, ["half"])[0]}["Half"] == halved(ROPE, 3)


def test_generate_runs_it(row, tmp_path, capsys):
    pytest.importorskip("safetensors")
    from flashrope.lab.small_models.model import LanguageModel, ModelConfig, save_checkpoint

    torch.manual_seed(0)
    save_checkpoint(tmp_path / "model", LanguageModel(ModelConfig(width=32, layers=1, heads=2)), ROPE, 32)
    arguments = ["--model", str(tmp_path / "model"), "--prompt", "abc", "--tokens", "2", "--device", "cpu"]
    assert commands.main(["generate", *arguments, "--scheme", "half"]) == 0
    assert "pairs 3" in capsys.readouterr().err


def test_convert_suggest_and_vllm_take_it(row, tmp_path):
    model = convert(tiny("llama"), half=2, log_n=True)
    expected = [halved(ROPE, 2).log_n(64)] * 3
    assert schemes(model) == expected and model.config.flashrope == {"half": 2, "log_n": 64}
    model.save_pretrained(tmp_path)
    assert schemes(from_pretrained(tmp_path)) == planned(tmp_path) == expected
    assert suggest(tiny("llama"), 256, "half") == ({"half": 3}, "Half: pairs 3")
    for wrong, message in ((dict(half="3"), "half: expected an integer"), (dict(half=2, ntk=2.0), "at most one of")):
        with pytest.raises((TypeError, ValueError), match=message):
            convert(tiny("llama"), **wrong)


# ---- the rows


@pytest.mark.parametrize("name", SCHEMES)
def test_the_schemes_are_those_of_rotary(name):
    length, longest = 256, 2048
    expected = {
        "stock": ROPE,
        "log-n": ROPE.log_n(length),
        "ntk": ROPE.ntk(8.0),
        "yarn": ROPE.yarn(8.0, length),
        "rerope": ROPE.rectify(128).log_n(length),
        "rerope-plain": ROPE.rectify(128),
        "leaky": ROPE.rectify(128, 30.0).log_n(length),
        "hope": Rotary.hope(16, length),
        "cope": ROPE.cope(length),
        "p-rope": Rotary.p_rope(16, 0.75),
        "string": ROPE.string(85, 21),
        "self-extend": ROPE.self_extend(128, 16),
        "self-extend-log-n": ROPE.self_extend(128, 16).log_n(length),
        "dual-chunk": ROPE.dual_chunk(256, 128),
        "dual-chunk-log-n": ROPE.dual_chunk(256, 128).log_n(length),
    }
    assert set(expected) == set(SCHEMES)
    options = SCHEMES[name].options(Lengths(length, longest))
    assert apply_options(ROPE, options) == expected[name]
    assert bool(describe_options(options)) is (name != "stock")
