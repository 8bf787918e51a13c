"""Reads models from GGUF files, the files of llama.cpp. transformers' reader loads the weights and the tokenizer."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import torch

from ...console.options import BadInput, need


def is_gguf(name: str) -> bool:
    return Path(name).suffix == ".gguf"


def read(path: Path, dtype: torch.dtype):
    """Returns the causal language model of a GGUF file, with weights that are dequantized to dtype when they are read.

    Raises:
        BadInput: a package is missing, or the file is invalid. The message is one line.
    """
    _check(path)
    from transformers import AutoModelForCausalLM

    try:
        # In any other dtype, newer versions of transformers warn that they could compute with packed weights.
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # transformers' reader has no exception class of its own
        raise BadInput(f"--model: {path.name}: {_first_line(error)}") from None
    # transformers does not save a model whose configuration names a quantization.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def tokenizer(path: Path):
    """Returns the tokenizer from a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def weights(path: Path) -> str:
    """Returns the types of the file's weights, such as "Q4_1, F32". The type with the most weights is first."""
    found: Counter[str] = Counter()
    for tensor in _reader(path).tensors:
        found[tensor.tensor_type.name] += int(tensor.n_elements)
    return ", ".join(name for name, _ in found.most_common())


def _check(path: Path) -> None:
    need("gguf", "accelerate", extra="gguf")
    if not path.is_file():
        raise BadInput(f"--model: expected a GGUF file, got {path}, which is not a file")
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    reader = _reader(path)
    field = reader.fields.get("general.architecture")
    architecture = bytes(field.parts[field.data[0]]).decode() if field else "none"
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise BadInput(
            f"--model: {path.name}: transformers does not read the architecture {architecture} from GGUF files "
            f"({', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))})"
        )


def _reader(path: Path):
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # GGUFReader passes on what numpy raises for a truncated file
        raise BadInput(f"--model: {path.name}: not a whole GGUF file ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
