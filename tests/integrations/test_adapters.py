"""Tests PEFT adapters of converted models: their folders carry the options, and loading them without is heard."""

import json
import subprocess
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from families import VERSION, logits, schemes, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained, revert
from test_saving import REGISTERS, registered  # noqa: F401  a fixture
from transformers import AutoModelForCausalLM

OPTIONS = dict(leaky_rerope=(6, 4.0), log_n=12)
SAID = (
    r"adapter: expected a model with leaky_rerope=\(6, 4.0\), log_n=12, .* got {}; "
    r".* from_pretrained .* or call convert"
)
LORA = dict(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def lora(model, how: str):
    torch.manual_seed(5)
    if how == "transformers":
        try:
            model.add_adapter(peft.LoraConfig(**LORA))
        except ValueError as error:  # transformers 5.24 needs peft 0.22
            pytest.skip(f"transformers {VERSION} with peft {peft.__version__}: {error}")
        return model
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a stock model."""
    folder = tmp_path_factory.mktemp("base")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["peft", "transformers", "adapter first", "a second adapter", "converted base"])
def adapter(request, base, tmp_path_factory):
    """Returns (folder of an adapter that was saved over a converted model, logits of this model)."""
    folder = tmp_path_factory.mktemp("adapter")
    if request.param == "converted base":
        convert(AutoModelForCausalLM.from_pretrained(base), **OPTIONS).save_pretrained(folder / "base")
        model = lora(from_pretrained(folder / "base"), "peft")
    elif request.param == "adapter first":
        model = convert(lora(AutoModelForCausalLM.from_pretrained(base), "peft"), **OPTIONS)
    else:
        model = convert(AutoModelForCausalLM.from_pretrained(base), **OPTIONS)
        model = lora(model, "transformers" if request.param == "transformers" else "peft")
    if request.param == "a second adapter":
        model.add_adapter("second", peft.LoraConfig(**LORA))
        model.set_adapter("second")
    model.save_pretrained(folder)
    if request.param == "a second adapter":
        folder = folder / "second"
    return folder, logits(model, tokens())


def test_the_folder_of_an_adapter_has_the_options(adapter):
    folder, _ = adapter
    assert json.loads((folder / "adapter_config.json").read_text())["flashrope"] == {
        **OPTIONS,
        "leaky_rerope": [6, 4.0],
    }


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, peft.AutoPeftModelForCausalLM])
def test_from_pretrained_reads_the_options_of_an_adapter(adapter, auto_class):
    folder, expected = adapter
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="adapter|Unexpected keyword|convert:")
        model = from_pretrained(folder, auto_class=auto_class)
    assert schemes(model) == [Rotary.rope(16).rectify(6, 4.0).log_n(12)] * 3
    assert torch.equal(logits(model, tokens()), expected)
    assert isinstance(model, peft.PeftModel) == (auto_class is peft.AutoPeftModelForCausalLM)


def test_auto_classes_read_the_options_of_an_adapter(adapter, registered):  # noqa: F811
    folder, expected = adapter
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert REGISTERS and torch.equal(logits(model, tokens()), expected)


@pytest.mark.parametrize(
    "how", ["AutoModel", "AutoPeftModel", "PeftModel", "load_adapter", "transformers' load_adapter"]
)
def test_an_adapter_that_is_loaded_without_its_options_is_heard(adapter, base, how):
    folder, _ = adapter
    converted = "base" in json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"].split("/")
    stock = tiny("llama")
    if how == "load_adapter":
        stock = peft.get_peft_model(stock, peft.LoraConfig(**LORA))
    load = {
        "AutoModel": lambda: AutoModelForCausalLM.from_pretrained(folder),
        "AutoPeftModel": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(folder),
        "PeftModel": lambda: peft.PeftModel.from_pretrained(stock, folder),
        "load_adapter": lambda: stock.load_adapter(folder, "other"),
        "transformers' load_adapter": lambda: stock.load_adapter(str(folder)),
    }[how]
    if how == "AutoModel" and converted:  # the base has the options; its forward raises an error until convert
        load()
        return
    with pytest.warns(
        UserWarning, match=SAID.format("a model with no options" if "AutoPeft" not in how else "no model")
    ):
        load()


def test_an_adapter_over_its_scheme_is_not_warned_about(adapter):
    folder, expected = adapter
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="adapter|Unexpected keyword")
        model = peft.PeftModel.from_pretrained(convert(tiny("llama"), **OPTIONS), folder)
        model.load_adapter(folder, "again")
    assert torch.equal(logits(model, tokens()), expected)
    with pytest.warns(UserWarning, match=SAID.format("a model with rerope=7")):
        peft.PeftModel.from_pretrained(convert(tiny("llama"), rerope=7), folder)


ALONE = """
import sys, warnings
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
for load in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        load.from_pretrained(sys.argv[1])
    print("|".join(str(each.message) for each in heard))
assert "flashrope" not in sys.modules
"""


def test_peft_alone_names_the_options(base, tmp_path):
    """Without this package, PEFT names the two fields that it does not know. The name of one says what to do."""
    lora(convert(AutoModelForCausalLM.from_pretrained(base), **OPTIONS), "peft").save_pretrained(tmp_path)
    ran = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if "LoraConfig" in line]
    assert len(lines) == 2 and all("load this adapter with from_pretrained of flashrope" in line for line in lines)


def test_an_adapter_of_a_model_without_options(base, tmp_path):
    """An adapter of a stock model, or of a model that was converted without options, is PEFT's own."""
    for name, change in (
        ("stock", lambda model: model),
        ("same", convert),
        ("reverted", lambda m: revert(convert(m, rerope=6))),
    ):
        model = lora(change(AutoModelForCausalLM.from_pretrained(base)), "peft")
        model.save_pretrained(tmp_path / name)
        assert not [
            key for key in json.loads((tmp_path / name / "adapter_config.json").read_text()) if "flashrope" in key
        ]
        assert schemes(from_pretrained(tmp_path / name)) == [Rotary.rope(16)] * 3


PREFIXES = {
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2, target_modules="self_attn"
    ),
}


@pytest.mark.parametrize("kind", PREFIXES)
def test_prefixes_are_refused_by_name(kind):
    """Adapters whose keys are rotated or not as the stock model expects are refused before and after convert."""
    message = f"peft_config: {kind} is not supported in a converted model .*, got {type(PREFIXES[kind]()).__name__}"
    try:
        model = peft.get_peft_model(tiny("llama"), PREFIXES[kind]())
    except Exception as error:  # this version of peft does not support this version of transformers
        pytest.skip(f"{kind}: {error}")
    stock = logits(model, tokens()) if kind == "ADAPTION_PROMPT" else None
    with pytest.raises(ValueError, match=message):
        convert(model)
    assert stock is None or torch.equal(logits(model, tokens()), stock)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(convert(tiny("llama")), PREFIXES[kind]())
    wrapped = peft.get_peft_model(convert(tiny("llama")), peft.LoraConfig(**LORA))
    with pytest.raises(ValueError, match=message):
        wrapped.add_adapter("prefix", PREFIXES[kind]())


def test_prompts_of_embeddings_work():
    """Prompt tuning adds embeddings, so it works as in the stock model."""
    torch.manual_seed(3)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny("llama"), config)
    mask = torch.ones_like(tokens())
    with torch.no_grad():
        stock = model(tokens(), attention_mask=mask).logits
        assert float((convert(model)(tokens(), attention_mask=mask).logits - stock).abs().max()) < 1e-5
