"""Tests which position_ids converted models accept, and which frequency tables follow from them."""

import inspect
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
import vision_models
from families import PACKED, SEQLEN, close, converted, logits, padded, static, tiny, tokens
from flashrope.integrations.transformers import convert
from flashrope.integrations.transformers.shared_layers import drops_rows
from test_transformers import scaled
from transformers import DynamicCache

# ---- frequency tables that depend on the length

LONG, SHORT = tokens(seqlen=20), tokens(seqlen=10)
BOTH_PADDED = torch.ones(2, 20, dtype=torch.long)
BOTH_PADDED[0, :8], BOTH_PADDED[1, :6] = 0, 0
COUNTED = (BOTH_PADDED.cumsum(-1) - 1).clamp(min=0)
FAR = torch.arange(30, 40)[None]
# The training length is 16. SHORT at the positions of FAR exceeds it, and BOTH_PADDED holds 14 tokens in 20 slots.
GROWING = {
    "far": lambda model: logits(model, SHORT, position_ids=FAR),
    "far, in every row": lambda model: logits(model, SHORT, position_ids=FAR.expand(2, -1)),
    "slots": lambda model: logits(model, LONG, BOTH_PADDED),
    "given slots": lambda model: logits(model, LONG, BOTH_PADDED, position_ids=torch.arange(20)[None]),
    "counted": lambda model: logits(model, LONG, BOTH_PADDED, position_ids=COUNTED),
    "packed": lambda model: logits(model, LONG, position_ids=torch.arange(10).repeat(2)[None]),
    "packed, far": lambda model: logits(model, LONG, position_ids=torch.cat((FAR[0], torch.arange(7, 17)))[None]),
}


def growing(which: str):
    if which != "phi3":
        return scaled(which)
    scaling = {"type": "longrope"} | {
        key: families.ROPE_TYPES["longrope"][key] for key in ("short_factor", "long_factor")
    }
    return tiny(which, rope_scaling=scaling, original_max_position_embeddings=16)


@pytest.mark.parametrize("which", ["dynamic", "longrope", "phi3"])
def test_tables_follow_the_largest_position(which):
    """The table is the stock model's: that of the largest position of the call, wherever positions begin."""
    model = growing(which)

    def run():
        found = {}
        for name, call in GROWING.items():
            logits(model, SHORT)  # the stock model returns to the table of the training length
            found[name] = call(model)
        return found

    stock = run()
    convert(model)
    for name, found in run().items():
        assert close(found, stock[name]), name
    assert not close(stock["far"], logits(model, SHORT), 0.1)


def test_tables_follow_the_largest_position_in_training():
    model = growing("phi3").train()
    model.gradient_checkpointing_enable()

    def grads():
        model.zero_grad()
        model(SHORT, labels=SHORT, position_ids=FAR).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    stock = grads()
    convert(model)
    for name, grad in grads().items():
        assert close(grad, stock[name], 1e-5 * max(1.0, float(stock[name].abs().max()))), name


@pytest.mark.skipif(families.VERSION < (5, 0), reason="the test sets rope_parameters, which 4.57 does not have")
def test_tables_follow_the_largest_coordinate():
    """An image has more tokens than different coordinates, so the text after it has smaller positions than slots."""
    stock = vision_models.tiny_vision("qwen2_vl", max_position_embeddings=16)
    stock.config.text_config.rope_parameters |= {"rope_type": "dynamic", "factor": 4.0}
    model = type(stock)(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    expected = vision_models.uncached(model, "qwen2_vl")
    convert(model)
    assert close(vision_models.uncached(model, "qwen2_vl"), expected)
    assert {module._flashrope.grows_from for module in converted(model)} == {16}


@pytest.mark.parametrize("name", ["nemotron", "stablelm"])
def test_layers_without_keyword_arguments(name):
    if name in families.REFUSED_BY_VERSION:
        pytest.skip("this transformers is too old for the family")
    model = convert(tiny(name, rope_scaling=dict(families.ROPE_TYPES["dynamic"]), max_position_embeddings=16))
    if min(module._flashrope.grows_from for module in converted(model)) == float("inf"):
        pytest.skip("this transformers does not read the rope type of the family")
    with pytest.raises(ValueError, match="model: a frequency table that depends on the length is not supported by"):
        logits(model, SHORT)


@pytest.mark.slow
def test_tables_follow_the_largest_position_when_compiled():
    """The stock model's rotary embedding breaks the graph."""
    model, positions = convert(scaled("longrope", num_hidden_layers=1)), torch.arange(10).repeat(2)[None]
    expected = logits(model, LONG, position_ids=positions)
    torch.compiler.reset()
    assert close(logits(torch.compile(model, backend="eager"), LONG, position_ids=positions), expected)


# ---- schemes that depend on where positions begin

COUNTING = [
    dict(log_n=8),
    dict(rerope=6, log_n=8),
    dict(rerope=6, log_n=8, log_n_clip=False),
    dict(self_extend=(6, 2)),
    dict(dual_chunk=(136, 8)),
]
MESSAGE = (
    "position_ids: expected positions that count from 0 after the left padding of every sequence .* got {} in row {}"
)
AWAY = [
    (dict(position_ids=FAR), 30, 0),
    (dict(position_ids=FAR.expand(2, -1)), 30, 0),
    (dict(position_ids=torch.arange(10).repeat(2, 1) + torch.tensor([[0], [3]])), 3, 1),
    (dict(position_ids=torch.cat((torch.arange(6), torch.arange(5, 9)))[None]), 5, 0),
    (dict(position_ids=FAR, use_cache=True), 30, 0),
    (dict(position_ids=FAR, attention_mask=torch.ones_like(SHORT)), 30, 0),
    (dict(position_ids=torch.arange(10)[None], attention_mask=padded(10)), 3, 0),
    (dict(position_ids=torch.arange(10)[None], attention_mask=padded(10), use_cache=True), 3, 0),
]


@pytest.mark.parametrize("changes", COUNTING, ids=str)
def test_positions_that_begin_elsewhere(changes):
    """A scheme that depends on where positions begin refuses positions that do not begin at 0."""
    model = convert(tiny("llama"), **changes)
    for call, got, row in AWAY:
        with pytest.raises(ValueError, match=MESSAGE.format(got, row)):
            model(SHORT, **{"use_cache": False} | call)
    for train in (True, False):
        model.train(train)
        with pytest.raises(ValueError, match=MESSAGE.format(30, 0)):
            model(SHORT, position_ids=FAR, use_cache=False)
    counted = (padded(10).cumsum(-1) - 1).clamp(min=0)
    assert close(logits(model, SHORT, padded(10), position_ids=counted), logits(model, SHORT, padded(10)))
    assert close(logits(model, tokens(), position_ids=PACKED)[:, :11], logits(model, tokens()[:, :11]))
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), static(model)):
            model(SHORT[:, :9], past_key_values=cache, position_ids=torch.arange(9)[None])
            with pytest.raises(ValueError, match=MESSAGE.format(12, 0)):
                model(SHORT[:, 9:], past_key_values=cache, position_ids=torch.tensor([[12]]))


def test_a_graph_refuses_positions_that_begin_elsewhere():
    model = convert(tiny("llama", num_hidden_layers=1), log_n=8)
    torch.compiler.reset()
    graph = torch.compile(model, fullgraph=True, backend="eager")
    assert close(logits(graph, SHORT, position_ids=FAR - 30), logits(model, SHORT))
    with pytest.raises(RuntimeError, match="position_ids do not match the positions that the kernels count"):
        logits(graph, SHORT, position_ids=FAR)


@pytest.mark.parametrize("changes", [{}, dict(rerope=6), dict(leaky_rerope=(6, 4.0)), dict(string=(6, 2))], ids=str)
def test_only_distances_matter(changes):
    """Other schemes have the same logits wherever positions begin."""
    model = convert(tiny("llama"), **changes)
    expected = logits(model, SHORT)
    assert close(logits(model, SHORT, position_ids=FAR), expected)
    assert close(
        logits(model, SHORT, padded(10), position_ids=torch.arange(10)[None]), logits(model, SHORT, padded(10))
    )
    two = logits(model, torch.cat((SHORT, SHORT), 1), position_ids=torch.cat((FAR, FAR + 100), 1))
    assert close(two[:, :10], expected) and close(two[:, 10:], expected)


# ---- arguments by position


def test_arguments_by_position():
    """The decoder's hook adds arguments also to calls that name none."""
    model = convert(growing("longrope")).model
    with torch.no_grad():
        named = model(input_ids=SHORT, position_ids=FAR, use_cache=False).last_hidden_state
        assert torch.equal(model(SHORT, None, FAR, use_cache=False).last_hidden_state, named)


@pytest.mark.skipif("gemma3n_text" not in families.HERE, reason="this transformers has no gemma3n_text")
def test_dropped_rows_and_arguments_by_position():
    model, mask = convert(tiny("gemma3n_text")).model, padded(10)
    keep = {"logits_to_keep": 2} if drops_rows(model) else {}
    names = list(inspect.signature(model.forward).parameters)
    given = {"input_ids": SHORT, "attention_mask": mask}
    with torch.no_grad():
        named = model(**given, use_cache=False, **keep).last_hidden_state
        args = [given.get(name) for name in names[: names.index("attention_mask") + 1]]
        assert torch.equal(model(*args, use_cache=False, **keep).last_hidden_state, named)


def test_the_message_names_the_remedy():
    model = convert(tiny("llama"), log_n=8)
    remedy = "subtract the first position of the sequence, or omit position_ids"
    with pytest.raises(ValueError, match=re.escape(remedy) + "$"):
        model(tokens(), position_ids=torch.arange(SEQLEN)[None] + 5, use_cache=False)
