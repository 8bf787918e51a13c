"""Hugging Face models, converted: held against the library's own attention, or against the reference where the scheme changes."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
from families import CALLS, FAMILIES, PADDING, RUNS, SEQLEN, logits, padded, static, tiny, tokens
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache

from flashrope import Rotary
from flashrope.backends import Call, reference
from flashrope.integrations import transformers as integration
from flashrope.integrations.transformers import convert, revert, suggest

BOUND = 1e-5  # of logits of size 3, float32
HERE = [name for name in FAMILIES if name not in families.REFUSED_BY_VERSION]
DOCS = Path(__file__).parents[2] / "docs" / "integration.md"


def converted(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "rotary_bands")]


def schemes(model) -> list[Rotary]:
    return [module.rotary_bands.rotary for module in converted(model)]


def close(a, b, bound=BOUND) -> bool:
    return float((a - b).abs().max()) <= bound


# ---- the model's own scheme: the same logits ------------------------------------------------------------------------------


def test_every_family_is_tested():
    assert set(FAMILIES) == integration.FAMILIES


@pytest.mark.parametrize("name", HERE)
def test_logits_are_the_stock_models(name):
    found = families.difference(name)
    assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("name", HERE)
def test_logits_depend_on_what_is_compared(name):
    """Without rotation, or without the mask, logits move by far more than the bound."""
    model = tiny(name)
    stock = {run: RUNS[run](model) for run in ("uncached", "padded", "packed")}
    assert not close(stock["padded"], stock["uncached"] * padded()[..., None], 0.1)
    assert not close(stock["packed"], stock["uncached"], 0.1)
    convert(model)
    for module in converted(model):
        none, window = Rotary.none(module.rotary_bands.rotary.head_dim), module.rotary_bands.window
        module.rotary_bands.rotary = none if window is None else none.local(window)
    assert not close(RUNS["uncached"](model), stock["uncached"], 0.1)


ROPE_TYPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3": dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=16),
    "longrope": dict(rope_type="longrope", factor=4.0, short_factor=[1.0 + m / 8 for m in range(8)],
                     long_factor=[1.0 + m for m in range(8)], original_max_position_embeddings=16),
}


def scaled(kind: str, **changes):
    """A llama whose configuration asks for the rope type, the trained length where either version of transformers looks."""
    scaling, lengths = dict(ROPE_TYPES[kind]), {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    if kind == "longrope":
        lengths["original_max_position_embeddings"] = 16
    return tiny("llama", rope_scaling=scaling, **lengths, **changes)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_rope_types(kind):
    model = scaled(kind)
    within, beyond = tokens(seqlen=14), tokens()

    def run():
        return (logits(model, within), logits(model, within, calls=[9, 10, 13, 14]), logits(model, beyond),
                logits(model, beyond, padded()))

    stock = run()
    convert(model)
    assert all(map(close, run(), stock))
    assert close(logits(model, within), stock[0])  # the table is the trained length's again


@pytest.mark.parametrize("which", ["dynamic", "longrope", "phi3"])
def test_tables_that_grow_over_a_cache(which):
    """The cache holds raw keys, so none is rotated by an older table. One layer: a second one's keys come of older tables."""
    if which == "phi3":  # with sliding windows
        scaling = {"type": "longrope"} | {key: ROPE_TYPES["longrope"][key] for key in ("short_factor", "long_factor")}
        model = tiny(which, rope_scaling=scaling, original_max_position_embeddings=16, num_hidden_layers=1)
    else:
        model = scaled(which, num_hidden_layers=1)
    whole = logits(model, tokens())
    convert(model)
    assert close(logits(model, tokens()), whole)
    for cache in (None, static(model)):
        assert close(logits(model, tokens(), calls=CALLS, cache=cache)[:, -1], whole[:, -1])


# ---- generate -------------------------------------------------------------------------------------------------------------

GENERATE = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True),
    "beams": dict(do_sample=False, num_beams=3),
    "static": dict(do_sample=False, cache_implementation="static", disable_compile=True),
    "no cache": dict(do_sample=False, use_cache=False),
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_generate(name, how):
    model, ids = tiny(name), tokens(seqlen=14)

    def run():
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=padded(14), max_new_tokens=6, min_new_tokens=6, **GENERATE[how])

    stock = run()
    convert(model)
    assert torch.equal(run(), stock)


@pytest.mark.parametrize("changes", [dict(window=6, log_n=16), dict(window=6, factor=4.0), dict(hope_train_length=24)])
def test_a_row_with_padding_is_the_row_alone(changes):
    model = convert(tiny("llama"), **changes)
    ids, mask = tokens(), padded()
    alone = logits(model, ids[:1, PADDING:])
    for calls, cache in ((None, None), (CALLS, None), (CALLS, static(model))):
        assert close(logits(model, ids, mask, cache=cache, calls=calls)[:1, PADDING:], alone)


# ---- revert, copies, saving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2"])
def test_revert_gives_back_the_stock_model(name):
    model = tiny(name)
    before, weights = {run: call(model) for run, call in RUNS.items()}, copy.deepcopy(model.state_dict())
    text = model.config.to_json_string()
    convert(model, hope_train_length=32)
    assert not close(RUNS["uncached"](model), before["uncached"], 0.01)
    assert revert(model) is model
    assert all(torch.equal(call(model), before[run]) for run, call in RUNS.items())
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values(), strict=True))
    assert model.config._attn_implementation == "sdpa" and model.config.to_json_string() == text
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or hasattr(module, "rotary_bands"))
    revert(model)  # nothing to do


def test_convert_again_replaces_the_scheme():
    model = tiny("llama")
    stock = logits(model, tokens())
    changed = logits(convert(model, window=4), tokens())
    assert not close(changed, stock, 0.1)
    assert close(logits(convert(model, window=SEQLEN), tokens()), stock)
    assert torch.equal(logits(revert(model), tokens()), stock)


def test_a_copy_can_be_reverted_alone():
    model = tiny("llama")
    stock = logits(model, tokens())
    convert(model, window=4)
    other = copy.deepcopy(model)
    changed = logits(model, tokens())
    assert torch.equal(logits(other, tokens()), changed)
    assert torch.equal(logits(revert(other), tokens()), stock)
    assert torch.equal(logits(model, tokens()), changed)


@pytest.mark.parametrize("asked", [dict(window=6, factor=4.0, log_n=True), dict(hope_train_length=32),
                                   dict(rotary=Rotary.rope(16).yarn(4.0, 64).rectify(8))], ids=["leaky", "hope", "rotary"])
def test_the_scheme_travels_with_the_model(asked, tmp_path):
    model = convert(tiny("llama"), **asked)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert not close(logits(loaded, tokens()), expected, 0.01)  # until converted it is a stock model
    assert torch.equal(logits(convert(loaded), tokens()), expected)
    revert(loaded).save_pretrained(tmp_path / "stock")
    assert schemes(convert(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))) == [Rotary.rope(16)] * 3


# ---- changes: the scheme that is asked for, in the layers it is meant for -------------------------------------------------


def test_changes_build_the_schemes():
    rope = Rotary.rope(16)
    assert schemes(convert(tiny("llama"), window=6)) == [rope.rectify(6)] * 3
    assert schemes(convert(tiny("llama"), window=6, factor=4.0, log_n=32)) == [rope.rectify(6, 4.0).log_n(32, clip=True)] * 3
    assert schemes(convert(tiny("llama"), log_n=True)) == [rope.log_n(64, clip=True)] * 3
    assert schemes(convert(tiny("llama"), hope_train_length=48)) == [Rotary.hope(16, 48)] * 3
    yarn = dict(ROPE_TYPES["yarn"])
    assert schemes(convert(tiny("llama", rope_scaling=yarn), hope_train_length=48)) == [Rotary.hope(16, 48).yarn(4.0, 16)] * 3
    assert schemes(convert(tiny("llama"), rotary=rope.interpolate(2.0), log_n=32)) == [rope.interpolate(2.0).log_n(32)] * 3


def test_layers_that_differ():
    local = Rotary.rope(16, interleaved=True).local(8)
    assert schemes(convert(tiny("cohere2"), log_n=32)) == [local, local, Rotary.none(16).log_n(32)]
    found = schemes(convert(tiny("gemma3_text"), hope_train_length=48))
    assert [rotary.bands[-1].stop for rotary in found] == [8, 8, float("inf")]
    assert found[0].theta != found[2].theta and found[0].theta[-1] == 0
    rope = Rotary.rope(16, base=2_000_000.0)
    assert schemes(convert(tiny("smollm3"), window=6)) == [rope.rectify(6), rope.rectify(6), Rotary.none(16)]
    given = {"sliding_attention": rope, "full_attention": rope.interpolate(4.0)}
    assert schemes(convert(tiny("gemma3_text"), rotary=given)) == [rope.local(8), rope.local(8), rope.interpolate(4.0)]


@pytest.mark.parametrize("changes", [{}, dict(window=6), dict(window=6, factor=4.0, log_n=8), dict(hope_train_length=24)],
                         ids=str)
def test_a_layer_is_the_formula(changes):
    model = convert(tiny("llama"), **changes)
    layer = model.model.layers[0].self_attn
    seen = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, out.double()))
    layer.o_proj.register_forward_pre_hook(lambda module, args: seen.__setitem__("out", args[0]))
    logits(model, tokens())
    q, k, v = (seen[name].unflatten(-1, (-1, 16)) for name in ("q_proj", "k_proj", "v_proj"))
    expected, _ = reference.attention(q, k, v, Call(schemes(model)[0], True, 16 ** -0.5))
    assert close(seen["out"], expected.flatten(-2))


@pytest.mark.parametrize("changes", [dict(window=6, log_n=12), dict(window=6, factor=2.0), dict(hope_train_length=24)], ids=str)
def test_a_cache_changes_nothing(changes):
    model = convert(tiny("llama"), **changes)
    whole = logits(model, tokens())
    assert close(logits(model, tokens(), calls=CALLS), whole)
    assert close(logits(model, tokens(), calls=CALLS, cache=static(model)), whole)


# ---- training -------------------------------------------------------------------------------------------------------------


def gradients(model, mask=None, **kwargs) -> dict[str, torch.Tensor]:
    ids = tokens()
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, use_cache=False, **kwargs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2"])
@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
def test_gradients(name, case):
    model = tiny(name).train()
    mask = {"left": padded(), "right": padded(left=0, right=6)}.get(case)
    kwargs = {"position_ids": families.PACKED} if case == "packed" else {}
    stock = gradients(model, mask, **kwargs)
    mine = gradients(convert(model), mask, **kwargs)
    assert stock.keys() == mine.keys()
    for parameter, grad in stock.items():
        assert close(mine[parameter], grad, 1e-5 * max(1.0, float(grad.abs().max()))), parameter


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = convert(tiny("llama"), window=6).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients(model)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_autocast():
    model = tiny("llama")

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return logits(model, tokens(), padded(), calls=CALLS).float()

    stock = run()
    assert close(run(), stock, 0.0)
    convert(model)
    assert close(run(), stock, 0.15)  # bfloat16 keeps 8 bits of logits of size 3


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.slow)
                                              for case in ("left", "packed", "cached"))])
def test_compile(case):
    torch._dynamo.reset()
    model = convert(tiny("llama", num_hidden_layers=1), window=6)
    arguments = {"plain": {}, "left": dict(mask=padded()), "packed": dict(position_ids=families.PACKED),
                 "cached": dict(calls=[22, 23, 24])}[case]
    expected = logits(model, tokens(), **arguments)
    model.forward = torch.compile(model.forward, backend="eager" if case == "plain" else "aot_eager")
    assert close(logits(model, tokens(), **arguments), expected)


@pytest.mark.slow
def test_compile_with_gradients():
    torch._dynamo.reset()
    model = convert(tiny("llama"), window=6).train()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.forward = torch.compile(model.forward, backend="aot_eager")
    found = gradients(model)
    assert all(close(found[name], grad) for name, grad in expected.items())


# ---- models that are wrapped or changed -----------------------------------------------------------------------------------


def test_quantised_linears():
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own notices of where its quantisation moves
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    stock = logits(model, tokens(), padded(), calls=CALLS)
    convert(model)
    assert "quantized" in type(model.model.layers[0].self_attn.q_proj).__module__
    # A rounding to int8 that is moved by 1e-7 can fall to the other side.
    assert close(logits(model, tokens(), padded(), calls=CALLS), stock, 0.1)
    assert torch.equal(logits(revert(model), tokens(), padded(), calls=CALLS), stock)


def test_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    stock = logits(model, tokens(), padded())
    convert(model)
    assert close(logits(model, tokens(), padded()), stock)
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert all((parameter.grad is not None) == ("lora" in name) for name, parameter in model.named_parameters())
    revert(model)
    assert torch.equal(logits(model, tokens(), padded()), stock)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

    def train(model):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True, logging_steps=1)
        data = [{"input_ids": row, "labels": row} for row in tokens(6)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = train(tiny("llama"))
    assert len(stock) == 3 and train(convert(tiny("llama"))) == pytest.approx(stock, abs=2e-4)


# ---- refusals -------------------------------------------------------------------------------------------------------------


def test_families_that_are_refused():
    with pytest.raises(ValueError, match="model: expected one of the types .* got 'gpt_oss', which has attention sinks"):
        config = AutoConfig.for_model("gpt_oss", **{**families.COMMON, "num_local_experts": 2, "head_dim": 16})
        convert(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match="attn_logit_softcapping = 50.0"):
        convert(tiny("gemma2", attn_logit_softcapping=50.0))
    with pytest.raises(ValueError, match="found 0 in GPT2LMHeadModel"):
        convert(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2)))
    with pytest.raises(TypeError, match="model: expected a torch module, got str"):
        convert("meta-llama/Llama-3.2-1B")
    for name in families.REFUSED_BY_VERSION:
        with pytest.raises(ValueError, match="asks AttentionMaskInterface for its masks, got StableLmModel"):
            convert(tiny(name))


def test_a_table_that_is_not_the_configurations():
    model = tiny("llama")
    model.config.rope_theta = 500_000.0
    if getattr(model.config, "rope_parameters", None):
        model.config.rope_parameters["rope_theta"] = 500_000.0
    with pytest.raises(ValueError, match="model: expected a rotary embedding of the frequencies that its configuration gives"):
        convert(model)
    if families.VERSION < (5, 0):
        with pytest.raises(ValueError, match="config: expected original_max_position_embeddings beside the rope parameters"):
            convert(tiny("llama", rope_scaling=dict(ROPE_TYPES["longrope"])))


@pytest.mark.parametrize("name, asked, error, message", [
    ("llama", dict(windw=6), TypeError, "windw: convert takes rotary, window"),
    ("llama", dict(factor=4.0), ValueError, "factor: expected a window beside it"),
    ("llama", dict(window=-1), ValueError, "window: expected a non-negative integer, got -1"),
    ("llama", dict(hope_train_length=-2), ValueError, "hope_train_length: expected a positive length, got -2"),
    ("llama", dict(log_n=1), ValueError, "train_length: expected more than 1, got 1"),
    ("llama", dict(rotary="rope"), TypeError, "rotary: expected a Rotary or a dict of one per layer type, got str"),
    ("llama", dict(rotary=Rotary.rope(64)), ValueError, "rotary: expected head_dim 16 of layer 0, got 64"),
    ("llama", dict(rotary={"full": Rotary.rope(16)}), ValueError, r"rotary: expected the layer types \[\], got \['full'\]"),
    ("mistral", dict(window=6), ValueError, "window: expected .* layers see all keys, got layers with a sliding window of 8"),
    ("gemma3_text", dict(window=6), ValueError, "sliding window of 8"),
    ("mistral", dict(log_n=32), ValueError, "log_n: expected a layer that sees all keys, got a sliding window in every layer"),
])
def test_bad_arguments(name, asked, error, message):
    model = tiny(name)
    stock = logits(model, tokens())
    with pytest.raises(error, match=message):
        convert(model, **asked)
    assert torch.equal(logits(model, tokens()), stock) and model.config._attn_implementation == "sdpa"


def prefix_lm(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx < 4


@pytest.mark.parametrize("call, message", [
    (dict(attention_mask=torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool)), r"attention_mask: .* a mask of shape \(2, 1, 28, 28\)"),
    (dict(attention_mask=torch.ones(2, SEQLEN - 3, dtype=torch.long)), r"attention_mask: expected one number for .* \(2, 25\)"),
    (dict(attention_mask=torch.arange(2 * SEQLEN).view(2, SEQLEN) % 5 > 0), "attention_mask: .* got zeros between ones in row 0"),
    (dict(position_ids=torch.arange(SEQLEN)[None] * 2, use_cache=True), "position_ids: .* 1, .* got 2 in row 0, column 1"),
    (dict(position_ids=families.PACKED, use_cache=True), "packed sequences need use_cache=False"),
    (dict(position_ids=torch.arange(SEQLEN)[None] + 3, attention_mask=padded()), "position_ids: .* got 6 in row 0, column 3"),
])
def test_bad_calls(call, message):
    model = convert(tiny("llama"))
    with pytest.raises(ValueError, match=message):
        model(tokens(), **call)


def test_positions_over_a_cache():
    model = convert(tiny("llama"))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens()[:, :9], past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids: expected the token's place in the cache, 9, .* got 4"):
            model(tokens()[:, 9:10], past_key_values=cache, position_ids=torch.tensor([[4]]))
        with pytest.raises(ValueError, match="zeros between ones in row 1"):  # a prompt padded on the right, continued
            mask = torch.ones(2, 10, dtype=torch.long)
            mask[1, 6:9] = 0
            model(tokens()[:, 9:10], past_key_values=cache, attention_mask=mask)


def test_masks_that_the_kernels_cannot_express():
    from transformers.masking_utils import create_causal_mask

    model = convert(tiny("llama"))
    hidden = torch.zeros(2, SEQLEN, 64)
    arguments = dict(config=model.config, attention_mask=None, past_key_values=None, or_mask_function=prefix_lm)
    try:
        with pytest.raises(ValueError, match="mask_function: expected causal.* got or_masks"):
            create_causal_mask(inputs_embeds=hidden, **arguments)
    except TypeError:  # as 4.57 names it
        with pytest.raises(ValueError, match="mask_function: expected causal.* got or_masks"):
            create_causal_mask(input_embeds=hidden, cache_position=torch.arange(SEQLEN), **arguments)


@pytest.mark.parametrize("keyword, value, message", [
    ("softcap", 30.0, "softcap: expected None"), ("s_aux", torch.zeros(4), "has attention sinks"),
    ("dropout", 0.1, "attention_dropout: expected 0"), ("is_causal", False, "is_causal"),
    ("sliding_window", 5, "sliding_window: layer 0 was converted with None, its forward asks for 5")])
def test_what_a_layer_may_not_ask_for(keyword, value, message):
    model = convert(tiny("llama"))
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    attend = AttentionInterface()[integration.NAME]
    with pytest.raises(ValueError, match=message):
        attend(model.model.layers[0].self_attn, q, k, k, None, **{keyword: value})


def test_a_layer_that_was_not_converted():
    model = tiny("llama")
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(ValueError, match=r"model: layer 0 \(LlamaAttention\) was not converted; call convert\(model\)"):
        model(tokens())


# ---- suggest --------------------------------------------------------------------------------------------------------------


def test_suggest():
    model = tiny("llama")
    found = suggest(model, 256)
    assert found.changes == {"window": 32, "log_n": 64} and "half of the training length 64" in found.reason
    assert suggest(model.config, 64).changes == {}
    assert schemes(convert(model, **found.changes)) == [Rotary.rope(16).rectify(32).log_n(64, clip=True)] * 3
    with pytest.raises(ValueError, match="sliding windows of 8 in 3 of 3 layers"):
        suggest(tiny("mistral"), 256)
    with pytest.raises(ValueError, match="target_length: expected a positive integer, got 0"):
        suggest(model, 0)
    with pytest.raises(ValueError, match="config: expected max_position_embeddings"):
        suggest(object(), 16)


# ---- the page -------------------------------------------------------------------------------------------------------------


def test_the_pages_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("checkpoint")
    scope = {"path": "checkpoint"}
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), scope)
