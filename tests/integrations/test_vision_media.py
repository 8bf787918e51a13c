"""Compares converted models with stock models on videos, on sounds, and on images in a later turn of a conversation."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from flashrope.integrations.transformers import convert
from small_models import VERSION
from vision_models import (
    FRAME_BY_FRAME,
    HERE,
    KINDS,
    OLD,
    SECONDS,
    TEXT,
    TOKENWISE,
    VIDEO,
    close,
    compare,
    joined,
    positions,
    prompt,
    runs,
    tiny_vision,
    uncached,
)

CLIP = (3, 4, 6)  # number of a video's frames, of patch rows and of patch columns
# The stock qwen3_omni_moe of 4.57 and 5.0 fails where an image and a video come in one call.
VIDEOS = [name for name in HERE if name.startswith("qwen") and not (VERSION < (5, 1) and name == "qwen3_omni_moe")]
SOUNDS = [name for name in VIDEOS if "omni" in name]
TURNS = [name for name in VIDEOS if name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *SOUNDS)]


def with_video(name, **more):
    """Returns a prompt with an image and a video."""
    return prompt(name, seed=3, grids=[(1, 4, 4)], videos=[CLIP], **more)


def padded(name):
    """Returns a batch of two prompts with an image and videos of different sizes. The shorter prompt is padded on the
    left."""
    return joined(with_video(name), prompt(name, seed=4, left=3, grids=[(1, 4, 4)], videos=[(2, 4, 4)]))


def ends(given) -> tuple[int, ...]:
    """Returns the numbers of tokens at which calls with a cache end. The first call contains everything that is not
    text."""
    length = given["input_ids"].shape[1]
    return length - 5, length - 4, length - 1


def check(name, alone, both) -> None:
    compare(tiny_vision(name), runs(name, alone, both, (ends(alone), ends(both))))


@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name):
    check(name, with_video(name), padded(name))


@pytest.mark.parametrize("name", VIDEOS)
def test_the_coordinates_of_a_video_count(name):
    """Every coordinate of a video changes the results: the time between frames, and the row and the column within a
    frame. Models with timestamps treat frames as separate images."""
    model, given = convert(tiny_vision(name)), with_video(name)
    where, stays = positions(model, name, given), uncached(convert(tiny_vision(name)), name, given)
    of_video = given["input_ids"][0] == VIDEO
    frames = where[0, 0, of_video].unique().numel()
    assert frames == CLIP[0] and int(of_video.sum()) == frames * CLIP[1] * CLIP[2] // 4
    step = int(where[0, 0, of_video].unique().diff()[0])
    assert step > 1 if name in FRAME_BY_FRAME or name in SECONDS else step == 1
    for axis in range(3):
        other = where.clone()
        other[axis] += 3 * of_video
        with torch.no_grad():
            assert not close(model(**given, position_ids=other, use_cache=False).logits, stays, 1e-2)


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds(name):
    both = joined(
        with_video(name, sounds=1), prompt(name, seed=5, left=3, grids=[(1, 4, 4)], videos=[(2, 4, 4)], sounds=1)
    )
    check(name, with_video(name, sounds=1), both)


# ---- images that come later


def turns(name):
    """Returns (first turn, its continuation with another image and a video, the whole conversation)."""
    first, second = prompt(name, seed=6, grids=[(1, 6, 4)]), prompt(name, seed=7, grids=[(1, 4, 8)], videos=[CLIP])
    whole = {
        key: torch.cat((first[key], x), 1 if key in TOKENWISE else 0) if key in first else x
        for key, x in second.items()
    }
    return first, second, whole


@torch.no_grad()
def after_the_second(model, name) -> torch.Tensor:
    """Returns the logits of all tokens: a turn with an image, two tokens, a turn with an image and a video, then one
    token at a time."""
    first, second, whole = turns(name)
    where, cache, parts = positions(model, name, whole), None, []
    split, length = first["input_ids"].shape[1], whole["input_ids"].shape[1]
    for start, end, media in ((0, split - 2, first), (split - 2, split, {}), (split, length - 3, second)) + tuple(
        (n, n + 1, {}) for n in range(length - 3, length)
    ):
        call = {key: x for key, x in media.items() if "pixel" in key or "grid" in key}
        if "mm_token_type_ids" in whole:
            call["mm_token_type_ids"] = whole["mm_token_type_ids"][:, start:end]
        out = model(
            input_ids=whole["input_ids"][:, start:end],
            attention_mask=whole["attention_mask"][:, :end],
            position_ids=where[..., start:end],
            past_key_values=cache,
            use_cache=True,
            **call,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", TURNS)
def test_images_and_videos_of_a_second_turn(name):
    """A second turn that continues over the cache of the first gives the same logits as the whole conversation in one
    call."""
    model = tiny_vision(name)
    stock, whole = after_the_second(model, name), uncached(model, name, turns(name)[2])
    assert close(stock, whole)
    made = after_the_second(convert(model), name)
    assert close(made, stock) and close(made, uncached(model, name, turns(name)[2]))


@pytest.mark.parametrize("name", TURNS)
def test_a_first_turn_that_answers_twice(name):
    """The second turn runs over a copy of the cache from which the answer to the first turn was cropped."""
    first, second, whole = turns(name)
    split, where = first["input_ids"].shape[1], positions(tiny_vision(name), name, whole)

    @torch.no_grad()
    def run(model):
        media = {key: x for key, x in first.items() if key not in TOKENWISE[:2]}
        cache = model(
            input_ids=first["input_ids"], attention_mask=first["attention_mask"], **media, use_cache=True
        ).past_key_values
        kept = copy.deepcopy(cache)
        for n in range(3):
            at = where[..., split - 1 : split] + 1 + n
            model(input_ids=torch.tensor([[7 + n]]), position_ids=at, past_key_values=kept, use_cache=True)
        kept.crop(-3)
        media = {key: x for key, x in second.items() if key not in TOKENWISE[:2]}
        return model(
            input_ids=second["input_ids"],
            attention_mask=whole["attention_mask"],
            position_ids=where[..., split:],
            past_key_values=kept,
            use_cache=True,
            **media,
        ).logits

    model = tiny_vision(name)
    stock = run(model)
    assert close(run(convert(model)), stock)


# ---- the parts of an Omni model that speak


@pytest.mark.skipif("qwen2_5_omni" not in HERE, reason="this version has no such model")
def test_talkers_are_refused():
    """convert refuses the talker of an Omni model with an error that names it. It also refuses a model with a thinker
    and a talker, of which only the thinker can be converted."""
    name = "qwen2_5_omni"
    rope = {"rope_type": "default", "mrope_section": KINDS[name].sections}
    config = transformers.models.qwen2_5_omni.configuration_qwen2_5_omni.Qwen2_5OmniTalkerConfig(
        **TEXT, head_dim=16, embedding_size=64, **({"rope_scaling": rope} if OLD else {"rope_parameters": rope})
    )
    talker = transformers.Qwen2_5OmniTalkerForConditionalGeneration(config)
    with pytest.raises(ValueError, match="^model: expected one of the types .* got 'qwen2_5_omni_talker'"):
        convert(talker)
    whole = torch.nn.ModuleDict({"thinker": tiny_vision(name), "talker": talker})
    with pytest.raises(ValueError, match="^model: expected one transformers decoder with a rotary embedding, found 2"):
        convert(whole)
    convert(whole["thinker"])
    assert not hasattr(talker.model, "_flashrope")
