"""A small Llama-style language model over bytes. The position scheme is an argument of its forward pass."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ... import Rotary, Step, attention
from ...console.files import replacing

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rotary], torch.Tensor]
IN_EXPERIMENTS = "language."  # prefix of the names of weights in checkpoints of the experiments


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a ``LanguageModel``. ``mlp_width`` 0 means 8/3 of the width, rounded to a multiple of 32."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    mlp_width: int = 0
    vocab_size: int = 256

    def __post_init__(self):
        if self.width % self.heads or (self.width // self.heads) % 8:
            raise ValueError(f"width: expected heads = {self.heads} times a multiple of 8, got {self.width}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return self.mlp_width or max(round(self.width * 8 / 3 / 32), 1) * 32


class ModelBlock(nn.Module):
    """Attention and a SwiGLU MLP, each with an RMSNorm before it and a residual connection around it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.attention_norm = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        x = x + self.out(attend(q, k, v, rotary).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """A decoder without biases. The output projection is tied to the embedding. The weights do not contain positions,
    so the model can run under any Rotary of the same head_dim."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        blocks = [ModelBlock(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in blocks:  # scaled so that the residual stream's variance does not grow with depth
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(
        self, tokens: torch.Tensor, rotary: Rotary, attend: Attend | Sequence[Attend] = attention
    ) -> torch.Tensor:
        """Returns the logits (batch, seqlen, vocab_size) of tokens, int64 (batch, seqlen).

        ``attend`` is called as attend(q, k, v, rotary). For a KV cache, give a sequence of functions, one per block.
        """
        return self.decode(self.embedding(tokens), rotary, attend)

    def decode(self, x: torch.Tensor, rotary: Rotary, attend: Attend | Sequence[Attend] = attention) -> torch.Tensor:
        """Does what ``forward`` does, from embeddings (batch, seqlen, width)."""
        attends = [attend] * len(self.blocks) if callable(attend) else attend
        for block, attend_in_block in zip(self.blocks, attends, strict=True):
            x = block(x, rotary, attend_in_block)
        return F.linear(self.norm(x), self.embedding.weight)


def read_in_step(
    model: LanguageModel, rotary: Rotary, step: Step, tokens: torch.Tensor, impl: str | None = None
) -> torch.Tensor:
    """Reads the tokens of a step, int64 (sequences, seqlen), and returns logits (sequences, seqlen, vocab_size).

    Every block writes its keys and values to the cache.
    """

    def attend(layer: int, q, k, v, rotary: Rotary) -> torch.Tensor:
        return step.attend(q, rotary, k, v, layer=layer, impl=impl)

    return model(tokens, rotary, [functools.partial(attend, layer) for layer in range(len(model.blocks))])


def save_checkpoint(
    path: str | os.PathLike, model: LanguageModel, rotary: Rotary, train_length: int | None = None
) -> None:
    """Writes weights, sizes, scheme and training length to one safetensors file. The write is atomic."""
    from safetensors.torch import save_file

    path = Path(path)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"config": json.dumps(dataclasses.asdict(model.config)), "rotary": rotary.text}
    if train_length is not None:
        metadata["train_length"] = str(train_length)
    with replacing(path) as partial:
        save_file(weights, partial, metadata=metadata)


def load_checkpoint(path: str | os.PathLike, device: torch.device | str = "cpu") -> tuple[LanguageModel, Rotary]:
    """Returns the model and the scheme with which it was trained. Also reads the rotary models of the experiments.
    Raises ValueError for other files."""
    with _opened(path, device) as file:
        metadata = _metadata(path, file)
        names = {name.removeprefix(IN_EXPERIMENTS): name for name in file.keys()}  # noqa: SIM118  not a mapping
        weights = {name: file.get_tensor(stored) for name, stored in names.items()}
    try:
        model, rotary = (
            LanguageModel(ModelConfig(**json.loads(metadata["config"]))),
            Rotary.from_text(metadata["rotary"]),
        )
        model.to(device).load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: not a flashrope checkpoint ({' '.join(str(error).split())})") from error
    return model, rotary


def check_checkpoint(path: str | os.PathLike) -> None:
    """Raises ValueError if ``load_checkpoint`` cannot read a file, from the file's metadata."""
    with _opened(path, "cpu") as file:
        _metadata(path, file)


def _metadata(path: str | os.PathLike, file) -> dict[str, str]:
    metadata = file.metadata() or {}
    if "trained" in metadata and "rotary" not in metadata:
        raise ValueError(
            f"{path}: expected a model with one rotary scheme, got a model that python -m experiments trained "
            f"with {metadata['trained']!r}; only python -m experiments reads it"
        )
    if not {"config", "rotary"} <= metadata.keys():
        raise ValueError(f"{path}: not a flashrope checkpoint, its metadata has no config and rotary")
    return metadata


def trained_length(path: str | os.PathLike) -> int | None:
    """Returns the training length recorded in a checkpoint, in tokens, or None if the file has none."""
    with _opened(path, "cpu") as file:
        length = (file.metadata() or {}).get("train_length", "")
    return int(length) if length.isdecimal() else None


def _opened(path: str | os.PathLike, device: torch.device | str):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{path}: not a flashrope checkpoint ({error})") from None
