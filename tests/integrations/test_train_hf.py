"""Tests examples/train_hf.py under Hugging Face's Trainer, its FSDP2 settings, and TRL's SFTTrainer on a converted
model."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

for library in ("transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(library, reason=f"{library} is not installed; .ci/run trainers installs it")

from flashrope import Rotary
from flashrope.cli.main import main as flashrope_command
from flashrope.integrations.transformers import attending as attention
from flashrope.integrations.transformers import convert, from_pretrained
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

ROOT = Path(__file__).resolve().parents[2]
STEPS, COPE_STEPS, SAVE_EVERY, LENGTH = 30, 12, 10, 64


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_hf", ROOT / "examples" / "train_hf.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_hf"] = module
    spec.loader.exec_module(module)
    return module


def options(out: Path, *more: str) -> list[str]:
    text = ["--text", str(ROOT / "docs" / "schemes.md"), "--out", str(out), "--device", "cpu"]
    sizes = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    scheme = ["--scheme", "cope-hope", "--cope-steps", str(COPE_STEPS)]
    return [*text, *sizes, *scheme, "--learning-rate", "3e-3", "--log-every", "1", *more]


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory) -> Path:
    """Returns the folder of a whole run. All its checkpoints are copied to "kept", because the run deletes all but the
    newest two."""
    out = tmp_path_factory.mktemp("train_hf") / "run"
    copy = shutil.copytree
    original = example.Schemes.on_step_begin

    def keeping(self, args, state, control, **others):
        if state.global_step == SAVE_EVERY + 1:
            copy(out / f"checkpoint-{SAVE_EVERY}", out.parent / "kept" / f"checkpoint-{SAVE_EVERY}")
        return original(self, args, state, control, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.Schemes, "on_step_begin", keeping)
        assert example.main(options(out)) == 0
    copy(out / f"checkpoint-{2 * SAVE_EVERY}", out.parent / "kept" / f"checkpoint-{2 * SAVE_EVERY}")
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def scheme_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["flashrope"]


def test_it_trains_under_cope_and_then_hope(trained):
    found = losses(trained / f"checkpoint-{STEPS}")
    assert len(found) == STEPS and sum(found[-5:]) < sum(found[:5]) - 5 * 0.5
    assert scheme_of(trained.parent / "kept" / f"checkpoint-{SAVE_EVERY}") == {"cope": LENGTH}
    assert scheme_of(trained / f"checkpoint-{2 * SAVE_EVERY}") == {"hope": LENGTH}


@pytest.mark.parametrize("step", [SAVE_EVERY, 2 * SAVE_EVERY], ids=["under CoPE", "under HoPE"])
def test_a_resumed_run_ends_bitwise_where_the_whole_one_does(example, trained, tmp_path, monkeypatch, step):
    steps, training_step = [], example.Trainer.training_step
    monkeypatch.setattr(example.Trainer, "training_step", lambda *a, **k: steps.append(1) or training_step(*a, **k))
    shutil.copytree(trained.parent / "kept" / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
    assert example.main(options(tmp_path / "run")) == 0
    whole, resumed = trained / f"checkpoint-{STEPS}", tmp_path / "run" / f"checkpoint-{STEPS}"
    # A run that started anew would also end at step STEPS, but would take all STEPS steps.
    assert len(steps) == STEPS - step
    assert losses(whole) == losses(resumed)
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    first, second = (torch.load(x / "optimizer.pt", weights_only=True)["state"] for x in (whole, resumed))
    assert all(torch.equal(value, second[at][name]) for at in first for name, value in first[at].items())


def test_the_folder_is_that_of_the_trained_model(trained, tmp_path, capsys):
    folder = trained / "model"
    model = from_pretrained(folder)
    assert model.model.layers[0].self_attn._flashrope.rotary == Rotary.hope(16, LENGTH)
    assert model.config.use_cache and model.config.max_position_embeddings == LENGTH
    last = weights(trained / f"checkpoint-{STEPS}")
    assert all(torch.equal(weight, last[name]) for name, weight in weights(folder).items())
    with pytest.raises(ValueError, match="from_pretrained"):  # the folder is never loaded as a stock model
        AutoModelForCausalLM.from_pretrained(folder)(torch.zeros(1, 4, dtype=torch.long))
    pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
    arguments = ["--model", str(folder), "--text", str(ROOT / "docs" / "schemes.md"), "--lengths", "32", "64"]
    arguments += ["--targets", "8", "--windows", "2", "--schemes", "stock", "--device", "cpu", "--out", str(tmp_path)]
    assert flashrope_command(["loss", *arguments]) in (None, 0)
    assert "HoPE" in capsys.readouterr().out


def test_packed_samples_have_the_loss_and_gradients_of_single_ones(example, monkeypatch):
    """attention_varlen gets the boundaries of the samples in a packed row. Packed samples have the same loss and
    gradients as single samples."""
    called = []
    varlen = attention.attention_varlen
    monkeypatch.setattr(attention, "attention_varlen", lambda *a, **k: called.append(a[4].tolist()) or varlen(*a, **k))
    torch.manual_seed(0)
    model = convert(AutoModelForCausalLM.from_config(example.TINY).double(), hope=LENGTH)
    model.config.use_cache = False
    samples = example.cut([bytes(range(100)), b"short", b"x"], None, LENGTH)
    assert [len(sample["input_ids"]) for sample in samples] == [64, 36, 5]
    batch = DataCollatorWithFlattening()(samples)
    packed = model(**batch, num_items_in_batch=63 + 35 + 4).loss
    packed.backward()
    assert called == [[0, 64, 100, 105]] * 2
    of_packed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    total = 0
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        total = total + model(ids, labels=ids, num_items_in_batch=63 + 35 + 4).loss
    total.backward()
    torch.testing.assert_close(packed, total, rtol=1e-6, atol=0)  # transformers computes the loss in float32
    for got, want in zip(of_packed, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scheme", "hope"], "--cope-steps: supported only with --scheme cope-hope, got --scheme hope"),
        (["--cope-steps", "30"], "--cope-steps: expected less than --steps = 30, got 30"),
        (["--text", "nowhere"], "--text: nowhere: no such file"),
    ],
)
def test_bad_options_are_refused_by_name(example, tmp_path, capsys, more, message):
    assert example.main(options(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_the_longest_sample_of_a_checkpoint_must_be_given(example, trained, tmp_path, capsys):
    """A model for long texts has a max_position_embeddings that no sample should have by accident."""
    assert example.main(options(tmp_path, "--model", str(trained / "model"))) == 2
    assert (
        f"--length: expected the longest sample in tokens, got none; the model's max_position_embeddings, {LENGTH}"
        in (capsys.readouterr().err)
    )


def test_other_settings_do_not_resume(example, trained, capsys):
    assert example.main(options(trained, "--length", "32")) == 2
    error = capsys.readouterr().err
    assert "checkpoint-30 was made with length 64 (now 32)" in error


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], (LENGTH, LENGTH, LENGTH)),
        (["--length", "16"], (16, LENGTH, LENGTH)),
        (["--length", "128"], (128, 128, 128)),
        (["--length", "16", "--train-length", "32"], (16, 32, LENGTH)),
        (["--length", "16", "--train-length", "96", "--max-positions", "96"], (16, 96, 96)),
    ],
)
def test_three_lengths(example, tmp_path, more, expected):
    """The example has separate options for three lengths: that of the samples, that of the scheme, and that of the
    saved model."""
    args = example.parse([*options(tmp_path, *more), "--scheme", "hope"])
    args.cope_steps = None
    trainer, _ = example.make_trainer(args)
    longest = max(len(sample["input_ids"]) for sample in trainer.train_dataset)
    saved, scheme = trainer.model.config.max_position_embeddings, trainer.model.config.flashrope
    assert (longest, scheme, saved) == (expected[0], {"hope": expected[1]}, expected[2])


def test_fsdp_without_an_accelerator_is_refused(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert example.main(options(tmp_path)) == 2
    assert "--device: expected a GPU for FSDP" in capsys.readouterr().err


def test_the_fsdp2_settings_shard_the_model_and_the_scheme_changes_in_it(example, monkeypatch):
    """The FSDP2 settings of the file shard the model, and the scheme can change in the sharded model. The test calls
    accelerate's own sharding function in one process, because the Trainer shards on accelerators only."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import FSDPModule

    arguments = ["--config_file", str(ROOT / "examples" / "train_hf_fsdp2.yaml"), "train_hf.py"]
    launch = _validate_launch_command(launch_command_parser().parse_args(arguments))[0]
    for name, value in prepare_multi_gpu_env(launch).items():
        if "FSDP" in name:
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    torch.manual_seed(0)
    whole, sharded = (AutoModelForCausalLM.from_config(example.TINY) for _ in range(2))
    sharded.load_state_dict(whole.state_dict())
    ids = torch.randint(256, (1, 40))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        convert(sharded, cope=LENGTH)
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="no",
            is_main_process=True,
            device=torch.device("cpu"),
        )
        sharded = fsdp2_prepare_model(accelerator, sharded)
        assert all(isinstance(layer, FSDPModule) for layer in sharded.model.layers)
        for scheme in ({"cope": LENGTH}, {"hope": LENGTH}):
            found = []
            for model in (convert(whole, **scheme), convert(sharded, **scheme)):
                model.zero_grad()
                loss = model(ids, labels=ids, use_cache=False).loss
                loss.backward()
                gradient = model.model.layers[0].self_attn.q_proj.weight.grad
                found.append((loss.detach(), getattr(gradient, "full_tensor", lambda g=gradient: g)()))
            torch.testing.assert_close(found[0], found[1])
            assert scheme == sharded.config.flashrope
    finally:
        dist.destroy_process_group()


def test_sft_trainer_packs_a_converted_model(example, tmp_path, monkeypatch):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from experiments.export import byte_tokenizer

    end = chr(256)  # the tokenizer writes byte 0 as this character
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(byte_tokenizer())), eos_token=end, pad_token=end
    )
    called = []
    varlen = attention.attention_varlen
    monkeypatch.setattr(attention, "attention_varlen", lambda *a, **k: called.append(a[4].tolist()) or varlen(*a, **k))
    torch.manual_seed(0)
    model = convert(AutoModelForCausalLM.from_config(example.TINY), hope=LENGTH)
    texts = [f"document {i} " * (1 + i % 4) for i in range(60)]
    lengths = {len(text.encode()) + 1 for text in texts}  # plus the end token
    settings = SFTConfig(
        str(tmp_path),
        max_length=LENGTH,
        packing=True,
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        bf16=True,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model, args=settings, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
    )
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 10 and found[-1] < found[0] - 0.5
    starts = {tuple(each) for each in called}
    assert len(starts) > 5 and all(len(each) > 3 for each in starts)
    assert {b - a for each in starts for a, b in zip(each, each[1:], strict=False)} <= lengths
