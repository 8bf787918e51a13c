"""Tests what convert and converted models refuse: errors name the argument, what was expected and what was given."""

import re

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
from families import ROPE_TYPES, SEQLEN, logits, padded, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, revert
from flashrope.integrations.transformers.conversion_plan import NAME
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, DynamicCache


# ---- refusals
def test_families_that_are_refused():
    with pytest.raises(ValueError, match="model: expected one of the types .* got 'internlm3'.* untested=True"):
        model = tiny("llama")
        model.config.model_type = model.model.config.model_type = "internlm3"
        convert(model)
    with pytest.raises(ValueError, match="hunyuan_v1_dense scales every channel .* after their rotation"):
        convert(tiny("hunyuan_v1_dense", head_dim=16), untested=True)
    with pytest.raises(ValueError, match="phimoe keeps longrope's table for short texts"):
        convert(tiny("phimoe", num_local_experts=4))
    with pytest.raises(ValueError, match="attn_logit_softcapping = 50.0"):
        convert(tiny("gemma2", attn_logit_softcapping=50.0))
    with pytest.raises(ValueError, match="found 0 in GPT2LMHeadModel"):
        convert(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2)))
    with pytest.raises(ValueError, match="one transformers decoder with a rotary embedding, found 2 in Moonshine"):
        sizes = dict(
            hidden_size=16,
            intermediate_size=16,
            encoder_num_hidden_layers=1,
            decoder_num_hidden_layers=1,
            encoder_num_attention_heads=2,
            decoder_num_attention_heads=2,
        )
        convert(AutoModelForSpeechSeq2Seq.from_config(AutoConfig.for_model("moonshine", **sizes)))
    with pytest.raises(TypeError, match="model: expected a torch module, got str"):
        convert("meta-llama/Llama-3.2-1B")
    for name, reason in families.REFUSED_BY_VERSION.items():
        with pytest.raises(ValueError, match=reason):
            convert(tiny(name))


@pytest.mark.parametrize("untested", [False, True])
@pytest.mark.parametrize(
    "name, changes, width, layer",
    [("llama", dict(head_dim=520), 520, 0), ("gemma4_text", dict(head_dim=256, global_head_dim=768), 768, 1)],
)
def test_widths_that_the_kernels_do_not_take(name, changes, width, layer, untested):
    if name not in families.CAUSAL_LM:
        pytest.skip(f"transformers {families.VERSION} has no {name}")
    model = tiny(name, **changes)
    stock = logits(model, tokens())
    message = (
        rf"model: head_dim = {width} of layer {layer} is not supported \(the kernels take .* up to 512\), got '{name}'"
    )
    with pytest.raises(ValueError, match=message):
        convert(model, untested=untested)
    assert torch.equal(logits(model, tokens()), stock) and model.config._attn_implementation == "sdpa"
    assert not any("_flashrope" in attribute for module in model.modules() for attribute in vars(module))


def test_widths_that_the_kernels_of_the_device_do_not_take(monkeypatch):
    """convert refuses a model on a GPU if its head_dim is too large for the Triton kernels, even if the CPU's kernels
    take it."""
    from flashrope.backends import registry

    backend = registry.load_backend("auto")
    monkeypatch.setattr(backend, "unsupported_reason", lambda q, cached=False: "too wide" if q.shape[-1] > 256 else "")
    with pytest.raises(
        ValueError, match=r"model: head_dim = 260 of layer 0 is not supported \(too wide\), got 'llama'"
    ):
        convert(tiny("llama", head_dim=260))
    convert(tiny("llama", head_dim=256))


def test_a_table_that_is_not_the_configurations():
    model = tiny("llama")
    model.config.rope_theta = 500_000.0
    if getattr(model.config, "rope_parameters", None):
        model.config.rope_parameters["rope_theta"] = 500_000.0
    with pytest.raises(
        ValueError, match="model: expected a rotary embedding of the frequencies that its configuration gives"
    ):
        convert(model)
    if families.VERSION < (5, 0):
        with pytest.raises(ValueError, match="config: expected original_max_position_embeddings, from which"):
            convert(tiny("llama", rope_scaling=dict(ROPE_TYPES["longrope"])))


T, V = TypeError, ValueError


@pytest.mark.parametrize(
    "name, asked, error, message",
    [
        ("llama", dict(reroppe=6), T, "options: expected names among rotary, .* got 'reroppe'; did you mean rerope"),
        ("llama", dict(temperature=2), T, "got 'temperature'$"),
        ("llama", dict(factor=4.0), T, r"factor: renamed, expected leaky_rerope=\(window, 4.0\), got factor=4.0"),
        (
            "llama",
            dict(window=6, factor=4.0),
            T,
            r"window and factor: renamed, expected leaky_rerope=\(6, 4.0\), got window=6, f",
        ),
        ("llama", dict(window=6), T, "window: renamed, expected rerope=6, got window=6"),
        ("llama", dict(hope_train_length=6), T, "hope_train_length: renamed, expected hope=6, got hope_train_length=6"),
        ("llama", dict(rerope=-1), V, "rerope: expected a non-negative integer, got -1"),
        ("llama", dict(log_n=1), V, "log_n: expected True or a length of more than 1, got 1"),
        ("llama", dict(log_n="64"), T, "log_n: expected True or a length of more than 1, got '64'"),
        ("llama", dict(hope=0), V, "hope: expected a positive finite number, got 0"),
        ("llama", dict(hope="48"), T, "hope: expected a number, got '48'"),
        ("llama", dict(leaky_rerope=(6, 0)), V, "leaky_rerope: factor: expected a positive finite number, got 0"),
        ("llama", dict(rotary="rope"), V, "rotary: expected the text of a Rotary, got 'rope'"),
        (
            "llama",
            dict(rotary=3),
            T,
            "rotary: expected a Rotary, its text, or a dict with one for each layer type, got int",
        ),
        ("llama", dict(rotary=Rotary.rope(64)), V, "rotary: expected head_dim 16 of layer 0, got 64"),
        (
            "llama",
            dict(rotary={"full": Rotary.rope(16)}),
            V,
            r"rotary: expected one Rotary, because all layers of this model .* got a dict with \['full'\]",
        ),
        (
            "llama",
            dict(rotary={}),
            V,
            r"rotary: expected one Rotary, because all layers of this model are of one type, got a dict with \[\]",
        ),
        (
            "gemma3_text",
            dict(rotary={}),
            V,
            r"rotary: expected the layer types \['full_attention', 'sliding_attention'\], got \[\]",
        ),
        (
            "glm4",
            dict(rotary=Rotary.rope(16)),
            V,
            "rotary: expected interleaved=True, because the model pairs .*, got False",
        ),
        (
            "mistral",
            dict(rerope=6),
            V,
            "rerope: expected a layer that sees all keys, got a sliding window of 8 keys in every layer",
        ),
        (
            "mistral",
            dict(log_n=32),
            V,
            "log_n: expected a layer that sees all keys, got a sliding window of 8 keys in every layer",
        ),
    ],
)
def test_bad_arguments(name, asked, error, message):
    model = tiny(name)
    stock = logits(model, tokens())
    with pytest.raises(error, match=message):
        convert(model, **asked)
    assert torch.equal(logits(model, tokens()), stock) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "asked, message",
    [
        (dict(rerope=0), "rerope: expected more than 0, got 0; every distance is seen as 0, as in Rotary.none"),
        (
            dict(leaky_rerope=(64, 4.0)),
            "leaky_rerope: expected a window of less than the training length 64, got 64; .* 7.1% .* half .* 82.4%",
        ),
        (dict(rerope=100, log_n=True), "rerope: expected a window of less than the training length 64, got 100"),
        (dict(rerope=63), None),
        (dict(leaky_rerope=(0, 4.0)), None),  # position interpolation
    ],
)
def test_windows_that_do_not_help_warn(asked, message, recwarn):
    convert(tiny("llama"), **asked)
    found = [str(each.message) for each in recwarn if "rerope:" in str(each.message)]
    assert len(found) == (message is not None) and all(re.match(message, each) for each in found), found


def prefix_lm(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx < 4


@pytest.mark.parametrize(
    "call, message",
    [
        (
            dict(attention_mask=torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool)),
            r"attention_mask: .* a mask of shape \(2, 1, 28, 28\)",
        ),
        (
            dict(attention_mask=torch.ones(2, SEQLEN - 3, dtype=torch.long)),
            r"attention_mask: expected one number for .* \(2, 25\)",
        ),
        (
            dict(attention_mask=torch.arange(2 * SEQLEN).view(2, SEQLEN) % 5 > 0),
            "attention_mask: .* got zeros between ones in row 0",
        ),
        (
            dict(position_ids=torch.arange(SEQLEN)[None] * 2, use_cache=True),
            "position_ids: .* 1, .* got 2 in row 0, column 1",
        ),
        (dict(position_ids=families.PACKED, use_cache=True), "packed sequences need use_cache=False"),
        (
            dict(position_ids=torch.arange(SEQLEN)[None] + 3, attention_mask=padded()),
            "position_ids: .* got 6 in row 0, column 3",
        ),
    ],
)
def test_bad_calls(call, message):
    model = convert(tiny("llama"))
    with pytest.raises(ValueError, match=message):
        model(tokens(), **call)


def test_packing_told_by_lengths_alone():
    model, lengths = convert(tiny("llama")), torch.tensor([0, 11, 23, SEQLEN], dtype=torch.int32)
    arguments = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=12, max_length_k=12, use_cache=False)
    with pytest.raises(
        ValueError, match="cu_seq_lens_q: expected position_ids as well, .* got 3 sequences without position_ids"
    ):
        model(tokens(1), **arguments)
    model(tokens(1), position_ids=families.PACKED[:1], **arguments)


def test_positions_over_a_cache():
    model = convert(tiny("llama"))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens()[:, :9], past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids: expected the token's slot in the cache, 9, .* got 4"):
            model(tokens()[:, 9:10], past_key_values=cache, position_ids=torch.tensor([[4]]))
        with pytest.raises(ValueError, match="zeros between ones in row 1"):  # the call continues a right-padded prompt
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
    except TypeError:  # the argument's name in 4.57
        with pytest.raises(ValueError, match="mask_function: expected causal.* got or_masks"):
            create_causal_mask(input_embeds=hidden, cache_position=torch.arange(SEQLEN), **arguments)


def test_packing_that_the_masks_do_not_see():
    """Packed sequences that the masks do not separate are refused. The stock gpt_oss lets them see one another."""
    model = tiny("gpt_oss")
    alone = logits(model, tokens()[:, 11:23])
    assert not families.close(logits(model, tokens(), position_ids=families.PACKED)[:, 11:23], alone, 0.1)
    with pytest.raises(ValueError, match="row 0, column 11; this model does not support packed"):
        logits(convert(model), tokens(), position_ids=families.PACKED)


@pytest.mark.parametrize(
    "keyword, value, message",
    [
        ("softcap", 30.0, "softcap: expected None"),
        ("s_aux", torch.zeros(3), r"sinks: expected shape \(4,\), one number per head of q, got \(3,\)"),
        ("dropout", 0.1, "attention_dropout: expected 0"),
        ("is_causal", False, "is_causal"),
        ("sliding_window", 5, "sliding_window: layer 0 was converted with None, its forward asks for 5"),
    ],
)
def test_what_a_layer_may_not_ask_for(keyword, value, message):
    model = convert(tiny("llama"))
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    attend = AttentionInterface()[NAME]
    with pytest.raises(ValueError, match=message):
        attend(model.model.layers[0].self_attn, q, k, k, None, **{keyword: value})


def test_a_layer_that_was_not_converted():
    model = tiny("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"model: expected a converted model, got one .* layer 0 \(LlamaAttention\)"):
        model(tokens())


def test_another_attention_chosen_after_converting():
    model = tiny("llama")
    stock = logits(model, tokens())
    convert(model).set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match="attn_implementation: expected 'rotary_bands' in a converted model, got 'sdpa'"
    ):
        model(tokens())
    assert torch.equal(logits(revert(model), tokens()), stock)
