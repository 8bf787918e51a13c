"""Compares converted vision-language models with stock models: images, caches, padding, packed rows, refusals."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from flashrope import Rotary
from flashrope.backends.sdpa import masked
from flashrope.integrations.transformers import CodesCache, convert, from_pretrained, revert
from flashrope.integrations.transformers import conversion_plan as plan
from flashrope.integrations.transformers.caches import COORDINATES
from flashrope.integrations.transformers.versions import CACHE
from small_models import VERSION
from transformers import DynamicCache, StaticCache
from vision_models import (
    HERE,
    IMAGE,
    batch,
    cached,
    close,
    compare,
    generated,
    joined,
    positions,
    prompt,
    runs,
    tiny_vision,
    towers,
    uncached,
)

DETAILED = [name for name in ("qwen2_vl", "qwen3_vl") if name in HERE]


def text(name):
    given = prompt(name, grids=[])
    return {key: given[key] for key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", HERE)
def test_logits_are_those_of_the_stock_model(name):
    model = tiny_vision(name)
    calls = runs(name, prompt(name), batch(name)) | {"text": lambda model: uncached(model, name, text(name))}
    stock = compare(model, calls)
    assert {tower.config._attn_implementation for tower in towers(model)} == {"sdpa"}
    assert model.config.get_text_config()._attn_implementation != "sdpa"
    revert(model)
    assert torch.equal(uncached(model, name), stock["uncached"])


@pytest.mark.parametrize("name", HERE)
def test_every_coordinate_counts(name):
    """A change of any coordinate changes the logits. Otherwise the comparison above would prove nothing."""
    model, given = convert(tiny_vision(name)), prompt(name)
    where = positions(model, name, given)
    stays = uncached(model, name)
    for axis in range(3):
        other = where.clone()
        other[axis] += 3 * (given["input_ids"] == IMAGE)
        with torch.no_grad():
            assert not close(model(**given, position_ids=other, use_cache=False).logits, stays, 1e-2)


def test_packed_rows():
    for name in DETAILED:
        model, one, two = tiny_vision(name), prompt(name, seed=1), prompt(name, seed=2, left=3, grids=[(1, 4, 4)])
        both = {
            key: torch.cat((one[key], two[key]), 0 if key in ("pixel_values", "image_grid_thw") else 1) for key in one
        }
        del both["attention_mask"]
        where = torch.cat([positions(model, name, given) for given in (one, two)], -1)
        rows = torch.cat([torch.arange(given["input_ids"].shape[1]) for given in (one, two)])[None, None]
        both["position_ids"] = torch.cat((rows, where))

        def packed(model, both=both):
            with torch.no_grad():
                return model(**both, use_cache=False).logits

        alone = torch.cat([uncached(model, name, given) for given in (one, two)], 1)
        stock = packed(model)
        assert close(stock, alone)
        assert close(packed(convert(model)), stock)


# ---- what a cache goes through


def after_images(model, name, given):
    """Returns a cache that holds all tokens of a batch except the last four."""
    end = given["input_ids"].shape[1] - 4
    where = positions(model, name, given)
    call = {
        key: x[:, :end] if key in ("input_ids", "attention_mask", "mm_token_type_ids") else x
        for key, x in given.items()
    }
    with torch.no_grad():
        return model(**call, position_ids=where[..., :end], use_cache=True).past_key_values


def continued(model, name, cache, given, rows, start):
    """Returns the logits of the tokens from start on, for these rows of a batch."""
    where = positions(model, name, given)[:, rows, start:]
    ids, mask = given["input_ids"][rows], given["attention_mask"][rows]
    with torch.no_grad():
        return model(
            input_ids=ids[:, start:], attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True
        ).logits


CHANGES = {
    "nothing": (lambda cache: None, [0, 1], 4),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0], 4),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1], 4),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1], 4),
    "crop": (lambda cache: cache.crop(-2), [0, 1], 6),
    "reorder, crop": (lambda cache: (cache.reorder_cache(torch.tensor([1, 0])), cache.crop(-3)), [1, 0], 7),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", DETAILED)
def test_coordinates_follow_the_cache(name, change):
    model, given = tiny_vision(name), batch(name)
    move, rows, left = CHANGES[change]
    start = given["input_ids"].shape[1] - left

    def run(model):
        cache = after_images(model, name, given)
        move(cache)
        return continued(model, name, cache, given, rows, start)

    stock = run(model)
    convert(model)
    assert close(run(model), stock)


def test_a_copy_of_a_cache_goes_its_own_way():
    name = DETAILED[0]
    model, given = tiny_vision(name), batch(name)
    start = given["input_ids"].shape[1] - 4
    stock = [continued(model, name, after_images(model, name, given), given, rows, start) for rows in ([0, 1],)]
    convert(model)
    cache = after_images(model, name, given)
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    swapped = continued(model, name, other, given, [1, 0], start)
    assert close(swapped[[1, 0]], stock[0])
    assert close(continued(model, name, cache, given, [0, 1], start), stock[0])


@pytest.mark.parametrize("name", HERE)
def test_a_static_cache(name):
    model, given = tiny_vision(name), batch(name)

    def static():
        return StaticCache(config=model.config.get_text_config(), max_cache_len=given["input_ids"].shape[1] + 9)

    stock = cached(model, name, static(), given)
    convert(model)
    assert close(cached(model, name, static(), given), stock)


def test_sequences_of_one_length_with_other_images():
    """Two sequences of equal length with different images give the stock model's results. There is no padding, so their
    positions differ only because of the images."""
    name = DETAILED[0]
    one, two = prompt(name, seed=1), prompt(name, seed=2, grids=[(1, 4, 6), (1, 8, 4)])
    model, given = tiny_vision(name), joined(one, two)
    where = positions(model, name, given)
    assert given["attention_mask"].all() and not torch.equal(where[:, 0], where[:, 1])
    stock = cached(model, name, given=given)
    assert close(cached(convert(model), name, given=given), stock)


@pytest.mark.parametrize("name", DETAILED)
def test_a_second_turn_with_the_same_cache(name):
    model, given = tiny_vision(name), prompt(name)

    def turns(model):
        cache = DynamicCache(config=model.config.get_text_config())
        model.model.rope_deltas = None
        first, _ = generated(model, name, given, past_key_values=cache)
        ids = torch.cat((first, torch.tensor([[7, 8, 9, 10]])), 1)
        more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return generated(model, name, more, past_key_values=cache)

    stock, made = turns(model), turns(convert(model))
    assert torch.equal(made[0], stock[0]) and close(made[1], stock[1])


@pytest.mark.parametrize("name", DETAILED)
def test_the_text_model_alone(name):
    """The text model by itself gives the stock results without position_ids and with the position_ids of text, also in
    calls that continue a cache."""
    model = tiny_vision(name).model.language_model
    ids = torch.arange(3, 23).view(2, 10)

    @torch.no_grad()
    def run(model):
        cache, parts = None, []
        for start, end, given in [(0, 5, False), (5, 8, False), (8, 10, True)]:
            where = {"position_ids": torch.arange(start, end).expand(2, -1)} if given else {}
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **where)
            cache = out.past_key_values
            parts.append(out.last_hidden_state)
        return torch.cat(parts, 1)

    stock = run(model)
    assert close(run(convert(model)), stock)


def test_beams():
    name = DETAILED[0]
    model = tiny_vision(name)
    stock = generated(model, name, batch(name), num_beams=3)
    made = generated(convert(model), name, batch(name), num_beams=3)
    assert torch.equal(made[0], stock[0]) and close(made[1], stock[1])


def test_quantized_keys():
    name = DETAILED[0]
    model = convert(tiny_vision(name))
    exact = cached(model, name, given=batch(name))
    coarse = cached(model, name, CodesCache(model.config, "int8"), batch(name))
    assert 0 < float((coarse - exact).abs().max()) < 0.2


def test_layers_of_a_step_share_their_table(monkeypatch):
    """A step computes the keys' cos and sin once for all layers."""
    name = DETAILED[0]
    model, given, calls = convert(tiny_vision(name)), prompt(name), []
    made = masked.rotation_at

    def counted(rotary, at, *rest):
        calls.append(at.shape[0])
        return made(rotary, at, *rest)

    cache = after_images(model, name, given)
    monkeypatch.setattr(masked, "rotation_at", counted)
    seqlen = given["input_ids"].shape[1]
    continued(model, name, cache, given, [0], seqlen - 4)
    assert calls.count(seqlen) == 1
    assert model.config.get_text_config().num_hidden_layers == 2


def test_compiled():
    """Models compile to one graph, without a cache and in steps with a static cache. The stock model of transformers
    5.0 does not support the latter."""
    name = DETAILED[0]
    model, given = tiny_vision(name, num_hidden_layers=1), prompt(name)
    text, where = model.model.language_model, positions(model, name, given)
    x = model.get_input_embeddings()(given["input_ids"])
    seqlen = x.shape[1]

    @torch.no_grad()
    def steps(run):
        cache, parts = StaticCache(config=model.config.get_text_config(), max_cache_len=seqlen + 8), []
        text(inputs_embeds=x[:, :-2], position_ids=where[..., :-2], past_key_values=cache)
        for n in (seqlen - 2, seqlen - 1):
            now = slice(n, n + 1)
            step = run(inputs_embeds=x[:, now], position_ids=where[..., now], past_key_values=cache)
            parts.append(step.last_hidden_state)
        return torch.cat(parts, 1)

    @torch.no_grad()
    def whole(run):
        return run(inputs_embeds=x, position_ids=where, use_cache=False).last_hidden_state

    runs = (whole, steps) if VERSION > (5, 0) else (whole,)
    stock = [run(text) for run in runs]
    convert(model)
    torch.compiler.reset()
    graph = torch.compile(text, fullgraph=True, dynamic=False, backend="eager")
    assert all(close(run(graph), expected) for run, expected in zip(runs, stock, strict=True))


# ---- training


@pytest.mark.parametrize("padded", [False, True])
def test_gradients(padded):
    name = DETAILED[0]
    given = batch(name) if padded else prompt(name)

    def gradients(model):
        labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
        model(**given, labels=labels, use_cache=False).loss.backward()
        return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}

    stock, made = gradients(tiny_vision(name)), gradients(convert(tiny_vision(name)))
    assert stock.keys() == made.keys() and any("visual" in key for key in stock)
    for key, gradient in stock.items():
        assert close(made[key], gradient, 1e-5 * max(1.0, float(gradient.abs().max()))), key


# ---- saved models, and what is refused


def test_saved_without_options(tmp_path):
    name = DETAILED[0]
    model = tiny_vision(name)
    stock = uncached(model, name)
    convert(model).save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, auto_class=transformers.AutoModelForImageTextToText)
    assert close(uncached(again, name), stock)
    assert hasattr(again.model.language_model, "_flashrope")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rerope": 8}, "rerope"),
        ({"leaky_rerope": (8, 4.0)}, "leaky_rerope"),
        ({"self_extend": (8, 4)}, "self_extend"),
        ({"dual_chunk": (16, 8)}, "dual_chunk"),
        ({"log_n": 32}, "log_n"),
        ({"ntk": 4.0}, "ntk"),
        ({"yarn": (4.0, 32)}, "yarn"),
        ({"cope": 32}, "cope"),
        ({"hope": 32}, "hope"),
        ({"rotary": Rotary.rope(16)}, "rotary"),
    ],
)
def test_schemes_over_one_distance_are_refused(options, named):
    model = tiny_vision(DETAILED[0])
    with pytest.raises(ValueError, match=f"^{named}: .* 3 (coordinates|axes)"):
        convert(model, **options)
    assert not hasattr(model.model.language_model, "_flashrope")


@pytest.mark.skipif(VERSION < (5, 0), reason="its padded steps need position_ids, which the comparison has not")
def test_a_type_that_is_not_tested(monkeypatch):
    """A model type that is not tested can be converted with untested=True. convert then compares the model with itself
    on text, with and without its rotation."""
    monkeypatch.setattr(plan, "FAMILIES", frozenset())
    name = DETAILED[0]
    model = tiny_vision(name)
    with pytest.raises(ValueError, match="got 'qwen2_vl_text'"):
        convert(model)
    stock = uncached(model, name)
    assert close(uncached(convert(tiny_vision(name), untested=True), name), stock)


def test_a_table_of_ones_own():
    """`rotary=` takes the user's own table, which here has half the angles of the model's table. Positions and caches
    do not change."""
    name = DETAILED[0]
    model = tiny_vision(name)
    stock = uncached(model, name)
    scheme = Rotary.from_hf_config(model.config.get_text_config())
    halved = Rotary.from_inv_freq(scheme.inv_freq / 2, 16).mrope([2, 3, 3])
    assert not close(uncached(convert(model, rotary=halved), name), stock, 1e-2)
    assert close(cached(model, name), uncached(model, name))
    assert close(uncached(convert(model, rotary=scheme), name), stock)


def test_a_cache_that_lost_its_coordinates():
    name = DETAILED[0]
    model, given = convert(tiny_vision(name)), batch(name)
    start = given["input_ids"].shape[1] - 4
    cache = after_images(model, name, given)
    delattr(cache, COORDINATES)
    with pytest.raises(
        ValueError, match=f"^{CACHE}: expected a cache .* with 3 coordinates for each of its .* of 0 tokens"
    ):
        continued(model, name, cache, given, [0, 1], start)
    cache = after_images(model, name, given)
    setattr(cache, COORDINATES, getattr(cache, COORDINATES)[:1])
    with pytest.raises(ValueError, match=f"^{CACHE}: expected a cache of 2 sequences, .* got .* of 1"):
        continued(model, name, cache, given, [0, 1], start)


def test_a_cache_that_returns_other_keys():
    name = DETAILED[0]
    model, given = convert(tiny_vision(name)), batch(name)
    cache = after_images(model, name, given)
    cache.layers[1].keys = cache.layers[1].keys[:, :, 1:].repeat(1, 1, 2, 1)
    cache.layers[1].values = cache.layers[1].values[:, :, 1:].repeat(1, 1, 2, 1)
    with pytest.raises(ValueError, match=f"^{CACHE}: expected a cache that returns the keys of its"):
        continued(model, name, cache, given, [0, 1], given["input_ids"].shape[1] - 4)


def test_continuous_batching_is_refused():
    model = convert(tiny_vision(DETAILED[0]))
    if not hasattr(model, "generate_batch"):
        pytest.skip("this version has no continuous batching of it")
    with pytest.raises(ValueError, match="^model: positions of several coordinates|^generate_batch: expected"):
        model.generate_batch([[5, 6, 7]], generation_config=transformers.GenerationConfig(max_new_tokens=2))
    revert(model)


def test_positions_of_another_shape():
    name = DETAILED[0]
    model, given = convert(tiny_vision(name)), prompt(name)
    where = positions(model, name, given)
    with pytest.raises(ValueError, match=r"^position_ids: expected \(batch, seqlen\), \(3, batch, seqlen\) or"):
        model.model.language_model(
            inputs_embeds=torch.zeros(1, where.shape[-1], 64), position_ids=where[:2], use_cache=False
        )


def test_sliding_windows_are_refused():
    name = DETAILED[0]
    model = tiny_vision(name, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="^sliding_window: not supported in a model with mrope_section"):
        convert(model)


def test_coordinates_travel_to_the_devices_of_the_layers():
    """accelerate sends the arguments of every layer to its device. All layers of a device share one object, which holds
    their plans."""
    from flashrope.integrations.transformers.caches import COORDINATES, Coordinates

    queries = torch.zeros(1, 4, 3)
    alone, cached = Coordinates(queries, queries), Coordinates(queries, torch.zeros(1, 9, 3))
    assert alone.to("cpu") is alone and alone.to(torch.device("cpu")) is alone
    for each in (alone, cached):
        moved = each.to("meta")
        assert moved is each.to(torch.device("meta"), non_blocking=True) and moved.plans is not each.plans
        assert [x.device.type for x in (moved.queries, moved.keys)] == ["meta"] * 2
        assert (moved.keys is moved.queries) == (each is alone)
    operations = pytest.importorskip("accelerate.utils.operations", reason="only accelerate sends arguments")
    sent = operations.send_to_device({COORDINATES: cached, "other": (queries, None)}, torch.device("meta"))
    assert sent[COORDINATES] is cached.to("meta")
