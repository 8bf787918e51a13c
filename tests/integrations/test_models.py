"""Tests converted models that are reverted, copied, wrapped, quantized, cast or trained with the library's Trainer."""

import copy
import io
import pickle
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import CALLS, COMMON, FAMILIES, RUNS, SEQLEN, close, logits, padded, tiny, tokens
from flashrope.integrations.transformers import convert, revert

# ---- revert and copies


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2"])
def test_revert_gives_back_the_stock_model(name):
    model = tiny(name)
    before, weights = {run: call(model) for run, call in RUNS.items()}, copy.deepcopy(model.state_dict())
    text = model.config.to_json_string()
    convert(model, hope=32)
    assert not close(RUNS["uncached"](model), before["uncached"], 0.01)
    assert revert(model) is model
    assert all(torch.equal(call(model), before[run]) for run, call in RUNS.items())
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values(), strict=True))
    assert model.config._attn_implementation == "sdpa" and model.config.to_json_string() == text
    for module in model.modules():
        assert not (module._forward_hooks or hasattr(module, "_flashrope"))
        assert len(module._forward_pre_hooks) == (module is model.model)  # the one hook refuses caches of raw keys
    revert(model)  # nothing to do
    revert(convert(model))
    assert len(model.model._forward_pre_hooks) == 1


def test_convert_again_replaces_the_scheme():
    model = tiny("llama")
    stock = logits(model, tokens())
    changed = logits(convert(model, rerope=4, log_n=8), tokens())
    assert not close(changed, stock, 0.1)
    assert close(logits(convert(model, rerope=SEQLEN), tokens()), stock)
    assert model.config.flashrope == {"rerope": SEQLEN}
    assert torch.equal(logits(revert(model), tokens()), stock)


def test_a_copy_can_be_reverted_alone():
    model = tiny("llama")
    stock = logits(model, tokens())
    convert(model, rerope=4)
    other = copy.deepcopy(model)
    changed = logits(model, tokens())
    assert torch.equal(logits(other, tokens()), changed)
    assert torch.equal(logits(revert(other), tokens()), stock)
    assert torch.equal(logits(model, tokens()), changed)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model(how):
    model = convert(tiny("gemma3_text"), hope=32)
    file = io.BytesIO()
    pickle.dump(model, file) if how == "pickle" else torch.save(model, file)
    file.seek(0)
    other = pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    assert torch.equal(logits(revert(other), tokens()), logits(tiny("gemma3_text"), tokens()))


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_any_attention_that_a_model_was_loaded_with(implementation):
    model = tiny("llama")
    stock = logits(model, tokens())
    model.set_attn_implementation(implementation)
    assert close(logits(convert(model), tokens()), stock)
    assert revert(model).config._attn_implementation == implementation


# ---- models that are wrapped or changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    """In 16-bit types, a converted model is as close to the float32 model as transformers' own attention."""
    exact = logits(tiny("llama"), tokens(), padded(), calls=CALLS)

    def error(model):
        return float((logits(model, tokens(), padded(), calls=CALLS).float() - exact).abs().max())

    stock = error(tiny("llama").to(dtype))
    assert error(convert(tiny("llama").to(dtype))) <= 1.5 * stock
    assert error(convert(tiny("llama")).to(dtype)) <= 1.5 * stock


def test_the_decoder_inside_a_larger_model():
    """A converted gemma3 serves text. It refuses images, because gemma3 attends to image tokens in both directions."""
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config={**COMMON, **FAMILIES["gemma3_text"]},
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=60,
        eoi_token_index=61,
        image_token_index=62,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    stock = logits(model, tokens(), padded())
    assert close(logits(convert(model), tokens(), padded()), stock)
    ids = tokens()
    ids[:, 3:7] = 62
    with pytest.raises(ValueError, match="mask_function: .* got or_masks"):
        model(ids, token_type_ids=(ids == 62).long(), pixel_values=torch.zeros(2, 3, 28, 28))


def test_quantized_linears():
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that quantization will move to another package
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    stock = logits(model, tokens(), padded(), calls=CALLS)
    convert(model)
    assert "quantized" in type(model.model.layers[0].self_attn.q_proj).__module__
    # The bound is large because a change of 1e-7 can round to the next int8 value.
    assert close(logits(model, tokens(), padded(), calls=CALLS), stock, 0.1)
    assert torch.equal(logits(revert(model), tokens(), padded(), calls=CALLS), stock)


def test_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = convert(tiny("llama"), rerope=6)
    changed = logits(model, tokens())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(logits(wrapped, tokens()), changed)  # LoRA starts without effect
    assert torch.equal(logits(wrapped.merge_and_unload(), tokens()), changed)

    model = peft.get_peft_model(
        tiny("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
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
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens(6)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = train(tiny("llama"))
    assert len(stock) == 3 and train(convert(tiny("llama"))) == pytest.approx(stock, abs=2e-4)
