"""Small random vision-language models, and prompts with images for them."""

import inspect
from typing import Any, NamedTuple

import torch
import transformers
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
IMAGE, VIDEO, START, END = 60, 61, 62, 63
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
    model: str  # of transformers
    config: str
    text: dict[str, Any]
    vision: dict[str, Any]
    sections: list[int]  # pairs of the three coordinates
    partial: float = 1.0  # of the channels rotate


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
    "qwen3_vl": Kind("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(head_dim=16), QWEN3, [4, 2, 2]),
    "qwen3_vl_moe": Kind("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", EXPERTS, QWEN3, [4, 2, 2]),
}
# 4.57 gives the text model of glm4v_moe another model_type than its configuration file.
HERE = [name for name, kind in KINDS.items() if hasattr(transformers, kind.model) and not (OLD and name == "glm4v_moe")]


def tiny_vision(name: str, **changes):
    """A small model in float32, the same in every call."""
    kind = KINDS[name]
    rope = {"rope_type": "default", "mrope_section": kind.sections}
    base = {"rope_theta": 100.0} | ({"partial_rotary_factor": kind.partial} if kind.partial < 1 else {})
    text = TEXT | kind.text | changes | ({"rope_scaling": rope, **base} if OLD else {"rope_parameters": rope | base})
    config = getattr(transformers, kind.config)(text_config=text, vision_config=kind.vision, **TOKENS)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return vary(getattr(transformers, kind.model)(config).float().eval())


GRIDS = [(1, 6, 4), (1, 4, 8)]  # patches of an image in time, rows and columns; four are one token


def prompt(
    name: str, seed: int = 0, left: int = 5, between: int = 4, right: int = 6, grids=GRIDS
) -> dict[str, torch.Tensor]:
    """The arguments of a forward with images of these sizes, batch 1."""
    generator = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    ids = words(left)
    for n, (t, h, w) in enumerate(grids):
        ids += [START, *[IMAGE] * (t * h * w // 4), END] + words(right if n == len(grids) - 1 else between)
    ids = torch.tensor([ids])
    patches = sum(t * h * w for t, h, w in grids)
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(patches, *((3, 2, 2) if name == "paddleocr_vl" else (12,)), generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }
    if "mm_token_type_ids" in inspect.signature(getattr(transformers, KINDS[name].model).forward).parameters:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    return given


def batch(name: str) -> dict[str, torch.Tensor]:
    """Two prompts with different images, the shorter one padded on the left."""
    one, two = prompt(name, seed=1), prompt(name, seed=2, left=3, right=8, grids=[(1, 4, 4)])
    missing = one["input_ids"].shape[1] - two["input_ids"].shape[1]
    padded = {
        key: torch.nn.functional.pad(x, (missing, 0)) if key not in ("pixel_values", "image_grid_thw") else x
        for key, x in two.items()
    }
    return {key: torch.cat((x, padded[key])) for key, x in one.items()}


def positions(model, name: str, given) -> torch.Tensor:
    """(3, batch, seqlen), as the stock model computes them for its images."""
    asked = inspect.signature(model.model.get_rope_index).parameters
    return model.model.get_rope_index(**{key: x for key, x in given.items() if key in asked})[0]
