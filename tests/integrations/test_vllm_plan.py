"""Tests the options of the vLLM plugin, the schemes of a served model's layers, and what is refused. vLLM is not
needed.

test_options.py tests that the plugin reads options as convert does. test_refusals.py and test_position_maps.py test the
errors of single options.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from caching import PAGE, Cached, same
from flashrope import Rotary
from flashrope.integrations.vllm import plugin
from flashrope.integrations.vllm.engine_plan import (
    ARCHITECTURES,
    INT8,
    EnginePlan,
    Layer,
    make_plan,
    row_bytes,
    split_pages,
)
from support import Target
from vllm_configs import attention_backend, cache_config, config, rope_parameters

SLIDING = ["sliding_attention", "full_attention"]


def test_the_package_imports_neither_vllm_nor_transformers():
    names = "flashrope.integrations.vllm.engine_plan, flashrope.integrations.vllm.plugin"
    code = f"import {names}, sys; assert not {{'vllm', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, lambda rope: rope),
        ({"rerope": 1024}, lambda rope: rope.rectify(1024)),
        ({"leaky_rerope": (1024, 8)}, lambda rope: rope.rectify(1024, 8)),
        ({"rerope": 1024, "log_n": True}, lambda rope: rope.rectify(1024).log_n(4096)),
        ({"rerope": 1024, "log_n": 8192}, lambda rope: rope.rectify(1024).log_n(8192)),
        ({"log_n": 4096, "log_n_clip": False}, lambda rope: rope.log_n(4096, clip=False)),
        ({"cope": True, "rerope": 64}, lambda rope: rope.cope(4096).rectify(64)),
        ({"cope": {"pairs": 3}, "log_n": 64}, lambda rope: rope.cope(4096, 3).log_n(64)),
        ({"hope": 4096}, lambda rope: Rotary.hope(32, 4096)),
        ({"self_extend": [1024, 8]}, lambda rope: rope.self_extend(1024, 8)),
        ({"self_extend": [1024, 8], "log_n": True}, lambda rope: rope.self_extend(1024, 8).log_n(4096)),
        ({"dual_chunk": [4096, 1024], "self_extend": False}, lambda rope: rope.dual_chunk(4096, 1024)),
        ({"rotary": Rotary.rope(32).dual_chunk(160, 32).text}, lambda rope: rope.dual_chunk(160, 32)),
        ({"rerope": 1024, "log_n": False, "leaky_rerope": None}, lambda rope: rope.rectify(1024)),  # what convert saves
        ({"rotary": Rotary.hope(32, 64).text, "rerope": 8}, lambda rope: Rotary.hope(32, 64).rectify(8)),
    ],
)
def test_the_scheme_that_is_asked_for(options, expected):
    plan = make_plan(config(options))
    assert [layer.rotary for layer in plan.layers] == [expected(Rotary.rope(32))] * 2
    assert plan.stock == {Rotary.rope(32)}
    assert repr(plan.layers[0].rotary) in str(plan)


def test_the_description_has_the_layers_of_every_kind():
    rope, local = Layer(Rotary.rope(32), None), Layer(Rotary.rope(32).local(48), 48, True)
    plan = EnginePlan((local, local, None, rope, local, local, local, rope), frozenset())
    local_text, rope_text = str(plan).split("; ")
    assert local_text.startswith("layers 0-1, 4-6 (window 48): Rotary(") and local_text.endswith(
        "rotated keys in the cache"
    )
    assert rope_text.startswith("layers 3, 7 (all keys): Rotary(") and rope_text.endswith("raw keys in the cache")


def test_rope_scaling_is_read():
    scaled = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    plan = make_plan(config({"rerope": 8}, hf={"rope_parameters": scaled}))
    assert plan.layers[0].rotary == Rotary.rope(32, 1e6).interpolate(4.0).rectify(8)


def test_layers_of_two_kinds():
    hf = dict(model_type="qwen2", layer_types=SLIDING, sliding_window=64)
    plan = make_plan(config({"log_n": 4096}, hf=hf, model={"architecture": "Qwen2ForCausalLM"}))
    rope = Rotary.rope(32)
    assert [layer[:2] for layer in plan.layers] == [(rope.local(64), 64), (rope.log_n(4096), None)]
    assert str(plan).startswith("layers 0 (window 64): ") and "; layers 1 (all keys): " in str(plan)


def test_layers_without_attention():
    """The recurrent layers of Qwen3-Next have no scheme, and a quarter of the channels of the others rotate."""
    kinds = ["linear_attention", "full_attention"]
    parameters = rope_parameters("default", partial_rotary_factor=0.25)
    hf = dict(model_type="qwen3_next", layer_types=kinds, head_dim=256, **parameters)
    given = dict(hf=hf, model={"architecture": "Qwen3NextForCausalLM"})
    plan = make_plan(config({"rerope": 64}, **given))
    assert plan.layers == (None, (Rotary.rope(256, rotary_dim=64).rectify(64), None, False))
    assert plan.attending == [(1, plan.layers[1])] and str(plan).startswith(
        "layers 1 (all keys): Rotary(head_dim=256, "
    )
    assert plan.digest != make_plan(config({"rerope": 32}, **given)).digest


@pytest.mark.parametrize(
    "options, rotated",
    [
        ({}, True),
        ({"hope": 64, "log_n": True}, True),
        ({"yarn": [4.0, 4096]}, True),
        ({"raw_keys": False}, True),
        ({"raw_keys": True}, False),
        ({"rerope": 1024}, False),
        ({"leaky_rerope": (1024, 8)}, False),
        ({"self_extend": [1024, 8]}, False),
        ({"dual_chunk": [4096, 1024]}, False),
    ],
)
def test_keys_are_stored_rotated_where_the_scheme_has_one_rotation(options, rotated):
    plan = make_plan(config(options))
    assert [layer.rotated_keys for layer in plan.layers] == [rotated] * 2
    assert f", {'rotated' if rotated else 'raw'} keys in the cache" in str(plan)
    assert [layer.rotary for layer in plan.layers] == [
        layer.rotary for layer in make_plan(config({**options, "raw_keys": True})).layers
    ]


TWO_WIDTHS = dict(model_type="gemma4_text", layer_types=SLIDING, sliding_window=64, head_dim=256, global_head_dim=512)


def gemma4(**engine):
    kinds = ("sliding_attention", 10_000.0, "default"), ("full_attention", 1e6, "proportional")
    parameters = {kind: {"rope_type": name, "rope_theta": base} for kind, base, name in kinds}
    parameters["full_attention"]["partial_rotary_factor"] = 0.25
    hf = {**TWO_WIDTHS, "rope_parameters": parameters}
    return config({}, hf=hf, model={"architecture": "Gemma4ForCausalLM"}, **engine)


def test_layers_of_two_widths():
    """Keys of more than 256 channels are stored raw, because no kernel reads rotated keys of this width."""
    local, wide = make_plan(gemma4()).layers
    assert local == (Rotary.rope(256).local(64), 64, True)
    assert wide == (Rotary.p_rope(512, 0.25, base=1e6), None, False)


def test_the_backend_that_vllm_itself_chooses_for_two_widths_is_replaced():
    for name in ("TRITON_ATTN", "FLASH_ATTN"):
        assert len(make_plan(gemma4(**attention_backend(SimpleNamespace(name=name)))).layers) == 2
    with pytest.raises(ValueError, match="attention_backend: expected None or CUSTOM, .* got FLASHINFER"):
        make_plan(gemma4(**attention_backend(SimpleNamespace(name="FLASHINFER"))))


@pytest.mark.parametrize("cache_dtype", ["auto", "float32", INT8])
def test_cache_dtypes(cache_dtype):
    make_plan(config({}, **cache_config(cache_dtype)))


def test_rotated_and_raw_blocks_are_not_interchangeable():
    assert make_plan(config({})).digest != make_plan(config({"raw_keys": True})).digest
    same = ({"rerope": 64}, {"rerope": 64, "raw_keys": True})  # raw both times
    assert len({make_plan(config(options)).digest for options in same}) == 1


def test_the_digest_is_that_of_the_schemes():
    digests = {make_plan(config(options)).digest for options in ({}, {"rerope": 64}, {"rerope": 65}, {"log_n": 4096})}
    assert len(digests) == 4
    assert make_plan(config({"log_n": True})).digest == make_plan(config({"log_n": 4096})).digest


def test_the_digest_has_the_windows_of_the_layers():
    """The digest includes the windows of the layers. The keys of a layer depend on them, because the earlier layers see
    other keys with another window."""
    plans = [EnginePlan((Layer(Rotary.rope(32), window),) * 2, frozenset()) for window in (None, 64, 65)]
    assert len({plan.digest for plan in plans}) == 3


def test_lengths_up_to_the_one_that_changes_the_frequencies():
    dynamic = rope_parameters("dynamic", factor=2.0)
    make_plan(config({}, hf=dynamic, model={"max_model_len": 4096}))
    with pytest.raises(ValueError, match="max_model_len: expected at most 4096, .* got 4097"):
        make_plan(config({}, hf=dynamic, model={"max_model_len": 4097}))


REFUSED = {
    "unknown key": (
        dict(options={"windw": 8}),
        "^flashrope of config.json: options: expected names among rotary, .*, raw_keys, got 'windw'",
    ),
    "no dict": (dict(options=True), "^flashrope of config.json: expected a dict with some of .*, raw_keys, got True"),
    "raw_keys of text": (dict(options={"raw_keys": "yes"}), "raw_keys: expected true or false, got 'yes'"),
    "window": (dict(options={"window": 8}), "window: renamed, expected rerope=8, got window=8"),
    "window as long": (
        dict(options={"rerope": 32768}),
        "rerope: expected a window of less than max_model_len = 32768 .*, got 32768",
    ),
    "self_extend as long": (
        dict(options={"self_extend": [32768, 8]}),
        "self_extend: expected a window of less than max_model_len = 32768 .*, got 32768",
    ),
    "numbers of text": (dict(options={"self_extend": ["8", 4]}), "window: expected a non-negative integer, got '8'"),
    "log_n true over an override": (
        dict(options={"log_n": True}, model={"hf_overrides": {"max_position_embeddings": 32768}}),
        "log_n: expected the training length in tokens.* got true",
    ),
    "cope true over an override": (
        dict(options={"cope": {"pairs": 3}}, model={"hf_overrides": {"max_position_embeddings": 32768}}),
        "cope: expected the training length in tokens.* got true",
    ),
    "only log_n_clip": (dict(options={"log_n_clip": False}), "log_n_clip: not supported without log_n, got False"),
    "log_n_clip of text": (
        dict(options={"log_n": 64, "log_n_clip": "no"}),
        "log_n_clip: expected True or False, got 'no'",
    ),
    "rotary of another head_dim": (
        dict(options={"rotary": Rotary.rope(64).text}),
        "rotary: expected head_dim 32 as in the model, got 64",
    ),
    "axial": (
        dict(options={"rotary": Rotary.axial(32).text}),
        "rotary: expected a scheme of one-dimensional positions",
    ),
    "another architecture": (
        dict(model={"architecture": "DeepseekV2ForCausalLM"}),
        "architecture: expected a tested architecture.*LlamaForCausalLM.*; got DeepseekV2ForCausalLM",
    ),
    "pooling": (dict(model={"runner_type": "pooling"}), "runner: expected 'generate', got 'pooling'"),
    "soft cap": (
        dict(hf={"attn_logit_softcapping": 50.0}),
        "attn_logit_softcapping: not supported by flashrope, got 50.0",
    ),
    "chunked attention": (
        dict(hf={"attention_chunk_size": 8192}),
        "attention_chunk_size: not supported by flashrope, got 8192",
    ),
    "alibi": (dict(hf={"alibi": True}), "alibi: expected a model that rotates, got a bias"),
    "both ways": (dict(hf={"use_bidirectional_attention": True}), "use_bidirectional_attention: expected causal"),
    "encoder": (dict(hf={"is_encoder_decoder": True}), "is_encoder_decoder: expected causal self-attention"),
    "not causal": (dict(hf={"is_causal": False}), "is_causal: expected causal self-attention"),
    "float64": (dict(model={"dtype": "torch.float64"}), "dtype: expected bfloat16, float16, float32, got float64"),
    "fp8 cache": (
        cache_config("fp8"),
        "kv_cache_dtype: expected auto or float32, the model's dtype, or int8_per_token_head, got fp8, whose numbers "
        "GPUs below sm_89 convert in software$",
    ),
    "4-bit cache": (
        cache_config("int4_per_token_head"),
        "got int4_per_token_head, whose keys of 4 bits cost too much loss$",
    ),
    "fp8 cache with scales": (
        cache_config("fp8_per_token_head"),
        "got fp8_per_token_head, whose numbers GPUs below sm_89 convert in software$",
    ),
    "a cache in another float type": (
        cache_config("bfloat16"),
        "kv_cache_dtype: expected auto or float32, .* got bfloat16$",
    ),
    "small pages": (cache_config("auto", 8), "block_size: expected 16, 32, 64, 128, ..., got 8"),
    "odd pages": (cache_config("auto", 48), "block_size: expected 16, 32, 64, 128, ..., got 48"),
    "another backend": (
        attention_backend(SimpleNamespace(name="FLASH_ATTN")),
        "attention_backend: expected None or CUSTOM, .* got FLASH_ATTN",
    ),
    "another backend for some layers": (
        attention_backend(None, full_attention="TRITON_ATTN"),
        "attention_backend: expected None or CUSTOM, .* got TRITON_ATTN",
    ),
    "context parallel": (
        dict(parallel_config=SimpleNamespace(decode_context_parallel_size=2)),
        "decode_context_parallel_size: expected 1, got 2",
    ),
    "connector": (dict(kv_transfer_config=object()), "kv_transfer_config: connectors are not supported by flashrope"),
    "draft model": (
        dict(speculative_config=SimpleNamespace(method="eagle")),
        "speculative_config: expected a method without a draft model, ngram, suffix, got 'eagle'",
    ),
    "rope of another kind": (dict(hf=rope_parameters("spiral")), "config: rope type 'spiral' is not known"),
    "mrope": (dict(hf=rope_parameters("default", mrope_section=[8, 4, 4])), "config: mrope_section"),
    "frequencies by length": (
        dict(hf=rope_parameters("dynamic", factor=4.0)),
        "max_model_len: expected at most 4096, beyond which the frequencies .* got 32768",
    ),
    "window in sliding layers": (
        dict(options={"rerope": 32}, hf={"sliding_window": 64}),
        "rerope: expected a layer that sees all keys, got a sliding window of 64 keys in every layer",
    ),
    "log_n in sliding layers": (
        dict(options={"log_n": 4096}, hf={"sliding_window": 64}),
        "log_n: expected a layer that sees all keys, got a sliding window of 64 keys in every layer",
    ),
    "head_dim": (dict(hf={"head_dim": 20}), "head_dim: expected a multiple of 8 up to 512, got 20"),
    "wide heads in int8": (
        dict(hf={"head_dim": 264}, **cache_config("int8_per_token_head")),
        "head_dim: expected a multiple of 8 up to 256 in a cache of int8_per_token_head, got 264",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make_plan(config(**{"options": {}, **changes}))


LAID_OUT = {
    ("cpu", False): lambda rope: rope.rectify(8).log_n(32),
    ("cpu", True): lambda rope: rope.self_extend(12, 4),
    ("triton", False): lambda rope: rope.rectify(8).log_n(32),
    ("triton", True): lambda rope: rope.self_extend(12, 4),
}


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize(("impl", "heads_first"), LAID_OUT)
def test_pages_as_vllm_lays_them_out(impl, heads_first, cache_dtype):
    """Pages in vLLM's layout give the right results. A block is (heads_kv, block_size, columns) in either order in
    memory, and its rows hold keys and values side by side. The test makes the same call as the backend on a GPU and on
    the CPU."""
    target, head_dim = Target(impl, torch.float32, "cpu"), 32
    rotary, sizes = LAID_OUT[impl, heads_first](Rotary.rope(head_dim)), ((1, 40), (17, 17), (5, 64))
    c = Cached.packed(target, rotary, sizes, page=PAGE, mapped=True, cache_dtype=cache_dtype)
    columns = [c.k_cache, c.v_cache]
    if cache_dtype is not None:
        k_scale, v_scale = (scale[..., None].view(torch.int8) for scale in c.scales.values())
        columns = [c.k_cache, k_scale, c.v_cache, v_scale]
        assert sum(x.shape[-1] for x in columns) == 2 * row_bytes(head_dim)
    cache = torch.cat(columns, dim=-1).transpose(1, 2)
    cache = cache.contiguous() if heads_first else cache
    _, *pages = (x for x in split_pages(cache, head_dim) if x is not None)
    assert all(page.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr() for page in pages)
    for page, held in zip(pages, (c.k_cache, c.v_cache, *c.scales.values()), strict=True):
        assert same(page, held)
    c.k_cache, c.v_cache = pages[:2]
    c.scales = dict(zip(c.scales, pages[2:], strict=True))
    c.check(softmax_scale=head_dim**-0.5)


def test_every_architecture_is_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    assert [name for name in ARCHITECTURES if name.removesuffix("ForCausalLM") not in page] == []


def test_embeddings_are_kept_apart_by_plan(monkeypatch):
    """Different plans do not share embeddings, because the registry looks at the configuration in use. Without a
    configuration the registry is a plain dict."""
    used = config({"rerope": 64})
    used.additional_config = {"flashrope": make_plan(used).digest}
    in_use = [None]
    stub = SimpleNamespace(get_current_vllm_config_or_none=lambda: in_use[0])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=stub))
    monkeypatch.setitem(sys.modules, "vllm.config", stub)
    monkeypatch.setattr(plugin, "check_backend", lambda: None)
    angles = Rotary.rope(32).inv_freq
    table = torch.stack([torch.cat((x.cos(), x.sin())) for x in (0 * angles, angles)]).float()
    registry, stock, served = plugin.RopeRegistry(), torch.nn.Identity(), torch.nn.Identity()
    served.cos_sin_cache, served.rotary_dim, served.is_neox_style = table, 32, True
    registry["key"] = stock
    in_use[0] = used
    assert "key" not in registry
    registry["key"] = served
    assert registry["key"] is served and type(served) is plugin.RawRotaryEmbedding
    assert registry.raw == {make_plan(used).digest} and not hasattr(served, "cos_sin_cache")
    other = torch.nn.Identity()
    other.cos_sin_cache, other.rotary_dim, other.is_neox_style = 2 * table, 32, True
    with pytest.raises(ValueError, match="rope: expected the cos and sin of the model's configuration"):
        registry["other"] = other
    in_use[0] = None
    assert registry["key"] is stock
