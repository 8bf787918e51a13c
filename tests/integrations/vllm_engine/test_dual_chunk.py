"""Tests vLLM with a configuration that has ``dual_chunk_attention_config`` (Qwen2.5-1M). Results of the engine are
compared with a float64 forward pass with ``attention(impl="reference")``. The chunks are compared with vLLM's own
rotary embedding for chunks."""

import logging

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

import torch
from engine import BOUND, engine, generate
from flashrope import Rotary, attention
from float64_model import HEAD_DIM, LAYERS, Float64Model, differences_by_step
from models import prompt, save_model
from vllm.v1.core import kv_cache_utils

LENGTH = 100  # the original length, beyond which the factor by length exceeds 1
QWEN = {"chunk_size": 160, "local_size": 32, "original_max_position_embeddings": LENGTH}  # chunks of 128
ROPE = Rotary.rope(HEAD_DIM)
SCHEME = ROPE.dual_chunk(160, 32, length_scale=LENGTH)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def largest_difference(folder: str, output, chunk: int = 10**6, scheme: Rotary = SCHEME) -> float:
    """Returns the largest difference of any log probability from the float64 model. chunk: how many tokens of the
    prompt one step reads."""
    ids = output.prompt_token_ids
    steps = [ids[n : n + chunk] for n in range(0, len(ids), chunk)]
    return differences_by_step(Float64Model(folder, scheme), output, steps)


OTHERS = {
    "no chunks": ROPE,
    "no factor": ROPE.dual_chunk(160, 32),
    "another local_size": ROPE.dual_chunk(144, 16, LENGTH),
    "another length": ROPE.dual_chunk(160, 32, 128),
}


def test_whole_prompts_and_decoding(qwen2):
    """Prompts that one step reads in one batch have the log probabilities of the float64 model, and so have the tokens
    decoded after them. The last prompt enters a further chunk while it decodes. Other schemes give the same results
    only while a sequence is within the first chunk and the original length."""
    settings = dict(hf_overrides={"dual_chunk_attention_config": QWEN}, max_num_batched_tokens=4096)
    with engine(qwen2, None, **settings) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 127, 129, 700)]) + generate(llm, [prompt(250)], tokens=290)
    assert max(largest_difference(qwen2, output) for output in outputs) <= BOUND
    assert len(set(outputs[-1].outputs[0].token_ids)) > 30
    short, *_, long, _ = outputs
    assert max(largest_difference(qwen2, short, scheme=scheme) for scheme in OTHERS.values()) <= BOUND
    assert min(largest_difference(qwen2, long, scheme=scheme) for scheme in OTHERS.values()) > 100 * BOUND


def test_chunked_prefill_and_prefix_hits(qwen2):
    """In chunked prefill with steps of 64 tokens, each step scales its scores by the factor for the number of keys so
    far. A prefix hit reuses the results of earlier steps, which had the same number of keys and so the same factor."""
    settings = dict(hf_overrides={"dual_chunk_attention_config": QWEN}, max_num_batched_tokens=64, max_num_seqs=4)
    with engine(qwen2, None, **settings) as llm:
        (first,) = generate(llm, [prompt(450)], tokens=8)
        (hit,) = generate(llm, [prompt(450)], tokens=8, all_prompt=False)
    assert hit.num_cached_tokens == 448
    assert largest_difference(qwen2, first, chunk=64) <= BOUND < 10 * BOUND < largest_difference(qwen2, first)
    assert largest_difference(qwen2, hit, chunk=64) <= BOUND


def test_the_field_beside_it(qwen2, caplog):
    """If the configuration also has the field "flashrope", the options of the field apply together with the chunks. The
    option dual_chunk = false switches the chunks off. A warning names the sparse attention that is ignored."""
    sparse = {"sparse_attention_config": [{}] * LAYERS}
    asked = (({"log_n": 64}, {}, SCHEME.log_n(64)), ({"dual_chunk": False}, sparse, ROPE))
    vllm_logger, seeds = logging.getLogger("vllm"), set()
    vllm_logger.addHandler(caplog.handler)
    try:
        for options, more, scheme in asked:
            caplog.clear()
            overrides = {"dual_chunk_attention_config": {**QWEN, **more}, "flashrope": options}
            with engine(qwen2, None, hf_overrides=overrides) as llm:
                seeds.add(kv_cache_utils.NONE_HASH)
                (output,) = generate(llm, [prompt(300)])
            del llm  # its destructor would shut down state that the next engine uses
            assert largest_difference(qwen2, output, scheme=scheme) <= BOUND
            assert any("sparse_attention_config" in each.getMessage() for each in caplog.records) == bool(more)
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert len(seeds) == 2


def test_the_chunks_are_vllms(monkeypatch):
    """The scheme gives the scores of vLLM's dual chunk attention. vLLM still has its DualChunkRotaryEmbedding, which
    rotates queries in three ways: for the same chunk, for the chunk before and for earlier chunks. vLLM's former
    backend multiplied keys by the factor that depends on the length, and computed one softmax over the scores of all
    three rotations."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import dual_chunk_rope

    device = torch.device
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(dual_chunk_rope.torch, "device", lambda name: device("cpu"))
    with set_current_vllm_config(VllmConfig()):
        theirs = dual_chunk_rope.DualChunkRotaryEmbedding(
            HEAD_DIM, HEAD_DIM, 512, 10000.0, True, torch.float32, 160, 32
        )
    monkeypatch.undo()
    torch.manual_seed(0)
    n = 500
    q, k, v = torch.randn(3, n, 2, HEAD_DIM)
    positions = torch.arange(n)
    queries, keys = theirs.forward_native(positions, q.flatten(1), k.flatten(1))
    queries = queries.view(n, 5, 2, HEAD_DIM)[:, :3]  # the last two of the five only select keys for sparse attention
    keys = keys.view(n, 2, HEAD_DIM) * max(1.0, 0.1 * torch.tensor(n / LENGTH).log().item() + 1)
    scores = torch.einsum("nahd,mhd->ahnm", queries, keys) * HEAD_DIM**-0.5
    before = (positions[:, None] // 128 - positions // 128).clamp(0, 2)  # chunks between query and key
    chosen = scores.gather(0, before.expand(1, 2, n, n))[0]
    chosen = chosen.masked_fill(positions[:, None] < positions, float("-inf"))
    expected = torch.einsum("hnm,mhd->nhd", chosen.softmax(-1), v)
    ours = attention(q[None], k[None], v[None], SCHEME, impl="reference")[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
