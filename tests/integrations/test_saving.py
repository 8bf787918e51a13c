"""Tests converted models that are saved and loaded: by this package, by transformers alone, and by its AutoModel
classes.

test_options.py tests that every option is saved and read again.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import transformers
from families import VERSION, logits, schemes, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained, register_auto_classes, revert
from flashrope.integrations.transformers.conversion import AUTO_CLASSES
from flashrope.integrations.transformers.conversion_plan import SAVED
from small_models import vary
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

NOT_CONVERTED = "model: expected a converted model, got one that was loaded or built from the configuration of a conv"
CHANGES = dict(leaky_rerope=(6, 4.0), log_n=12, hope=48)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (folder of a model that was saved under another scheme, its logits)."""
    folder = tmp_path_factory.mktemp("changed")
    model = convert(tiny("llama"), **CHANGES)
    model.save_pretrained(folder)
    return folder, logits(model, tokens())


# ---- by this package


def test_from_pretrained_converts_as_it_was_saved(saved):
    folder, expected = saved
    model = from_pretrained(folder)
    assert torch.equal(logits(model, tokens()), expected)
    assert schemes(model) == [Rotary.hope(16, 48).rectify(6, 4.0).log_n(12)] * 3
    assert model.config._attn_implementation != SAVED


def test_from_pretrained_passes_its_arguments_on(saved):
    folder, _ = saved
    model, found = from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
    assert model.dtype == torch.float64 and not found["missing_keys"] and len(schemes(model)) == 3
    assert revert(model).config._attn_implementation == "eager"
    assert revert(from_pretrained(folder)).config._attn_implementation == "sdpa"
    decoder = from_pretrained(folder, auto_class=AutoModel)
    assert type(decoder).__name__ == "LlamaModel" and schemes(decoder) == schemes(from_pretrained(folder))


def test_other_attentions_than_sdpa(tmp_path):
    """A model that does not use sdpa can be saved too. The test uses gpt_oss, which does not support sdpa."""
    model = convert(tiny("gpt_oss"), log_n=12)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    assert revert(loaded).config._attn_implementation == "eager"


def test_saved_options_that_are_not_known(saved, tmp_path):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"flashrope": {"rerope": 6, "clipp": False}}))
    with pytest.raises(TypeError, match="options: expected names among rotary, .* got 'clipp'"):
        from_pretrained(tmp_path)


# ---- by transformers

ALONE = """
import sys, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
folder = sys.argv[1]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
for load in (
    lambda: AutoModelForCausalLM.from_pretrained(folder),
    lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa"),
    lambda: AutoModel.from_pretrained(folder),
    lambda: LlamaForCausalLM.from_pretrained(folder),
    lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)),
    lambda: pipeline("text-generation", folder, tokenizer=tokenizer),
):
    try:
        load()
        print("LOADED")
    except Exception as error:
        print(str(error).replace("\\n", " "))
assert "flashrope" not in sys.modules
"""


def alone(folder) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    return ran.stdout.splitlines()


def test_transformers_alone_refuses_a_changed_model(saved, tmp_path):
    """Without this package, transformers refuses a model that was saved under another scheme. The error has a line that
    loads it, and names a way to the stock model. Both work."""
    lines = alone(saved[0])
    assert lines and all('or delete the key "_attn_implementation" from its config.json' in line for line in lines)
    (code,) = {re.search("Load it with: (import .*?) --", line)[1] for line in lines}
    namespace: dict = {}
    exec(code.replace("FOLDER", str(saved[0])), namespace)
    assert torch.equal(logits(namespace["model"], tokens()), saved[1])
    config = json.loads((saved[0] / "config.json").read_text())
    assert not {"/", "|"} & set(config["_attn_implementation"]) and "flash" not in config["_attn_implementation"]
    del config["_attn_implementation"]
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens()), logits(tiny("llama"), tokens())
    )


def test_transformers_alone_loads_a_model_with_its_own_scheme(tmp_path):
    """After a conversion without options, or after a conversion and a revert, the saved configuration is that of the
    stock model."""
    model = tiny("llama")
    model.save_pretrained(tmp_path / "stock")
    convert(model).save_pretrained(tmp_path / "same")
    convert(model, rerope=6)
    revert(model).save_pretrained(tmp_path / "reverted")
    stock = (tmp_path / "stock" / "config.json").read_text()
    assert (tmp_path / "same" / "config.json").read_text() == stock
    assert (tmp_path / "reverted" / "config.json").read_text() == stock
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "same", attn_implementation="sdpa")
    assert torch.equal(logits(model, tokens()), logits(tiny("llama"), tokens()))


def test_loaded_without_convert(saved):
    """If this package is imported, transformers loads the model without converting it. The first forward then raises an
    error."""
    folder, expected = saved
    for load in (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained):
        model = load(folder)
        with pytest.raises(ValueError, match=NOT_CONVERTED):
            model(tokens())
        with pytest.raises(ValueError, match="from_pretrained"):
            model.generate(tokens(), max_new_tokens=2)
        assert torch.equal(logits(convert(model), tokens()), expected)
        assert torch.equal(logits(revert(model), tokens()), logits(tiny("llama"), tokens()))
    model = revert(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(logits(model, tokens()), logits(tiny("llama"), tokens()))
    assert not hasattr(model.config, "flashrope")


@pytest.mark.parametrize("build", [AutoModelForCausalLM.from_config, LlamaForCausalLM, "dict"])
@pytest.mark.parametrize("options", [{}, CHANGES])
def test_a_model_made_from_a_converted_models_configuration(build, options):
    """A model that is made from a converted model's configuration raises an error in its first forward. Both convert
    and revert make it usable."""
    config = convert(tiny("llama"), **options).config
    if build == "dict":
        config, build = LlamaConfig(**config.to_dict()), LlamaForCausalLM
    model = vary(build(copy.deepcopy(config)).float().eval())
    if model.config._attn_implementation != "sdpa":  # to_dict omits the attention if the scheme is unchanged
        with pytest.raises(ValueError, match=NOT_CONVERTED):
            model(tokens())
    stock = logits(revert(copy.deepcopy(model)), tokens())
    converted = convert(model)
    assert torch.allclose(logits(converted, tokens()), stock, atol=1e-4) == (not options)
    assert torch.equal(logits(revert(converted), tokens()), stock)


# transformers 5.1 to 5.18 ignores classes that are registered for a configuration class of transformers itself.
REGISTERS = not (5, 1) <= VERSION < (5, 19)


def test_a_version_that_does_not_register():
    if not REGISTERS:
        with pytest.raises(ValueError, match="transformers: expected a version whose AutoModel.register accepts Lla"):
            register_auto_classes("llama")


@pytest.fixture
def registered():
    if not REGISTERS:
        pytest.skip(f"transformers {transformers.__version__} does not register classes for its own configurations")
    mappings = [getattr(transformers, name)._model_mapping for name in AUTO_CLASSES]
    before = [dict(mapping._extra_content) for mapping in mappings]
    register_auto_classes("llama")
    yield
    for mapping, content in zip(mappings, before, strict=True):
        mapping._extra_content.clear()
        mapping._extra_content.update(content)


def test_auto_classes(registered, saved, tmp_path):
    folder, expected = saved
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is LlamaForCausalLM and torch.equal(logits(model, tokens()), expected)
    assert revert(model).config._attn_implementation == "sdpa"
    assert len(schemes(AutoModel.from_pretrained(folder))) == 3
    tiny("llama").save_pretrained(tmp_path)
    assert not schemes(AutoModelForCausalLM.from_pretrained(tmp_path))  # no options: a stock model
    assert type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))) is LlamaForCausalLM
    with pytest.raises(ValueError, match="model_types: expected names among .*; got 'gpt2'"):
        register_auto_classes("gpt2")


def test_pipeline(registered, saved):
    from tokenizers import Tokenizer, models

    folder, expected = saved
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    run = transformers.pipeline("text-generation", str(folder), tokenizer=tokenizer)
    assert torch.equal(logits(run.model, tokens()), expected)


# ---- what print shows


def test_print_shows_the_scheme():
    model = tiny("llama")
    stock = repr(model)
    convert(model)
    assert "converted by flashrope: the same scheme, raw keys in the cache" in repr(model)
    convert(model, rerope=6, log_n=True)
    assert "converted by flashrope: rerope=6, log_n=64" in repr(model)
    assert "distance: d for 0 <= d < 6; 6 for d >= 6" in repr(model)
    assert repr(revert(model)) == stock


# ---- what a second convert does


def test_a_convert_without_options_keeps_the_last_ones_and_says_so():
    model = convert(tiny("llama"), rerope=6, log_n=12)
    with pytest.warns(UserWarning, match=r"convert: the model keeps rerope=6, log_n=12 .* revert\(model\)"):
        convert(model)
    assert schemes(model) == [Rotary.rope(16).rectify(6).log_n(12)] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(revert(model))
        assert schemes(convert(model)) == [Rotary.rope(16)] * 3


def test_a_saved_model_is_converted_without_a_warning(saved):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convert")
        convert(AutoModelForCausalLM.from_pretrained(saved[0]))
