"""Saves the state from which a run can resume: nested dicts and lists of tensors and plain values, in one safetensors
file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ...console.files import replacing


def save(path: Path, tree: dict) -> None:
    """Writes the tree to a file. Tensors are stored under numbers. The metadata holds everything else as JSON."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(tree, tensors))
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"tree": text})


def load(path: Path, device: torch.device) -> dict:
    """Returns the tree that ``save`` wrote. Raises ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return _tree(json.loads(file.metadata()["tree"]), file.get_tensor)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the state of an interrupted run, as this version writes it, got another file ({error}); "
            "remove it to train from the start"
        ) from None


def _plain(x: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns x as JSON values. Tensors, dicts, lists and tuples become {type: content}."""
    if isinstance(x, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = x.detach().cpu().clone(memory_format=torch.contiguous_format)  # tied weights share memory
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": [[key, _plain(value, tensors)] for key, value in x.items()]}
    if isinstance(x, (list, tuple)):
        return {type(x).__name__: [_plain(value, tensors) for value in x]}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"state: expected tensors and plain values, got {type(x).__name__}")


def _tree(x: Any, tensor) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _tree(value, tensor) for key, value in content}
    return {"list": list, "tuple": tuple}[kind](_tree(value, tensor) for value in content)
