"""Tests torchtitan's checkpoints and exports. A run resumes from a checkpoint, and an exported model has the same
scheme in transformers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import trainings
from flashrope import Rotary
from flashrope.__main__ import main

SCHEMES = {
    "hope": {},
    "rerope": {"scheme": "rerope"},
    "text": {"rotary": Rotary.hope(16, trainings.SEQLEN, interleaved=True).text},
    "own": {"scheme": "stock"},
}
EXPORTS = [("llama3", "hope"), ("llama3", "rerope"), ("llama3", "text"), ("qwen3", "hope"), ("qwen3", "own")]


def config_for(folder: Path, family: str, given: dict, **checkpoint):
    config = trainings.settings(family, given, 1)
    config.dump_folder = str(folder)
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=True, **checkpoint)
    return config


def test_a_run_resumes(tmp_path):
    def run():
        return trainings.trainer(config_for(tmp_path, "llama3", {}, interval=2, last_save_model_only=False))

    first = run()
    trainings.steps_of(first, 2)
    first.checkpointer.save(2)
    at_once = trainings.steps_of(first, 2)
    second = run()
    second.checkpointer.load()
    assert second.step == 2
    assert trainings.steps_of(second, 2) == at_once
    for name, value in trainings.states(second).items():
        assert torch.equal(value, trainings.states(first)[name]), name


@pytest.fixture(params=EXPORTS, ids="-".join)
def exported(request, tmp_path):
    """Returns (folder of the model that was exported after one step, trainer)."""
    from flashrope.integrations.torchtitan import save_config

    family, scheme = request.param
    run = trainings.trainer(
        config_for(tmp_path, family, SCHEMES[scheme], last_save_in_hf=True, last_save_model_only=True)
    )
    trainings.steps_of(run, 1)
    run.checkpointer.save(1, last_step=True)
    folder = next(tmp_path.rglob("*.safetensors")).parent
    save_config(run.model_config, folder)
    trainings.write_tokenizer(folder)
    return folder, run, SCHEMES[scheme]


def test_an_export_computes_the_same(exported):
    from flashrope.integrations.transformers import from_pretrained

    folder, run, given = exported
    model = from_pretrained(folder)
    tokens = torch.randint(256, (1, trainings.SEQLEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = run.model_parts[0].lm_head(run.model_parts[0](tokens))
        torch.testing.assert_close(model(tokens).logits, own, rtol=1e-4, atol=1e-4)
    options = json.loads((folder / "config.json").read_text()).get("flashrope", {})
    assert bool(options) == (given != SCHEMES["own"])


def test_flashrope_loss_reads_an_export(exported, capsys):
    folder, *_ = exported
    text = folder / "text.txt"
    text.write_text("abc def gh " * 40)
    settings = ["--lengths", "32", "64", "--schemes", "stock", "--windows", "2", "--out", str(folder / "losses")]
    assert not main(["loss", "--model", str(folder), "--text", str(text), *settings]), capsys.readouterr().err
    assert "64" in capsys.readouterr().out


def test_the_command_writes_what_the_trainer_would(tmp_path):
    from flashrope.integrations.torchtitan.export import config_of
    from flashrope.integrations.torchtitan.export import main as export

    override = trainings.OVERRIDE + '={"scheme": "rerope", "rerope": 8}'
    arguments = ["--module", "llama3", "--config", "llama3_debugmodel", "--training.seq_len", str(trainings.SEQLEN)]
    export([str(tmp_path), *arguments, "--override.imports", override])
    run = trainings.trainer(trainings.settings("llama3", {"scheme": "rerope", "rerope": 8}, 6))
    assert json.loads((tmp_path / "config.json").read_text()) == config_of(run.model_config)
    with pytest.raises(SystemExit, match="expected the folder"):
        export(arguments)


def test_a_model_that_cannot_be_exported():
    from flashrope.integrations.torchtitan.export import config_of

    with pytest.raises(ValueError, match="model: expected the override flashrope.integrations.torchtitan.attention"):
        config_of(trainings.settings().model_spec.model)
    from torchtitan.models.qwen3 import model_registry

    with pytest.raises(ValueError, match="model: expected a dense Llama3Model or Qwen3Model"):
        config_of(model_registry("debugmodel_moe").model)
