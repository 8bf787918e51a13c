"""Tests what ``convert`` plans before it changes a model, and what applying a plan changes."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import close, logits, schemes, state, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import applying, convert, versions
from flashrope.integrations.transformers import conversion_plan as plan


def test_a_version_that_is_too_new(monkeypatch):
    monkeypatch.setattr(versions, "VERSION", versions.UNTESTED)
    model = tiny("llama")
    before = state(model)
    with pytest.raises(
        ValueError, match=r"^transformers: a version from 5.25 on is not supported .* 'transformers<5.25'$"
    ):
        convert(model)
    assert state(model) == before


def test_the_newest_version_is_one_for_the_code_the_extra_and_ci():
    root, bound = Path(__file__).resolve().parents[2], "<" + ".".join(map(str, versions.UNTESTED))
    assert f'["transformers>=4.57,{bound}"]' in (root / "pyproject.toml").read_text()
    ci = (root / ".ci/run").read_text()
    assert re.search(rf"install_transformers \S*transformers-newest\S* 'transformers>=[\d.]+,{bound}'", ci)


def test_a_plan_changes_nothing_and_undo_restores_what_was_applied():
    model = tiny("gemma3_text")
    before = state(model)
    planned = plan.plan_conversion(model, model.model, {"log_n": 12})
    assert state(model) == before and plan.plan_of(model.model) is None
    assert planned.field == planned.options == {"log_n": 12} and planned.own is None and not planned.warnings
    assert list(planned.schemes) == [f"layers.{layer}.self_attn" for layer in range(model.config.num_hidden_layers)]
    applying.apply(model, model.model, planned)
    assert plan.plan_of(model.model) is planned and state(model) != before
    assert schemes(model) == [scheme.rotary for scheme in planned.schemes.values()]
    assert applying.undo(model, model.model) and state(model) == before
    assert not applying.undo(model, model.model)


def test_a_plan_is_frozen():
    planned = plan.plan_conversion(model := tiny("llama"), model.model, {})
    with pytest.raises(AttributeError):
        planned.mark = "another"


def test_a_plan_of_the_same_schemes_keeps_the_mark():
    model = convert(tiny("llama"), rerope=6)
    earlier = plan.plan_of(model.model)
    assert plan.plan_conversion(model, model.model, {"rerope": 6}).mark == earlier.mark
    assert plan.plan_conversion(model, model.model, {"rerope": 7}).mark != earlier.mark
    kept = plan.plan_conversion(model, model.model, {})
    assert kept.mark == earlier.mark and "the model keeps rerope=6 of its last convert" in kept.warnings[0]


def test_a_plan_of_an_untested_type_has_its_own_schemes(monkeypatch):
    monkeypatch.setattr(plan, "FAMILIES", plan.FAMILIES - {"llama"})
    model = tiny("llama")
    planned = plan.plan_conversion(model, model.model, {"rerope": 6}, untested=True)
    assert {scheme.rotary for scheme in planned.schemes.values()} == {Rotary.rope(16).rectify(6)}
    assert {scheme.rotary for scheme in planned.own.schemes.values()} == {Rotary.rope(16)}
    assert planned.own.mark != planned.mark and not planned.own.field


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_scheme_without_rotation(name):
    """without_rotation returns a scheme that rotates nothing, even at a length for which the stock model changes its
    table."""
    scaling = {"type": "dynamic", "factor": 2.0}
    model = tiny(name, rope_scaling=scaling, max_position_embeddings=16) if name == "llama" else tiny(name)
    for scheme in plan.plan_conversion(model, model.model, {}).schemes.values():
        other = scheme.without_rotation()
        assert not any(other.at(100).frequencies) and any(scheme.at(100).frequencies)
        assert other.window == scheme.window and other.rotary.head_dim == scheme.rotary.head_dim


def test_undo_finds_layers_whose_names_have_changed():
    model = tiny("llama")
    stock = logits(model, tokens())
    convert(model, rerope=6)
    layers = model.model.layers
    layer = layers[1]
    layers[1] = torch.nn.ModuleDict({"wrapped": layer})  # torch.compile and checkpointing wrap layers like this
    assert applying.undo(model, model.model) and not schemes(model)
    layers[1] = layer
    assert close(logits(model, tokens()), stock)


def test_names_of_what_a_conversion_leaves():
    """All attributes that a conversion leaves on modules and caches have the project's name in their names. The name
    under which the attention is registered does not, because transformers treats names with "flash" specially."""
    model = tiny("llama")
    before = {key for module in model.modules() for key in vars(module)}
    cache = convert(model, rerope=6)(tokens(), use_cache=True).past_key_values
    left = {key for module in model.modules() for key in vars(module)} - before
    assert left == {"_flashrope", "extra_repr"} and vars(cache)["_flashrope"] == plan.plan_of(model.model).mark
    assert repr(model).count("flashrope: Rotary") == 1  # equal layers are printed once
