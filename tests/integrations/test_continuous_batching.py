"""Tests that converted models under transformers' continuous batching give the tokens of ``generate`` and read the
engine's own pages."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import released
import transformers
from families import HERE, ROPE_TYPES, VERSION, tiny
from flashrope import CachePlan
from flashrope.integrations.transformers import continuous_batching, convert, revert
from flashrope.schemes.families import families_with
from transformers import GenerationConfig

SUPPORTED = continuous_batching.SUPPORTED
REFUSED = set(families_with("not_batched")) & set(HERE)
# transformers' engine has no caches for layers without attention, nor for layers whose head_dim or number of key heads
# differs from the configuration.
NOT_BATCHED = {
    "falcon_h1",
    "jetmoe",
    "lfm2",
    "lfm2_moe",
    "nemotron",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
NEW = 12
PAGE = 16
SCHEMES = {"rope": {}, "rerope": {"rerope": 16, "log_n": 32}, "leaky": {"leaky_rerope": (16, 4.0)}}
supported = pytest.mark.skipif(not SUPPORTED, reason=f"transformers {transformers.__version__} is refused, see below")


def model_of(name="llama", **changes):
    """Returns a model with four query heads and two key heads. It has no token that ends a text."""
    if name in ("gpt_neox", "persimmon"):
        changes = {"num_key_value_heads": 4, **changes}  # the engine reads this field, the model does not
    return tiny(name, **{"eos_token_id": None, "max_position_embeddings": 256, **changes})


def prompts_of(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


MIXED = prompts_of(17, 5, 40, 110, 32, 1, 70, 16)


def generated(model, prompts):
    each = [torch.tensor([prompt]) for prompt in prompts]
    return [
        model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        for ids in each
    ]


def settings(**options):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return ContinuousBatchingConfig(
        **{"num_blocks": 24, "max_batch_tokens": 48, "page_size": PAGE, "max_memory_percent": 0.5, **options}
    )


def batched(model, prompts, persistent=False, **options):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=settings(**options),
        persistent_manager=persistent,
    )
    assert [result.error for result in out.values()] == [None] * len(out)
    return [result.generated_tokens for result in out.values()]


@pytest.fixture
def calls(monkeypatch):
    """Records every call of the kernels as (queries of the longest request, whether slots were given, address of the
    cache). Raises an error if transformers copies the keys itself."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found, attend, plan = [], CachePlan.attend, continuous_batching.plan_cache

    def watched(self, q, layer, *new, **options):
        packed, where = self.tables.new, layer.k.untyped_storage().data_ptr()
        found.append((packed.max_seqlen_q, packed.slot_mapping is not None, where))
        assert where == layer.v.untyped_storage().data_ptr()
        return attend(self, q, layer, *new, **options)

    def copies(*_, **__):
        raise AssertionError("the keys were copied")

    monkeypatch.setattr(CachePlan, "attend", watched)
    monkeypatch.setattr(
        continuous_batching, "plan_cache", lambda *given, **options: plan(*given, **options, validate=True)
    )
    monkeypatch.setattr(PagedAttentionCache, "update", copies)
    return found


@supported
@pytest.mark.parametrize("tables", [True, False], ids=["tables", "indices"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_equal_generate(scheme, tables, calls):
    """The tokens equal those of generate when there are more requests than fit at once. Batches then mix chunks of
    prompts with one-token steps. The kernels read keys in place."""
    model = convert(model_of(), **SCHEMES[scheme])
    expected = generated(model, MIXED)
    assert len({token for tokens in expected for token in tokens}) > 10  # the model does not repeat one token
    assert batched(model, MIXED, max_blocks_per_request=None if tables else 0) == expected
    assert len({where for *_, where in calls}) == 1  # all calls read one tensor, that of the engine
    assert {slots for _, slots, _ in calls} == ({True, False} if tables else {True})
    assert any(1 < longest < 48 for longest, *_ in calls)


@supported
def test_schemes_are_told_apart():
    """Different schemes give different tokens. Otherwise equal tokens would prove nothing."""
    model, found = model_of(), []
    for changes in SCHEMES.values():
        found.append(batched(convert(model, **changes), MIXED))
        revert(model)
    assert found[0] != found[1] != found[2] != found[0]


@supported
def test_a_stock_model_is_not_affected():
    model = model_of()
    stock = generated(model, MIXED)
    assert batched(model, MIXED) == stock
    assert batched(convert(model), MIXED) == stock  # the model's own scheme
    assert batched(revert(model), MIXED) == stock


@supported
@pytest.mark.parametrize("name", sorted(set(HERE) - {"llama"} - REFUSED - NOT_BATCHED))
def test_families(name):
    """For each remaining family, generate_batch gives the same tokens as generate. In layers with a sliding window,
    transformers gathers the keys into one tensor."""
    model = convert(model_of(name))
    prompts = prompts_of(17, 5, 40, 9)
    assert batched(model, prompts) == generated(model, prompts)


def allocators_of(monkeypatch) -> dict:
    """Returns a dict that the next engine fills with its allocators of pages, by layer type."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found, stock = {}, PagedAttentionCache.__init__

    def watched(self, *arguments, **options):
        stock(self, *arguments, **options)
        found.update(self.cache_allocators)

    monkeypatch.setattr(PagedAttentionCache, "__init__", watched)
    return found


@supported
@pytest.mark.parametrize("changes", [{}, {"log_n": 12}], ids=str)
@pytest.mark.parametrize("name", released.GEMMAS)
def test_gemma_4(name, changes, monkeypatch):
    """Pages have the head_dim of the layers of their type, 512 or 256. Layers that share keys have no pages. The stock
    model fails under continuous batching, because its layers have different head_dims."""
    model = released.released(name, eos_token_id=None, max_position_embeddings=256)
    with pytest.raises(RuntimeError, match="is a per-layer attribute"):
        batched(model, MIXED)
    allocators = allocators_of(monkeypatch)
    convert(model, **changes)
    expected = generated(model, MIXED)
    assert len({token for tokens in expected for token in tokens}) > 10
    assert batched(model, MIXED) == expected
    assert {each: allocator.head_dim for each, allocator in allocators.items()} == {
        "full_attention": 512,
        "sliding_attention": 256,
    }
    layers = model.config.num_hidden_layers - model.config.num_kv_shared_layers
    assert sorted(sum((list(each.layer_indices) for each in allocators.values()), [])) == list(range(layers))
    for allocator in allocators.values():
        own = model.config.per_layer_config[allocator.layer_indices[0]]
        assert allocator.num_key_value_heads == own.num_key_value_heads


@supported
@pytest.mark.parametrize("kind", [kind for kind in ROPE_TYPES if kind not in ("dynamic", "longrope")])
def test_rope_types(kind):
    model = convert(model_of(rope_scaling=ROPE_TYPES[kind]))
    prompts = prompts_of(17, 5, 40)
    assert batched(model, prompts) == generated(model, prompts)


@supported
def test_shared_prefixes(monkeypatch, calls):
    """A later request finds the pages of an earlier request with the same prefix, and does not compute them again."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found, stock = [], PagedAttentionCache.search_prefix_match

    def search(self, *arguments):
        found.append(stock(self, *arguments))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", search)
    model = convert(model_of(), **SCHEMES["rerope"])
    prefix = prompts_of(50)[0]
    prompts = [prefix + more for more in prompts_of(3, 20, 1, 9, seed=2)]
    expected = generated(model, prompts)
    assert batched(model, prompts, max_requests_per_batch=1) == expected
    assert max(found) == 48  # three pages
    found.clear()
    assert batched(model, prompts, max_requests_per_batch=1, allow_block_sharing=False) == expected
    assert not any(found)


@supported
def test_several_answers_to_a_prompt(calls):
    """With several answers per prompt, transformers forks the request. Each answer has the tokens that generate gives.
    All answers are equal, because every step takes the most likely token."""
    model = convert(model_of(), **SCHEMES["rerope"])
    prompts = prompts_of(20, 33)
    expected = [tokens for tokens in generated(model, prompts) for _ in range(3)]
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0, **sampling)
    out = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=settings())
    assert [result.generated_tokens for result in out.values()] == expected


@supported
def test_half_precision():
    model = convert(model_of().to(torch.bfloat16), rerope=16)
    assert all(len(tokens) == NEW for tokens in batched(model, MIXED[:4]))


# ---- refusals


@supported
@pytest.mark.parametrize("page_size", [8, 24])
def test_page_sizes_that_are_refused(page_size):
    with pytest.raises(
        ValueError, match=f"page_size: expected 16, 32, 64, ... for continuous batching, got {page_size}"
    ):
        batched(convert(model_of()), MIXED, page_size=page_size)


@supported
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_depend_on_the_length(kind):
    model = convert(model_of(rope_scaling=ROPE_TYPES[kind], original_max_position_embeddings=16))
    with pytest.raises(ValueError, match="model: expected a rotary table that does not depend on the length"):
        batched(model, MIXED)


@supported
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_whose_layers_cannot_be_served(name):
    with pytest.raises(ValueError, match="model: not supported in continuous batching"):
        batched(convert(model_of(name)), MIXED)


@supported
def test_a_persistent_manager_of_another_scheme():
    """A persistent manager holds pages of the old scheme. It is refused, because the raw keys of deeper layers depend
    on the scheme too."""
    model = convert(model_of())
    prompts = prompts_of(40, 20)
    assert batched(model, prompts, persistent=True) == generated(model, prompts)
    assert batched(model, prompts, persistent=True) == generated(model, prompts)
    convert(model, rerope=16)
    for changed in (lambda: model, lambda: revert(model)):
        with pytest.raises(
            ValueError, match="persistent_manager: expected a manager that was made after the last convert"
        ):
            batched(changed(), prompts, persistent=True)
    model.destroy_cached_continuous_batching_manager()
    convert(model, rerope=16)
    assert batched(model, prompts) == generated(model, prompts)


@pytest.mark.skipif(SUPPORTED, reason="this version is supported")
def test_older_versions_are_refused():
    """Older versions are refused with an error that names continuous batching, before a request is taken. The model
    does not change."""
    model = convert(model_of())
    expected = generated(model, MIXED[:2])
    with pytest.raises(ValueError) as caught:
        model.generate_batch(inputs=MIXED[:2], generation_config=GenerationConfig(max_new_tokens=4, eos_token_id=-1))
    message = str(caught.value)
    assert "continuous batching of a converted model" in message and transformers.__version__ in message
    assert "5.19 or newer" in message and "attn_implementation" not in message and "sdpa" not in message
    assert generated(model, MIXED[:2]) == expected


def test_which_versions_are_supported():
    assert SUPPORTED or VERSION < (5, 19)
    assert not SUPPORTED or VERSION > (5, 17)
