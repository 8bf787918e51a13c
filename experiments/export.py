"""``python -m experiments export MODEL.safetensors DIR``: exports a trained model as a ``LlamaForCausalLM`` of
transformers.

A model with plain RoPE becomes a stock Llama. Any other rotary scheme is written to config.json as the field
"flashrope", and ``flashrope.integrations.transformers.from_pretrained`` loads such a model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from flashrope.console.options import BadInput, need
from flashrope.lab.evaluation.llama import to_llama

from .training import load_model, rotary_of
from .zoo import Defaults

SUMMARY = "write a trained model as a LlamaForCausalLM: export MODEL.safetensors DIR"
TOKENIZER = "tokenizer.json"  # the file is in the folder of the models, if they read tokens
BYTES = 256


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL.safetensors", type=Path, help="a file in models/ of a run directory")
    parser.add_argument("out", metavar="DIR", type=Path, help="a new directory")
    args = parser.parse_args(argv)
    print(f"written to {export(args.model, args.out)}")


def export(path: Path, out: Path) -> Path:
    """Writes config.json, model.safetensors and a tokenizer to ``out``. Raises BadInput."""
    need("safetensors")
    need("transformers", extra="transformers")
    if not path.is_file():
        raise BadInput(f"export: expected a model of a run directory, models/NAME.safetensors, got {path}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"export: expected a new or empty directory, got {out}")
    model, metadata = load_model(path), _metadata(path)
    trained, length = metadata["trained"], int(metadata["train_length"])
    rotary = rotary_of(model, trained, length, Defaults(base=_base(path, metadata)))
    if rotary is None:
        raise BadInput(
            f"export: expected a Llama model with one rotary scheme for all layers, got {model.architecture} trained "
            f"with {trained}, which LlamaForCausalLM does not have"
        )
    llama = to_llama(model.language, rotary, length)
    llama.save_pretrained(out)
    if path.with_name(TOKENIZER).exists():
        shutil.copy(path.with_name(TOKENIZER), out)
    elif model.config.vocab_size == BYTES:
        (out / TOKENIZER).write_text(json.dumps(byte_tokenizer()), encoding="utf-8")
    if (out / TOKENIZER).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return out


def byte_tokenizer() -> dict:
    """Returns the contents of a tokenizer.json whose tokens are the 256 bytes. Token n is byte n."""
    shown = [n for n in range(256) if 33 <= n <= 126 or 161 <= n <= 172 or n >= 174]  # GPT-2 keeps these bytes
    others = [n for n in range(256) if n not in shown]
    letters = {n: chr(n) for n in shown} | {n: chr(256 + at) for at, n in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letters[n]: n for n in range(256)}, "merges": []},
    }


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()


def _base(path: Path, metadata: dict[str, str]) -> float:
    """Returns the base of the rotary frequencies. It is in the model's metadata, or for older models in settings.json
    of their run directory."""
    if "base" in metadata:
        return float(metadata["base"])
    settings = path.parent.parent / "settings.json"
    if not settings.exists():
        raise BadInput(
            f"export: {path} does not record the base of its frequencies, and {settings} does not exist; move the file "
            "back to its run directory"
        )
    return float(json.loads(settings.read_text(encoding="utf-8")).get("base", Defaults().base))
