"""Tests ReRoPE and other options in models that have layers with a sliding window, without rotation or without
attention beside layers that see all keys. The options change only layers that see all keys."""

import pytest

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import torch
from families import HERE, close, logits, schemes, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, suggest

LOCAL, WHOLE = "sliding_attention", "full_attention"
WINDOW = 6  # of the options
OPTIONS = {
    "rerope": ({"rerope": WINDOW}, lambda rope: rope.rectify(WINDOW)),
    "rerope, log_n": ({"rerope": WINDOW, "log_n": 12}, lambda rope: rope.rectify(WINDOW).log_n(12)),
    "leaky_rerope": ({"leaky_rerope": (WINDOW, 4.0)}, lambda rope: rope.rectify(WINDOW, 4.0)),
    "self_extend": ({"self_extend": (WINDOW, 2)}, lambda rope: rope.self_extend(WINDOW, 2)),
    "string": ({"string": (WINDOW, 2)}, lambda rope: rope.string(WINDOW, 2)),
}
UNROTATED = ["afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe"]  # the layers that see all keys do not rotate
SLIDING = [
    "cwm",
    "dots1",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "laguna",
    "mellum",
    "ministral",
    "modernbert-decoder",
    "olmo3",
    "qwen2",
    "vaultgemma",
]
OTHERS = ["lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "smollm3"]


def here(names) -> list[str]:
    """Returns the names of the families that the installed version of transformers has."""
    return [name for name in names if name in HERE]


def own_schemes(model) -> dict[str, Rotary]:
    return dict(zip(model.config.layer_types, schemes(model), strict=True))


def test_all_models_with_sliding_windows_in_some_layers_are_here():
    kinds = {name: set(getattr(tiny(name).config, "layer_types", None) or ()) for name in HERE}
    assert sorted(here(UNROTATED + SLIDING)) == sorted(name for name, types in kinds.items() if {LOCAL, WHOLE} <= types)


@pytest.mark.parametrize("name", here(SLIDING))
def test_options_change_only_the_layers_that_see_all_keys(name):
    """The options give the schemes and the logits of a scheme by layer type. The first tokens, which have no distances
    beyond the window, keep the stock model's logits."""
    model, ids = tiny(name), tokens()
    stock = logits(model, ids)
    own = own_schemes(convert(model))
    local = Rotary.from_hf_config(model.config, LOCAL)
    for options, change in OPTIONS.values() if name in ("gemma3_text", "gpt_oss", "qwen2") else [OPTIONS["rerope"]]:
        changed = {LOCAL: own[LOCAL], WHOLE: change(own[WHOLE])}
        by_type = logits(convert(model, rotary={LOCAL: local, WHOLE: change(own[WHOLE])}), ids)
        found = convert(model, **options)
        assert schemes(found) == [changed[each] for each in model.config.layer_types]
        assert torch.equal(logits(found, ids), by_type)
        assert not close(by_type, stock)
        if list(options) == ["rerope"]:
            size = max(1.0, float(stock.abs().max()) / 3)
            assert close(by_type[:, :WINDOW] / size, stock[:, :WINDOW] / size)
    whole = ", ".join(str(layer) for layer, each in enumerate(model.config.layer_types) if each == WHOLE)
    suggestion = suggest(model.config, 4 * model.config.max_position_embeddings)
    assert f"in the layers that see all keys ({whole})" in suggestion.reason


@pytest.mark.parametrize("name", here(UNROTATED))
def test_layers_that_see_all_keys_and_do_not_rotate(name):
    """Options that change distances raise an error in models whose layers with distances beyond the window do not
    rotate, because they would change nothing. log_n changes these layers."""
    model = convert(tiny(name))
    own = own_schemes(model)
    for options in [{"rerope": WINDOW, "log_n": 12}, {"self_extend": (WINDOW, 2)}]:
        with pytest.raises(
            ValueError, match=f"^{next(iter(options))}: expected a layer that sees all keys and rotates"
        ):
            convert(model, **options)
    if name != "cohere2_moe":  # its configuration does not say which layers rotate
        with pytest.raises(ValueError, match="^rerope: expected a layer that sees all keys and rotates"):
            suggest(tiny(name), 256)
    changed = {LOCAL: own[LOCAL], WHOLE: own[WHOLE].log_n(12)}
    assert schemes(convert(model, log_n=12)) == [changed[each] for each in model.config.layer_types]


@pytest.mark.parametrize("name", here(OTHERS))
def test_rerope_beside_layers_of_other_kinds(name):
    """ReRoPE changes the layers that rotate. Layers without attention or rotation stay as they are."""
    model, ids = tiny(name), tokens()
    stock = logits(model, ids)
    own = schemes(convert(model))
    model = convert(model, rerope=WINDOW)
    assert schemes(model) == [scheme.rectify(WINDOW) if any(scheme.frequencies) else scheme for scheme in own]
    size = max(1.0, float(stock.abs().max()) / 3)
    found = logits(model, ids)
    assert not close(found, stock) and close(found[:, :WINDOW] / size, stock[:, :WINDOW] / size)
