"""Tests flashrope generate with a Hugging Face checkpoint: it writes the text that transformers' generate gives under
the requested scheme."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import transformers
from families import tiny
from flashrope.cli.main import main
from flashrope.integrations.transformers import CodesCache, convert, from_pretrained
from flashrope.integrations.transformers.versions import CACHE
from flashrope.lab.evaluation.checkpoint import Tokens
from flashrope.lab.evaluation.generation import _decoder

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
        return capsys.readouterr()

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
        (["--rectify"], {"rerope": 16}),
        (["--window", "8", "--factor", "4", "--log-n"], {"leaky_rerope": (8, 4.0), "log_n": 32}),
        (["--log-n"], {"log_n": 32}),
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


def test_seeds(run):
    first = run("--seed", "1").out
    assert first == run("--seed", "1").out != run("--seed", "2").out
    assert run("--seed", "1", "--top-k", "1").out == run("--temperature", "0").out


def test_a_model_that_was_saved_with_a_scheme(run, tmp_path):
    convert(model_of(), rerope=8).save_pretrained(tmp_path)
    shown = run("--temperature", "0", model=tmp_path)
    assert shown.out == continued(from_pretrained(tmp_path)) and "ReRoPE w 8: window 8" in shown.err
    shown = run("--temperature", "0", "--log-n", model=tmp_path)
    assert shown.out == continued(convert(model_of(), rerope=8, log_n=32))


def test_what_is_said(run):
    said = " ".join(run("--temperature", "0", "--rectify").err.split())
    for part in (
        "parameters, training length 32 tokens",
        "scheme: ReRoPE w 16: window 16",
        f"prompt of {len(PROMPT)} bytes, up to {NEW} bytes generated; past the training length within the prompt",
        "always the most likely byte (greedy)",
        f"generated: {NEW} tokens, ",
        f"context: reached {len(PROMPT) + NEW} bytes, 3.5 times the training length",
    ):
        assert part in said, said
    assert "scheme: the model's own" in " ".join(run().err.split())


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
        (["--impl", "cpu"], "--impl: supported only for a checkpoint of flashrope demo"),
        (["--keep", "4,8"], "--keep: supported only for a checkpoint of flashrope demo"),
        (["--window", "33"], "--window: expected at most the training length of 32 bytes"),
        (["--rectify", "--factor", "-1"], "--rectify: factor: expected a positive number"),
        (["--scheme", "rerope", "--log-n"], "--scheme: cannot be combined with --log-n"),
        (["--temperature", "-1"], "--temperature: expected a number of at least 0"),
        (["--top-k", "300"], "--top-k: expected at most 256, the number of different bytes"),
        (["--prompt-file", "nowhere"], "--prompt-file: cannot read nowhere"),
        ([], "--prompt: expected a text to continue"),
        (["--model", "nowhere/at/all"], "--model: "),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, options, message):
    without = not options or options[0] == "--prompt-file"
    shown = run(*options, code=2, prompt=None if without else PROMPT)
    said = [line for line in shown.err.splitlines() if line and "Loading weights" not in line]  # transformers' bar
    assert len(said) == 1 and said[0].startswith("flashrope generate: error: ") and message in said[0]
    assert not shown.out


def test_text_of_a_tokenizer_comes_in_whole_characters():
    """The command prints whole characters, although each token of this tokenizer is a byte. The tokenizer drops the
    leading space of a text's first token, as some tokenizers do."""
    tokens = Tokens(None, decode=lambda ids: bytes(ids).decode(errors="replace").removeprefix(" "))
    text = "a grün \N{SNOWMAN} and  more"
    add, rest = _decoder(tokens, list(b"say "))
    shown = [add(byte) for byte in text.encode()]
    assert "".join(shown) + rest() == text and "\N{SNOWMAN}" in shown


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
