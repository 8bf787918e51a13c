"""Tests python -m experiments on the user's own text, token files and settings."""

import array
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flashrope import Rotary
from flashrope.console.options import BadInput
from flashrope.lab.small_models import data, workers
from flashrope.lab.small_models.model import LanguageModel, ModelConfig
from flashrope.lab.small_models.train import Ranks, TrainConfig, learning_rate_fraction, train
from flashrope.lab.small_models.workers import Workers

from experiments import estimate, presets, runs, tasks, tokenizing, tokens, training_curves
from experiments.__main__ import main
from experiments.arguments import seeds
from experiments.runs import read_csv as rows
from experiments.tables import resolve
from experiments.zoo import ZooModel, scheme

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


def test_pieces_to_tokenize_are_the_text():
    text = "first line\nsecond\n" + "x" * 25 + "\n\nlast"
    found = list(tokenizing.pieces(text, 12))
    assert "".join(found) == text and max(map(len, found)) <= 12 and found[0] == "first line\n"


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


def test_seeds_are_a_number_or_a_list():
    assert seeds("3") == 3 and seeds("0,3,7") == (0, 3, 7) and seeds("7,") == (7,)
    run = runs.Run(Path(), presets.PRESETS["cpu"], "cpu", None, torch.device("cpu"), None, 0, 1, 2)
    assert run.seeds == (2, 3, 4, 5, 6) and "window" not in run.identity() and "compile" not in run.identity()


def test_listed_seeds_window_and_base(texts, tmp_path):
    out = tmp_path / "out"
    asked = [*SMALL, "--text", str(texts / "a"), str(texts / "b"), "--steps", "3", "--schemes", "rope,rerope"]
    asked += ["--seeds", "4,1", "--window", "20", "--base", "50"]
    assert main(["perplexity", *asked, "--out", str(out)]) == 0
    names = {path.name for path in (out / "models").glob("*.safetensors")}
    assert names == {"rope-L64-s4.safetensors", "rope-L64-s1.safetensors"}
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["window"], settings["base"]) == (20, 50.0) and settings["text"]["name"] == "a, b"
    run = runs.Run(out, presets.PRESETS["tiny"], "tiny", None, torch.device("cpu"), None, 0, 1, window=20)
    used = scheme("rerope", ModelConfig(32, 1, 1), 64, run.defaults).rotary
    assert used == Rotary.rope(32, 10_000.0).rectify(20)
    found = rows(out / "perplexity/training.csv")
    assert [(row["seed"], row["step"]) for row in found] == [(s, n) for s in "41" for n in "123"]
    stored = rows(out / "models/rope-L64-s1.losses.csv")
    assert [row["loss"] for row in found[3:]] == [row["loss"] for row in stored]
    assert (out / "perplexity/training.png").exists()
    before = (out / "settings.json").read_text()
    assert main(["perplexity", *asked, "--window", "21", "--out", str(out)]) == 2
    assert (out / "settings.json").read_text() == before


def test_a_figure_of_many_models_has_several_panels(tmp_path):
    from matplotlib.image import imread

    sizes = {}
    for count in (2, 9):
        found = [
            {"trained_with": name, "train_length": "64", "seed": "0", "step": str(step), "loss": str(5 / step)}
            for name in ("rope", "hope", "alibi", "kerple", "fire", "nope", "learned", "t5", "rope+logn")[:count]
            for step in (1, 2, 3)
        ]
        training_curves.draw(tmp_path / f"{count}.png", found)
        sizes[count] = imread(tmp_path / f"{count}.png").shape[0]
    assert sizes[9] > 1.6 * sizes[2]


TOKENS = ["--tokens", "no.bin"]
RE, RE_8, ALIBI = (["--schemes", names] for names in ("rerope", "rope,rerope-w8", "alibi,nope"))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("perplexity", ["--seeds", "1,1"], "expected a number or different seeds A,B,..., got 1,1"),
        ("perplexity", ["--seeds", "1,2", "--seed", "3"], "--seed: --seeds already lists the seeds"),
        ("perplexity", ["--window", "65", *RE], "--window: expected at most the training length of 64"),
        ("perplexity", ["--window", "20", *RE_8], "--window: expected a scheme whose window is"),
        ("positions", ["--window", "20"], "--window: expected a scheme whose window is not in its name"),
        ("perplexity", ["--base", "1"], "--base: expected a number of more than 1, got 1.0"),
        ("perplexity", ["--base", "500", *ALIBI], "--base: expected a scheme that rotates, got alibi"),
        ("positions", ["--compile"], "--compile: supported only by experiments that train language models"),
        ("perplexity", ["--vocab-size", "300"], "--vocab-size: supported only with --tokens; without"),
        ("perplexity", TOKENS, "--tokens: no file no.bin; python -m experiments tokenize makes one"),
        ("patterns", TOKENS, "--tokens: patterns is written in bytes; perplexity and accuracy take"),
        ("copying", ["--preset", "copying", *TOKENS], "--tokens: the task of the preset copying is written"),
    ],
)
def test_options_without_a_sense_are_refused(tmp_path, texts, capsys, name, options, message):
    text = [] if "--tokens" in options or name == "copying" else ["--text", str(texts)]
    try:
        code = main([name, *SMALL, *text, *options, "--out", str(tmp_path / "out")])
    except SystemExit as error:
        code = error.code
    errors = capsys.readouterr().err
    assert code == 2 and message in errors and not (tmp_path / "out").exists()


# ---- processes


def where(report):
    return str(workers.device())


@pytest.mark.slow
def test_each_worker_has_a_device_of_its_own():
    devices = [torch.device("meta"), torch.device("cpu")]
    with Workers(2, 1, devices) as some:
        found = [some.map(where, [()] * 6) for _ in range(2)]
    assert set(found[0]) <= {"meta", "cpu"} and set(sum(found, [])) == {"meta", "cpu"}
    with pytest.raises(ValueError, match="devices: expected one device for each of 2 processes, got 1"):
        Workers(2, 1, devices[:1])


def test_more_ranks_than_rows_are_refused():
    with pytest.raises(ValueError, match="batch_size: expected at least 3, a row for each rank, got 2"):
        train(LanguageModel(ModelConfig(32, 1, 1)), Rotary.rope(32), [], TrainConfig(1, 2, 8), ranks=Ranks(0, 3))


def test_the_presets_for_a_gpu():
    small, paper = presets.PRESETS["small"], presets.PRESETS["125m"]
    assert (small.layers, small.width, small.train_length, small.seeds) == (4, 256, 512, 3)
    found = estimate.estimate(small, 256)
    assert 100e6 <= found.tokens < 100.1e6
    for preset, vocabulary in ((small, 256), (paper, 50_257)):
        with torch.device("meta"):
            size = ModelConfig(preset.width, preset.layers, preset.heads, preset.mlp_width, vocabulary)
            weights = sum(p.numel() for p in LanguageModel(size).parameters())
        assert estimate.estimate(preset, vocabulary).weights == weights
    trained = {scheme(resolve(name, 512)[0], small.config, 512).trained for name in small.schemes}
    assert trained == {"rope", "rope+logn", "hope", "alibi", "kerple", "nope"}


def test_the_page_has_the_estimates():
    page = (ROOT / "docs/experiments/running.md").read_text()
    small, paper = presets.PRESETS["small"], presets.PRESETS["125m"]
    one, other = estimate.estimate(small, 256), estimate.estimate(paper, 50_257)
    hours = [18 * one.flops / 40e12 / 3600, other.flops / 125e12 / 3600, other.flops / 125e12 / 3600 / 8]
    told = [f"| {one.tokens_per_step:,} | {other.tokens_per_step:,} |", f"| {small.steps:,} | {paper.steps:,} |"]
    told += [f"{one.flops:.1e}".replace("+", ""), f"{other.flops:.2e}".replace("+", "")]
    told += [f"{one.memory / 1e9:.1f} GB", f"{other.memory / 1e9:.1f} GB", f"{other.weights / 1e6:.0f} million weights"]
    told += [f"{hours[0]:.2f} hours for 18 models", f"{hours[1]:.1f} hours a model", f"{hours[2]:.1f} hours on eight"]
    told += [f"{other.tokens / 1e9:.1f} billion: {other.tokens / 9_035_582_198:.2f} epochs"]
    assert not [words for words in told if words not in page]


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


@pytest.mark.slow
def test_compiled_training_is_the_same(texts, tmp_path):
    asked = [*SMALL, "--text", str(texts), "--steps", "10", "--schemes", "rope"]
    for out, more in (("plain", []), ("compiled", ["--compile"])):
        assert main(["perplexity", *asked, *more, "--out", str(tmp_path / out)]) == 0
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "plain"), rel=1e-3)
    assert json.loads((tmp_path / "compiled/settings.json").read_text())["compile"] is True
