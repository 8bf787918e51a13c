"""Computes Qwen2 in float64 with ``attention(impl="reference")``, step by step. It does two things that convert()
cannot: its query factors follow the length of each step, and keys of a document can be computed without the text before
it."""

from pathlib import Path

import torch
import torch.nn.functional as F
from flashrope import Rotary, attention
from models import COMMON, VOCABULARY
from safetensors.torch import load_file

HEAD_DIM, LAYERS = COMMON["head_dim"], COMMON["num_hidden_layers"]


class Float64Model:
    """Computes Qwen2 in float64 and holds the keys and values of the steps so far. The number of keys in a step
    determines the step's factor by length."""

    def __init__(self, folder: str, scheme: Rotary):
        self.weights = {name: x.double() for name, x in load_file(Path(folder) / "model.safetensors").items()}
        self.scheme = scheme
        self.cache = [
            torch.empty(2, 0, COMMON["num_key_value_heads"], HEAD_DIM, dtype=torch.float64) for _ in range(LAYERS)
        ]

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Returns log probabilities (tokens, vocabulary) of the token after each token."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for n in range(LAYERS):
            layer = f"model.layers.{n}"
            h = self._norm(x, f"{layer}.input_layernorm")
            q, k, v = (self._linear(h, f"{layer}.self_attn.{p}_proj").unflatten(-1, (-1, HEAD_DIM)) for p in "qkv")
            self.cache[n] = torch.cat((self.cache[n], torch.stack((k, v))), dim=1)
            out = attention(q[None], *self.cache[n][:, None], self.scheme, impl="reference")[0].flatten(-2)
            x = x + self._linear(out, f"{layer}.self_attn.o_proj")
            h, mlp = self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
            gated = F.silu(self._linear(h, f"{mlp}.gate_proj")) * self._linear(h, f"{mlp}.up_proj")
            x = x + self._linear(gated, f"{mlp}.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head").log_softmax(-1)

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps=1e-6)

    def _linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def differences_by_step(model: Float64Model, output, steps: list[list[int]]) -> float:
    """Returns the largest difference of any log probability of one output, including its prompt.

    model: a model with the keys and values that the cache holds before these steps. steps: the tokens of each step of
    the prompt. After the last step the model decodes.
    """
    prompt_ids, (completion,) = output.prompt_token_ids, output.outputs
    expected = torch.cat([model.step(ids) for ids in [*steps, *([t] for t in completion.token_ids[:-1])]])
    entries = (output.prompt_logprobs or [])[1:]
    found = [
        abs(entry[t].logprob - expected[n, t])
        for n, (entry, t) in enumerate(zip(entries, prompt_ids[1:], strict=bool(entries)))
    ]
    for entry, row in zip(completion.logprobs, expected[-len(completion.logprobs) :], strict=True):
        found.append((torch.tensor([entry[token].logprob for token in range(VOCABULARY)]) - row).abs().max())
    return float(max(found))
