"""Makes small random models on disk, and computes the log probabilities of a converted Hugging Face model.

The initializer_range is 0.12. With the default of transformers such a model repeats one token, so that a wrong rotation
would change nothing.
"""

from typing import NamedTuple

import torch
from flashrope import Rotary, rotate
from flashrope.calls.int8 import dequantize, quantize
from flashrope.integrations.transformers import convert
from transformers import AutoConfig, AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

VOCABULARY = 256
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.12,
    tie_word_embeddings=False,
)


def save_model(folder, name: str, **changes) -> str:
    """Saves a model in float32, the same in every call, and returns the folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == "gemma4_text":  # the weights of its norms are all that scales the scores
        for each in (module for key, module in model.named_modules() if key.endswith("q_norm")):
            each.weight.data.fill_(each.weight.numel() ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


class Rounded(NamedTuple):
    """Describes a quantized cache."""

    stored_as: Rotary | None = None  # the scheme that rotates keys before they are rounded
    layers: tuple[int, ...] = (0, 1, 2)  # the layers whose caches are quantized


class RoundedLayer(DynamicLayer):
    """Stores keys and values after quantizing and dequantizing them. Keys may be rotated before they are quantized and
    rotated back afterwards."""

    def __init__(self, rounded: Rounded):
        super().__init__()
        self.stored_as = rounded.stored_as

    def update(self, k, v, *args, **kwargs):
        if self.stored_as is None:
            return super().update(self._round(k), self._round(v))
        k, positions = k.float().transpose(1, 2), torch.arange(k.shape[2])
        turned = self._round(rotate(k, self.stored_as, positions))
        return super().update(rotate(turned, self.stored_as, -positions).transpose(1, 2).to(v.dtype), self._round(v))

    def _round(self, x):
        return dequantize(*quantize(x), torch.float32).to(x.dtype)


@torch.no_grad()
def reference(
    folder: str, options: dict | None, token_ids: list[int], dtype=torch.float32, rounded: Rounded | None = None
) -> torch.Tensor:
    """Returns the log probabilities (tokens, vocabulary) of the next token at each position. options: the options with
    which the model is converted. None: the model is not converted."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if options is not None:
        convert(model, **options)
    cache = {"use_cache": False}
    if rounded is not None:
        layers = range(model.config.num_hidden_layers)
        kinds = [RoundedLayer(rounded) if n in rounded.layers else DynamicLayer() for n in layers]
        cache = {"past_key_values": Cache(layers=kinds)}
    return model(torch.tensor([token_ids]), **cache).logits[0].float().log_softmax(-1)
