"""Tests flashrope generate: it writes the text that transformers' generate gives under the requested scheme."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import transformers
from families import tiny
from flashrope import Rotary, attention
from flashrope.cli.main import main
from flashrope.integrations.transformers import CodesCache, convert, from_pretrained
from flashrope.integrations.transformers.versions import CACHE
from flashrope.lab.small_models.model import LanguageModel, ModelConfig, save_checkpoint

pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated")
PROMPT = "the quick brown fox jumps over the lazy dog " * 2
NEW = 24


def model_of(family="llama", **changes):
    return tiny(family, vocab_size=256, max_position_embeddings=32, eos_token_id=None, **changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    model_of().save_pretrained(path)
    return path


@pytest.fixture
def run(checkpoint, capsys):
    def run(*options, code=0, model=checkpoint, prompt=PROMPT):
        command = ["generate", "--device", "cpu", "--threads", "1", "--model", str(model), "--tokens", str(NEW)]
        command += [] if prompt is None else ["--prompt", prompt]
        assert main([*command, *options]) == code
        out, err = capsys.readouterr()
        return SimpleNamespace(out=out.removesuffix("\n"), err=err)  # the text is followed by a newline

    return run


def continued(model, cache=None) -> str:
    """Returns the greedy continuation of the prompt by transformers' own `generate`."""
    ids = torch.tensor([list(PROMPT.encode())])
    done = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **{CACHE: cache})
    return bytes(done[0].tolist()).decode(errors="replace")


@pytest.mark.parametrize(
    "options, changes",
    [
        ([], {}),
        (["--scheme", "rerope-plain"], {"rerope": 16}),
        (["--scheme", "leaky", "--window", "8", "--factor", "4"], {"leaky_rerope": (8, 4.0), "log_n": 32}),
        (["--scheme", "yarn"], {"yarn": ((len(PROMPT) + NEW) / 32, 32)}),
        (["--scheme", "rerope", "--window", "8", "--train-length", "40"], {"rerope": 8, "log_n": 40}),
        (["--scheme", "stock"], {}),
    ],
    ids=str,
)
def test_the_text_is_that_of_the_converted_model(run, checkpoint, monkeypatch, options, changes):
    monkeypatch.setattr("flashrope.lab.evaluation.generation.CHUNK", 20)
    assert run("--temperature", "0", *options).out == continued(convert(model_of(), **changes))
    assert changes == {} or continued(convert(model_of(), **changes)) != continued(model_of())


def test_a_quantized_cache(run):
    shown, model = run("--temperature", "0", "--cache-dtype", "int8"), convert(model_of())
    assert shown.out == continued(model, CodesCache(model.config, "int8")) and "int8" in shown.err


def test_a_prompt_with_lines(run):
    """transformers' TextStreamer decodes one token by itself after a new line."""
    shown = run("--temperature", "0", prompt="a\n\nb\n")
    assert shown.out.startswith("a\n\nb\n") and f"generated: {NEW} tokens" in " ".join(shown.err.split())


def test_seeds(run):
    first = run("--seed", "1").out
    assert first == run("--seed", "1").out != run("--seed", "2").out
    assert run("--seed", "1", "--top-k", "1").out == run("--temperature", "0").out


def test_a_model_that_was_saved_with_a_scheme(run, tmp_path):
    convert(model_of(), rerope=8).save_pretrained(tmp_path)
    shown = run("--temperature", "0", model=tmp_path)
    assert shown.out == continued(from_pretrained(tmp_path)) and "ReRoPE w 8: window 8" in shown.err
    shown = run("--temperature", "0", "--scheme", "log-n", model=tmp_path)
    assert shown.out == continued(convert(model_of(), rerope=8, log_n=32))


def test_a_family_that_convert_refuses(run, tmp_path):
    """If convert refuses a model, the command generates with transformers' own attention, up to the model's last
    position."""
    sizes = dict(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=120, bos_token_id=None, eos_token_id=None)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert "the library's own attention; convert does not support the model" in " ".join(
        run(model=tmp_path).err.split()
    )
    assert "--scheme rerope: model: expected" in run("--scheme", "rerope", model=tmp_path, code=2).err
    assert "--cache-dtype: model: expected" in run("--cache-dtype", "int8", model=tmp_path, code=2).err
    assert "--tokens: expected at most 120" in run("--tokens", "80", model=tmp_path, code=2).err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--window", "8"], "--window, --factor: expected --scheme"),
        (
            ["--scheme", "leaky", "--factor", "-1"],
            "leaky: leaky_rerope: factor: expected a positive finite number",
        ),
        (["--scheme", "rerope", "--factor", "2"], "--factor: expected a scheme with a factor, got rerope"),
        (["--scheme", "cope", "--window", "8"], "--window: expected a scheme with a window, got cope"),
        (["--scheme", "dual-chunk"], "--scheme dual-chunk: dual_chunk: expected a training length above 128"),
        (["--temperature", "nan"], "--temperature: expected a number of at least 0"),
        (["--prompt", ""], "--prompt: expected at least one byte"),
        (["--model", "nowhere/rope.safetensors"], "no file nowhere/rope.safetensors; run 'flashrope demo' first"),
        (["--prompt-file", "nowhere"], "--prompt-file: cannot read nowhere"),
        (["--model", "nowhere/at/all"], "--model: "),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, options, message):
    shown = run(*options, code=2, prompt=None if options[0].startswith("--prompt") else PROMPT)
    said = [line for line in shown.err.splitlines() if line and "Loading weights" not in line]  # transformers' bar
    assert len(said) == 1 and said[0].startswith("flashrope generate: error: ") and message in said[0]
    assert not shown.out


@pytest.mark.parametrize("adds_start", [True, False])
def test_a_model_with_a_tokenizer_ends_its_text(run, tmp_path, adds_start):
    """Token 0 begins a text if the tokenizer adds it, and token 1 ends a text. The command prints neither."""
    import tokenizers

    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>", "</s>"])
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.train_from_iterator([PROMPT, *map(str, range(10))], trainer)
    if adds_start:
        words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    tiny("llama", vocab_size=words.get_vocab_size(), max_position_embeddings=32).save_pretrained(tmp_path)
    shown = run("--tokens", "2000", "--temperature", "5", model=tmp_path, prompt="the quick")
    said = " ".join(shown.err.split())
    assert shown.out.startswith("the quick") and "s>" not in shown.out and " of 2,000, the end of the text" in said
    assert f"prompt of {len(words.encode('the quick').ids)} tokens" in said


# ---- models of flashrope demo


def demo_model(layers=2):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(width=32, layers=layers, heads=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 10  # initial weights are too small for attention to matter
    return model


@pytest.fixture(scope="module")
def demo_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "hope.safetensors"
    save_checkpoint(path, demo_model(), Rotary.hope(16, 32), 32)
    return path


def by_full_passes(model, rotary) -> str:
    """Decodes greedily without a cache. The two most likely bytes must differ by more than rounding."""
    text = list(PROMPT.encode())
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(torch.tensor([text]), rotary, lambda *qkv: attention(*qkv, impl="reference"))[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4
        text.append(int(logits.argmax()))
    return bytes(text).decode(errors="replace")


@pytest.mark.parametrize(
    "options, change", [([], lambda x: x), (["--scheme", "rerope-plain"], lambda x: x.rectify(16))]
)
def test_a_model_of_the_demo(run, demo_checkpoint, options, change):
    shown = run("--temperature", "0", *options, model=demo_checkpoint)
    assert shown.out == by_full_passes(demo_model(), change(Rotary.hope(16, 32)))
    assert "training length 32 tokens" in " ".join(shown.err.split())


def test_a_cache_of_fixed_size(run, tmp_path):
    """With one layer, a token sees the tokens that the cache keeps, at positions 0, 1, 2, ..."""
    model, text = demo_model(layers=1), list(PROMPT.encode())
    save_checkpoint(tmp_path / "rope", model, Rotary.rope(16), 32)
    shown = run("--temperature", "0", "--keep", "3,20", model=tmp_path / "rope")
    for n in range(NEW):
        start = 64 - 20 if n == 0 else len(text) - 1 - 20  # the prompt is read in pieces of 64 tokens
        seen = [*text[:3], *text[start:]]
        text.append(int(model(torch.tensor([seen]), Rotary.rope(16))[0, -1].argmax()))
    assert shown.out == bytes(text).decode(errors="replace")
    assert "kept: the first 3 and the last 20 bytes" in " ".join(shown.err.split())


def test_files_that_are_not_checkpoints(run, tmp_path):
    (tmp_path / "text").write_text("not a checkpoint at all")
    assert f"--model: {tmp_path / 'text'}: not a flashrope checkpoint" in run(code=2, model=tmp_path / "text").err
    model = demo_model()
    model.norm.weight.data[0] = float("nan")
    save_checkpoint(tmp_path / "nan", model, Rotary.rope(16), 32)
    assert "--model: the largest logit is nan" in run(code=2, model=tmp_path / "nan").err


def start(checkpoint):
    command = [sys.executable, "-m", "flashrope", "generate", "--device", "cpu", "--model", str(checkpoint)]
    command += ["--prompt", "abc def ", "--tokens", "200000"]  # the whole text would take minutes
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def test_stops_at_an_interrupt(demo_checkpoint):
    process = start(demo_checkpoint)
    assert process.stdout.read(3) == b"abc"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors
    assert "of 200,000, interrupted" in " ".join(errors.decode().split())
