"""Tests models in GGUF files: they give the logits and the text of the checkpoint that they were made from, and a bad
file gives an error of one line."""

import json
import re

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="gguf is not installed; .ci/run tests it")
pytest.importorskip("accelerate", reason="accelerate is not installed; .ci/run tests it")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
from flashrope.cli.main import main
from flashrope.lab.evaluation import gguf_file
from flashrope.lab.evaluation.checkpoint import load
from tokenizers import pre_tokenizers

LAYERS, WIDTH, HIDDEN, HEADS, HEADS_KV, D = 2, 32, 64, 4, 2, 8
WORDS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
MERGES = ["t h", "th e"]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def of(*shape):
        return torch.randn(*shape, generator=generator).mul_(0.2).half().float()  # exact in a float16 file

    found = {"token_embd.weight": of(len(WORDS), WIDTH), "output_norm.weight": torch.ones(WIDTH)}
    for n in range(LAYERS):
        sizes = {"attn_q": (HEADS * D, WIDTH), "attn_k": (HEADS_KV * D, WIDTH), "attn_v": (HEADS_KV * D, WIDTH)}
        sizes |= {"attn_output": (WIDTH, HEADS * D), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH)}
        sizes |= {"ffn_down": (WIDTH, HIDDEN)}
        found |= {f"blk.{n}.{name}.weight": of(*size) for name, size in sizes.items()}
        found |= {f"blk.{n}.{name}.weight": torch.ones(WIDTH) for name in ("attn_norm", "ffn_norm")}
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path)
    return path


def write(path, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, *[1] * (len(WORDS) - 2)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, x in tensors().items():
        kind = np.float16 if x.ndim == 2 else np.float32
        writer.add_tensor(name, x.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpermuted(x, heads):
    """Returns the rows of the weights x of a q or k projection in the order for half pairing. llama.cpp stores them in
    the order for interleaved pairs."""
    return x.view(heads, x.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(x.shape)


def test_the_weights_are_the_files(file):
    model, tokens = load(str(file), torch.device("cpu"))
    own, state = tensors(), model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], own["token_embd.weight"])
    for n in range(LAYERS):
        attention = f"model.layers.{n}.self_attn"
        assert torch.equal(state[f"{attention}.v_proj.weight"], own[f"blk.{n}.attn_v.weight"])
        for name, heads in (("q", HEADS), ("k", HEADS_KV)):
            stored = unpermuted(own[f"blk.{n}.attn_{name}.weight"], heads)
            assert torch.equal(state[f"{attention}.{name}_proj.weight"], stored)
        assert torch.equal(state[f"model.layers.{n}.mlp.down_proj.weight"], own[f"blk.{n}.ffn_down.weight"])
    config = model.config
    assert config.max_position_embeddings == 64 and config.num_key_value_heads == HEADS_KV
    assert tokens.decode(tokens.encode("the cat 12")) == "the cat 12"
    assert tokens.start == (), "this tokenizer adds no start token by itself"
    assert gguf_file.weights(file) == "F16, F32"


def test_the_model_can_be_saved_and_converted(file, tmp_path):
    from flashrope.integrations.transformers import convert, revert

    model, _ = load(str(file), torch.device("cpu"))
    ids = torch.arange(40)[None] % len(WORDS)
    own = model(ids).logits
    convert(model, rerope=16).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert torch.equal(revert(model)(ids).logits, own)


def test_the_lines_of_the_docs(file, tmp_path):
    """A converted model from a GGUF file is saved, with dequantized weights and the scheme, by the lines of
    docs/trainers.md."""
    from flashrope.integrations.transformers import convert, from_pretrained

    folder, name, ids = file.parent, file.name, torch.arange(40)[None] % len(WORDS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    convert(model, rerope=True, log_n=True)
    if int(transformers.__version__.split(".")[0]) >= 5:
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path)
        del model.config.quantization_config, model.hf_quantizer
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config.flashrope == {"rerope": 32, "log_n": 64}
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_commands_say_what_the_file_holds(file, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    run = ["--model", str(file), "--device", "cpu", "--threads", "1"]
    lengths = ["--lengths", "16", "32", "--windows", "2", "--schemes", "stock", "rerope"]
    assert main(["loss", *run, "--text", str(text), "--out", str(tmp_path / "loss"), *lengths]) == 0
    facts = json.loads((tmp_path / "loss" / "loss.json").read_text())["facts"]
    assert "dequantized from F16, F32" in facts["model"] and "training length 64" in facts["model"]
    assert main(["generate", *run, "--prompt", "the cat", "--tokens", "2"]) == 0
    capsys.readouterr()


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])


BAD = {
    "nothing": (lambda path: path.unlink(), "expected a GGUF file, got .*, which is not a file"),
    "text": (lambda path: path.write_text("hello"), "bad.gguf: not a whole GGUF file"),
    "truncated": (cut, "bad.gguf: not a whole GGUF file"),
    "architecture": (lambda path: write(path, "no-such-net"), "does not read the architecture no-such-net"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name, tmp_path, capsys):
    path, (spoil, message) = tmp_path / "bad.gguf", BAD[name]
    write(path)
    spoil(path)
    assert main(["generate", "--model", str(path), "--prompt", "a", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error) and error.count("--model") == 1, error


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_what_to_install(package, file, monkeypatch, capsys):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    assert main(["generate", "--model", str(file), "--prompt", "a", "--device", "cpu"]) == 2
    assert f"needs {package}: pip install 'flashrope[gguf]'" in capsys.readouterr().err
