"""Tests that vLLM's engine with the plugin gives the log probabilities of a model converted by convert(), within 1e-4
in float32."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

import torch
from engine import BOUND, check_rounded, differences, engine, generate
from flashrope import Rotary
from flashrope.integrations.transformers import convert
from flashrope.integrations.vllm.engine_plan import INT8
from models import Rounded, prompt, reference, save_model
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError

REROPE = {"rerope": 64, "log_n": 256}
LENGTHS = [5, 15, 16, 17, 63, 64, 65, 129, 300, 700]
OPTIONS = {
    "cope": {"cope": {"pairs": 6}, "log_n": 64, "log_n_clip": False},
    "RoPE": {},
    "RoPE, raw keys": {"raw_keys": True},
    "ReRoPE, log n": REROPE,
    "Leaky ReRoPE": {"leaky_rerope": (64, 8.0)},
    "HoPE": {"hope": 64},
    "Self-Extend, log n": {"self_extend": [64, 8], "log_n": 256},
    "dual chunk": {"dual_chunk": [160, 32]},
    "Rotary's text": {"rotary": Rotary.rope(32, 500.0).text, "rerope": 32},
}


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def converted(options):
    """Returns the options as convert() takes them."""
    options = {name: value for name, value in options.items() if name != "raw_keys"}
    return {**options, "rotary": Rotary.from_text(options["rotary"])} if "rotary" in options else options


@pytest.mark.parametrize("name", OPTIONS)
def test_log_probabilities(llama, name):
    """Prompts of several lengths in one batch, and the tokens decoded after them, have the log probabilities of
    convert()."""
    with engine(llama, OPTIONS[name]) as llm:
        outputs = generate(llm, [prompt(n) for n in LENGTHS])
    assert max(differences(llama, converted(OPTIONS[name]), outputs)) <= BOUND
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 10


def test_the_scheme_shows(llama):
    """Different schemes give different results. Otherwise the tests above would prove nothing."""
    with engine(llama, REROPE) as llm:
        outputs = generate(llm, [prompt(300)])
    assert max(differences(llama, REROPE, outputs)) <= BOUND < 0.1 < max(differences(llama, {}, outputs))


def test_a_model_that_was_saved_after_convert(llama, tmp_path):
    convert(AutoModelForCausalLM.from_pretrained(llama), **REROPE).save_pretrained(tmp_path)
    with engine(str(tmp_path), None) as llm:
        outputs = generate(llm, [prompt(300)])
    assert max(differences(llama, REROPE, outputs)) <= BOUND


def test_a_model_that_does_not_ask_is_stock(llama):
    """A model without the field gives the stock model's results, also if engines with schemes ran earlier in the same
    process."""
    for options in (None, REROPE, None, {}, None):
        with engine(llama, options) as llm:
            outputs = generate(llm, [prompt(n) for n in (16, 250)])  # vLLM's stock table ends at position 256
            chosen = llm.llm_engine.vllm_config.attention_config.backend
        assert (chosen is None) == (options is None)
        assert max(differences(llama, options, outputs)) <= BOUND


def test_chunked_prefill_beside_decoding(llama):
    """Chunked prefill gives the right results while other requests decode. With at most 64 tokens per step, a batch has
    chunks of some prompts and single tokens of other requests."""
    with engine(llama, REROPE, max_num_batched_tokens=64, max_num_seqs=8, block_size=16) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 300, 16, 129, 500)], tokens=12)
    assert max(differences(llama, REROPE, outputs)) <= BOUND


def test_prefix_cache(llama):
    shared = prompt(400)
    with engine(llama, REROPE) as llm:
        first = generate(llm, [shared], all_prompt=False)
        second = generate(llm, [shared[:300] + prompt(30, seed=1), shared], all_prompt=False)
    assert [output.num_cached_tokens for output in second] == [288, 384]
    assert max(differences(llama, REROPE, first + second)) <= BOUND


def test_forks(llama):
    """Three continuations of one prompt have the log probabilities of convert(). They share the prompt's pages and
    diverge in the middle of a page."""
    with engine(llama, REROPE) as llm:
        outputs = generate(llm, [prompt(200), prompt(70)], tokens=40, n=3, temperature=1.0, seed=7, all_prompt=False)
    assert all(len({tuple(c.token_ids) for c in output.outputs}) == 3 for output in outputs)
    assert max(differences(llama, REROPE, outputs)) <= BOUND


def test_preemption(llama):
    """Preempted sequences that are computed again have the log probabilities of convert(). Six sequences of 5 pages
    each compete for 12 pages."""
    settings = dict(num_gpu_blocks_override=12, max_model_len=160, disable_log_stats=False)
    with engine(llama, REROPE, **settings) as llm:
        outputs = generate(llm, [prompt(64, seed=n) for n in range(6)], tokens=70, all_prompt=False)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0
    assert max(differences(llama, REROPE, outputs)) <= BOUND


QUANTIZED = {
    "RoPE": ({}, {}, Rounded(Rotary.rope(32))),
    "HoPE": ({"hope": 64}, {}, Rounded(Rotary.hope(32, 64))),
    "ReRoPE, layer 0 in float32": (REROPE, {"kv_cache_dtype_skip_layers": ["0"]}, Rounded(layers=(1, 2))),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_cache(llama, name):
    options, settings, rounded = QUANTIZED[name]
    with engine(llama, options, kv_cache_dtype=INT8, **settings) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 6, 7, 15, 16, 65, 300)])
    check_rounded(llama, converted(options), outputs, rounded)


@pytest.mark.parametrize("options", [REROPE, {"raw_keys": True}], ids=["rerope", "raw keys"])
def test_requests_over_a_quantized_cache(llama, options):
    """Over a quantized cache, requests have the log probabilities of convert() over rounded keys and values. This holds
    in chunked prefill while other requests decode, after a prefix hit, in forks, and after preemption: six sequences of
    9 pages each compete for 40 pages."""
    settings = dict(max_num_batched_tokens=64, max_num_seqs=8, block_size=16, max_model_len=600)
    settings |= dict(num_gpu_blocks_override=40, disable_log_stats=False, kv_cache_dtype=INT8)
    with engine(llama, options, **settings) as llm:
        chunks = generate(llm, [prompt(n) for n in (5, 300, 6, 129)], tokens=8)
        hits = generate(llm, [prompt(300)[:200] + prompt(30, seed=1)], all_prompt=False)
        forks = generate(llm, [prompt(70)], tokens=24, n=3, temperature=1.0, all_prompt=False)
        crowded = generate(llm, [prompt(64, seed=n) for n in range(6)], tokens=70, all_prompt=False)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert hits[0].num_cached_tokens == 192 and preempted > 0
    assert len({tuple(c.token_ids) for c in forks[0].outputs}) == 3
    check_rounded(llama, converted(options), chunks + hits + forks + crowded, Rounded())


def test_a_request_that_is_too_long_harms_no_other(llama):
    with engine(llama, REROPE, max_model_len=128) as llm:
        before = generate(llm, [prompt(64)])
        with pytest.raises(VLLMValidationError, match="128 tokens"):
            generate(llm, [prompt(64), prompt(200)])
        after = generate(llm, [prompt(64), prompt(65)])
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids
    assert max(differences(llama, REROPE, before + after)) <= BOUND


def test_drafts_from_the_text(llama, monkeypatch):
    """Drafts that vLLM takes from the text (n-grams) do not change the results. A step that verifies a draft has
    several query tokens per sequence. The engine runs in a separate process, because it imports llvmlite, and vLLM
    0.32.0 then fails if a second engine starts in the same process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    draft = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = [prompt(20) * 5, prompt(33) * 3]
    with engine(llama, REROPE, speculative_config=draft) as llm:
        outputs = generate(llm, prompts, tokens=24, all_prompt=False)
    assert max(differences(llama, REROPE, outputs)) <= BOUND


def test_compiled(llama):
    """torch.compile compiles the model with the attention as one operator. The graph contains no rotation, because the
    operator rotates."""
    with engine(llama, REROPE, enforce_eager=False) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 64, 300)], tokens=8)
    assert max(differences(llama, REROPE, outputs)) <= BOUND


@pytest.mark.parametrize("dtype, cache_dtype", [("bfloat16", None), ("float16", None), ("bfloat16", INT8)])
def test_half_precision(llama, dtype, cache_dtype):
    """In 16-bit types, results are no further from float32 than those of convert() in the same type."""
    ids, codes = prompt(300), None if cache_dtype is None else Rounded()
    with engine(llama, REROPE, dtype=dtype, kv_cache_dtype=cache_dtype or "auto") as llm:
        (output,) = generate(llm, [ids], tokens=1)
    exact = reference(llama, REROPE, ids, rounded=codes)
    rounded = float((reference(llama, REROPE, ids, getattr(torch, dtype), codes) - exact).abs().max())
    served = max(
        abs(entry[ids[n + 1]].logprob - float(exact[n, ids[n + 1]]))
        for n, entry in enumerate(output.prompt_logprobs[1:])
    )
    assert 0 < served <= 1.5 * rounded < 1


@pytest.mark.slow
def test_two_ranks(llama, monkeypatch):
    """Tensor parallelism on two ranks does not change the results. Each rank has half of the heads."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(llama, REROPE, tensor_parallel_size=2) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 65, 300)])
    assert max(differences(llama, REROPE, outputs)) <= BOUND


def test_block_hashes_differ_by_scheme(llama):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seeds = {}
    for name, options in (("rope", {}), ("rerope", REROPE), ("stock", None)):
        with engine(llama, options):
            seeds[name] = kv_cache_utils.NONE_HASH
    assert len(set(seeds.values())) == 3
    assert seeds["stock"] == get_hash_fn_by_name("sha256")(kv_cache_utils.DEFAULT_NONE_HASH_SEED)
