"""Tests where the vLLM plugin finds its field, what it says of misspelt and lost options, and how it reads
dual_chunk_attention_config. vLLM is not needed."""

from types import SimpleNamespace

import pytest
from flashrope import Rotary
from flashrope.integrations.scheme_options import option_names
from flashrope.integrations.vllm.configured import adopt_chunks, asked, dropped, misspelt, origin_of
from flashrope.integrations.vllm.engine_plan import make_plan
from vllm_configs import config


def test_a_model_without_the_field_is_left_alone():
    assert not asked(config())
    assert asked(config({}))


def overridden(overrides, **hf):
    """Returns the configuration of a model whose config.json has the fields hf, with vLLM's hf_overrides."""
    return config(hf={**hf, **overrides}, model={"hf_overrides": overrides})


@pytest.mark.parametrize("name", ["flashrop", "flash_rope", "FlashRope", "flash-rope", "falshrope", "flashropes"])
def test_a_misspelt_field(name):
    given = {"rerope": 64}
    for found, origin in (overridden({name: given}), "--hf-overrides"), (config(hf={name: given}), "config.json"):
        assert not asked(found)
        (message,) = misspelt(found.model_config)
        assert message == f'{name} of {origin}: expected the name "flashrope", got "{name}", which has no effect'


def test_a_misspelt_field_beside_the_right_one():
    (message,) = misspelt(overridden({"flashrop": {}}, flashrope={"log_n": 64}).model_config)
    assert "flashrop of --hf-overrides" in message


def test_options_outside_the_field():
    (message,) = misspelt(overridden({"rerope": 64, "raw_keys": True, "rope_theta": 1e4}).model_config)
    assert message == (
        'rerope, raw_keys of --hf-overrides: expected options within the field, {"flashrope": {"rerope": 64, '
        '"raw_keys": true}}, got {"rerope": 64, "raw_keys": true}, which has no effect'
    )


LIKE_IT = dict.fromkeys(["layerdrop", "layer_type", "use_mem_rope", "fusion_type", "rope_type", "use_flash_attn"], 1)


@pytest.mark.parametrize("fields", [{}, {"flashrope": {}}, LIKE_IT])
def test_nothing_is_misspelt(fields):
    """LIKE_IT has the fields of transformers' configurations that are most similar to the field."""
    assert not list(misspelt(overridden(fields, log_n=True, rope_theta=1e4).model_config))
    assert not list(misspelt(config(model={"hf_overrides": lambda each: each}).model_config))


@pytest.mark.parametrize(
    "overrides, origin",
    [
        ({"flashrope": {"rerop": 8}}, "--hf-overrides"),
        ({"text_config": {"flashrope": {"rerop": 8}}}, "--hf-overrides"),
        ({"rope_theta": 1e4}, "config.json"),
        ({}, "config.json"),
        (lambda each: each, "--hf-overrides or config.json"),
    ],
)
def test_errors_name_the_field_where_it_came_from_and_every_option(overrides, origin):
    asking = config({"rerop": 8}, model={"hf_overrides": overrides})
    assert origin_of(asking.model_config) == origin
    names = ", ".join([*option_names(), "raw_keys"])
    with pytest.raises(TypeError) as raised:
        make_plan(asking)
    expected = f"flashrope of {origin}: options: expected names among {names}, got 'rerop'; did you mean rerope?"
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    "options, hf, message",
    [
        ({"raw_keys": 1}, {}, "raw_keys: expected true or false, got 1"),
        ({"rerope": 99999}, {}, "rerope: expected a window of less than max_model_len"),
        ({"rerope": 8}, {"sliding_window": 64}, "rerope: expected a layer that sees all keys"),
        ({"rotary": Rotary.rope(64).text}, {}, "rotary: expected head_dim 32 as in the model, got 64"),
        ({"dual_chunk": [200, 32]}, {}, "chunk_size: expected "),
    ],
)
def test_errors_of_values_name_the_field(options, hf, message):
    asking = config(hf={"flashrope": options, **hf}, model={"hf_overrides": {"flashrope": options}})
    with pytest.raises((TypeError, ValueError), match="^flashrope of --hf-overrides: " + message):
        make_plan(asking)


def test_errors_of_the_model_do_not_name_the_field():
    with pytest.raises(ValueError, match="^config: rope type 'spiral'"):
        make_plan(config({}, hf={"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}))


@pytest.mark.parametrize(
    "saved, given, lost, together",
    [
        ({"log_n": 256}, {"rerope": 32}, '{"log_n": 256}', '{"log_n": 256, "rerope": 32}'),
        ({"log_n": 256, "hope": False}, {}, '{"log_n": 256}', '{"log_n": 256}'),
        ({"yarn": [2.0, 64], "raw_keys": True}, {"hope": 8}, None, '{"yarn": [2.0, 64], "raw_keys": true, "hope": 8}'),
        ({"log_n": 256}, {"rerope": 32, "log_n": False}, "", ""),
        ({"leaky_rerope": [32, 8.0]}, {"rerope": 32}, "", ""),  # an option of the same kind
        ({"log_n": 256, "log_n_clip": False}, {"log_n": 64}, "", ""),
        ({}, {"rerope": 32}, "", ""),
    ],
)
def test_overrides_that_drop_saved_options(saved, given, lost, together):
    """hf_overrides replaces the saved field. A warning says which options are lost and how to keep them."""
    model = SimpleNamespace(hf_overrides={"flashrope": given})
    for whole in {"flashrope": saved}, {"text_config": {"flashrope": saved}}:
        message = dropped(model, whole)
        assert bool(message) == bool(together)
        if message:
            assert f'pass {{"flashrope": {together}}}' in message
            assert lost is None or f"drops {lost};" in message


@pytest.mark.parametrize("saved", [None, {}, {"flashrope": None}])
def test_overrides_that_drop_nothing(saved):
    assert not dropped(SimpleNamespace(hf_overrides={"flashrope": {"rerope": 32}}), saved)
    assert not dropped(SimpleNamespace(hf_overrides={}), {"flashrope": {"log_n": 256}})


QWEN = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
SIZES = {"chunk_size": 160, "local_size": 32}
SPARSE = {"sparse_attention_config": [{"0": ["vertical_and_slash", 1000, 6096, 1]}]}


@pytest.mark.parametrize(
    ("chunks", "options", "expected", "sparse"),
    [
        (QWEN, None, lambda rope: rope.dual_chunk(262144, 8192, 262144), False),
        (SIZES, None, lambda rope: rope.dual_chunk(160, 32), False),
        ({**SIZES, "original_max_position_embeddings": 0}, {}, lambda rope: rope.dual_chunk(160, 32), False),
        ({**QWEN, **SPARSE}, {}, lambda rope: rope.dual_chunk(262144, 8192, 262144), True),
        ({**SIZES, **SPARSE, "sparse_attention_enabled": False}, {}, lambda rope: rope.dual_chunk(160, 32), False),
        ({**SIZES, "sparse_attention_enabled": True}, {}, lambda rope: rope.dual_chunk(160, 32), True),
        (SIZES, {"log_n": 64, "dual_chunk": None}, lambda rope: rope.dual_chunk(160, 32).log_n(64), False),
        (QWEN, {"dual_chunk": [160, 32]}, lambda rope: rope.dual_chunk(160, 32), False),
        (QWEN, {"dual_chunk": False, "rerope": 64}, lambda rope: rope.rectify(64), False),
        (QWEN, {"rotary": Rotary.hope(32, 64).text}, lambda rope: Rotary.hope(32, 64), False),
    ],
)
@pytest.mark.parametrize("of_text", [True, False])
def test_a_configuration_with_dual_chunks(chunks, options, expected, sparse, of_text):
    asking = config(options)
    model, given = asking.model_config, dict(chunks)
    model.hf_config = SimpleNamespace()  # a model of several parts has such a configuration
    (model.hf_text_config if of_text else model.hf_config).dual_chunk_attention_config = given
    assert adopt_chunks(model) is sparse
    assert not adopt_chunks(model)  # a copy of the configuration is checked again
    assert not any(hasattr(each, "dual_chunk_attention_config") for each in (model.hf_text_config, model.hf_config))
    plan = make_plan(asking)
    assert [layer.rotary for layer in plan.layers] == [expected(Rotary.rope(32))] * 2
    assert plan.stock == {Rotary.rope(32)} and given == chunks


def test_dual_chunks_of_a_model_of_several_parts():
    """In a model of several parts, dual_chunk_attention_config and "flashrope" may be fields of the text model's
    configuration or of the whole model's."""
    asking = config()
    text, whole = asking.model_config.hf_text_config, SimpleNamespace(flashrope={"log_n": 64})
    asking.model_config.hf_config = whole
    text.dual_chunk_attention_config, whole.dual_chunk_attention_config = None, dict(SIZES)
    adopt_chunks(asking.model_config)
    assert text.flashrope is None and whole.flashrope == {"log_n": 64, "dual_chunk": [160, 32]}
    assert {layer.rotary for layer in make_plan(asking).layers} == {Rotary.rope(32).dual_chunk(160, 32).log_n(64)}
    whole.flashrope, text.dual_chunk_attention_config = None, dict(QWEN)
    adopt_chunks(asking.model_config)
    assert whole.flashrope is None and text.flashrope == {"dual_chunk": [262144, 8192, 262144]}


@pytest.mark.parametrize("chunks", [None, {}])
def test_no_dual_chunks(chunks):
    stock = config(hf={"dual_chunk_attention_config": chunks})
    assert not adopt_chunks(stock.model_config) and not asked(stock)


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        (160, None, "dual_chunk_attention_config: expected a dict with chunk_size, local_size, got 160"),
        (
            {"chunk_size": 160},
            None,
            "dual_chunk_attention_config: expected chunk_size and local_size, got none of local_",
        ),
        (
            {**SIZES, "chunks": 3},
            None,
            "dual_chunk_attention_config: expected names among chunk_size, .*, got 'chunks'",
        ),
        ({**SIZES, "chunk_size": 200}, None, "chunk_size: expected .* multiple of 128, .* got 200 - 32 = 168"),
        ({**SIZES, "original_max_position_embeddings": -1}, None, "length_scale: expected a positive finite number"),
        (
            SIZES,
            {"rerope": 64},
            "dual_chunk: expected at most one of .*rerope.*, got also rerope|rerope: .* got also dual_chunk",
        ),
    ],
)
def test_dual_chunks_that_are_refused(chunks, options, message):
    asking = config(options, hf={"dual_chunk_attention_config": chunks})
    with pytest.raises((TypeError, ValueError), match=message):
        adopt_chunks(asking.model_config)
        make_plan(asking)
