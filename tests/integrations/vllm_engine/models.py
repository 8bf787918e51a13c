"""Small random models on disk, and the log probabilities that a converted Hugging Face model gives.

Weights with initializer_range 0.12: at the library's default such a model repeats one token, and a wrong rotation shows
in nothing.
"""

import torch
from flashrope.integrations.transformers import convert
from transformers import AutoConfig, AutoModelForCausalLM

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
    """A model in float32, the same in every call; the folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@torch.no_grad()
def reference(folder: str, options: dict | None, token_ids: list[int], dtype=torch.float32) -> torch.Tensor:
    """(tokens, vocabulary): log probabilities of the token after each, by convert() with the options; None: stock."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if options is not None:
        convert(model, **options)
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)
