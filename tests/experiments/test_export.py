"""Tests models of the experiments that are exported as LlamaForCausalLM, or read by flashrope generate, loss and
passkey."""

import json

import pytest
import torch

pytest.importorskip("safetensors", reason="the extra 'demo' is not installed")

from flashrope.cli.main import main as flashrope
from flashrope.lab.small_models.model import ModelConfig, load_checkpoint, trained_length

from experiments import export, runs
from experiments.__main__ import main
from experiments.training import load_model, save_model
from experiments.zoo import Defaults, ZooModel, scheme

CONFIG = ModelConfig(32, 2, 2, mlp_width=48)
LENGTH, BASE = 64, 500.0
ROTARY = ("rope", "hope", "rope+logn", "nope", "p-rope")


def saved(folder, name):
    """Returns the file of an untrained model. Weights have five times the usual size, so that all channels matter."""
    torch.manual_seed(3)
    model = ZooModel(CONFIG, name, LENGTH)
    with torch.no_grad():
        for parameter in model.language.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else torch.rand_like(parameter) + 0.5)
    path = folder / f"{name}-L{LENGTH}-s0.safetensors"
    save_model(path, model, name, LENGTH, Defaults(base=BASE))
    return path


def ours(path, tokens):
    name = path.name.split("-L")[0]
    model = load_model(path)
    with torch.no_grad():
        return model(tokens, scheme(name, CONFIG, LENGTH, Defaults(base=BASE)).rotary)


TOKENS = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ROTARY)
def test_the_commands_read_the_same_model(tmp_path, name):
    path = saved(tmp_path, name)
    model, rotary = load_checkpoint(path)
    with torch.no_grad():
        assert torch.equal(model(TOKENS, rotary), ours(path, TOKENS))
    assert trained_length(path) == LENGTH


def test_other_encodings_are_refused_with_the_reason(tmp_path, capsys):
    path = saved(tmp_path, "alibi")
    assert flashrope(["generate", "--model", str(path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert "got a model that python -m experiments trained with 'alibi'; only python -m experiments reads it" in error


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")


def test_generate(tmp_path, transformers, capsys):
    path = saved(tmp_path, "hope")
    code = flashrope(["generate", "--model", str(path), "--prompt", "def ", "--tokens", "5", "--device", "cpu"])
    shown = capsys.readouterr()
    assert code == 0 and shown.out.startswith("def ") and "training length 64" in " ".join(shown.err.split())


def test_the_byte_tokenizer_has_every_byte_once():
    vocabulary = export.byte_tokenizer()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256)) and vocabulary["A"] == 65 and vocabulary["Ġ"] == 32


@pytest.mark.parametrize("name", ROTARY)
def test_the_exported_model_has_the_same_logits(tmp_path, transformers, name):
    from flashrope.integrations.transformers import from_pretrained

    path, out = saved(tmp_path, name), tmp_path / "out"
    assert main(["export", str(path), str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["max_position_embeddings"] == LENGTH
    assert ("flashrope" in config) == (name != "rope")
    models = [from_pretrained(out)]
    if name == "rope":
        models.append(transformers.AutoModelForCausalLM.from_pretrained(out))
    for model in models:
        with torch.no_grad():
            found = model.eval()(TOKENS).logits
        assert (found - ours(path, TOKENS)).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "naïve  code:\n\tx = '𝄞'"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name, schemes", [("rope", ["stock", "rerope"]), ("hope", ["stock", "rerope", "yarn"])])
def test_loss_of_a_file_and_of_its_export_are_the_same(tmp_path, transformers, name, schemes):
    path, out = saved(tmp_path, name), tmp_path / "out"
    assert main(["export", str(path), str(out)]) == 0
    (tmp_path / "text.txt").write_text("".join(f"{n} is a number, " for n in range(300)))
    found = []
    for model in (path, out):
        options = ["--text", str(tmp_path / "text.txt"), "--lengths", "32", "128", "--schemes", *schemes]
        options += ["--windows", "3", "--device", "cpu", "--threads", "1", "--overwrite"]
        assert flashrope(["loss", "--model", str(model), "--out", str(tmp_path / "loss"), *options]) == 0
        found.append(runs.read_csv(tmp_path / "loss/loss.csv"))
    assert found[0] == found[1] and len(found[0]) >= 2 * len(schemes)
    tokens = torch.tensor([list((tmp_path / "text.txt").read_bytes()[:33])])
    assert ours(path, tokens).isfinite().all()


def test_other_schemes_change_the_one_that_a_model_was_trained_with(tmp_path, transformers):
    from flashrope.lab.evaluation.checkpoint import load
    from flashrope.lab.evaluation.readings import applicable

    path = saved(tmp_path, "hope")
    model, _ = load(str(path), torch.device("cpu"))
    schemes, skipped = applicable(model, ["stock", "rerope", "yarn"], LENGTH, 2 * LENGTH)
    assert not skipped
    for used, name in zip(
        [*schemes, schemes[0]], ("hope", "hope+rerope-w32+dagger", "hope+yarn-s2", "hope"), strict=True
    ):
        used.apply()
        expected = scheme(name, CONFIG, LENGTH, Defaults(base=BASE)).rotary
        with torch.no_grad():
            found, wanted = model(TOKENS, use_cache=False).logits, load_model(path)(TOKENS, expected)
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_what_cannot_be_exported(tmp_path, transformers, capsys):
    path = saved(tmp_path, "kerple")
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "llama trained with kerple, which LlamaForCausalLM does not have" in capsys.readouterr().err
    assert main(["export", str(path), str(tmp_path)]) == 2
    assert "expected a new or empty directory" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
