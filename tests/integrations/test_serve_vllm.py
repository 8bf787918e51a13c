"""Runs examples/serve_vllm.py up to the start of the engine. A replacement records the engine's arguments."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import transformers
from families import tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_vllm.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a folder with a model of 8,192 positions and a tokenizer whose tokens are words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    path = tmp_path_factory.mktemp("model")
    words = Tokenizer(WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    tiny("llama", max_position_embeddings=8192).save_pretrained(path)
    return path


@pytest.fixture
def serve(monkeypatch):
    """Returns a function that runs the example. It returns the engine's arguments, or None if no engine was started."""
    started = []

    class Engine:
        def __init__(self, model, **options):
            started.append(options | {"model": model})

        def generate(self, prompts, sampling):
            started[-1]["prompt"] = prompts[0]
            return [SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(text="word", token_ids=[1])])]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    spec = importlib.util.spec_from_file_location("serve_vllm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        started.clear()
        module.main(list(map(str, arguments)))
        return started[0]

    run.started = started
    return run


@pytest.mark.parametrize(
    "options, changes",
    [
        ([], {}),  # the context is within the training length
        (["--context", 8193], {"rerope": 4096, "log_n": 8192}),
        (["--context", 65536], {"rerope": 4096, "log_n": 8192}),
        (["--context", 65536, "--window", 100], {"rerope": 100, "log_n": 8192}),
    ],
)
def test_the_scheme_is_what_suggest_proposes(serve, model, options, changes):
    given = serve(model, *options)
    assert given["hf_overrides"] == {"flashrope": changes}
    assert len(given["prompt"]["prompt_token_ids"]) == given["max_model_len"] - 16


def test_a_text_that_fits(serve, model, tmp_path):
    (tmp_path / "text").write_text("word " * 48)
    assert serve(model, "--context", 64, "--text", tmp_path / "text")["prompt"] == "word " * 48


@pytest.mark.parametrize(
    "options, message",
    [
        (["--context", 64], "--text: expected at most 48 tokens, --context 64 less --tokens 16, got 49"),
        (["--context", 64, "--tokens", 64], "--tokens: expected 1 to 63"),
        (["--context", 64, "--window", 64], "--window: expected 1 to 63"),
        (["--text", "nowhere"], "No such file"),
    ],
)
def test_what_fails_before_the_engine_starts(serve, model, tmp_path, capsys, options, message):
    (tmp_path / "text").write_text("word " * 49)
    with pytest.raises(SystemExit) as stop:
        serve(model, "--text", tmp_path / "text", *options)
    assert stop.value.code == 2 and not serve.started
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_random_model_has_no_tokenizer(serve, tmp_path, capsys):
    (tmp_path / "text").write_text("word")
    with pytest.raises(SystemExit):
        serve("--text", tmp_path / "text")
    assert "--text: expected a model beside it" in capsys.readouterr().err and not serve.started
