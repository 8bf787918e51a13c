"""Tests that converted models compile to one graph, with torch.compile(fullgraph=True) and torch.export, wherever the
stock model does."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
from families import PACKED, close, logits, padded, static, tiny, tokens
from flashrope.integrations.transformers import convert

LAYERS = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": lambda: convert(tiny("llama", num_hidden_layers=1), rerope=6, log_n=12),
    "mistral": lambda: convert(tiny("mistral", num_hidden_layers=1)),
    "gemma3_text": lambda: convert(tiny("gemma3_text", **LAYERS)),
}
CALLS = {
    "plain": {},
    "positions": dict(position_ids=torch.arange(28).expand(2, -1)),
    "packed": dict(position_ids=PACKED),
    "left": dict(mask=padded()),
    "right": dict(mask=padded(left=0, right=5)),
}


def compiled(model, backend: str = "eager"):
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    "name, call", [*(("gemma3_text", call) for call in CALLS), ("llama", "left"), ("mistral", "plain")]
)
def test_without_a_cache(name, call):
    model = MODELS[name]()
    expected = logits(model, tokens(), **CALLS[call])
    assert close(logits(compiled(model), tokens(), **CALLS[call]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_one_graph_for_every_packing(name):
    """One graph serves every packing, because the starts of the sequences are inputs of the graph."""
    model = MODELS[name]()
    graph = compiled(model)
    for lengths in ((11, 12, 5), (28,), (1, 1, 26)):
        positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1).contiguous()
        with torch.compiler.set_stance("default" if lengths == (11, 12, 5) else "fail_on_recompile"):
            found = logits(graph, tokens(), position_ids=positions)
        assert close(found, logits(model, tokens(), position_ids=positions))


@pytest.mark.parametrize("name", [name for name in MODELS if name == "gemma3_text" or families.VERSION >= (5, 0)])
@pytest.mark.parametrize("mask", [None, padded()], ids=["whole", "padded"])
def test_steps_with_a_static_cache(name, mask):
    """Steps with a static cache compile to one graph if they are compiled as ``generate`` compiles them. In
    transformers 4.57 the test leaves out models whose layers are all of one kind, because the stock model does not
    compile to one graph either."""
    model, ids = MODELS[name](), tokens()
    expected = logits(model, ids, mask)[:, 20:23]
    cache, found = static(model), []
    graph = compiled(model)
    with torch.no_grad():
        model(ids[:, :20], attention_mask=None if mask is None else mask[:, :20], past_key_values=cache)
        for at in range(20, 23):
            seen = None if mask is None else torch.nn.functional.pad(mask[:, : at + 1], (0, families.SEQLEN + 7 - at))
            found.append(graph(ids[:, at : at + 1], attention_mask=seen, past_key_values=cache).logits)
    assert close(torch.cat(found, 1), expected)


@pytest.mark.parametrize("name, call", [("llama", "plain"), ("llama", "left"), ("gemma3_text", "packed")])
def test_gradients(name, call):
    model, arguments = MODELS[name]().train(), dict(CALLS[call])
    arguments["attention_mask"] = mask = arguments.pop("mask", None)
    labels = tokens() if mask is None else tokens().masked_fill(mask == 0, -100)

    def gradients(run):
        model.zero_grad()
        run(tokens(), labels=labels, use_cache=False, **arguments).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients(model)
    found = gradients(compiled(model, "aot_eager"))
    assert found.keys() == expected.keys()
    assert all(close(found[name], grad, 1e-5 * max(1.0, float(grad.abs().max()))) for name, grad in expected.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, padded()], ids=["whole", "padded"])
def test_export(name, mask):
    model = MODELS[name]()
    arguments = {"use_cache": False} | ({} if mask is None else {"attention_mask": mask})
    with torch.no_grad():
        program = torch.export.export(model, (tokens(),), kwargs=arguments, strict=False)
        found = program.module()(tokens(), **arguments).logits
    assert close(found if mask is None else found * mask[..., None], logits(model, tokens(), mask))
    assert "flashrope.attention" in str(program.graph)


@pytest.mark.slow
def test_inductor():
    model = MODELS["gemma3_text"]()
    expected = logits(model, tokens(), padded())
    assert close(logits(compiled(model, "inductor"), tokens(), padded()), expected)


def test_a_graph_refuses_what_it_cannot_express():
    """A graph raises an error for a mask that it cannot express. The error cannot name the row."""
    holes = torch.arange(56).view(2, 28) % 5 > 0
    graph = compiled(MODELS["mistral"](), "aot_eager")
    with pytest.raises(RuntimeError, match="attention_mask: expected sequences without gaps"):
        logits(graph, tokens(), holes)
    with pytest.raises(RuntimeError, match="position_ids do not match"):
        graph(tokens(), position_ids=torch.arange(28)[None] + 3, attention_mask=padded())
