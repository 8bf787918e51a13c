"""Tests flashrope generate with models of random weights: which bytes come out, not how well they read."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from flashrope import Rotary, attention
from flashrope.cli.main import main
from flashrope.lab.small_models import data
from flashrope.lab.small_models.continuation import generate, pick
from flashrope.lab.small_models.model import (
    Decoder,
    LanguageModel,
    ModelConfig,
    RollingDecoder,
    load_checkpoint,
    save_checkpoint,
    trained_length,
)
from test_small_models import model_of

LENGTH = 32  # the training length that the checkpoint states
ROPE = Rotary.rope(16)
PROMPT = bytes(range(65, 65 + 26)) * 2  # the prompt is longer than the training length


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "rope.safetensors"
    save_checkpoint(path, model_of(), ROPE, LENGTH)
    return path


@pytest.fixture
def run(checkpoint, capsys):
    """Runs the command and returns (stdout, stderr)."""

    def run(*options, code=0, model=checkpoint):
        base = ["generate", "--device", "cpu", "--model", str(model), "--tokens", "40"]
        if not {"--prompt", "--prompt-file"} & set(options):
            base += ["--prompt", PROMPT.decode()]
        assert main([*base, *options]) == code
        return capsys.readouterr()

    return run


def by_full_passes(model, rotary, prompt, tokens):
    """Decodes greedily without a cache. Also returns the smallest margin between the two most likely bytes, which shows
    that rounding decided no byte."""
    text, margin = list(prompt), float("inf")
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(torch.tensor([text]), rotary, lambda *qkv: attention(*qkv, impl="reference"))[0, -1]
            best, second = logits.topk(2).values.tolist()
            margin = min(margin, best - second)
            text.append(int(logits.argmax()))
    return bytes(text[len(prompt) :]), margin


# ---- decoding
def test_one_cache_for_all_blocks():
    """If reading a prompt is interrupted in the last block of the model, the caches of the other blocks stay empty."""
    model, tokens = model_of(), data.as_tokens([PROMPT], "cpu")
    decoder = Decoder(model, ROPE, 60)
    assert decoder.cache.layers == len(model.blocks)
    with torch.inference_mode():
        decoder.read(tokens[:, :20])
        hook = model.blocks[-1].out.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decoder.read(tokens[:, 20:40])
        hook.remove()
        assert decoder.cache.lengths == [20]
        again = decoder.read(tokens[:, 20:])
        torch.testing.assert_close(again, model(tokens, ROPE)[:, 20:])
        with pytest.raises(ValueError, match="52 of 60 slots in use: no room for 20"):
            decoder.read(tokens[:, :20])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    "rotary",
    [ROPE, Rotary.hope(16, LENGTH), ROPE.rectify(16), ROPE.rectify(16, 4.0).log_n(LENGTH)],
    ids=["rope", "hope", "rerope", "leaky, log n"],
)
def test_decoding_with_the_cache_is_decoding_by_full_passes(rotary, impl, monkeypatch):
    monkeypatch.setattr("flashrope.lab.small_models.continuation.CHUNK", 20)  # the prompt has three pieces
    model = model_of()
    expected, margin = by_full_passes(model, rotary, PROMPT, 60)
    assert margin > 1e-4 and len(set(expected)) > 5
    with torch.inference_mode():
        assert bytes(generate(Decoder(model, rotary, len(PROMPT) + 60, impl=impl), PROMPT, 60)) == expected


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_logits_with_the_cache(cache_dtype):
    """Logits are the same whether the prompt is read in one piece or in several. The error that quantization makes does
    not depend on the pieces."""
    model, rotary, tokens = model_of(), ROPE.rectify(16, 4.0).log_n(LENGTH), torch.randint(256, (1, 100))
    with torch.inference_mode():
        expected, found = model(tokens, rotary), []
        for sizes in ([100], [50, 1, 1, 30, 18]):
            decoder = Decoder(model, rotary, 100, cache_dtype=cache_dtype)
            assert decoder.cache.cache_dtype == cache_dtype
            found.append(torch.cat([decoder.read(piece) for piece in tokens.split(sizes, dim=1)], dim=1))
    if cache_dtype is None:
        assert all((x - expected).abs().max() < 1e-3 * expected.abs().max() for x in found)
        return
    error, difference = ((x - found[0]).square().mean().sqrt() for x in (expected, found[1]))
    assert 1e-5 < error < 0.2 * expected.square().mean().sqrt() and difference < error / 5


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_a_cache_of_fixed_size(cache_dtype):
    """With a cache of fixed size, a byte sees the bytes that the cache keeps and the bytes of its own chunk, at
    positions 0, 1, 2, ... The model has one block, so keys depend only on their own byte."""
    torch.manual_seed(1)
    model = LanguageModel(dataclasses.replace(model_of().config, layers=1)).eval()
    rotary, tokens = ROPE.rectify(16, 4.0).log_n(LENGTH), torch.randint(256, (2, 200))
    decoder = RollingDecoder(model, rotary, (3, 20), 9, cache_dtype=cache_dtype, batch=2)
    with torch.inference_mode():
        for start in range(0, 200, 9):
            chunk = tokens[:, start : start + 9]
            seen = torch.cat((tokens[:, : min(3, start)], tokens[:, max(start - 20, 3) : start], chunk), 1)
            found, expected = decoder.read(chunk), model(seen, rotary)[:, -chunk.shape[1] :]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if cache_dtype is None else 0.05)
    assert decoder.cache.lengths == {0: 23, 1: 23} and decoder.cache.pages == 10


def test_one_attend_for_each_block():
    model, tokens = model_of(), torch.randint(256, (1, 8))
    expected = model(tokens, ROPE)
    assert torch.equal(model(tokens, ROPE, [attention, attention]), expected)
    assert not torch.allclose(model(tokens, ROPE, [attention, lambda q, k, v, rotary: v]), expected)
    with pytest.raises(ValueError, match="zip"):
        model(tokens, ROPE, [attention])


def test_pick():
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64), torch.Generator().manual_seed(0)
    draws = lambda *options, count=100: [pick(logits, *options, generator) for _ in range(count)]  # noqa: E731
    assert set(draws(0.0, None)) == {1}
    assert set(draws(1e-300, None)) == {1}
    assert set(draws(5.0, 1)) == {1}
    assert set(draws(5.0, 2)) == {1, 3}
    drawn = draws(2.0, None, count=2000)
    shares = torch.tensor([drawn.count(token) / 2000 for token in range(4)], dtype=torch.float64)
    assert (shares - (logits / 2).softmax(0)).abs().max() < 0.05
    with pytest.raises(FloatingPointError, match="largest logit is nan"):
        pick(logits * float("nan"), 1.0, None, generator)


# ---- the command
def test_scheme_options_are_the_schemes(run):
    ours = {}
    for options, rotary in {
        (): ROPE,
        ("--rectify",): ROPE.rectify(16),
        ("--window", "8"): ROPE.rectify(8),
        ("--factor", "2"): ROPE.rectify(16, 2.0),
        ("--log-n",): ROPE.log_n(LENGTH),
        ("--rectify", "--window", "8", "--factor", "2", "--log-n"): ROPE.rectify(8, 2.0).log_n(LENGTH),
        ("--scheme", "cope"): ROPE.cope(LENGTH),
        ("--scheme", "yarn"): ROPE.yarn(76 / LENGTH, LENGTH),
        ("--scheme", "self-extend-log-n", "--window", "8"): ROPE.self_extend(8, 4).log_n(LENGTH),
        ("--scheme", "leaky", "--factor", "3"): ROPE.rectify(16, 3.0).log_n(LENGTH),
    }.items():
        expected, margin = by_full_passes(model_of(), rotary, PROMPT, 24)
        assert margin > 1e-4
        shown = run("--temperature", "0", "--tokens", "24", *options)
        assert shown.out == (PROMPT + expected).decode(errors="replace")
        ours[options] = shown.out
    assert len(set(ours.values())) == len(ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rerope", "--log-n"], "--scheme: cannot be combined with --log-n"),
        (["cope", "--window", "8"], "--window: expected a scheme with a window, got cope"),
        (["rerope", "--factor", "2"], "--factor: expected a scheme with a factor, got rerope"),
        (["dual-chunk"], "--scheme: dual_chunk: expected a training length above 128"),
    ],
    ids=str,
)
def test_schemes_that_do_not_fit(run, options, message):
    assert message in run("--scheme", *options, code=2).err


def test_messages(run):
    shown = run("--window", "8", "--factor", "2", "--log-n", "--temperature", "0").err
    shown = " ".join(shown.split())
    for part in (
        "layers 2, heads 2 of 16 channels, training length 32 bytes",
        "8 of 8 channel pairs rotated",
        "Leaky ReRoPE, window 8 bytes",
        "beyond it grow by 1/2",
        "ln(32)",
        "prompt of 52 bytes, up to 40 bytes generated; past the training length within the prompt",
        "greedy",
        "prompt: 52 tokens, ",
        "generated: 40 tokens, ",
        "tokens/s",
        "context: reached 92 bytes, 2.9 times the training length",
        "device: cpu, backend default",
    ):
        assert part in shown
    shown = " ".join(run("--prompt", "abc", "--rectify", "--top-k", "9", "--impl", "reference").err.split())
    for part in (
        "ReRoPE, window 16 bytes: distances beyond it count as 16",
        "past the training length at generated byte 30",
        "temperature 0.8, from the 9 most likely bytes, seed 0",
        "backend reference",
    ):
        assert part in shown
    shown = " ".join(run("--prompt", "abc", "--tokens", "29").err.split())
    assert "distances unchanged" in shown and "within the training length" in shown
    shown = " ".join(run("--prompt", "abc", "--tokens", "1").err.split())
    assert "generated: 1 tokens (1 token = 1 byte)" in shown


def test_a_quantized_cache(run):
    plain = run("--temperature", "0")
    shown = run("--temperature", "0", "--cache-dtype", "int8")
    assert "cache: int8, a scale for each token and key head" in " ".join(shown.err.split())
    assert "cache:" not in plain.err and shown.out.startswith(PROMPT.decode())
    assert "--cache-dtype" in run("--cache-dtype", "int8", "--impl", "cuda", code=2).err


def test_keep(run):
    said = " ".join(run("--temperature", "0", "--tokens", "90", "--keep", "4,20").err.split())
    assert "kept: the first 4 and the last 20 bytes" in said and "a byte sees 88 at most" in said


def test_seeds(run):
    first = run("--seed", "1").out
    assert first == run("--seed", "1").out != run("--seed", "2").out
    assert run("--seed", "1", "--temperature", "0").out == run("--seed", "2", "--temperature", "0").out


def test_prompts(run, tmp_path):
    (tmp_path / "prompt").write_bytes("grün ".encode() + b"\xff!")
    assert run("--prompt-file", str(tmp_path / "prompt")).out.startswith("grün \N{REPLACEMENT CHARACTER}!")
    assert run("--prompt", "grün").out.startswith("grün")
    with pytest.raises(SystemExit) as stop:
        run("--prompt", "a", "--prompt-file", "b")
    assert stop.value.code == 2


def test_default_prompt_is_unseen(checkpoint, capsys):
    corpus = data.standard_library(257)
    split = checkpoint.with_name("split.json")
    split.write_text(json.dumps(corpus.record()))
    options = ["generate", "--device", "cpu", "--model", str(checkpoint), "--tokens", "1"]
    try:
        prompts = []
        for seed in ("0", "1"):
            assert main([*options, "--seed", seed]) == 0
            shown = capsys.readouterr()
            assert "prompt of 32 bytes" in shown.err
            prompts.append(shown.out[:20].encode())
        assert prompts[0] != prompts[1]
        assert all(any(prompt in piece for piece in corpus.unseen) for prompt in prompts)
        split.write_text(json.dumps({**corpus.record(), "text": "mine"}))
        assert main(options) == 2
        assert "the unseen part of mine is not available; give --prompt" in capsys.readouterr().err
    finally:
        split.unlink()
    assert main(options) == 2
    assert "which says which text is unseen; give --prompt or --prompt-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--model", "nowhere/rope.safetensors"],
            "--model: no file nowhere/rope.safetensors; run 'flashrope demo' first",
        ),
        (["--prompt", ""], "--prompt: expected at least one byte, got none"),
        (["--prompt-file", "nowhere"], "--prompt-file: cannot read nowhere (No such file or directory)"),
        (["--prompt-file", os.devnull], "--prompt-file: expected at least one byte"),
        (["--temperature", "-1"], "--temperature: expected a number of at least 0, got -1.0"),
        (["--temperature", "nan"], "--temperature: expected a number of at least 0, got nan"),
        (["--top-k", "257"], "--top-k: expected at most 256"),
        (["--top-k", "3", "--temperature", "0"], "--top-k: has no effect at --temperature 0"),
        (["--seed", "-1"], "--seed: expected 0 to"),
        (["--tokens", "1000000000000"], "--tokens: cpu has not enough memory for a cache of 1,000,000,000,052 tokens"),
        (["--window", "33"], "--window: expected at most the training length of 32 bytes, beyond"),
        (["--factor", "0"], "--factor: expected a positive number, got 0.0"),
        (["--train-length", "64"], "--train-length: expected 32, which "),
        (["--device", "abacus"], "--device: expected auto, cpu, cuda or cuda:N, got abacus"),
        (["--impl", "triton"], "--impl: impl='triton' cannot serve this call: no"),
        (["--dtype", "bfloat16"], "--dtype: supported only for a transformers model or a .gguf file"),
    ],
)
def test_bad_input_is_one_line(run, monkeypatch, options, message):
    monkeypatch.setattr("flashrope.backends.triton.unsupported_reason", lambda q, cached=False: "no")
    shown = run(*options, code=2)
    assert message in shown.err and shown.err.count("\n") == 1 and shown.err.startswith("flashrope generate: error: ")
    assert not shown.out


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "0"],
        ["--tokens", "x"],
        ["--top-k", "0"],
        ["--window", "0"],
        ["--temperature", "x"],
        ["--keep", "4"],
        ["--keep", "4,0"],
    ],
)
def test_bad_numbers_name_the_option(run, capsys, options):
    with pytest.raises(SystemExit) as stop:
        run(*options)
    assert stop.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err


def test_files_that_are_not_checkpoints(run, tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("not a checkpoint at all")
    save_file({"weight": torch.zeros(1)}, tmp_path / "other")
    good = {"config": json.dumps({"width": 32, "layers": 1, "heads": 2}), "rotary": ROPE.text}
    save_file({"weight": torch.zeros(1)}, tmp_path / "weights", metadata=good)
    save_file({"weight": torch.zeros(1)}, tmp_path / "config", metadata={**good, "config": '{"depth": 3}'})
    save_file({"weight": torch.zeros(1)}, tmp_path / "rotary", metadata={**good, "rotary": "{}"})
    for name in ("text", "other", "weights", "config", "rotary"):
        shown = run(code=2, model=tmp_path / name)
        assert f"--model: {tmp_path / name}: not a flashrope checkpoint" in shown.err and shown.err.count("\n") == 1
    small = LanguageModel(ModelConfig(width=32, layers=1, heads=2, vocab_size=100))
    save_checkpoint(tmp_path / "small", small, ROPE, LENGTH)
    assert "expected a model over 256 bytes" in run(code=2, model=tmp_path / "small").err


def test_checkpoints_without_a_training_length(run, checkpoint, tmp_path):
    assert trained_length(checkpoint) == LENGTH
    old = tmp_path / "old"
    save_checkpoint(old, model_of(), ROPE)
    assert trained_length(old) is None and load_checkpoint(old)[1] == ROPE
    assert "training length unknown" in run(model=old).err
    for options in (["--rectify"], ["--window", "8"], ["--log-n"]):
        errors = run(*options, code=2, model=old).err
        assert f"{options[0]}: {old} does not record its training length; give --train-length" in errors
    given = run("--rectify", "--log-n", "--train-length", str(LENGTH), model=old)
    assert given.out == run("--rectify", "--log-n").out


def test_weights_that_are_not_finite(run, tmp_path):
    model = model_of()
    model.norm.weight.data[0] = float("nan")
    save_checkpoint(tmp_path / "nan", model, ROPE, LENGTH)
    shown = run(code=1, model=tmp_path / "nan")
    assert shown.out == PROMPT.decode() and "error: the model's largest logit is nan" in shown.err


def test_schemes_that_do_not_stack(run, tmp_path):
    for name, rotary, option, message in (
        ("nope", Rotary.none(16), "--factor=2", "--factor: no channel pair of this model is rotated"),
        ("rerope", ROPE.rectify(8), "--rectify", "--rectify: rectify: this scheme is rectified already"),
        ("logn", ROPE.log_n(32, clip=False), "--log-n", "--log-n: log_n: this scheme is scaled by log n already"),
    ):
        save_checkpoint(tmp_path / name, model_of(), rotary, LENGTH)
        assert message in run(option, code=2, model=tmp_path / name).err
        run("--tokens", "2", model=tmp_path / name)


def test_every_byte_is_out_before_the_next_is_decoded(run, monkeypatch):
    out, seen = io.BytesIO(), []

    def bytes_of(text):
        for byte in text:
            seen.append(out.getvalue())
            yield byte
        seen.append(out.getvalue())

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "utf-8", newline=""))
    monkeypatch.setattr(
        "flashrope.lab.small_models.continuation.generate", lambda *options: bytes_of("aü\nb".encode() + b"\xff\xc3")
    )
    run("--prompt", "abc")
    assert [text.decode() for text in seen] == [
        "abc",
        "abca",
        "abca",
        "abcaü",
        "abcaü\n",
        "abcaü\nb",
        "abcaü\nb\ufffd",
        "abcaü\nb\ufffd",
    ]
    assert out.getvalue() == "abcaü\nb\ufffd\ufffd".encode()  # the character at the end is incomplete


def test_a_terminal_without_utf_8(run, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "ascii"))
    run("--prompt", "grün", "--tokens", "1")
    assert out.getvalue().startswith(b"gr?n")


def test_an_interrupt_while_the_prompt_is_read(run, monkeypatch):
    def interrupted(*options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("flashrope.lab.small_models.continuation.generate", interrupted)
    shown = run("--prompt", "abc", code=130)
    assert shown.out == "abc" and "prompt:    interrupted during the prefill\ndevice:    cpu" in shown.err


def start(checkpoint, tokens):
    command = [sys.executable, "-m", "flashrope", "generate", "--device", "cpu", "--model", str(checkpoint)]
    command += ["--prompt", "abc", "--tokens", str(tokens)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )


def test_streams_and_stops_at_an_interrupt(checkpoint):
    process = start(checkpoint, 200_000)  # the whole text would take minutes
    try:
        seen = b""
        while len(seen) < 40:
            piece = process.stdout.read(100)
            assert piece, process.stderr.read()
            seen += piece
        assert seen.startswith(b"abc") and process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    errors = " ".join(errors.decode().split())
    assert process.returncode == 130 and "Traceback" not in errors
    assert "of 200,000, interrupted" in errors and "tokens/s" in errors and "context: reached" in errors
    assert (seen + rest).decode()  # raises an error unless all characters are whole


def test_closed_stdout_gives_no_traceback(checkpoint):
    process = start(checkpoint, 200_000)
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.wait(timeout=60)
    assert process.returncode == 1 and "Traceback" not in errors and "Exception ignored" not in errors
    assert "generated:" not in errors
