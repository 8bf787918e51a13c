"""Makes small random vision-language models, and prompts with images, videos and sounds for them."""

import inspect
from typing import Any, NamedTuple

import torch
import transformers
from flashrope.integrations.transformers import convert
from small_models import vary

OLD = transformers.__version__.startswith("4.")
TEXT = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SOUND_START, SOUND_END, SOUND, IMAGE, VIDEO, START, END = range(57, 64)
TOKENS = dict(
    image_start_token_id=START,
    image_end_token_id=END,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
PATCHES = dict(in_channels=3, patch_size=2, temporal_patch_size=1, spatial_merge_size=2)


class Kind(NamedTuple):
    model: str  # class of transformers
    config: str
    text: dict[str, Any]
    vision: dict[str, Any]
    sections: list[int]  # number of pairs for each of the three coordinates
    partial: float = 1.0  # which share of the channels rotates
    sound: dict[str, Any] | None = None  # configuration of the tower for sounds


SAME = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, **PATCHES)
QWEN2_5 = SAME | dict(window_size=16, fullatt_block_indexes=[0])
QWEN3 = SAME | dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
GLM = SAME | dict(image_size=16)
EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
GLM_EXPERTS = dict(
    head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1
)
LINEAR = dict(
    head_dim=32,
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
QWEN3_5 = SAME | dict(num_position_embeddings=64)
SOUNDS = dict(
    d_model=32,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=48,
    num_mel_bins=16,
    n_window=50,
    output_dim=64,
    max_source_positions=100,
)
OMNI = dict(
    audio_token_id=SOUND,
    audio_token_index=SOUND,  # the names of qwen2_5_omni
    image_token_index=IMAGE,
    video_token_index=VIDEO,
    audio_start_token_id=SOUND_START,
    audio_end_token_id=SOUND_END,
    position_id_per_seconds=5,
)
KINDS = {
    "glm4v": Kind("Glm4vForConditionalGeneration", "Glm4vConfig", {}, GLM, [2, 1, 1], 0.5),
    "glm4v_moe": Kind("Glm4vMoeForConditionalGeneration", "Glm4vMoeConfig", GLM_EXPERTS, GLM, [2, 1, 1], 0.5),
    "glm_ocr": Kind("GlmOcrForConditionalGeneration", "GlmOcrConfig", dict(head_dim=16), GLM, [2, 3, 3]),
    "paddleocr_vl": Kind(
        "PaddleOCRVLForConditionalGeneration",
        "PaddleOCRVLConfig",
        dict(head_dim=16),
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            patch_size=2,
            image_size=16,
            spatial_merge_size=2,
        ),
        [2, 3, 3],
    ),
    "qwen2_5_omni": Kind(
        "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5OmniThinkerConfig", {}, QWEN2_5, [2, 3, 3], sound=SOUNDS
    ),
    "qwen2_5_vl": Kind("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", {}, QWEN2_5, [2, 3, 3]),
    "qwen2_vl": Kind(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {},
        dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, **PATCHES),
        [2, 3, 3],
    ),
    "qwen3_5": Kind("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", LINEAR, QWEN3_5, [2, 1, 1], 0.25),
    "qwen3_5_moe": Kind(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", EXPERTS | LINEAR, QWEN3_5, [2, 1, 1], 0.25
    ),
    "qwen3_omni_moe": Kind(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerConfig",
        EXPERTS,
        QWEN3,
        [4, 2, 2],
        sound=SOUNDS | dict(n_window_infer=100, downsample_hidden_size=16),
    ),
    "qwen3_vl": Kind("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(head_dim=16), QWEN3, [4, 2, 2]),
    "qwen3_vl_moe": Kind("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", EXPERTS, QWEN3, [4, 2, 2]),
}
# 4.57 gives the text model of glm4v_moe another model_type than its configuration file.
HERE = [name for name, kind in KINDS.items() if hasattr(transformers, kind.model) and not (OLD and name == "glm4v_moe")]


# Kinds whose configuration has a default that no released model has.
OTHER_DEFAULTS = {"glm4v_moe": 128, "qwen2_5_omni": 128, "qwen3_omni_moe": 128}


def released_width(name: str) -> int:
    """Returns the head_dim of a kind's released models, from the defaults of its configuration."""
    if name in OTHER_DEFAULTS:
        return OTHER_DEFAULTS[name]
    text = getattr(transformers, KINDS[name].config)().text_config
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def wide_vision(name: str):
    """Returns a small model with the head_dim of released models, and with their number of pairs for every
    coordinate."""
    width, kind = released_width(name), KINDS[name]
    small = kind.text.get("head_dim", 16)
    changes = {"head_dim": width} if "head_dim" in kind.text else {"hidden_size": 4 * width}
    if "hidden_size" in changes:
        changes["initializer_range"] = 0.1 * (64 / changes["hidden_size"]) ** 0.5
    return tiny_vision(name, [pairs * width // small for pairs in kind.sections], **changes)


def tiny_vision(name: str, sections: list[int] | None = None, **changes):
    """Returns a small model in float32, the same in every call. sections: the number of pairs of each coordinate,
    by default the numbers of the model's kind."""
    kind = KINDS[name]
    rope = {"rope_type": "default", "mrope_section": sections or kind.sections}
    base = {"rope_theta": 100.0} | ({"partial_rotary_factor": kind.partial} if kind.partial < 1 else {})
    text = TEXT | kind.text | changes | ({"rope_scaling": rope, **base} if OLD else {"rope_parameters": rope | base})
    sound = {} if kind.sound is None else OMNI | {"audio_config": kind.sound}
    config = getattr(transformers, kind.config)(text_config=text, vision_config=kind.vision, **TOKENS, **sound)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return vary(getattr(transformers, kind.model)(config).float().eval())


GRIDS = [(1, 6, 4), (1, 4, 8)]  # for every image: its patches in time, rows and columns; four patches are one token
FRAMES = {"qwen2_5_omni": 8, "qwen3_omni_moe": 4}  # tokens of a sound of 32 frames
SECONDS = {"qwen2_5_vl": "second_per_grid_ts", "qwen2_5_omni": "video_second_per_grid"}
SECONDS["qwen3_omni_moe"] = SECONDS["qwen2_5_omni"]  # the argument with the seconds between two frames of a video
FRAME_BY_FRAME = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")  # they put a timestamp before each frame


def prompt(
    name: str, seed: int = 0, left: int = 5, between: int = 4, right: int = 6, grids=GRIDS, videos=(), sounds: int = 0
) -> dict[str, torch.Tensor]:
    """Returns the arguments of a forward with one sequence: images, then videos, then sounds. grids, videos: the
    patches of each in time, rows and columns. left, between, right: numbers of text tokens."""
    generator = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(3, SOUND_START, (count,), generator=generator).tolist()

    parts = [[START, *[IMAGE] * (t * h * w // 4), END] for t, h, w in grids]
    for t, h, w in videos:
        split, size = name in FRAME_BY_FRAME, h * w // 4
        parts.append(
            [token for _ in range(t) for token in (*words(2), START, *[VIDEO] * size, END)]
            if split
            else [START, *[VIDEO] * (t * size), END]
        )
    parts += [[SOUND_START, *[SOUND] * FRAMES.get(name, 0), SOUND_END]] * sounds
    ids = words(left)
    for n, part in enumerate(parts):
        ids += part + words(right if n == len(parts) - 1 else between)
    ids = torch.tensor([ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for sizes, pixels, grid in (
        (grids, "pixel_values", "image_grid_thw"),
        (videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if sizes:
            patches = sum(t * h * w for t, h, w in sizes)
            channels = (3, 2, 2) if name == "paddleocr_vl" else (12,)
            given |= {pixels: torch.randn(patches, *channels, generator=generator), grid: torch.tensor(sizes)}
    if videos and name in SECONDS:
        given[SECONDS[name]] = torch.tensor([1.6] * len(videos))
    if sounds:
        given["input_features"] = torch.randn(sounds, 16, 32, generator=generator)
        given["feature_attention_mask"] = torch.ones(sounds, 32, dtype=torch.long)
    if "mm_token_type_ids" in inspect.signature(getattr(transformers, KINDS[name].model).forward).parameters:
        given["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return given


TOKENWISE = ("input_ids", "attention_mask", "mm_token_type_ids")


def batch(name: str) -> dict[str, torch.Tensor]:
    """Returns a batch of two prompts with different images. The shorter prompt is padded on the left."""
    return joined(prompt(name, seed=1), prompt(name, seed=2, left=3, right=8, grids=[(1, 4, 4)]))


def joined(one, two) -> dict[str, torch.Tensor]:
    """Returns a batch of two prompts, the second one padded on the left to the length of the first."""
    missing = one["input_ids"].shape[1] - two["input_ids"].shape[1]
    padded = {
        key: torch.nn.functional.pad(x, (missing, 0)) if key in TOKENWISE and missing else x for key, x in two.items()
    }
    return {key: torch.cat((x, padded[key])) for key, x in one.items()}


def positions(model, name: str, given) -> torch.Tensor:
    """Returns the position ids (3, batch, seqlen) that the stock model computes for images, videos and sounds."""
    owner = model.model if hasattr(model.model, "get_rope_index") else model
    asked = inspect.signature(owner.get_rope_index).parameters
    given = given | {"second_per_grids": given.get("video_second_per_grid")}
    if "feature_attention_mask" in given:
        given["audio_seqlens"] = given["feature_attention_mask"].sum(-1)
    return owner.get_rope_index(**{key: x for key, x in given.items() if key in asked})[0]


def towers(model) -> list[torch.nn.Module]:
    """Returns the towers for images, videos and sounds, which keep their attention."""
    return [module for path, module in model.named_modules() if path.split(".")[-1] in ("visual", "audio_tower")]


# ---- the outputs of a model

BOUND = 1e-5  # the same bound as in families.py, for float32 logits scaled to a maximum of 3
CALLS = (26, 27, 30, 31)  # numbers of tokens at which calls with a cache end; the first call contains the images


def close(a, b, bound=BOUND) -> bool:
    return float((a - b).abs().max()) <= bound


@torch.no_grad()
def uncached(model, name, given=None) -> torch.Tensor:
    given = given or prompt(name)
    return model(**given, use_cache=False).logits * given["attention_mask"][..., None]


@torch.no_grad()
def cached(model, name, cache=None, given=None, where=None, calls=CALLS) -> torch.Tensor:
    """Returns the logits of a prompt from calls that continue a cache. The first call has the images, videos and
    sounds, and later calls have text."""
    given = given or prompt(name)
    ids, mask, where = given["input_ids"], given["attention_mask"], positions(model, name, given)
    parts, start, images = [], 0, {key: x for key, x in given.items() if key not in TOKENWISE[:2]}
    for end in (*calls, *range(calls[-1] + 1, ids.shape[1] + 1)):
        call = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": where[..., start:end]}
        if "mm_token_type_ids" in images:
            images["mm_token_type_ids"] = given["mm_token_type_ids"][:, start:end]
        out = model(**call, **images, past_key_values=cache, use_cache=True)
        cache, start, images = out.past_key_values, end, {}
        parts.append(out.logits)
    return torch.cat(parts, 1) * mask[..., None]


@torch.no_grad()
def generated(model, name, given=None, **options):
    """Generates greedily and returns (tokens, logits of every new token)."""
    given = given or prompt(name)
    made = model.generate(
        **given, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    return made.sequences, torch.stack(made.logits, 1)


def runs(name: str, alone, both, calls=(CALLS, CALLS)) -> dict:
    """Returns {name: call of a model} with one prompt and with a padded batch. calls: for each of the two, the numbers
    of tokens at which calls with a cache end."""
    return {
        "uncached": lambda model: uncached(model, name, alone),
        "cached": lambda model: cached(model, name, given=alone, calls=calls[0]),
        "padded": lambda model: uncached(model, name, both),
        "padded, cached": lambda model: cached(model, name, given=both, calls=calls[1]),
        "generated": lambda model: generated(model, name, alone)[1],
        "padded, generated": lambda model: generated(model, name, both)[1],
    }


def compare(model, calls: dict) -> dict[str, torch.Tensor]:
    """Converts the model and compares every call with the same call of the stock model. Returns the results."""
    stock = {run: call(model) for run, call in calls.items()}
    convert(model)
    for run, call in calls.items():
        assert close(call(model), stock[run]), run
    return stock
