"""Tests python -m experiments on the user's own text, token files and settings."""

import array
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flashrope.console.options import BadInput
from flashrope.lab.small_models import data, workers
from flashrope.lab.small_models.train import TrainConfig, learning_rate_fraction

from experiments import presets, tasks, tokenizing, tokens
from experiments.__main__ import main
from experiments.runs import read_csv as rows
from experiments.zoo import ZooModel

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--threads", "1", "--width", "32", "--heads", "1", "--layers", "1"]
SMALL += ["--train-length", "64", "--batch", "6", "--samples", "4"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Returns two folders of text."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(20):
        (folder / "ab"[n % 2]).mkdir(exist_ok=True)
        (folder / "ab"[n % 2] / f"{n}.txt").write_text("".join(f"{n * m} is {n} times {m}, " for m in range(330)))
    return folder


def token_file(path, ids, width=2, **description):
    path.write_bytes(array.array("H" if width == 2 else "I", ids).tobytes())
    if description:
        path.with_suffix(".json").write_text(json.dumps(description))
    return path


# ---- text


def test_several_files_and_folders_are_one_text(texts):
    corpus = data.from_paths([texts / "a", texts / "b" / "1.txt", texts / "b" / "3.txt"], 100)
    names = corpus.train_files + corpus.unseen_files
    assert len(names) == len(set(names)) == 12 and str(texts / "b" / "3.txt") in names
    one = data.from_paths([texts / "a"], 100)
    assert one.train == data.from_path(texts / "a", 100).train


# ---- token files


@pytest.mark.parametrize("width, largest", [(2, 2**16 - 1), (4, 2**32 - 1)])
def test_a_token_file_is_read_where_it_is_asked(tmp_path, width, largest):
    ids = [largest, 0, largest // 2 + 1, *range(7, 300)]
    path = token_file(tmp_path / "t.bin", ids, width)
    file = tokens.TokenFile(path, width, 0, len(ids))
    assert file[0:4] == ids[:4] and file[290:400] == ids[290:] and len(file) == len(ids)
    part = tokens.TokenFile(path, width, 3, 103)
    assert part[0:2] == [7, 8] and part.at(torch.tensor([[0, 5], [99, 1]])).tolist() == [[7, 12], [106, 8]]
    assert len(pickle.dumps(part)) < 500 and pickle.loads(pickle.dumps(part))[5:7] == [12, 13]
    assert (tokens.width(2**16), tokens.width(2**16 + 1)) == (2, 4)


def test_windows_and_batches_are_of_the_file(tmp_path):
    ids = [n * 37 % 1000 for n in range(4000)]
    corpus = tokens.from_files([str(token_file(tmp_path / "t.bin", ids))], 1000, 50)
    assert corpus.train.stop == corpus.unseen[0].start == 3600 and corpus.unseen[0].stop == 4000
    text = bytes(n % 251 for n in ids)
    of_bytes = data.Corpus("", text[:3600], (text[3600:],), (), ())
    for mine, theirs in zip(tasks.batches(corpus, 3, 20, 5), tasks.batches(of_bytes, 3, 20, 5), strict=False):
        assert mine.dtype == torch.int64 and torch.equal(mine % 251, theirs)
        break
    windows, expected = (data.unseen_windows(c.unseen, 50, 4, 1) for c in (corpus, of_bytes))
    assert torch.equal(data.as_tokens(windows) % 251, data.as_tokens(expected))
    assert tasks.repeated(windows, 20, 45)[0] == (windows[0][:20] * 3)[:46]
    two = [str(tmp_path / "t.bin"), str(token_file(tmp_path / "v.bin", ids[::-1]))]
    whole = tokens.from_files(two, 1000, 50)
    assert len(whole.train) == 4000 and whole.unseen[0][0:3] == ids[:-4:-1]
    before = whole.record()
    token_file(tmp_path / "v.bin", ids)
    assert whole.record()["unseen"]["sha256"] != before["unseen"]["sha256"] and "1000" in json.dumps(before)


@pytest.mark.parametrize(
    "ids, known, size, message",
    [
        (range(900), {}, None, "--vocab-size: expected the number of tokens in the vocabulary"),
        (range(900), {"vocab_size": 900}, 901, "--vocab-size: expected one size for all files, got 900, 901"),
        (range(900), {"vocab_size": "x"}, None, "expected vocab_size in"),
        (range(900), {"vocab_size": 899}, None, "--vocab-size: expected more than 899, a token of"),
        (range(901), {"vocab_size": 2**17}, None, "--tokens: expected 4 bytes per token, got"),
        (range(700), {"vocab_size": 900}, None, "at least 400 tokens to train on, for windows of 50 tokens, got 300"),
    ],
)
def test_token_files_that_cannot_be_used(tmp_path, ids, known, size, message):
    path = token_file(tmp_path / "t.bin", ids, **known)
    with pytest.raises(BadInput, match=message):
        tokens.from_files([str(path)], size, 50)


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory, texts):
    """Returns a token file of the texts. Its tokenizer was trained on these texts."""
    package = pytest.importorskip("tokenizers", reason="the extra 'experiments' is not installed")
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([path.read_text() for path in texts.rglob("*.txt")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    asked = ["--text", str(texts), "--tokenizer", str(folder / "tokenizer.json"), "--out", str(folder / "t.bin")]
    assert main(["tokenize", *asked]) == 0
    return folder / "t.bin"


def test_tokenize_writes_the_tokens_of_every_text(tokenized, texts):
    from tokenizers import Tokenizer

    record = json.loads(tokenized.with_suffix(".json").read_text())
    tokenizer = tokenizing.load(str(tokenized.with_name("tokenizer.json")))
    assert isinstance(tokenizer, Tokenizer) and record["vocab_size"] == 600 and record["texts"] == 20
    found = array.array("H", tokenized.read_bytes()).tolist()
    assert len(found) == record["tokens"] and found.count(record["separator"]) == 20
    decoded = tokenizer.decode(found, skip_special_tokens=False).split("<|endoftext|>")
    assert decoded[:-1] == list(data.read_texts([texts]).values())


def test_perplexity_of_token_models_and_their_log(tokenized, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra 'experiments' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    asked = [*SMALL, "--tokens", str(tokenized), "--steps", "8", "--schemes", "rope", "--tensorboard"]
    assert main(["perplexity", *asked, "--out", str(out)]) == 0
    assert json.loads((out / "settings.json").read_text())["vocab_size"] == 600
    assert 300 < float(rows(out / "perplexity/results.csv")[0]["value"]) < 620
    assert "Perplexity per token" in (out / "perplexity/table.md").read_text()
    log = EventAccumulator(str(out / "tensorboard/rope-L64-s0"))
    log.Reload()
    losses = {event.step: event.value for event in log.Scalars("loss")}
    found = {int(row["step"]): float(row["loss"]) for row in rows(out / "perplexity/training.csv")}
    assert losses == pytest.approx(found, rel=1e-4) and len(losses) == 8
    config = TrainConfig(8, 6, 64, presets.PRESETS["tiny"].learning_rate, warmup=presets.PRESETS["tiny"].warmup)
    rates = [event.value for event in log.Scalars("learning rate")]
    assert rates == pytest.approx([config.learning_rate * learning_rate_fraction(n, config) for n in range(8)])
    assert len(log.Scalars("tokens per second")) == 7
    assert (out / "models/tokenizer.json").exists()


# ---- settings


TOKENS = ["--tokens", "no.bin"]
RE, RE_8, ALIBI = (["--schemes", names] for names in ("rerope", "rope,rerope-w8", "alibi,nope"))


# ---- processes


def where(report):
    return str(workers.device())


# ---- slow


def curve(out):
    return [float(row["loss"]) for row in rows(out / "models/rope-L64-s0.losses.csv")]


@pytest.mark.slow
def test_torchrun_trains_the_same_model(texts, tmp_path):
    """torchrun with two processes trains the same model as one process. The batch has five rows, in micro-batches of
    two."""
    from experiments.training import load_model

    asked = [*SMALL, "--text", str(texts), "--steps", "8", "--schemes", "rope,kerple"]
    asked += ["--batch", "5", "--micro-batch", "2"]
    assert main(["perplexity", *asked, "--out", str(tmp_path / "one")]) == 0

    def torchrun(out):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "-m", "experiments", "perplexity", *asked, "--out", str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("perplexity: written to") == 1

    torchrun(tmp_path / "two")
    for name in ("rope", "kerple"):
        models = [load_model(tmp_path / which / f"models/{name}-L64-s0.safetensors") for which in ("one", "two")]
        assert isinstance(models[0], ZooModel)
        for one, two in zip(*(model.parameters() for model in models), strict=True):
            assert (one - two).abs().max() < 1e-4
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-4)
    assert json.loads((tmp_path / "two/perplexity/results.json").read_text())["processes"] == 2
    settings = [(tmp_path / which / "settings.json").read_text() for which in ("one", "two")]
    assert settings[0] == settings[1]
