"""Small random models of every tested family, and the differences between converted and stock logits.

python tests/integrations/families.py [PAGE.md]      prints the table, and writes it to the page, docs/integration.md
"""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from flashrope import Rotary
from flashrope.integrations.transformers import convert
from flashrope.integrations.transformers.masks import WITHOUT_PACKING

COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.1,
)  # such attention is sharp: a wrong rotation moves logits by 0.4 to 3
HYBRID = dict(sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
FAMILIES = {
    "cohere2": dict(logit_scale=1.0, **HYBRID),
    "gemma": dict(head_dim=24),
    "gemma2": dict(head_dim=16, attn_logit_softcapping=None, **HYBRID),
    "gemma3_text": dict(head_dim=16, **HYBRID),
    "glm4": dict(head_dim=16, partial_rotary_factor=0.5),
    "gpt_neox": dict(rotary_pct=0.25),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **HYBRID),
    "granite": dict(attention_multiplier=0.2),
    "llama": {},
    "mistral": dict(sliding_window=8),
    "mixtral": dict(sliding_window=None, num_local_experts=4),
    "olmo2": {},
    "phi": dict(partial_rotary_factor=0.5),
    "phi3": dict(sliding_window=8),
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, **HYBRID),
    "qwen3": dict(head_dim=16),
    "smollm3": dict(no_rope_layers=[1, 1, 0]),
    "stablelm": dict(partial_rotary_factor=0.25),
    "starcoder2": dict(sliding_window=8),
}
NOTES = {
    "cohere2": "interleaved pairs; full layers do not rotate",
    "gemma2": "without its soft cap, refused with it",
    "gemma3_text": "two tables",
    "glm4": "interleaved pairs, partial",
    "gpt_neox": "partial",
    "gpt_oss": "attention sinks, windows in some layers",
    "phi": "partial",
    "qwen2": "windows in some layers",
    "smollm3": "some layers do not rotate",
    "stablelm": "partial; refused up to transformers 5.0",
}
ROPE_TYPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3": dict(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "longrope": dict(
        rope_type="longrope",
        factor=4.0,
        short_factor=[1.0 + m / 8 for m in range(8)],
        long_factor=[1.0 + m for m in range(8)],
        original_max_position_embeddings=16,
    ),
}
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
BOUND = 1e-5  # of logits of size 3, float32
SEQLEN, PADDING = 28, 3
# where calls with a cache end: a prompt, one token at a time past the window, several tokens
CALLS = [5, 6, 7, 8, 9, 20, 21, SEQLEN]
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
REFUSED_BY_VERSION = {"stablelm"} if VERSION < (5, 1) else set()  # it made its masks itself


def tiny(name: str, **changes):
    """A model of three layers in float32, the same in every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **FAMILIES.get(name, {}), **changes})
    eager = name in ("gemma2", "gpt_oss")  # the library has no sdpa for them
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    for module in model.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks)  # initialized by initializer_range, they hardly matter
    return model


def tokens(batch: int = 2, seqlen: int = SEQLEN) -> torch.Tensor:
    return torch.randint(3, 60, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padded(seqlen: int = SEQLEN, left: int = PADDING, right: int = 0) -> torch.Tensor:
    """Masks of two sequences: padding on the left of the first, on the right of the second."""
    mask = torch.ones(2, seqlen, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, seqlen - right :] = 0
    return mask


@torch.no_grad()
def logits(model, ids, mask=None, cache=None, calls=None, **kwargs) -> torch.Tensor:
    """(batch, seqlen, vocabulary), from one call without a cache or several with one; rows of padding are 0."""
    if calls is None:
        out = model(ids, attention_mask=mask, use_cache=False, **kwargs).logits
    else:
        parts = []
        for start, end in zip([0, *calls], calls, strict=False):
            seen = None if mask is None else mask[:, :end]
            step = model(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            parts.append(step.logits)
        out = torch.cat(parts, 1)
    return out if mask is None else out * mask[..., None]


def converted(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "rotary_bands")]


def schemes(model) -> list[Rotary]:
    return [module.rotary_bands.rotary for module in converted(model)]


def close(a, b, bound=BOUND) -> bool:
    return float((a - b).abs().max()) <= bound


def static(model, extra: int = 8) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=SEQLEN + extra)


# position_ids of three sequences in each row
PACKED = torch.cat([torch.arange(n) for n in (11, 12, 5)])[None].expand(2, -1)
RUNS = {
    "uncached": lambda model: logits(model, tokens()),
    "cached": lambda model: logits(model, tokens(), calls=CALLS),
    "padded": lambda model: logits(model, tokens(), padded()),
    "padded on the right": lambda model: logits(model, tokens(), padded(left=3, right=5)),
    "padded, cached": lambda model: logits(model, tokens(), padded(), calls=CALLS),
    "static cache": lambda model: logits(model, tokens(), cache=static(model), calls=CALLS),
    "padded, static cache": lambda model: logits(model, tokens(), padded(), cache=static(model), calls=CALLS),
    "packed": lambda model: logits(model, tokens(), position_ids=PACKED),
}


def difference(name: str) -> dict[str, float]:
    """The largest difference of any logit to the stock model's, by run."""
    model = tiny(name)
    runs = {run: call for run, call in RUNS.items() if run != "packed" or name not in WITHOUT_PACKING}
    stock = {run: call(model) for run, call in runs.items()}
    convert(model)
    return {run: float((call(model) - stock[run]).abs().max()) for run, call in runs.items()}


def table() -> str:
    columns = ["uncached", "cached", "padded", "padded, cached", "static cache", "packed"]
    lines = [
        f"| transformers {transformers.__version__} | " + " | ".join(columns) + " | |",
        "|---|" + "---:|" * len(columns) + "---|",
    ]
    for name in sorted(set(FAMILIES) - REFUSED_BY_VERSION):
        found = difference(name)
        lines.append(
            f"| {name} | "
            + " | ".join(f"{found[column]:.1e}" if column in found else "refused" for column in columns)
            + f" | {NOTES.get(name, '')} |"
        )
    return "\n".join(lines)


def main() -> None:
    text = table()
    print(text)
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        before, after = page.read_text().split(BEGIN)[0], page.read_text().split(END)[1]
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
