"""Makes small random models of every tested family, and measures the differences between converted and stock logits.

python tests/integrations/families.py [PAGE.md]

prints the table. If PAGE.md (docs/families.md) is given, it also writes the table and the list of all other types
(all_types.py) to the page.
"""

import sys
from pathlib import Path

import torch
import transformers
from flashrope import Rotary
from flashrope.integrations.transformers import convert
from flashrope.integrations.transformers.conversion_plan import head_dim_of
from flashrope.integrations.transformers.versions import CACHE, cache_of
from flashrope.schemes.families import family
from small_models import (  # noqa: F401  the tests import them from here
    CAUSAL_LM,
    COMMON,
    FAMILIES,
    HERE,
    REFUSED_BY_VERSION,
    VERSION,
    causal_lm,
    released_widths,
    tiny,
    wide,
)
from transformers import StaticCache

NOTES = {
    "afmoe": "full layers do not rotate",
    "cohere": "interleaved pairs",
    "cohere2": "interleaved pairs; full layers do not rotate",
    "cohere2_moe": "interleaved pairs; full layers do not rotate",
    "axk1": "latent attention",
    "bailing_hybrid": "latent attention, some layers are recurrent",
    "deepseek_v2": "latent attention, interleaved pairs",
    "deepseek_v3": "latent attention",
    "diffllama": "two calls per layer",
    "ernie4_5": "interleaved pairs",
    "ernie4_5_moe": "interleaved pairs",
    "exaone4": "full layers do not rotate",
    "exaone_moe": "full layers do not rotate",
    "falcon_h1": "attention beside Mamba",
    "gemma2": "without its soft cap, refused with it",
    "gemma3_text": "two tables",
    "gemma3n_text": "two tables, layers that share keys",
    "gemma4_text": "two tables, two widths, layers that share keys",
    "gemma4_unified_text": "two tables, two widths, one projection for keys and values",
    "glm": "interleaved pairs, partial",
    "glm4": "interleaved pairs, partial",
    "glm4_moe": "partial",
    "glm4_moe_lite": "latent attention",
    "gpt_neox": "partial",
    "gpt_oss": "attention sinks, windows in some layers",
    "granite_swa": "attention sinks, windows in some layers",
    "granitemoe_swa": "attention sinks, windows in some layers",
    "helium": "interleaved pairs",
    "lfm2": "some layers are convolutions",
    "lfm2_moe": "some layers are convolutions",
    "longcat_flash": "latent attention, two layers in one",
    "minicpm3": "latent attention",
    "minimax_m2": "partial",
    "ministral3": "queries scaled by position",
    "mistral4": "latent attention, queries scaled by position",
    "nanochat": "rotates backwards",
    "nemotron": "partial",
    "olmo3": "two tables",
    "olmo_hybrid": "some layers are recurrent",
    "persimmon": "partial",
    "phi": "partial",
    "phi3": "partial with longrope, too (Phi-4-mini)",
    "qwen2": "windows in some layers",
    "qwen3_5_moe_text": "some layers are recurrent, partial",
    "qwen3_5_text": "some layers are recurrent, partial",
    "qwen3_next": "some layers are recurrent, partial",
    "smollm3": "some layers do not rotate",
    "stablelm": "partial",
    "vaultgemma": "without its soft cap, refused with it",
    "youtu": "latent attention",
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
BYTES = "<!-- bytes:begin -->", "<!-- bytes:end -->"
RELEASED = "<!-- released:begin -->", "<!-- released:end -->"
BOUND = 1e-5  # for float32 logits scaled to a maximum of 3
SEQLEN, PADDING = 28, 3
# The numbers of tokens at which calls with a cache end. The first call reads a prompt, the next calls read single
# tokens and go beyond the window, and the last calls read several tokens each.
CALLS = [5, 6, 7, 8, 9, 20, 21, SEQLEN]


def tokens(batch: int = 2, seqlen: int = SEQLEN) -> torch.Tensor:
    return torch.randint(3, 60, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padded(seqlen: int = SEQLEN, left: int = PADDING, right: int = 0) -> torch.Tensor:
    """Returns the masks of two sequences, with padding on the left of the first and on the right of the second."""
    mask = torch.ones(2, seqlen, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, seqlen - right :] = 0
    return mask


@torch.no_grad()
def logits(model, ids, mask=None, cache=None, calls=None, **kwargs) -> torch.Tensor:
    """Returns logits (batch, seqlen, vocabulary). They come from one call without a cache, or from several calls over a
    cache, which end at the numbers of tokens in ``calls``. The logits of padding are 0."""
    if calls is None:
        out = model(ids, attention_mask=mask, use_cache=False, **kwargs).logits
    else:
        parts = []
        for start, end in zip([0, *calls], calls, strict=False):
            seen = None if mask is None else mask[:, :end]
            step = model(ids[:, start:end], attention_mask=seen, use_cache=True, **{CACHE: cache})
            cache = cache_of(step)
            parts.append(step.logits)
        out = torch.cat(parts, 1)
    return out if mask is None else out * mask[..., None]


def converted(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "_flashrope")]


def schemes(model) -> list[Rotary]:
    return [module._flashrope.rotary for module in converted(model)]


def state(model) -> dict:
    """Returns the parts of a model that tests compare before and after a conversion."""
    modules = list(model.modules())
    return {
        "weights": {name: weight.tolist() for name, weight in model.state_dict().items()},
        "training": [module.training for module in modules],
        "names": [sorted(key for key in vars(module) if "reverted" not in key) for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "config": model.config.to_json_string(),
        "attention": model.config._attn_implementation,
    }


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


def difference(name: str, untested: bool = False) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.nn.Module]:
    """Returns ({run: largest difference}, the stock model's logits, the converted model). A run's difference is the
    largest change of any logit, after scaling logits to a maximum of 3."""
    model = tiny(name)
    runs = {run: call for run, call in RUNS.items() if run != "packed" or family(name).packs}
    stock = {run: call(model) for run, call in runs.items()}
    convert(model, untested=untested)
    size = max(1.0, float(stock["uncached"].abs().max()) / 3)
    return {run: float((call(model) - stock[run]).abs().max()) / size for run, call in runs.items()}, stock, model


def widths(model) -> str:
    """Returns the head_dim of a converted model's layers as text. If layers differ, it names all values."""
    return ", ".join(map(str, sorted({head_dim_of(module) for module in converted(model)})))


def released_width(name: str) -> str:
    """Returns the head_dim of a family's released models as text. If their layers have two values, it names both."""
    fields = released_widths(name)
    if family(name).latent:
        return str(fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
    return ", ".join(map(str, sorted(fields.values())))


def difference_at(model, calls=CALLS) -> float:
    """Converts a model and returns the largest change of any logit, after scaling logits to a maximum of 3. It compares
    a call without a cache, and calls with padding over a cache, which end at the numbers of tokens in ``calls``. calls
    None: the padded call has no cache either. None of the tokens stands for an image or a sound."""
    ids = tokens().clamp(max=50)

    def both() -> list[torch.Tensor]:
        return [logits(model, ids), logits(model, ids, padded(), calls=calls)]

    stock = both()
    convert(model)
    size = max(1.0, float(stock[0].abs().max()) / 3)
    return max(float((found - before).abs().max()) for found, before in zip(both(), stock, strict=True)) / size


def table() -> str:
    columns = ["uncached", "cached", "padded", "padded, cached", "static cache", "packed"]
    lines = [
        f"| transformers {transformers.__version__} | head_dim | " + " | ".join(columns) + " | as released | there | |",
        "|---|" + "---:|" * (3 + len(columns)) + "---|",
    ]
    for name in sorted(HERE):
        found, _, model = difference(name)
        errors = [f"{found[column]:.1e}" if column in found else "refused" for column in columns]
        there = f"{difference_at(wide(name)):.1e}"
        cells = [name, widths(model), *errors, released_width(name), there, NOTES.get(name, "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shapes() -> str:
    """Returns a table of the models in released.py, which have the head widths of released models."""
    from released import HERE, SHAPES, WHAT, released

    columns = [column for column in RUNS if column != "padded on the right"]
    lines = [
        "| model | model_type | head_dim | " + " | ".join(columns) + " | |",
        "|---|---|---:|" + "---:|" * 7 + "---|",
    ]
    for name in HERE:
        model = released(name)
        stock = {column: RUNS[column](model) for column in columns}
        size = max(1.0, float(stock["uncached"].abs().max()) / 3)
        convert(model)
        errors = [f"{float((RUNS[each](model) - stock[each]).abs().max()) / size:.1e}" for each in columns]
        lines.append("| " + " | ".join([name, SHAPES[name][0], widths(model), *errors, WHAT[name]]) + " |")
    return "\n".join(lines)


def bytes_table() -> str:
    """Returns a table of how many bytes a cache takes per token and layer."""
    from flashrope.integrations.transformers import LatentCache, SharedKeysCache
    from transformers import CONFIG_MAPPING, DynamicCache

    lines = ["| model_type | key heads | expanded | transformers | one tensor | |", "|---|---:|---:|---:|---:|---|"]
    for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "gemma4_unified_text"):
        default, latent = CONFIG_MAPPING[name](), family(name).latent
        heads = default.num_attention_heads if latent else 1
        one: dict = dict(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads)
        one |= dict(hidden_size=8 * heads) if latent else dict(layer_types=["full_attention"])
        model = convert(tiny(name, **released_widths(name) | one).bfloat16())
        kind, sizes = LatentCache if latent else SharedKeysCache, []
        for cache in (DynamicCache(config=model.config), kind(model.config)):
            logits(model, tokens(1), calls=[SEQLEN], cache=cache)
            held = cache.layers[0].keys, cache.layers[0].values
            sizes.append(sum(x.numel() * x.itemsize for x in held) // SEQLEN)
        module = converted(model)[0]
        expanded = heads * (head_dim_of(module) + getattr(module, "v_head_dim", head_dim_of(module))) * 2
        lines.append(f"| {name} | {heads} | {expanded:,} | {sizes[0]:,} | {sizes[1]:,} | `{kind.__name__}` |")
    return "\n".join(lines)


def main() -> None:
    text = table()
    print(text)
    if len(sys.argv) > 1:
        from all_types import summary

        page = Path(sys.argv[1])
        written = page.read_text()
        parts = (RELEASED, shapes()), (BYTES, bytes_table()), ((BEGIN, END), f"{text}\n\n{summary()}")
        for marks, new in parts:
            before, after = written.split(marks[0])[0], written.split(marks[1])[1]
            written = f"{before}{marks[0]}\n{new}\n{marks[1]}{after}"
        page.write_text(written)


if __name__ == "__main__":
    main()
